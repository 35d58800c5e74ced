"""LangGraph beside a framework that is known by OpenTelemetry's spans alone."""

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
