"""Names of attributes that only exported spans have (`lightspan.schema.semconv` has the others)."""

from __future__ import annotations

from typing import Final

SEQUENCE_START: Final = "lightspan.sequence.start"
SEQUENCE_END: Final = "lightspan.sequence.end"
SPAN_KIND: Final = "lightspan.span.kind"
SPAN_LATE: Final = "lightspan.span.late"
SPAN_SCHEMA: Final = "lightspan.span.schema"
EPISODE_REWARD: Final = "lightspan.episode.reward"
"""Reward of the attempt, on its outermost spans, in exports only."""
CALL_REWARD: Final = "lightspan.call.reward"
"""Reward of the call, in exports only; a list if it differs between its choices."""
ADVANTAGE: Final = "lightspan.advantage"
"""Advantage of the call, in exports only; a list if it differs between its choices."""
STEP: Final = "lightspan.step"
"""Training iteration, in exports only."""
