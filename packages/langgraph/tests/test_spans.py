"""LangGraph beside a framework that is known by OpenTelemetry's spans alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.adapters.layers import MARKS, LangGraph, LangGraphNode
from tests.adapters.spans_nesting import PROVIDER, SpansNesting

lightspan_langgraph = pytest.importorskip("lightspan_langgraph")
pytest.importorskip("langchain_openai")
pytestmark = MARKS


class TestSpans(SpansNesting):
    adapter = lightspan_langgraph
    layers = (LangGraphNode, LangGraph)

    @contextmanager
    def openinference(self) -> Iterator[None]:
        beside = pytest.importorskip("openinference.instrumentation.langchain")
        instrumentor = beside.LangChainInstrumentor()
        instrumentor.instrument(tracer_provider=PROVIDER)
        try:
            yield
        finally:
            instrumentor.uninstrument()
