"""Episode: what an attempt's spans and token records say, as calls in causal order.

A *call* is (attempt, call id, choice). It is known from its token record, its LLM span, or both.
Everything about it is what it says itself:

- its agent is the path that was recorded when it was made, never a guess from times or from the
  spans around it;
- its place is the gateway's sequence, `(sequence_start, call id, choice)`, never a clock. Calls
  that the app made past the gateway have no sequence. They are shown among the others by start
  time, and nothing that is trained depends on where;
- its identity is its call id: retries are one call, equal prompts under two ids are two calls.

The reward of the episode is what the app returned; else the last reward emitted for the attempt as
a whole. Rewards emitted on a call, or on its span, stay with that call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import msgspec

from lightspan.errors import DataError
from lightspan.lightning.span_tree import SpanTree, build_tree
from lightspan.schema import semconv
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import usable
from lightspan.schema.routing import Route, agent_name, join_path
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome, TokenRecord

CallKey = tuple[str, int]
"""(call id, choice), unique within an attempt."""
RewardSource = Literal["returned", "emitted", "failure", "scored"]
"""Who gave a final reward: the app, `failure_reward`, or a judge or function in the app's place."""

_APP_FAILED: Final = frozenset(
    {Outcome.APP_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.BUDGET}
)
_NEVER_SCORED: Final = frozenset({Outcome.INFRASTRUCTURE, Outcome.CANCELLED})
_ENDED: Final = frozenset({AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.TIMEOUT})
_UNSCORED: Final = frozenset({AttemptStatus.LOST, AttemptStatus.CANCELLED})
# Members of enums as globals: each is compared with every span or call of a batch.
_LLM: Final = SpanKind.LLM
_REWARD: Final = SpanKind.REWARD
_OK: Final = CallOutcome.OK
_CALL_ID: Final = semconv.CALL_ID
_OUTCOMES: Final = {str(outcome): outcome for outcome in CallOutcome}
_ROUTES: Final = {str(route): route for route in Route}


class EmittedReward(msgspec.Struct, frozen=True, gc=False):
    """One `emit_reward`."""

    span_id: str
    value: float | None
    """None: unscored (NaN, infinity)."""
    dimensions: dict[str, float]
    time_ns: int


class Call(msgspec.Struct, frozen=True, gc=False):
    """One model call of an attempt (see the module)."""

    call_id: str
    """Its id; a span without a call id gets `span:` and its span id."""
    choice: int
    agent_path: str
    outcome: CallOutcome
    sequence_start: int | None = None
    """None: the call did not go through the gateway."""
    sequence_end: int | None = None
    record: TokenRecord | None = None
    """None: no token ids are known."""
    span: Span | None = None
    rewards: tuple[EmittedReward, ...] = ()
    """Emitted on this call or its span, in order of time. Choices of one call share them."""

    @property
    def key(self) -> CallKey:
        return self.call_id, self.choice

    @property
    def agent(self) -> str:
        """The name of the acting agent: the innermost of the path."""
        return _agent(self.agent_path)

    @property
    def span_id(self) -> str:
        if self.span is not None:
            return self.span.span_id
        return "" if self.record is None else self.record.span_id

    @property
    def route(self) -> Route | None:
        """Where the call went, as its span says."""
        recorded = None if self.span is None else self.span.attributes.get(semconv.ROUTE)
        return _ROUTES.get(str(recorded))

    @property
    def policy(self) -> str:
        """The policy that sampled; empty for none of ours."""
        return "" if self.record is None else self.record.policy

    @property
    def finish(self) -> str | None:
        """The finish reason, None if nobody recorded one."""
        if self.record is not None:
            return self.record.finish_reason
        if self.span is None:
            return None
        reasons = self.span.attributes.get(semconv.FINISH_REASONS)
        if not isinstance(reasons, list) or self.choice >= len(reasons):
            return None
        return str(reasons[self.choice]) or None

    @property
    def refused(self) -> str | None:
        """The field that the gateway refused the call for, empty where it is of none; None: it did
        not refuse it."""
        if self.outcome is not CallOutcome.ERROR or self.span is None:
            return None
        field = self.span.attributes.get(semconv.CALL_REFUSED)
        return None if field is None else str(field)

    @property
    def reward(self) -> float | None:
        """The last reward emitted on the call: several are never summed."""
        return self.rewards[-1].value if self.rewards else None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An attempt with its calls in causal order. Built by `build_episode`."""

    rollout_id: str
    attempt_id: str
    task_id: str
    group_id: str
    """Whose rewards are compared: the rollout's group, else its task."""
    mode: Mode
    status: AttemptStatus
    outcome: Outcome | None
    message: str = ""
    """What went wrong, for people."""
    capture_errors: tuple[str, ...] = ()
    """Capture errors: an episode with any is never trained."""
    reward: float | None = None
    """The final reward; None: unscored, which is not zero."""
    dimensions: Mapping[str, float] = field(default_factory=dict)
    reward_source: RewardSource | None = None
    """None: no reward was given. With a source and no `reward`, NaN or so was."""
    unscored: str = ""
    """Why a judge or a function gave none."""
    reasons: str = ""
    """Why the reward is this much, in a judge's words."""
    calls: tuple[Call, ...] = ()
    late_calls: tuple[Call, ...] = ()
    """Calls written after the seal or under a lost lease: kept, and never among `calls`."""
    late: int = 0
    """How many spans and records are late."""
    foreign: int = 0
    """How many spans and records of other attempts were handed in: they are ignored."""
    unattached: tuple[EmittedReward, ...] = ()
    """Rewards emitted on something that is no call of this attempt. They count for nothing."""
    notes: tuple[str, ...] = ()
    """What a person should know: contradicting rewards and the like."""
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """Spans that are not late."""

    @property
    def finished(self) -> bool:
        """Whether the attempt ended by itself: not running, not lost, not cancelled."""
        return self.status in _ENDED and self.outcome not in _NEVER_SCORED

    def scored(self, step_rewards: bool = False) -> bool:
        """Whether there is a usable reward.

        Args:
            step_rewards: the credit rule pays for rewards on calls. Then they suffice, unless a
                final reward was given and is unusable; and none of them may be unusable, or the
                rollout was paid nobody knows how much.
        """
        if step_rewards and any(call.rewards and call.reward is None for call in self.calls):
            return False
        if self.reward is not None:
            return True
        if not step_rewards or self.reward_source is not None or not self.finished:
            return False
        return any(call.reward is not None for call in self.calls)

    @cached_property
    def tree(self) -> SpanTree:
        """The spans as a tree, for display. Made when it is asked for: training never asks."""
        return build_tree(self.spans)

    @property
    def orphans(self) -> int:
        """Spans whose parent is unknown; in the tree they are roots."""
        return self.tree.orphans

    @cached_property
    def parallel(self) -> frozenset[str]:
        """Call ids whose [sequence_start, sequence_end] overlaps that of another call id."""
        overlapping: set[str] = set()
        open_until, owner = -1, ""
        for call in self.calls:
            if call.sequence_start is None or call.sequence_end is None or call.call_id == owner:
                continue
            if owner and call.sequence_start <= open_until:
                overlapping |= {owner, call.call_id}
            if call.sequence_end > open_until:
                open_until, owner = call.sequence_end, call.call_id
        return frozenset(overlapping)


def build_episode(
    attempt: Attempt,
    rollout: Rollout,
    spans: Sequence[Span],
    records: Sequence[TokenRecord],
    *,
    failure_reward: float | None = None,
) -> Episode:
    """The episode of an attempt. The order in which spans and records arrive does not matter.

    Args:
        attempt: one of this rollout's; nothing of it is trained until it is sealed.
        rollout: what was asked for.
        spans: the attempt's, all of them.
        records: the attempt's token records, all of them.
        failure_reward: the reward where the app failed (error, timeout, context, budget) and gave
            none. None: unscored. Infrastructure failures never get one.

    Raises:
        DataError: attempt and rollout do not belong together.
    """
    if attempt.rollout_id != rollout.rollout_id:
        raise DataError(
            f"attempt {attempt.attempt_id} belongs to rollout {attempt.rollout_id}, "
            f"not to {rollout.rollout_id}"
        )
    intake = _take_in(attempt.attempt_id, spans, records)
    rewards = _sort_rewards(intake)
    notes = list(rewards.notes)
    value, dimensions, source = _final_reward(attempt, rewards.final, failure_reward, notes)
    calls, late_calls = _calls(intake, rewards.on_calls, notes)
    return Episode(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        task_id=rollout.task_id,
        group_id=rollout.group_id or rollout.task_id,
        mode=rollout.mode,
        status=attempt.status,
        outcome=attempt.outcome,
        message=attempt.message,
        capture_errors=tuple(attempt.capture_errors),
        reward=value,
        dimensions=dimensions,
        reward_source=source,
        calls=_in_causal_order(calls),
        late_calls=_in_causal_order(late_calls),
        late=intake.late,
        foreign=intake.foreign,
        unattached=rewards.unattached,
        notes=tuple(notes),
        spans=tuple(intake.spans),
    )


# --- sorting out what arrived -----------------------------------------------------------------


@dataclass(slots=True)
class _Intake:
    """What arrived, sorted by what it is."""

    spans: list[Span] = field(default_factory=list)
    """Spans that are not late."""
    llm: dict[str, list[Span]] = field(default_factory=dict)
    """Call id → its LLM spans."""
    late_llm: dict[str, list[Span]] = field(default_factory=dict)
    rewards: dict[str, Span] = field(default_factory=dict)
    """Span id → REWARD span."""
    records: list[TokenRecord] = field(default_factory=list)
    late_records: list[TokenRecord] = field(default_factory=list)
    late: int = 0
    foreign: int = 0

    def llm_spans(self, *, late: bool) -> dict[str, list[Span]]:
        return self.late_llm if late else self.llm


def _take_in(attempt_id: str, spans: Iterable[Span], records: Iterable[TokenRecord]) -> _Intake:
    intake = _Intake()
    unnamed: list[Span] = []
    for span in spans:
        if span.attempt_id != attempt_id and span.attempt_id:
            intake.foreign += 1
            continue
        if span.late:
            intake.late += 1
        else:
            intake.spans.append(span)
        kind = span.kind
        if kind is _LLM:
            call_id = span.attributes.get(_CALL_ID)
            if not call_id:
                unnamed.append(span)
                continue
            intake.llm_spans(late=span.late).setdefault(str(call_id), []).append(span)
        elif kind is _REWARD and not span.late:
            intake.rewards[span.span_id] = span
    if unnamed:
        _name_unnamed(intake, unnamed)
    _take_records(intake, attempt_id, records)
    return intake


def _take_records(intake: _Intake, attempt_id: str, records: Iterable[TokenRecord]) -> None:
    for record in records:
        if record.attempt_id != attempt_id:
            intake.foreign += 1
        elif record.late:
            intake.late += 1
            intake.late_records.append(record)
        else:
            intake.records.append(record)


def _name_unnamed(intake: _Intake, unnamed: Sequence[Span]) -> None:
    """Give LLM spans without a call id one of their own, save those that wrap another call.

    Another instrumentation may have opened an LLM span around a call that the gateway recorded:
    the same call seen from outside, by its parent id. Counted again it would be two calls.
    """
    named = [*intake.llm.values(), *intake.late_llm.values()]
    inside = [*unnamed, *(span for spans in named for span in spans)]
    parents = {span.span_id: span.parent_id for span in (*intake.spans, *inside)}
    outside: set[str] = set()
    for call in inside:
        ancestor = call.parent_id
        while ancestor is not None and ancestor not in outside:  # else a circle would never end
            outside.add(ancestor)
            ancestor = parents.get(ancestor)
    for span in unnamed:
        if span.span_id not in outside:
            intake.llm_spans(late=span.late)[f"span:{span.span_id}"] = [span]


# --- calls ------------------------------------------------------------------------------------


def _calls(
    intake: _Intake, rewards: Mapping[str, tuple[EmittedReward, ...]], notes: list[str]
) -> tuple[list[Call], list[Call]]:
    """(calls in time, late calls), unordered."""
    records = _once(intake.records, notes)
    calls = [_from_record(record, intake.llm, rewards) for record in records]
    recorded = {record.call_id for record in records}
    # What the app says of a stream that it left, or never got, is in time where the gateway, which
    # notices later, is not.
    told = {name for name, spans in intake.llm.items() if _outcome(spans) is not _OK} | recorded
    late_records = [r for r in _once(intake.late_records, []) if r.call_id not in told]
    late = [_from_record(record, intake.late_llm, {}) for record in late_records]
    recorded |= {record.call_id for record in late_records}
    for call_id, spans in intake.llm.items():
        if call_id not in recorded:
            calls.append(_from_spans(call_id, spans, rewards))
    calls += _empty_choices(calls)
    for call_id, spans in intake.late_llm.items():
        if call_id not in recorded and call_id not in intake.llm:
            late.append(_from_spans(call_id, spans, {}))
    return calls, late


def _empty_choices(calls: Sequence[Call]) -> list[Call]:
    """Choices that the client asked for (n > 1) and of which no token was recorded: without them
    the coverage would pass over them in silence."""
    several = {call.call_id: call for call in calls if _choices(call) > 1}
    there = {call.key for call in calls if call.call_id in several}
    return [
        msgspec.structs.replace(call, choice=choice, record=None)
        for call in several.values()
        for choice in range(_choices(call))
        if (call.call_id, choice) not in there
    ]


_MAX_CHOICES: Final = 128
"""As many as the gateway allows: a span of somebody else cannot make us build more."""


def _choices(call: Call) -> int:
    asked = call.span.attributes.get(semconv.REQUEST_CHOICES) if call.span else None
    return min(asked, _MAX_CHOICES) if isinstance(asked, int) else 1


def _once(records: list[TokenRecord], notes: list[str]) -> list[TokenRecord]:
    """One record per (call id, choice): a retry of a call id is the same call."""
    by_key: dict[CallKey, TokenRecord] = {}
    double: set[CallKey] = set()
    for record in records:
        key = record.call_id, record.choice
        earlier = by_key.setdefault(key, record)
        if earlier is not record and earlier != record:
            double.add(key)
            # which of the two arrived first is chance: the choice must not depend on it
            by_key[key] = min(earlier, record, key=_record_order)
    notes += [f"call {call} choice {n} has two token records" for call, n in sorted(double)]
    return list(by_key.values()) if len(by_key) < len(records) else records


def _record_order(record: TokenRecord) -> tuple[int, int, bytes, bytes, bytes]:
    return (
        record.sequence_start,
        record.sequence_end,
        record.prompt,
        record.response,
        msgspec.msgpack.encode(record),
    )


def _from_record(
    record: TokenRecord,
    llm: Mapping[str, list[Span]],
    rewards: Mapping[str, tuple[EmittedReward, ...]],
) -> Call:
    spans = llm.get(record.call_id)
    if spans is None:
        span, outcome = None, record.outcome
    else:
        span = spans[0] if len(spans) == 1 else _primary(spans)
        outcome = record.outcome
        if outcome is _OK:
            outcome = _outcome(spans)
    start, end = record.sequence_start, record.sequence_end
    if not end and span is not None and span.sequence_start is not None:
        start, end = _sequence(span)
    return Call(
        record.call_id,
        record.choice,
        record.agent_path or _path(span),
        outcome,
        start,
        end if end > start else start,
        record,
        span,
        rewards.get(record.call_id, ()),
    )


def _from_spans(
    call_id: str, spans: list[Span], rewards: Mapping[str, tuple[EmittedReward, ...]]
) -> Call:
    span = _primary(spans)
    start, end = (None, None) if span.sequence_start is None else _sequence(span)
    return Call(
        call_id,
        0,
        _path(span),
        _outcome(spans),
        start,
        end,
        None,
        span,
        rewards.get(call_id, ()),
    )


def _sequence(span: Span) -> tuple[int, int]:
    start = span.sequence_start or 0
    return start, max(start, start if span.sequence_end is None else span.sequence_end)


def _primary(spans: list[Span]) -> Span:
    """The span that speaks for a call: the gateway's, else the earliest."""
    if len(spans) == 1:
        return spans[0]
    return min(spans, key=lambda s: (s.sequence_start is None, s.sequence_start or 0, *_time(s)))


def _path(span: Span | None) -> str:
    """The agent path that the call itself recorded, in whichever dialect."""
    if span is None:
        return semconv.UNNAMED_AGENT
    path = span.attributes.get(semconv.AGENT_PATH)
    if path:
        return str(path)
    name = semconv.agent_name_of(span.attributes)
    return join_path([name]) if name else semconv.UNNAMED_AGENT


def _outcome(spans: list[Span]) -> CallOutcome:
    """What the spans of one call id say became of it.

    A failed delivery stands unless a span of a later sequence says that a retry fetched the answer.
    Spans without sequence cannot be later than anything, so what they report stands. A call that
    was sampled anew stays so, whatever became of it afterwards.
    """
    if len(spans) == 1:
        return _stated(spans[0])
    if any(_stated(span) is CallOutcome.RESAMPLED for span in spans):
        return CallOutcome.RESAMPLED
    ordered = sorted((s for s in spans if s.sequence_start is not None), key=_sequence_order)
    stated = [_stated(span) for span in spans if span.sequence_start is None]
    stated += [_stated(span) for span in ordered[-1:]]
    return min(stated, key=_GRAVITY.index)


_GRAVITY: Final = (
    CallOutcome.UNDELIVERED,
    CallOutcome.RESAMPLED,
    CallOutcome.CANCELLED,
    CallOutcome.ERROR,
    CallOutcome.OK,
)
"""Outcomes, the one that most forbids training first: where spans disagree, it stands."""


def _sequence_order(span: Span) -> tuple[int, int, int]:
    start, end = _sequence(span)
    return start, end, -_GRAVITY.index(_stated(span))


def _stated(span: Span) -> CallOutcome:
    """What one span says became of its call; an event that was added later overrides the span."""
    if span.attributes.get(semconv.CALL_RESAMPLED):
        return CallOutcome.RESAMPLED
    stated = span.attributes.get(semconv.CALL_OUTCOME)
    if stated == "ok" and not span.events:
        return _OK
    for event in span.events:
        stated = event.attributes.get(semconv.CALL_OUTCOME, stated)
    outcome = None if stated is None else _OUTCOMES.get(str(stated))
    if outcome is None:
        return CallOutcome.ERROR if span.status is SpanStatus.ERROR else CallOutcome.OK
    return outcome


_by_sequence: Final = attrgetter("sequence_start", "call_id", "choice")


def _in_causal_order(calls: list[Call]) -> tuple[Call, ...]:
    """The calls by gateway sequence. Those without one are put in by start time, for display only:
    before the first call of the sequence that started later; without a start time, at the end."""
    ordered = [call for call in calls if call.sequence_start is not None]
    ordered.sort(key=_by_sequence)
    if len(ordered) == len(calls):
        return tuple(ordered)
    rest = sorted((call for call in calls if call.sequence_start is None), key=_display_order)
    merged: list[Call] = []
    place = 0
    for call in ordered:
        started = call.span.start_ns if call.span is not None else 0
        while place < len(rest) and _display_order(rest[place])[0] < started:
            merged.append(rest[place])
            place += 1
        merged.append(call)
    return (*merged, *rest[place:])


def _display_order(call: Call) -> tuple[float, str, int]:
    started = call.span.start_ns if call.span is not None else 0
    return started or math.inf, call.call_id, call.choice


_agent: Final = lru_cache(maxsize=4096)(agent_name)
"""A batch has few paths and asks for each of them once per call."""


# --- rewards ----------------------------------------------------------------------------------


class _Rewards(NamedTuple):
    final: tuple[EmittedReward, ...]
    on_calls: dict[str, tuple[EmittedReward, ...]]
    unattached: tuple[EmittedReward, ...]
    notes: list[str]


def _sort_rewards(intake: _Intake) -> _Rewards:
    """The emitted rewards, sorted by ids alone: for the attempt, for a call, or for neither."""
    result = _Rewards((), {}, (), [])
    if not intake.rewards:
        return result
    call_ids = {record.call_id for record in intake.records} | intake.llm.keys()
    by_span = {span.span_id: call_id for call_id, spans in intake.llm.items() for span in spans}
    by_span |= {record.span_id: record.call_id for record in intake.records if record.span_id}
    on_calls: dict[str, list[EmittedReward]] = {}
    final, unattached = [], []
    for span in sorted(intake.rewards.values(), key=_time):
        target = _target(span)
        call_id = target if target in call_ids else by_span.get(target or "")
        if call_id is None and target is not None:
            call_id = _by_response(target, intake.llm)
        if target is None:
            final.append(_emitted(span))
        elif call_id is None:
            unattached.append(_emitted(span))
            result.notes.append(f"a reward was emitted on {target}, which is no call: it is unused")
        else:
            on_calls.setdefault(call_id, []).append(_emitted(span))
    for call_id, emitted in sorted(on_calls.items()):
        if len(emitted) > 1:
            result.notes.append(f"{len(emitted)} rewards on call {call_id}: the last one counts")
    attached = {call_id: tuple(emitted) for call_id, emitted in on_calls.items()}
    return _Rewards(tuple(final), attached, tuple(unattached), result.notes)


def _by_response(target: str, llm: Mapping[str, list[Span]]) -> str | None:
    """The call whose response has this id, with or without the prefix that its dialect gives it:
    an endpoint that is not ours makes ids of its own."""
    for call_id, spans in llm.items():
        for span in spans:
            response_id = str(span.attributes.get(semconv.RESPONSE_ID, ""))
            if response_id == target or response_id.endswith((f"-{target}", f"_{target}")):
                return call_id
    return None


def _target(span: Span) -> str | None:
    """The call id or span id that a reward is for; None for the attempt."""
    named = span.attributes.get(semconv.REWARD_CALL_ID)
    named = named or span.attributes.get(semconv.REWARD_SPAN_ID)
    if named:
        return str(named)
    return span.links[0].span_id if span.links else None


def _emitted(span: Span) -> EmittedReward:
    prefix = semconv.REWARD_DIMENSION
    dimensions = {
        key.removeprefix(prefix): number
        for key, value in sorted(span.attributes.items())
        if key.startswith(prefix) and (number := _finite(value)) is not None
    }
    value = _finite(span.attributes.get(semconv.REWARD_VALUE))
    return EmittedReward(span.span_id, value, dimensions, span.start_ns)


def _finite(value: Any) -> float | None:
    """float64 of a number or bool; None for everything else."""
    if not isinstance(value, int | float):
        return None
    return usable(value)


def _final_reward(
    attempt: Attempt,
    emitted: Sequence[EmittedReward],
    failure_reward: float | None,
    notes: list[str],
) -> tuple[float | None, Mapping[str, float], RewardSource | None]:
    """(value, dimensions, source). The return value wins; nothing is summed."""
    # what was emitted before the infrastructure failed speaks of half an attempt
    if attempt.outcome in _NEVER_SCORED or attempt.status in _UNSCORED:
        return None, {}, None
    last = emitted[-1] if emitted else None
    returned = attempt.reward
    if returned is not None:
        value = _finite(returned.value)
        if last is not None and last.value != value:
            notes.append(
                f"the app returned {returned.value} but emitted {last.value}: {value} counts"
            )
        return value, returned.dimensions, "returned"
    if last is not None:
        if len({reward.value for reward in emitted}) > 1:
            notes.append(
                f"{len(emitted)} differing rewards emitted: the last, {last.value}, counts"
            )
        return last.value, last.dimensions, "emitted"
    if attempt.outcome in _APP_FAILED and failure_reward is not None:
        return _finite(failure_reward), {}, "failure"
    return None, {}, None


def _time(span: Span) -> tuple[int, str]:
    return span.start_ns, span.span_id
