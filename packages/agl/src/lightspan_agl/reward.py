"""Rewards of spans."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.schema.semconv import REWARD_VALUE
from lightspan.schema.spans import Span
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.emitter import emit_reward

__all__ = ["emit_reward", "find_final_reward"]
__getattr__ = _refuse_names(__name__)


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the reward of the last span with a reward; None if no span has a reward."""
    rewards = [span.attributes[REWARD_VALUE] for span in spans if REWARD_VALUE in span.attributes]
    return float(rewards[-1]) if rewards else None  # type: ignore[arg-type]
