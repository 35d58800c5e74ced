"""Test the Agents SDK with a framework whose agents are known only by OpenTelemetry spans."""

from __future__ import annotations

import pytest

from tests.adapters.layers import MARKS, OpenAIAgents
from tests.adapters.spans_nesting import SpansNesting

lightspan_openai_agents = pytest.importorskip("lightspan_openai_agents")
pytestmark = MARKS


class TestSpans(SpansNesting):
    adapter = lightspan_openai_agents
    layers = (OpenAIAgents,)
    beside = "openai_agents.OpenAIAgentsInstrumentor"
