"""`InMemoryLightningStore`: spans of the rollouts of a `LitAgentRunner`."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.schema.spans import Span

__all__ = ["InMemoryLightningStore"]


class InMemoryLightningStore:
    """An in-memory store of spans."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}

    def add(self, rollout_id: str, spans: Sequence[Span]) -> None:
        """Store the spans of a rollout."""
        self._spans[rollout_id] = sorted(spans, key=lambda span: span.start_ns)

    async def query_spans(self, rollout_id: str) -> list[Span]:
        """Return the spans of a rollout (lightspan's own type) by start time."""
        return self._spans.get(rollout_id, [])
