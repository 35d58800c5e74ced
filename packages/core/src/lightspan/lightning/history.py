"""History: what had happened in an attempt when a call began, for what may depend on nothing else.

Model calls are ordered by the gateway's sequence. Tool calls have none, only clocks, and an app's
clock may not be the gateway's. A tool call is therefore given a *place* in the sequence that is
never too early: it counts as ended only for model calls that begin after every one of

- the model call that asked for it, by the id of the tool call;
- the model calls made inside it (an agent that is a tool), by parent spans;
- every model call that began or ended by the clock before it ended. A tie is "before".

Counting a tool call too late costs some information; counting it too early would tell an action's
outcome to the state that it was taken in. So where the two clocks provably disagree (a model call
outlives the span it was made in, a tool call begins before the answer that asked for it), or a
span has no time, clocks are not used: a tool call that ids do not place then stays *unplaced*.
Nothing here raises, whatever was recorded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.span_tree import walk
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome

CLOCK_TOLERANCE_NS: Final = 1_000_000
"""Two readings of one clock may differ by this much while it is adjusted (as NTP does)."""

_RESULTS: Final = (c.TOOL_CALL_RESULT, "output.value", "traceloop.entity.output")
_ARGUMENTS: Final = (c.TOOL_CALL_ARGUMENTS, "input.value", "traceloop.entity.input")
_NAMES: Final = (c.TOOL_NAME, "tool.name", "traceloop.entity.name")
_json: Final = msgspec.json.Decoder()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, from its TOOL span."""

    name: str
    arguments: str | None
    """Text or JSON, possibly cut; None: not recorded."""
    result: str | None
    """Text or JSON, possibly cut; None: not recorded."""
    succeeded: bool | None
    """None: not known (interrupted, abandoned)."""
    agent_path: str
    call: CallKey | None
    """The model call that asked for it; None: not known."""
    span: Span


class PlacedTool(NamedTuple):
    """A tool call with its place in the attempt's sequence (see the module)."""

    tool: ToolCall
    after: int | None
    """It had ended for model calls that began after this; None: unplaced."""
    since: int | None
    """Model calls that ended up to here ended before it began; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The state in which a turn is taken: what had ended before its first call began.

    It holds no reward and nothing of the turn itself, so that a function of it is a potential.
    """

    task_id: str
    turn: int
    """The turn, as `lightspan.lightning.transitions` counts them from 0."""
    calls: tuple[Call, ...]
    """Model calls through the gateway, of any agent, in causal order."""
    tools: tuple[ToolCall, ...]
    """Tool calls, by their place."""


class Trace:
    """The calls and tool calls of an episode, by their places.

    Args:
        episode: of any kind, damaged ones too.
    """

    def __init__(self, episode: Episode) -> None:
        self.task_id = episode.task_id
        self.calls = [call for call in episode.calls if call.sequence_start is not None]
        self.messages = {call.key: message for call, message in _messages(episode.calls)}
        self.tools = _place(episode, self.calls, self.messages)

    def history(self, turn: int, position: float) -> History:
        """What had ended before a sequence number."""
        ended = [call for call in self.calls if (call.sequence_end or 0) < position]
        placed = [p for p in self.tools if p.after is not None and p.after < position]
        return History(
            task_id=self.task_id,
            turn=turn,
            calls=tuple(msgspec.structs.replace(call, rewards=()) for call in ended),
            tools=tuple(place.tool for place in sorted(placed, key=_by_place)),
        )


def _by_place(placed: PlacedTool) -> tuple[int, int, str]:
    return placed.after or 0, placed.tool.span.start_ns, placed.tool.span.span_id


# --- what models said -------------------------------------------------------------------------


def _messages(calls: Sequence[Call]) -> Iterator[tuple[Call, Mapping[str, Any]]]:
    """The message that each call answered, as far as one was recorded."""
    by_span: dict[str, list[Any]] = {}  # the choices of a call share a span: it is read once
    for call in calls:
        if call.span is None:
            continue
        answers = by_span.get(call.span.span_id)
        if answers is None:
            answers = by_span[call.span.span_id] = _output(call.span)
        if call.choice < len(answers) and isinstance(answers[call.choice], Mapping):
            yield call, answers[call.choice]


def _output(span: Span) -> list[Any]:
    try:
        decoded = _json.decode(str(span.attributes.get(c.OUTPUT_MESSAGES, "[]")))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return []
    return decoded if isinstance(decoded, list) else []


def parts(message: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """The parts of a message that are of a kind, such as `tool_call`."""
    recorded = message.get("parts")
    listed = recorded if isinstance(recorded, list) else []
    return [part for part in listed if isinstance(part, Mapping) and part.get("type") == kind]


def _askers(messages: Mapping[CallKey, Mapping[str, Any]]) -> dict[str, CallKey]:
    """Id of a tool call → the model call that asked for it; ids that several used say nothing."""
    by_id: dict[str, set[CallKey]] = {}
    for key, message in messages.items():
        for part in parts(message, "tool_call"):
            if part.get("id"):
                by_id.setdefault(str(part["id"]), set()).add(key)
    return {name: next(iter(keys)) for name, keys in by_id.items() if len(keys) == 1}


# --- tool calls -------------------------------------------------------------------------------


def _place(
    episode: Episode, calls: Sequence[Call], messages: Mapping[CallKey, Mapping[str, Any]]
) -> list[PlacedTool]:
    spans = _tool_spans(episode)
    if not spans:
        return []
    askers = _askers(messages)
    tools = [_tool(span, askers.get(_tool_id(span))) for span in spans]
    by_key = {call.key: call for call in calls}
    inside = _ends_inside(episode, calls)
    clock = _Clock(calls) if _clocks_agree(episode, tools, by_key) else None
    return [_placed(tool, by_key, inside, clock) for tool in tools]


def _placed(
    tool: ToolCall,
    calls: Mapping[CallKey, Call],
    inside: Mapping[str, int],
    clock: _Clock | None,
) -> PlacedTool:
    start, end = tool.span.start_ns, tool.span.end_ns
    asker = calls.get(tool.call) if tool.call is not None else None
    asked = None if asker is None else asker.sequence_end
    since, bounds = asked, [asked, inside.get(tool.span.span_id)]
    if clock is not None and 0 < start <= end:
        bounds.append(clock.last(end))
        since = clock.last(start) if asked is None else asked
    return PlacedTool(tool, max((b for b in bounds if b is not None), default=None), since)


def _tool_spans(episode: Episode) -> list[Span]:
    """Each tool call once, by span id and by the id of the tool call: the one that began last."""
    spans = [span for span in episode.spans if span.kind is SpanKind.TOOL]
    spans.sort(key=lambda span: (span.start_ns, span.span_id))
    once = {span.span_id: span for span in spans}
    named = {_tool_id(span) or f"span:{span.span_id}": span for span in once.values()}
    return list(named.values())


def _tool_id(span: Span) -> str:
    return str(span.attributes.get(c.TOOL_CALL_ID) or "")


def _tool(span: Span, asker: CallKey | None) -> ToolCall:
    result = _first(span, _RESULTS)
    return ToolCall(
        name=_first(span, _NAMES) or span.name,
        arguments=_first(span, _ARGUMENTS),
        result=result,
        succeeded=_succeeded(span, result),
        agent_path=str(span.attributes.get(c.AGENT_PATH) or c.UNNAMED_AGENT),
        call=asker,
        span=span,
    )


def _first(span: Span, keys: Sequence[str]) -> str | None:
    return next((str(span.attributes[key]) for key in keys if key in span.attributes), None)


def _succeeded(span: Span, result: str | None) -> bool | None:
    if span.status is SpanStatus.ERROR or span.attributes.get(c.ERROR_TYPE):
        return False
    # frameworks differ in setting OK: a tool that answered without a status has succeeded, and one
    # that did not answer was interrupted
    return True if span.status is SpanStatus.OK or result is not None else None


def _ends_inside(episode: Episode, calls: Sequence[Call]) -> dict[str, int]:
    """Span id → the last sequence number of the model calls made inside it."""
    ends: dict[str, int] = {}
    for call in calls:
        ends[call.span_id] = max(ends.get(call.span_id, 0), call.sequence_end or 0)
    inside: dict[str, int] = {}
    for _, node in reversed(list(walk(episode.tree.roots))):  # children before their parents
        spans = [child.span.span_id for child in node.children]
        inner = [inside[span_id] for span_id in spans if span_id in inside]
        if node.span.span_id in ends:
            inner.append(ends[node.span.span_id])
        if inner:
            inside[node.span.span_id] = max(inner)
    return inside


# --- clocks -----------------------------------------------------------------------------------


class _Clock:
    """When calls began and ended, as (time, sequence)."""

    def __init__(self, calls: Sequence[Call]) -> None:
        points = sorted(point for call in calls for point in _points(call))
        self._times = [time for time, _ in points]
        self._last = list(accumulate((sequence for _, sequence in points), max))

    def last(self, time: int) -> int:
        """The highest sequence number given up to a time; -1 for none."""
        before = bisect_right(self._times, time)
        return self._last[before - 1] if before else -1


def _points(call: Call) -> list[tuple[int, int]]:
    """(time, sequence) of the call's start and end. Without a time it may have been at any, and
    counts as before everything: then no tool call is placed too early."""
    start, end = (call.span.start_ns, call.span.end_ns) if call.span is not None else (0, 0)
    return [(start, call.sequence_start or 0), (max(start, end), call.sequence_end or 0)]


def _clocks_agree(
    episode: Episode, tools: Sequence[ToolCall], calls: Mapping[CallKey, Call]
) -> bool:
    """Whether nothing recorded shows the gateway's clock to be another than the app's."""
    spans = {span.span_id: span for span in episode.spans}
    for call in calls.values():
        inner = call.span
        if inner is None or call.outcome is not CallOutcome.OK or not inner.start_ns:
            continue
        outer = spans.get(inner.parent_id or "")
        if outer is None or not 0 < outer.start_ns <= outer.end_ns:
            continue
        if outer.start_ns - inner.start_ns > CLOCK_TOLERANCE_NS:
            return False
        if inner.end_ns - outer.end_ns > CLOCK_TOLERANCE_NS:
            return False
    for tool in tools:
        asker = calls.get(tool.call) if tool.call is not None else None
        if asker is None or asker.span is None or not tool.span.start_ns:
            continue
        if asker.span.end_ns - tool.span.start_ns > CLOCK_TOLERANCE_NS:
            return False
    return True
