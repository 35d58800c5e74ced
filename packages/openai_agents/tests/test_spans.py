"""The OpenAI Agents SDK beside a framework that is known by OpenTelemetry's spans alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.adapters.layers import MARKS, OpenAIAgents
from tests.adapters.spans_nesting import PROVIDER, SpansNesting

lightspan_openai_agents = pytest.importorskip("lightspan_openai_agents")
pytestmark = MARKS


class TestSpans(SpansNesting):
    adapter = lightspan_openai_agents
    layers = (OpenAIAgents,)

    @contextmanager
    def openinference(self) -> Iterator[None]:
        beside = pytest.importorskip("openinference.instrumentation.openai_agents")
        instrumentor = beside.OpenAIAgentsInstrumentor()
        instrumentor.instrument(tracer_provider=PROVIDER)
        try:
            yield
        finally:
            instrumentor.uninstrument()
