"""What production recorded, as tests look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightspan import conventions as c
from lightspan import messages
from lightspan.lightning.tree import build_tree, walk
from lightspan.records import Attempt, Mode, Rollout
from lightspan.spans import Span, SpanKind
from lightspan.stores import open_store


class Answered(NamedTuple):
    """One call: the last text that was asked, and the answer's."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One attempt of a store."""

    rollout: Rollout
    attempt: Attempt
    spans: Sequence[Span]
    """By start."""

    @property
    def calls(self) -> list[Span]:
        """The model calls."""
        return [span for span in self.spans if span.kind is SpanKind.LLM]

    @property
    def answered(self) -> list[Answered]:
        """The model calls, by what was said."""
        return [
            Answered(
                str(messages.asked_of(span.attributes)[-1]["content"]),
                "".join(str(one["content"]) for one in messages.answers_of(span.attributes)),
            )
            for span in self.calls
        ]

    def tree(self) -> str:
        """A line per span, indented by depth; calls with the path of their agent."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for depth, node in walk(build_tree(self.spans).roots):
            span = node.span
            agent = f" @{span.attributes[c.AGENT_PATH]}" if span.kind is SpanKind.LLM else ""
            yield f"{'  ' * depth}{span.name}{agent}"


def read_recorded(url: str) -> list[Recorded]:
    """Every attempt of production in a store, in the order of their beginning."""
    return asyncio.run(_read(url))


async def _read(url: str) -> list[Recorded]:
    async with open_store(url) as store:
        states = await store.rollouts(mode=Mode.PRODUCTION)
        rollouts = {state.rollout.rollout_id: state.rollout for state in states}
        attempts = await store.attempts(list(rollouts))
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
    return [
        Recorded(
            rollout=rollouts[attempt.rollout_id],
            attempt=attempt,
            spans=sorted(spans[attempt.attempt_id], key=lambda span: (span.start_ns, span.span_id)),
        )
        for attempt in sorted(attempts, key=lambda attempt: attempt.attempt_id)
    ]


__all__ = ["Answered", "Recorded", "read_recorded"]
