"""Forks: repeat a recorded attempt up to a call, then sample.

A retry of a call is answered as the call was. A fork extends this to the calls of another attempt:
each request of the forked attempt that equals a recorded one gets the recorded answer, under the
recorded call id, so that response ids and the ids of tool calls come out equal. Two requests are
equal if their agents' paths and the hashes of their bodies are.

The *prefix* of the call at which a rollout forks are the calls that ended before it began, by the
gateway's sequence numbers. `Script` decides for each request which of these it is:

- the next call of the prefix: it is answered as recorded;
- the call at which the rollout forks: it waits until the prefix is used up, then is sampled, and so
  is every request after it;
- another recorded call, which ran at the same time as that call or after it: it waits until the
  fork is there;
- anything else: the attempt has departed from the recorded one.

If no two calls of the recorded attempt overlapped, the requests must come in the recorded order.
Otherwise they may come in any order. Answers are always given in the order in which they were
recorded, each when the app has received those before it, because an app may act on the first of
several answers.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightspan.schema import semconv as c
from lightspan.schema.genai_attributes import request_attributes
from lightspan.schema.genai_messages import load
from lightspan.schema.records import Fork
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome
from lightspan_gateway.api_errors import ApiError, bad_request

if TYPE_CHECKING:
    from lightspan_gateway.calls import RecordedCall

MAX_EXCERPT: Final = 60
"""Maximum characters of a text that a departure quotes."""


class ScriptCall(NamedTuple):
    """A recorded call, as requests are compared with it."""

    call_id: str
    agent_path: str
    body_hash: str
    start: int
    """The gateway's sequence number at the start."""
    end: int
    """The gateway's sequence number at the end."""


class Role(Enum):
    """What a request of a forked attempt is."""

    PREFIX = "prefix"
    """A call before the fork: it is answered as recorded."""
    FORK = "fork"
    """The call at which the rollout forks."""
    CONCURRENT = "concurrent"
    """A call that ran at the same time as the fork, or after it."""
    AFTER = "after"
    """A call after the fork."""


class Placement(NamedTuple):
    """The role of a request, and the id of the recorded call that it equals."""

    role: Role
    call_id: str = ""
    """Empty for a call after the fork."""


class Script:
    """The calls that a forked attempt repeats, and how far it has repeated them.

    Args:
        calls: the recorded calls, in any order.
        fork: id of the call at which to fork; empty to repeat all calls and nothing else. If no
            recorded call has this id, every request departs.
    """

    def __init__(self, calls: Iterable[ScriptCall], fork: str = "") -> None:
        ordered = sorted(calls, key=lambda call: call.start)
        by_id = {call.call_id: call for call in ordered}
        self.fork = by_id.get(fork)
        self.prefix = [c for c in ordered if self.fork is None or c.end < self.fork.start]
        """The calls to repeat, in the order in which they began."""
        self.is_sequential = all(a.end < b.start for a, b in pairwise(ordered))
        """Whether no two calls of the recorded attempt overlapped."""
        self.departed = ""
        """Why the attempt departed; empty if it did not."""
        if fork and self.fork is None:
            self.departed = (
                f"the recorded attempt has no call {fork!r} in the store: was it pruned?"
            )
        self._by_id = by_id
        self._expected = list(self.prefix)
        """Calls of the prefix that have not been requested yet."""
        answers = sorted(self.prefix, key=lambda call: call.end)
        self._answers = [call.call_id for call in answers]
        """Ids of the calls of the prefix that are not answered yet, in the order of answers."""
        repeated = {*self._answers, fork}
        self._others = [call for call in ordered if call.call_id not in repeated]
        self._placements: dict[str, Placement] = {}
        """Id of a request → its role."""

    @property
    def answered(self) -> int:
        """The number of calls of the prefix whose answers the app has received."""
        return len(self.prefix) - len(self._answers)

    @property
    def has_forked(self) -> bool:
        """Whether the call at which the rollout forks has been requested and may be sampled."""
        forks = (each.role is Role.FORK for each in self._placements.values())
        return not self._answers and any(forks)

    def place(self, request_id: str, agent_path: str, body_hash: str) -> Placement | None:
        """Find the role of a request, and record that it has come.

        A repeated request gets the same role.

        Args:
            request_id: the call id of the request.
            agent_path: path of the agent that makes the call.
            body_hash: hash of the request's body.

        Returns:
            The role; None if the request is none of the expected ones, so that the attempt departs.
        """
        if request_id not in self._placements:
            placement = self._find(agent_path, body_hash)
            if placement is None:
                return None
            self._placements[request_id] = placement
        return self._placements[request_id]

    def _find(self, agent_path: str, body_hash: str) -> Placement | None:
        if self.has_forked:
            return Placement(Role.AFTER)
        sought = agent_path, body_hash
        expected = self._expected[:1] if self.is_sequential else self._expected
        for call in expected:
            if sought == (call.agent_path, call.body_hash):
                self._expected.remove(call)
                return Placement(Role.PREFIX, call.call_id)
        fork, roles = self.fork, {each.role for each in self._placements.values()}
        if fork is None:
            return None
        if Role.FORK not in roles and sought == (fork.agent_path, fork.body_hash):
            return Placement(Role.FORK, fork.call_id)
        for call in self._others:
            if sought == (call.agent_path, call.body_hash):
                self._others.remove(call)
                return Placement(Role.CONCURRENT, call.call_id)
        return None

    def withdraw(self, request_id: str) -> None:
        """Forget a request whose client disconnected before the answer; it may come again."""
        placement = self._placements.pop(request_id, Placement(Role.AFTER))
        if placement.role is Role.PREFIX:
            self._expected.append(self._by_id[placement.call_id])
            self._expected.sort(key=lambda call: call.start)
        elif placement.role is Role.CONCURRENT:
            self._others.append(self._by_id[placement.call_id])

    def is_ready(self, placement: Placement) -> bool:
        """Return whether a request with this role may be answered or sampled now."""
        if placement.role is Role.PREFIX:
            return placement.call_id not in self._answers[1:]
        return self.has_forked

    def answer(self, call_id: str) -> None:
        """Record that the app has received the answer of a call."""
        if call_id in self._answers:
            self._answers.remove(call_id)

    def restore(self, request_id: str, call_id: str) -> None:
        """Record that a call of the prefix was answered before the gateway was started again.

        Args:
            request_id: the call id that the client sent, which a retry sends again.
            call_id: id of the recorded call.
        """
        placement = Placement(Role.PREFIX, call_id)
        self._placements |= {request_id: placement, call_id: placement}
        self._expected = [call for call in self._expected if call.call_id != call_id]
        self.answer(call_id)

    def restore_fork(self, request_id: str) -> None:
        """Record that the call at which the rollout forks was made before such a start."""
        self._placements[request_id] = Placement(Role.FORK)
        self._expected, self._answers = [], []

    def number(self, call_id: str) -> int:
        """Return the number of a recorded call in the order in which they began, from 1 on."""
        return 1 + list(self._by_id).index(call_id)

    def later_call(self, agent_path: str, body_hash: str) -> str:
        """Return the id of the expected call that a request equals, although another one is next.

        Empty if there is none.
        """
        sought = agent_path, body_hash
        equal = [c.call_id for c in self._expected if sought == (c.agent_path, c.body_hash)]
        return equal[0] if equal else ""

    def next_call(self, agent_path: str) -> str:
        """Return the id of the recorded call with which to compare a request of this agent.

        It is the first call that has not come, of this agent if it has one. Empty if all have come.
        """
        waiting = [*self._expected, *([self.fork] if self.fork is not None else [])]
        if not self.is_sequential:
            waiting.sort(key=lambda call: call.agent_path != agent_path)
        return waiting[0].call_id if waiting else ""


@dataclass(slots=True)
class Replay:
    """The replay of a session: the requests of a forked attempt, which wait for their turn.

    Args:
        script: the calls to repeat.
        parent_id: id of the recorded attempt.
        calls: id → recorded call.
        limit_s: seconds without progress after which a waiting request departs.
    """

    script: Script
    parent_id: str
    calls: Mapping[str, RecordedCall]
    limit_s: float
    waiting: Counter[str] = field(default_factory=Counter)
    """Id of a request → how many clients wait for it."""
    is_reported: bool = False
    """Whether the attempt was marked, because it departed."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def place(self, request_id: str, agent_path: str, body_hash: str, body: Any) -> Placement:
        """Return the role of a request; wait until it may be answered or sampled.

        Args:
            request_id: the call id of the request.
            agent_path: path of the agent that makes the call.
            body_hash: hash of the request's body.
            body: the body.

        Raises:
            ApiError: 400 if the attempt departs here, or has departed.
        """
        self._check()
        placement = self.script.place(request_id, agent_path, body_hash)
        if placement is None:
            raise self.depart(self._difference(agent_path, body_hash, body))
        self._notify()
        self.waiting[request_id] += 1
        try:
            while not self.script.is_ready(placement):
                await self._wait(agent_path)
        except asyncio.CancelledError:
            if self.waiting[request_id] == 1:
                self.script.withdraw(request_id)
            raise
        finally:
            self.waiting -= Counter([request_id])
        if placement.role is Role.FORK:
            self._notify()
        return placement

    async def _wait(self, agent_path: str) -> None:
        """Wait for progress; depart if there is none for `limit_s` seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), self.limit_s)
        except TimeoutError:
            call_id = self.script.next_call("")
            agent = self._span(call_id).attributes[c.AGENT_PATH] if call_id else agent_path
            self.depart(
                f"a call of {agent_path!r} waited {self.limit_s:.0f} s for a recorded call of "
                f"{agent!r} that did not come: does the app keep answers, or act on time?"
            )
        self._check()

    def answer(self, call_id: str) -> None:
        """Record that the app has received the answer of a call."""
        self.script.answer(call_id)
        self._notify()

    def depart(self, reason: str) -> ApiError:
        """End the replay: refuse the requests that wait, and all later ones, with this error."""
        if not self.script.departed:
            done, size = self.script.answered, len(self.script.prefix)
            self.script.departed = (
                f"the attempt departed from {self.parent_id} after {done} of {size} calls: {reason}"
            )
            self._notify()
        return self._error()

    def _check(self) -> None:
        if self.script.departed:
            raise self._error()

    def _error(self) -> ApiError:
        # not 409, 429 or 5xx, which the SDKs repeat
        return bad_request(self.script.departed, code=c.REPLAY_DEPARTED)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _span(self, call_id: str) -> Span:
        return self.calls[call_id].span

    def _difference(self, agent_path: str, body_hash: str, body: Any) -> str:
        call_id = self.script.next_call(agent_path)
        if not call_id:
            return f"a call of {agent_path!r} more than were recorded"
        span, number = self._span(call_id), self.script.number(call_id)
        later = self.script.later_call(agent_path, body_hash)
        if later:
            return (
                f"call {self.script.number(later)} came where call {number} was: the app left "
                "calls out, or made them in another order, such as that of a set or of threads"
            )
        recorded = str(span.attributes[c.AGENT_PATH])
        if recorded != agent_path:
            return f"call {number} was of {recorded!r}, and is of {agent_path!r}"
        return f"call {number}, of {recorded!r}: {describe_difference(span.attributes, body)}"


# --- reading the store -----------------------------------------------------------------------
def make_replay(fork: Fork, calls: Mapping[str, RecordedCall], limit_s: float) -> Replay:
    """Return the replay of a recorded attempt.

    Args:
        fork: the attempt, and the call at which to fork.
        calls: id → recorded call of the attempt.
        limit_s: seconds for which a request waits without progress, beyond the time that the
            recorded attempt took.
    """
    spans = {call_id: call.span for call_id, call in calls.items()}
    script = make_script(spans, fork.call_id)
    return Replay(script, fork.attempt_id, calls, limit_s + duration_s(spans.values()))


def make_script(spans: Mapping[str, Span], fork: str) -> Script:
    """Return the script for the calls of a recorded attempt; `spans` has them by call id."""
    calls = [
        ScriptCall(
            call_id,
            str(span.attributes.get(c.AGENT_PATH)),
            str(span.attributes.get(c.REQUEST_HASH)),
            span.sequence_start or 0,
            span.sequence_end or 0,
        )
        for call_id, span in spans.items()
    ]
    return Script(calls, fork)


def restore_script(script: Script, spans: Iterable[Span]) -> None:
    """Bring a script to where its forked attempt is, by the spans that the attempt has so far."""
    for span in spans:
        values = span.attributes
        if values.get(c.ERROR_TYPE) == c.REPLAY_DEPARTED:
            script.departed = span.status_message
        elif values.get(c.CALL_OUTCOME) == CallOutcome.REPLAYED:
            script.restore(str(values[c.REPLAY_REQUEST]), str(values[c.CALL_ID]))
        elif values.get(c.REPLAY_FORK):
            script.restore_fork(str(values[c.CALL_ID]))


def duration_s(spans: Iterable[Span]) -> float:
    """Return the seconds from the start of the first of some calls to the end of the last."""
    times = [(span.start_ns, span.end_ns) for span in spans]
    if not times:
        return 0.0
    starts, ends = zip(*times, strict=True)
    return float(max(ends) - min(starts)) / 1e9


# --- differences -----------------------------------------------------------------------------
_CAUSES: Final = (
    ("a UUID", re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")),
    ("a time of day", re.compile(r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AaPp][Mm])?")),
    ("a date", re.compile(r"\b\d{4}-\d{2}-\d{2}\b")),
    (
        "a date or time of day",
        re.compile(r"\b\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?"),
    ),
    ("a temporary path", re.compile(r"/(?:tmp|var/folders)/[^\s\"']+")),
    ("an address in memory", re.compile(r"0x[0-9a-f]+")),
    ("a number, such as a time, a row's number or a random one", re.compile(r"\d+(?:\.\d+)?")),
    ("a random text", re.compile(r"\b[0-9a-fA-F]{6,}\b")),
)
"""Likely cause → pattern that hides it: texts that are equal without it differ by it alone."""


def likely_cause(before: str, after: str) -> str:
    """Return why a text may differ between two runs of an app; empty if nothing is recognised.

    Example:
        >>> likely_cause("It is 14:03.", "It is 14:07.")
        'a time of day'
        >>> likely_cause("tools: add, mul", "tools: mul, add")
        'an order, such as that of a set, or of results that arrive at once'
    """
    for cause, pattern in _CAUSES:
        if pattern.sub("#", before) == pattern.sub("#", after):
            return cause
    if _is_reordered(before, after):
        return "an order, such as that of a set, or of results that arrive at once"
    return ""


_SEPARATOR: Final = re.compile(r"[\n,;|()\[\]{}]")
"""What separates the parts of a list in a text."""


def _is_reordered(before: str, after: str) -> bool:
    """Return whether two texts are lists of the same parts, in another order.

    Separators, such as commas, brackets and line ends, separate parts. The words that both texts
    begin and end with may be outside the list.
    """
    words = [re.findall(r"\w+|\W", text) for text in (before, after)]
    start = _shared(*words)
    end = _shared(*(each[start:][::-1] for each in words))
    within = ["".join(each[start : len(each) - end]) for each in words]
    return sorted(before) == sorted(after) and any(
        _parts(one) == _parts(two) for one, two in ((before, after), within)
    )


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many items two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _parts(text: str) -> list[str]:
    return sorted(part.strip() for part in _SEPARATOR.split(text))


def describe_difference(recorded: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Describe the first difference between a recorded request and another.

    Args:
        recorded: the attributes of the recorded call's span.
        body: the body of the other request.
    """
    request = request_attributes(body)
    before = load(str(recorded.get(c.INPUT_MESSAGES, "[]")))
    after = load(str(request.get(c.INPUT_MESSAGES, "[]")))
    if c.CALL_CONTEXT in request:  # it continues a response, and has the new messages only
        before = before[max(0, len(before) - len(after)) :]
    for number, (one, two) in enumerate(zip(before, after, strict=False)):
        if one != two:
            return f"messages[{number}] {_describe_message(one, two)}"
    if len(before) != len(after):
        return f"{len(after)} messages where there were {len(before)}"
    for key, value in request.items():
        if key not in (c.INPUT_MESSAGES, c.CALL_CONTEXT) and recorded.get(key) != value:
            return f"{key} {_describe_texts(str(recorded.get(key)), str(value))}"
    return "a field that is not recorded differs, such as `user`, `metadata` or `stop`"


def _describe_message(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    role, kind = before.get("role"), "a tool's answer" if before.get("role") == "tool" else ""
    if role != after.get("role"):
        return f"is of role {after.get('role')!r}, and was of {role!r}"
    texts = [
        one if isinstance(one, str) else str(msg)
        for msg in (before, after)
        for one in [msg.get("content")]
    ]
    if texts[0] == texts[1]:
        texts = [str(before), str(after)]
    return f"({kind or role}): {_describe_texts(*texts)}"


def _describe_texts(before: str, after: str) -> str:
    pairs = zip(before, after, strict=False)
    shorter = min(len(before), len(after))
    place = next((n for n, (one, two) in enumerate(pairs) if one != two), shorter)
    cause = likely_cause(before, after)
    first = max(0, place - MAX_EXCERPT // 3)
    shown = [text[first : first + MAX_EXCERPT] for text in (before, after)]
    return f"{shown[0]!r} became {shown[1]!r}{f' ({cause})' if cause else ''}"
