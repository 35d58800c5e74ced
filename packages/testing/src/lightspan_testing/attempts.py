"""Record attempts in tests, and read recorded attempts.

`captured()` opens an attempt around an app in this process; `read_recorded()` reads an attempt that
`lightspan.record` stored; `tree()` renders spans as lines of text.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lightspan.capture import context
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.lightning.span_tree import build_tree, walk
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.stores import open_store

ROOT_ID: Final = "00000000000000aa"
"""Root span id of attempts that tests open."""


# --- spans as text --------------------------------------------------------------------------
def tree(spans: Sequence[Span], *, ordered: bool = True, models: bool = False) -> list[str]:
    """Return one line per span, indented by depth: its name, its agent path, and its status.

    The status is left out if it is OK.

    Args:
        spans: all spans of an attempt.
        ordered: whether to sort siblings by start; otherwise they are sorted by text.
        models: whether to include the requested model of a model call: `chat m` instead of `chat`.
    """
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans), "two spans of one id"
    orphans = [span.name for span in spans if span.parent_id not in {*ids, ROOT_ID}]
    assert orphans == [], "spans without a parent"

    def below(parent: str, depth: int) -> list[str]:
        children = sorted(
            (span for span in spans if span.parent_id == parent),
            key=lambda span: (span.start_ns, span.sequence_start or 0, span.name),
        )
        blocks = [[line(span, depth), *below(span.span_id, depth + 1)] for span in children]
        return [text for block in (blocks if ordered else sorted(blocks)) for text in block]

    def line(span: Span, depth: int) -> str:
        name = "chat" if span.kind is SpanKind.LLM and not models else span.name
        status = "" if span.status is SpanStatus.OK else f" {span.status}"
        return f"{'  ' * depth}{name} @{path_of(span)}{status}"

    lines = below(ROOT_ID, 0)
    assert len(lines) == len(spans), "a cycle"
    return lines


def path_of(span: Span) -> str:
    """Return the agent path of a span."""
    return str(span.attributes[c.AGENT_PATH])


# --- an agent -------------------------------------------------------------------------------
@contextmanager
def push(frame: context.Frame) -> Iterator[context.AgentContext | None]:
    """Make the agent of `frame` the acting agent in a `with` block.

    Yield the context inside the agent. Outside attempts, do nothing and yield None.
    """
    current = context.current_context()
    if current is None:
        yield None
        return
    inside = current.within(frame.span_id, (*current.frames, frame))
    leave = context.set_agent(inside)
    try:
        yield inside
    finally:
        leave()


# --- an attempt in this process -------------------------------------------------------------
@dataclass(slots=True, eq=False, kw_only=True)
class Captured:
    """An attempt in this process. It has its spans only after it has ended."""

    scope: AttemptContext
    spans: list[Span] = field(default_factory=list)

    def close(self) -> None:
        """Collect the spans, and check that the attempt has no capture errors."""
        recorder = self.scope.recorder
        recorder.cancel_pending()
        self.spans += recorder.drain()
        assert recorder.capture_errors() == []

    @property
    def tree(self) -> list[str]:
        """Return the spans as lines of text, including the models that were requested."""
        return tree(self.spans, models=True)

    @property
    def llm_spans(self) -> list[Span]:
        """Return the spans of model calls in order."""
        calls = [span for span in self.spans if span.kind is SpanKind.LLM]
        return sorted(calls, key=lambda span: span.start_ns)

    @property
    def calls(self) -> list[str]:
        """Return the agent path of every model call, in order."""
        return [path_of(span) for span in self.llm_spans]

    def one(self, name: str) -> Span:
        """Return the only span with the name `name`."""
        (span,) = (span for span in self.spans if span.name == name)
        return span


def make_scope(**fields: Any) -> AttemptContext:
    """Return the context of a new attempt that uses no gateway.

    Args:
        fields: fields of `AttemptContext` to set; the others have their defaults.
    """
    return AttemptContext(
        rollout_id="r", attempt_id=uuid.uuid4().hex, root_span_id=ROOT_ID, **fields
    )


@contextmanager
def captured(**fields: Any) -> Iterator[Captured]:
    """Open an attempt for the duration of a `with` block; collect its spans at the end.

    Args:
        fields: fields of the attempt's `AttemptContext`, such as `routing`.
    """
    attempt = Captured(scope=make_scope(**fields))
    with open_scope(attempt.scope):
        yield attempt
    attempt.close()


# --- attempts in a store --------------------------------------------------------------------


class Exchange(NamedTuple):
    """Two texts of a model call: the last message of the request, and the answer."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An attempt that was read from a store."""

    rollout: Rollout
    attempt: Attempt
    spans: Sequence[Span]
    """All spans, sorted by start."""

    @property
    def calls(self) -> list[Span]:
        """Return the spans of model calls."""
        return [span for span in self.spans if span.kind is SpanKind.LLM]

    @property
    def answered(self) -> list[Exchange]:
        """Return the last message and the answer of every model call."""
        return [
            Exchange(
                str(genai_messages.input_messages_of(span.attributes)[-1]["content"]),
                "".join(
                    str(one["content"])
                    for one in genai_messages.output_messages_of(span.attributes)
                ),
            )
            for span in self.calls
        ]

    def tree(self) -> str:
        """Return a line per span, indented by depth.

        The line of a model call contains the path of its agent.
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for depth, node in walk(build_tree(self.spans)):
            span = node.span
            agent = f" @{span.attributes[c.AGENT_PATH]}" if span.kind is SpanKind.LLM else ""
            yield f"{'  ' * depth}{span.name}{agent}"


def read_recorded(url: str) -> list[Recorded]:
    """Return all attempts that were recorded in the store at `url`, in order of start."""
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
