"""Test LangGraph together with a framework whose agents are known only by OpenTelemetry spans."""

from __future__ import annotations

import pytest

from tests.adapters.layers import MARKS, LangGraph, LangGraphNode
from tests.adapters.spans_nesting import SpansNesting

lightspan_langgraph = pytest.importorskip("lightspan_langgraph")
pytest.importorskip("langchain_openai")
pytestmark = MARKS


class TestSpans(SpansNesting):
    adapter = lightspan_langgraph
    layers = (LangGraphNode, LangGraph)
    beside = "langchain.LangChainInstrumentor"
