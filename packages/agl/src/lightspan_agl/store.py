"""`InMemoryLightningStore`: spans of the rollouts of a `LitAgentRunner`."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.schema.spans import Span
from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["InMemoryLightningStore"]
__getattr__ = _refuse_names(__name__)


class InMemoryLightningStore:
    """An in-memory store of spans."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}

    def add(self, rollout_id: str, spans: Sequence[Span]) -> None:
        """Store the spans of a rollout, in place of earlier spans of that rollout."""
        self._spans[rollout_id] = sorted(spans, key=lambda span: span.start_ns)

    async def query_spans(self, rollout_id: str) -> list[Span]:
        """Return the spans of a rollout by start time; empty if the rollout is unknown."""
        return self._spans.get(rollout_id, [])
