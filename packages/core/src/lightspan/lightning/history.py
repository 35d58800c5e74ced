"""History: the model calls and tool calls that ended before a call began.

Model calls are ordered by the gateway's sequence. Tool calls have timestamps only, and the app's
clock may differ from the gateway's. A tool call therefore gets a *place* in the sequence that is
never too early: it counts as ended only for model calls that begin after every one of

- the model call that requested it, by the id of the tool call;
- the model calls made inside it (an agent as a tool), by parent spans;
- every model call that, by the clock, began or ended before the tool call ended, ties included.

A place that is too late loses some information; a place that is too early would leak the outcome of
an action into the state in which the action was taken. So the third rule is not used if a span has
no timestamps, or if the two clocks provably disagree: a model call outlives the span around it, or
a tool call begins before the answer that requested it. Without this rule, a tool call to which the
other two do not apply has no place; it is *unplaced*. No function here raises an exception,
whatever was recorded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.span_tree import walk
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import mappings_in
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome

CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Maximum disorder, in nanoseconds, of times that are still treated as times of one clock; NTP may
adjust the clock meanwhile.
"""

_RESULTS: Final = (c.TOOL_CALL_RESULT, "output.value", "traceloop.entity.output")
_ARGUMENTS: Final = (c.TOOL_CALL_ARGUMENTS, "input.value", "traceloop.entity.input")
_NAMES: Final = (c.TOOL_NAME, "tool.name", "traceloop.entity.name")
_json: Final = msgspec.json.Decoder()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Call of a tool, from its TOOL span."""

    name: str
    arguments: str | None
    """Text or JSON, possibly truncated; None if not recorded."""
    result: str | None
    """Text or JSON, possibly truncated; None if not recorded."""
    succeeded: bool | None
    """Whether the tool call succeeded; None if unknown, such as after an interruption."""
    agent_path: str
    call: CallKey | None
    """The model call that requested the tool call; None if unknown."""
    span: Span


class PlacedTool(NamedTuple):
    """A tool call with its place among the model calls, given by the gateway's sequence numbers."""

    tool: ToolCall
    after: int | None
    """Sequence number: the tool call ended before every model call that began after it. None if the
    place is unknown.
    """
    since: int | None
    """Sequence number: model calls that ended up to it came before the tool call. None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """State before a turn: all model calls and tool calls that ended before its first call began.

    It contains no rewards and nothing of the turn itself. So any function of it is a valid
    potential (`lightspan.lightning.air`).
    """

    task_id: str
    turn: int
    """Number of the turn, from 0: the depth of its calls in the causal order."""
    calls: tuple[Call, ...]
    """Model calls of any agent through the gateway, in causal order."""
    tools: tuple[ToolCall, ...]
    """Tool calls, in the order in which they ended."""


class Trace:
    """The model calls and tool calls of an episode; `history` selects those before a turn."""

    def __init__(self, episode: Episode) -> None:
        self.task_id = episode.task_id
        self.calls = [call for call in episode.calls if call.sequence_start is not None]
        self.tools = _place(episode, self.calls)

    def history(self, turn: int, position: float) -> History:
        """Return the calls that ended before turn `turn` began.

        Args:
            turn: number of the turn.
            position: sequence number at which the turn begins.
        """
        ended = [call for call in self.calls if (call.sequence_end or 0) < position]
        placed = [p for p in self.tools if p.after is not None and p.after < position]
        by_place = attrgetter("after", "tool.span.start_ns", "tool.span.span_id")
        return History(
            task_id=self.task_id,
            turn=turn,
            calls=tuple(msgspec.structs.replace(call, rewards=()) for call in ended),
            tools=tuple(each.tool for each in sorted(placed, key=by_place)),
        )


# --- answers of models ------------------------------------------------------------------------


def _output(span: Span) -> list[Any]:
    try:
        decoded = _json.decode(str(span.attributes.get(c.OUTPUT_MESSAGES, "[]")))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return []
    return decoded if isinstance(decoded, list) else []


def _requesters(calls: Sequence[Call]) -> dict[str, CallKey]:
    """Return the model call that requested each tool call, by the id of the tool call.

    Ids that several model calls used are left out, because their requester is unknown.
    """
    by_id: dict[str, set[CallKey]] = defaultdict(set)
    answers: dict[str, list[Any]] = {}  # the choices of a call share a span, so decode it once
    for call in calls:
        if call.span is None:
            continue
        if call.span_id not in answers:
            answers[call.span_id] = _output(call.span)
        for message in mappings_in(answers[call.span_id][call.choice : call.choice + 1]):
            for part in mappings_in(message.get("parts")):
                if part.get("type") == "tool_call" and part.get("id"):
                    by_id[str(part["id"])].add(call.key)
    return {name: next(iter(keys)) for name, keys in by_id.items() if len(keys) == 1}


# --- tool calls -------------------------------------------------------------------------------


def _place(episode: Episode, calls: Sequence[Call]) -> list[PlacedTool]:
    """Return the tool calls of an episode, each with its place among the model calls.

    Args:
        episode: the episode.
        calls: its model calls through the gateway.
    """
    spans = _tool_spans(episode)
    if not spans:
        return []
    requesters = _requesters(episode.calls)
    tools = [_tool(span, requesters.get(_tool_id(span))) for span in spans]
    by_key = {call.key: call for call in calls}
    inside = _ends_inside(episode, calls)
    clock = _Clock(calls) if _clocks_agree(episode, tools, by_key) else None
    placed = []
    for tool in tools:
        start, end = tool.span.start_ns, tool.span.end_ns
        requester = by_key.get(tool.call) if tool.call is not None else None
        since = None if requester is None else requester.sequence_end
        bounds = [since, inside.get(tool.span.span_id)]
        if clock is not None and 0 < start <= end:
            bounds.append(clock.last(end))
            since = clock.last(start) if since is None else since
        after = max((bound for bound in bounds if bound is not None), default=None)
        placed.append(PlacedTool(tool, after, since))
    return placed


def _tool_spans(episode: Episode) -> list[Span]:
    """Return one span per tool call.

    If several spans have the same tool call id, it is the one that began last.
    """
    spans = [span for span in episode.spans if span.kind is SpanKind.TOOL]
    spans.sort(key=lambda span: (span.start_ns, span.span_id))
    once = {span.span_id: span for span in spans}
    return list({_tool_id(span) or f"span:{span.span_id}": span for span in once.values()}.values())


def _tool_id(span: Span) -> str:
    return str(span.attributes.get(c.TOOL_CALL_ID) or "")


def _tool(span: Span, requester: CallKey | None) -> ToolCall:
    result = _first(span, _RESULTS)
    return ToolCall(
        name=_first(span, _NAMES) or span.name,
        arguments=_first(span, _ARGUMENTS),
        result=result,
        succeeded=_succeeded(span, result),
        agent_path=str(span.attributes.get(c.AGENT_PATH) or c.UNNAMED_AGENT),
        call=requester,
        span=span,
    )


def _first(span: Span, keys: Sequence[str]) -> str | None:
    return next((str(span.attributes[key]) for key in keys if key in span.attributes), None)


def _succeeded(span: Span, result: str | None) -> bool | None:
    if span.status is SpanStatus.ERROR or span.attributes.get(c.ERROR_TYPE):
        return False
    # not every framework sets OK: a tool with a result and no status succeeded, and one without a
    # result was interrupted
    return True if span.status is SpanStatus.OK or result is not None else None


def _ends_inside(episode: Episode, calls: Sequence[Call]) -> dict[str, int]:
    """Return for each span the highest sequence number at which a model call inside it ended.

    The keys are span ids. Spans without a model call are left out.
    """
    ends: dict[str, int] = {}
    for call in calls:
        ends[call.span_id] = max(ends.get(call.span_id, 0), call.sequence_end or 0)
    inside: dict[str, int] = {}
    for _, node in reversed(list(walk(episode.tree))):  # children before their parents
        spans = [child.span.span_id for child in node.children]
        inner = [inside[span_id] for span_id in spans if span_id in inside]
        if node.span.span_id in ends:
            inner.append(ends[node.span.span_id])
        if inner:
            inside[node.span.span_id] = max(inner)
    return inside


# --- clocks -----------------------------------------------------------------------------------


class _Clock:
    """Converts a time of the clock to a place in the gateway's sequence of calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        points = sorted(point for call in calls for point in _points(call))
        self._times = [time for time, _ in points]
        self._last = list(accumulate((sequence for _, sequence in points), max))

    def last(self, time: int) -> int:
        """Return the highest sequence number of the model calls that began or ended by `time`.

        `time` is in nanoseconds. The result is -1 if no call had begun by then.
        """
        before = bisect_right(self._times, time)
        return self._last[before - 1] if before else -1


def _points(call: Call) -> list[tuple[int, int]]:
    """Return (time, sequence number) of the start and the end of a model call.

    If the call has no timestamps, both times are 0: it then counts as earlier than every tool call.
    """
    start, end = (call.span.start_ns, call.span.end_ns) if call.span is not None else (0, 0)
    return [(start, call.sequence_start or 0), (max(start, end), call.sequence_end or 0)]


def _clocks_agree(
    episode: Episode, tools: Sequence[ToolCall], calls: Mapping[CallKey, Call]
) -> bool:
    """Return False if recorded times show that the clocks of gateway and app differ."""
    spans = {span.span_id: span for span in episode.spans}
    gaps = []
    for call in calls.values():
        inner = call.span
        if inner is None or call.outcome is not CallOutcome.OK or not inner.start_ns:
            continue
        outer = spans.get(inner.parent_id or "")
        if outer is not None and 0 < outer.start_ns <= outer.end_ns:
            gaps += [outer.start_ns - inner.start_ns, inner.end_ns - outer.end_ns]
    for tool in tools:
        requester = calls.get(tool.call) if tool.call is not None else None
        if requester is not None and requester.span is not None and tool.span.start_ns:
            gaps.append(requester.span.end_ns - tool.span.start_ns)
    return max(gaps, default=0) <= CLOCK_TOLERANCE_NS
