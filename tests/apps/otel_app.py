"""Two agents of a framework without an adapter, which are known by their OpenTelemetry spans.

`boss` calls its model, then runs `helper`, which calls the model too. The helper's answer
determines the reward.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from toy_apps import letters, say  # type: ignore[import-not-found]

import lightspan
import lightspan_otel as otel

provider = TracerProvider()
tracer = provider.get_tracer("some.framework")
otel.instrument(provider)


@lightspan.rollout
def answer(task: dict[str, Any]) -> float:
    """Run both agents."""
    with _agent("boss"):
        text = say(task["q"])
        with _agent("helper"):
            return float(letters(say(text)))


def _agent(name: str) -> Any:
    who = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return tracer.start_as_current_span("run", attributes=who)
