"""Rewards of spans."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.schema.semconv import REWARD_VALUE
from lightspan.schema.spans import Span
from lightspan_agl.emitter import emit_reward

__all__ = ["emit_reward", "find_final_reward"]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the reward of the last span that has one."""
    rewards = [span.attributes[REWARD_VALUE] for span in spans if REWARD_VALUE in span.attributes]
    return float(rewards[-1]) if rewards else None  # type: ignore[arg-type]
