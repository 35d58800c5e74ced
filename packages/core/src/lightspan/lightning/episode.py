"""Episode: the spans and token records of an attempt, as calls in causal order.

A *call* is (attempt, call id, choice), recorded as a token record, an LLM span, or both. All its
properties come from its own record:

- its agent is the path recorded with the call, never inferred from times or surrounding spans;
- its place is the gateway's sequence, `(sequence_start, call id, choice)`, never a clock. Calls
  that bypassed the gateway have no sequence. They are displayed among the others by start time,
  which affects nothing that is trained;
- its identity is its call id: retries are one call, equal prompts under two ids are two calls.

The reward of the episode is the app's return value, or else the last reward emitted for the attempt
as a whole. Rewards emitted on a call, or on its span, belong to that call only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from lightspan.errors import DataError
from lightspan.lightning.span_tree import SpanNode, build_tree, walk
from lightspan.schema import semconv
from lightspan.schema.records import Attempt, AttemptStatus, Fork, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward, reward_of, usable
from lightspan.schema.routing import Route, Routing, agent_name, join_path
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome, TokenRecord

CallKey = tuple[str, int]
"""(call id, choice), unique within an attempt."""
RewardSource = Literal["returned", "emitted", "failure", "scored"]
"""Source of a final reward: the app (`returned`, `emitted`), `failure_reward`, or a judge or
function (`scored`)."""

_APP_FAILED: Final = frozenset({Outcome.APP_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW})
_NEVER_SCORED: Final = frozenset({Outcome.INFRASTRUCTURE, Outcome.CANCELLED})
_ENDED: Final = frozenset({AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.TIMEOUT})
_UNSCORED: Final = frozenset({AttemptStatus.LOST, AttemptStatus.CANCELLED})
# enum members as globals: attribute access on the class is slow, and every span or call reads them
_LLM: Final = SpanKind.LLM
_REWARD: Final = SpanKind.REWARD
_NODES: Final = (SpanKind.AGENT, SpanKind.TOOL)
_OK: Final = CallOutcome.OK
_UNDELIVERED: Final = CallOutcome.UNDELIVERED
_CALL_ID: Final = semconv.CALL_ID
_OUTCOMES: Final = {str(outcome): outcome for outcome in CallOutcome}
_ROUTES: Final = {str(route): route for route in Route}


class Call(msgspec.Struct, frozen=True, gc=False):
    """A model call of an attempt, from its token record, its span, or both."""

    call_id: str
    """Id of the call; `span:<span id>` for a span without a call id."""
    choice: int
    """Number of the choice among the call's answers (OpenAI's `n`), from 0."""
    agent_path: str
    outcome: CallOutcome
    sequence_start: int | None = None
    """The gateway's sequence number at the start; None if the call bypassed the gateway."""
    sequence_end: int | None = None
    """The gateway's sequence number at the end; None if the call bypassed the gateway."""
    record: TokenRecord | None = None
    """Token record; None if the token ids are unknown."""
    span: Span | None = None
    rewards: tuple[Reward, ...] = ()
    """Rewards emitted on this call or its span, by time. All choices of a call share them."""

    @property
    def key(self) -> CallKey:
        return self.call_id, self.choice

    @property
    def agent(self) -> str:
        """Name of the calling agent: the innermost name of the path."""
        return _agent(self.agent_path)

    @property
    def span_id(self) -> str:
        if self.span is not None:
            return self.span.span_id
        return "" if self.record is None else self.record.span_id

    @property
    def route(self) -> Route | None:
        """Destination of the call, such as the trained policy; None if it was not recorded."""
        recorded = None if self.span is None else self.span.attributes.get(semconv.ROUTE)
        return _ROUTES.get(str(recorded))

    @property
    def policy(self) -> str:
        """Name of the policy that sampled the call; empty without a token record."""
        return "" if self.record is None else self.record.policy

    @property
    def finish(self) -> str | None:
        """The finish reason; None if it was not recorded."""
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
        """Name of the request field for which the gateway refused the call.

        Empty if the gateway refused it for another reason; None if the call was not refused.
        """
        if self.outcome is not CallOutcome.ERROR or self.span is None:
            return None
        field = self.span.attributes.get(semconv.CALL_REFUSED)
        return None if field is None else str(field)

    @property
    def reward(self) -> float | None:
        """Last reward emitted on the call; None if there is none or it is unusable."""
        return self.rewards[-1].value if self.rewards else None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An attempt with its calls in causal order; `build_episode` creates it."""

    rollout_id: str
    attempt_id: str
    task_id: str
    group_id: str
    """Id of the group of rollouts whose rewards are compared; the task's id without a group."""
    mode: Mode
    status: AttemptStatus
    outcome: Outcome | None
    message: str = ""
    """Error message."""
    runner: str = ""
    """Name of the runner, which ends with its host and process id; of production, the service."""
    capture_errors: tuple[str, ...] = ()
    """Errors of the recording; an episode with such an error is never trained."""
    reward: float | None = None
    """Final reward; None if unscored, which is not a reward of zero."""
    dimensions: Mapping[str, float] = field(default_factory=dict)
    reward_source: RewardSource | None = None
    """Source of the final reward; None without a final reward. If there is a source and `reward` is
    None, the reward is not usable, such as NaN.
    """
    failure_reward: float | None = None
    """Credit of the calls in `retried`; with None they are rejected."""
    unscored: str = ""
    """Why the episode is not scored, such as a judge's error or an answer that never reached the
    app; empty if it is scored, or has no reward.
    """
    reasons: str = ""
    """A judge's reasons for the reward; empty without a judge."""
    calls: tuple[Call, ...] = ()
    late_calls: tuple[Call, ...] = ()
    """Calls recorded after the attempt had ended, or under a lost lease; not in `calls`."""
    late: int = 0
    """Number of late spans and records."""
    notes: tuple[str, ...] = ()
    """Notes for the user about contradictions, such as two different rewards."""
    stray_rewards: int = 0
    """Number of rewards that were emitted on an id of no call, which are unused."""
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """All spans of the attempt except late ones."""
    fork: Fork | None = None
    """The attempt that this one repeats up to a call; None if it repeats none."""
    departed: str = ""
    """Why the attempt is no fork of the recorded one, although it was to be; empty otherwise. It is
    unscored, never trained, and in no statistics."""
    earlier: tuple[Episode, ...] = field(default=(), repr=False)
    """Episodes of the rollout's earlier attempts, which were lost and repeated."""

    @property
    def recorded_calls(self) -> tuple[Call, ...]:
        """All calls of the attempt, late ones at the end."""
        return (*self.calls, *self.late_calls)

    @property
    def finished(self) -> bool:
        """Whether the attempt ended by itself: it is not running, lost, cancelled or departed."""
        ended = self.status in _ENDED and self.outcome not in _NEVER_SCORED
        return ended and not self.departed

    def scored(self, step_rewards: bool = False) -> bool:
        """Return whether the episode has rewards that can be used for training.

        Args:
            step_rewards: whether the credit rule uses rewards on calls. If it does, a finished
                episode needs no final reward if a call has a usable reward. An unusable reward on
                any call then makes the result False.
        """
        if step_rewards and any(call.rewards and call.reward is None for call in self.calls):
            return False
        if self.reward is not None:
            return True
        if not step_rewards or self.reward_source is not None or self.unscored or not self.finished:
            return False
        return any(call.reward is not None for call in self.calls)

    @cached_property
    def retried(self) -> frozenset[CallKey]:
        """Calls inside a run of an agent that ended in an error and was then repeated.

        A later run of the agent is a repetition if it has the same parent span (a loop, a retry of
        the framework), or if its first prompt is the same (a cycle of a graph, a tool that runs the
        agent again). A run that goes on from a checkpoint is one only by its first prompt. Runs in
        which a call itself failed are left out.
        """
        failed = {_path(span) for span in self.spans if span.status is SpanStatus.ERROR}
        runs: dict[tuple[Any, str], list[tuple[Span, list[Call]]]] = defaultdict(list)
        for _, node in walk(self.tree if failed else ()):
            if node.span.kind is SpanKind.AGENT and _path(node.span) in failed:
                ids = {below.span.span_id for _, below in walk([node])}
                calls = [call for call in self.calls if call.span_id in ids]
                prompts = [call.record.prompt_key for call in calls if call.record is not None]
                is_resumed = node.span.attributes.get(semconv.AGENT_RESUMED)
                for key in (*prompts[:1], *([] if is_resumed else [node.span.parent_id])):
                    runs[key, _path(node.span)].append((node.span, calls))
        return frozenset(
            call.key
            for same in runs.values()
            for span, calls in same
            # a call that failed explains the error, not what the others answered
            if span.status is SpanStatus.ERROR and all(call.outcome is _OK for call in calls)
            if any(later.start_ns >= span.end_ns for later, _ in same if later is not span)
            for call in calls
        )

    @cached_property
    def tree(self) -> tuple[SpanNode, ...]:
        """Roots of the span tree, for display only."""
        return build_tree(self.spans)


def build_episode(
    attempt: Attempt, rollout: Rollout, spans: Sequence[Span], records: Sequence[TokenRecord]
) -> Episode:
    """Return the episode of an attempt, whatever the order of spans and records.

    If the app failed without giving a reward, the episode is unscored (`score_failure`).

    Args:
        attempt: an attempt of `rollout`. Its calls are trained only if it has ended.
        rollout: the rollout of the attempt.
        spans: all spans of the attempt; spans of other attempts are ignored.
        records: all token records of the attempt; records of other attempts are ignored.

    Raises:
        DataError: the attempt belongs to another rollout.
    """
    if attempt.rollout_id != rollout.rollout_id:
        raise DataError(
            f"attempt {attempt.attempt_id} belongs to rollout {attempt.rollout_id}, "
            f"not to {rollout.rollout_id}"
        )
    inputs = _sort_inputs(attempt.attempt_id, spans, records)
    notes: list[str] = []
    emitted, on_calls = _sort_rewards(inputs, notes)
    value, dimensions, source = _final_reward(attempt, emitted, notes)
    calls, late_calls = _calls(inputs, on_calls, notes)
    episode = Episode(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt.attempt_id,
        task_id=rollout.task_id,
        group_id=rollout.group_id or rollout.task_id,
        mode=rollout.mode,
        status=attempt.status,
        outcome=attempt.outcome,
        message=attempt.message,
        runner=attempt.runner_id,
        capture_errors=tuple(attempt.capture_errors),
        reward=value,
        dimensions=dimensions,
        reward_source=source,
        calls=_in_causal_order(calls),
        late_calls=_in_causal_order(late_calls),
        late=inputs.late,
        notes=tuple(notes),
        stray_rewards=len(inputs.rewards) - len(emitted) - sum(map(len, on_calls.values())),
        spans=tuple(inputs.spans),
        fork=rollout.fork,
    )
    departed = _departure(episode)
    if unscored := departed or _lost_answer(calls, inputs.llm):
        return replace(episode, reward=None, dimensions={}, unscored=unscored, departed=departed)
    return episode


def _departure(episode: Episode) -> str:
    """Return why an ended attempt did not repeat the recorded one; empty if it did or need not."""
    if episode.fork is None or not episode.finished:
        return ""
    spans = [call.span for call in episode.recorded_calls if call.span is not None]
    for span in spans:
        if span.attributes.get(semconv.ERROR_TYPE) == semconv.REPLAY_DEPARTED:
            return span.status_message
    if episode.fork.call_id and not any(s.attributes.get(semconv.REPLAY_FORK) for s in spans):
        end = f": {episode.message}" if episode.message else ""
        return f"the app ended before the call at which the rollout forks{end}"
    return ""


def _lost_answer(calls: Sequence[Call], llm: Mapping[str, list[Span]]) -> str:
    """Return why a reward is not the policy's: the app went on without an answer of a call.

    Empty if each answer reached the app, perhaps by a repeated request. Calls that the app's
    process recorded are left out, because its runner knows whether the app repeated them.
    """
    by_prompt = {c.record.prompt_key: c for c in calls if c.record and c.outcome is _UNDELIVERED}
    answered = {c.record.prompt_key for c in calls if by_prompt and c.record and c.outcome is _OK}
    for prompt in by_prompt.keys() - answered:
        call = by_prompt[prompt]
        if all(span.sequence_start is not None for span in llm.get(call.call_id, ())):
            return f"an answer to {call.agent_path} never reached the app, which went on without it"
    return ""


def score_failure(episode: Episode, failure_reward: float | Literal["lowest"] | None) -> Episode:
    """Return the episode with the reward `failure_reward` if its app failed and gave no reward.

    The failures are an exception, the time limit, a prompt that is too long and an exceeded budget,
    because a model's answer can cause these. Infrastructure failures are not included.

    In other episodes, `failure_reward` is an upper limit of the credit of the calls in
    `Episode.retried`.

    Args:
        episode: the episode.
        failure_reward: the reward; "lowest" is 0 here. None leaves the episode unchanged.
    """
    is_failure = episode.outcome in _APP_FAILED and episode.finished
    value = 0.0 if failure_reward == "lowest" else usable(failure_reward)
    if value is not None and is_failure and episode.reward is None:
        return replace(episode, reward=value, reward_source="failure", failure_reward=value)
    is_retried = value is not None and episode.retried
    return replace(episode, failure_reward=value) if is_retried else episode


def policy_calls(episode: Episode, routing: Routing) -> int:
    """Return how many calls of an episode reached a trained policy, late ones included."""
    calls = filter(_reached_policy, episode.recorded_calls)
    return sum(routing.target(call.agent_path).selected for call in calls)


def _reached_policy(call: Call) -> bool:
    """Return whether the gateway took a call. If the app left, the gateway's record may be late."""
    is_sent = call.route is Route.POLICY and call.outcome is not CallOutcome.ERROR
    return call.sequence_start is not None or is_sent


def dimension_means(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each named reward, over the scored episodes that have it.

    The keys are `dimension/<name>`; `dimension_n/<name>` is the number of these episodes, if some
    scored episodes lack the name or have NaN there. The name "reward" is left out, because it
    repeats the reward itself.
    """
    values: dict[str, list[float]] = defaultdict(list)
    scored = [episode for episode in episodes if episode.reward is not None]
    for name, value in ((n, v) for e in scored for n, v in e.dimensions.items() if n != "reward"):
        values[name].append(value)
    means = {f"dimension/{name}": math.fsum(v) / len(v) for name, v in sorted(values.items())}
    sizes = {f"dimension_n/{n}": len(v) for n, v in sorted(values.items()) if len(v) < len(scored)}
    return means | sizes


def named_means(metrics: Mapping[str, Any]) -> str:
    """Return the means in `metrics` of `dimension_means` as text, such as `, exact 0.5 (n=4)`."""
    named = {k.partition("/")[2]: v for k, v in metrics.items() if k.startswith("dimension/")}
    sizes = {k.partition("/")[2]: f" (n={n:g})" for k, n in metrics.items() if "dimension_n/" in k}
    return "".join(f", {name} {mean:.3g}{sizes.get(name, '')}" for name, mean in named.items())


def lowest_reward(episodes: Iterable[Episode], lowest: float) -> float:
    """Return the lowest reward of the scored episodes, or `lowest` if that is lower.

    For a finished episode without a final reward, the sum of the rewards on its calls counts.
    """
    for episode in episodes:
        on_calls = [call.reward for call in episode.calls if call.reward is not None]
        if episode.reward is not None:
            lowest = min(lowest, episode.reward)
        elif on_calls and episode.finished:
            lowest = min(lowest, math.fsum(on_calls))
    return lowest


# --- sorting spans and records ----------------------------------------------------------------


@dataclass(slots=True)
class _Inputs:
    """The spans and token records of an attempt, sorted by what they describe."""

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
    """Number of late spans and records."""

    def llm_spans(self, *, late: bool) -> dict[str, list[Span]]:
        return self.late_llm if late else self.llm


def _sort_inputs(attempt_id: str, spans: Iterable[Span], records: Iterable[TokenRecord]) -> _Inputs:
    inputs = _Inputs()
    unnamed: list[Span] = []
    for span in spans:
        if span.attempt_id != attempt_id and span.attempt_id:
            continue
        if span.late:
            inputs.late += 1
        else:
            inputs.spans.append(span)
        kind = span.kind
        if kind is _LLM:
            call_id = span.attributes.get(_CALL_ID)
            if not call_id:
                unnamed.append(span)
                continue
            inputs.llm_spans(late=span.late).setdefault(str(call_id), []).append(span)
        elif kind is _REWARD and not span.late:
            inputs.rewards[span.span_id] = span
    if unnamed:
        _name_unnamed(inputs, unnamed)
    for record in records:
        if record.attempt_id == attempt_id:
            (inputs.late_records if record.late else inputs.records).append(record)
    inputs.late += len(inputs.late_records)
    return inputs


def _name_unnamed(inputs: _Inputs, unnamed: Sequence[Span]) -> None:
    """Add each LLM span without a call id to `inputs`, as a call named `span:<span id>`.

    A span that contains the span of another call is left out. Both may record the same call, which
    would then count twice. A call in an agent or a tool is another call than the one around it.

    Args:
        inputs: the sorted spans, to which the calls are added.
        unnamed: the LLM spans without a call id.
    """
    named = [*inputs.llm.values(), *inputs.late_llm.values()]
    calls = [*unnamed, *(span for spans in named for span in spans)]
    by_id = {span.span_id: span for span in (*inputs.spans, *calls)}
    ancestors: set[str] = set()
    for call in calls:
        outer = by_id.get(call.parent_id or "")
        # also ends if parents form a circle
        while outer is not None and outer.kind not in _NODES and outer.span_id not in ancestors:
            ancestors.add(outer.span_id)
            outer = by_id.get(outer.parent_id or "")
    for span in unnamed:
        if span.span_id not in ancestors:
            inputs.llm_spans(late=span.late)[f"span:{span.span_id}"] = [span]


# --- calls ------------------------------------------------------------------------------------


def _calls(
    inputs: _Inputs, rewards: Mapping[str, tuple[Reward, ...]], notes: list[str]
) -> tuple[list[Call], list[Call]]:
    """Return the calls of the attempt, and the calls that were recorded too late.

    Both lists are in no particular order.

    Args:
        inputs: the sorted spans and records.
        rewards: call id → rewards emitted on the call.
        notes: list to which notes for the user are added.
    """
    records = _deduplicated(inputs.records, notes)
    calls = [_from_record(record, inputs.llm, rewards) for record in records]
    recorded = {record.call_id for record in records}
    # if the app abandoned a stream, or never received it, the app's span arrives in time, but the
    # gateway notices that later and writes a late record
    in_time = {name for name, spans in inputs.llm.items() if _outcome(spans) is not _OK} | recorded
    late_records = [r for r in _deduplicated(inputs.late_records, []) if r.call_id not in in_time]
    late = [_from_record(record, inputs.late_llm, {}) for record in late_records]
    recorded |= {record.call_id for record in late_records}
    for call_id, spans in inputs.llm.items():
        if call_id not in recorded:
            calls.append(_from_spans(call_id, spans, rewards))
    calls += _empty_choices(calls)
    for call_id, spans in inputs.late_llm.items():
        if call_id not in recorded and call_id not in inputs.llm:
            late.append(_from_spans(call_id, spans, {}))
    return calls, late


def _empty_choices(calls: Sequence[Call]) -> list[Call]:
    """Return a call without tokens for each requested choice that was not recorded.

    A call may request several choices (n > 1). Without the added calls, the missing choices would
    not be reported.
    """
    several = {call.call_id: call for call in calls if _choices(call) > 1}
    present = {call.key for call in calls if call.call_id in several}
    return [
        msgspec.structs.replace(call, choice=choice, record=None)
        for call in several.values()
        for choice in range(_choices(call))
        if (call.call_id, choice) not in present
    ]


_MAX_CHOICES: Final = 128
"""Maximum number of choices per call, as in the gateway; spans of other programs may have any."""


def _choices(call: Call) -> int:
    choices = call.span.attributes.get(semconv.REQUEST_CHOICES) if call.span else None
    return min(choices, _MAX_CHOICES) if isinstance(choices, int) else 1


def _deduplicated(records: list[TokenRecord], notes: list[str]) -> list[TokenRecord]:
    """Return one token record per call id and choice, because a retry has the same call id.

    Args:
        records: token records of an attempt.
        notes: list to which a note is added per call that has two different records.
    """
    by_key: dict[CallKey, TokenRecord] = {}
    double: set[CallKey] = set()
    for record in records:
        key = record.call_id, record.choice
        earlier = by_key.setdefault(key, record)
        if earlier is not record and earlier != record:
            double.add(key)
            # the order of arrival is random, so the choice must not depend on it
            by_key[key] = min(
                earlier, record, key=lambda r: (r.sequence_start, msgspec.msgpack.encode(r))
            )
    notes += [f"call {call} choice {n} has two token records" for call, n in sorted(double)]
    return list(by_key.values()) if len(by_key) < len(records) else records


def _from_record(
    record: TokenRecord, llm: Mapping[str, list[Span]], rewards: Mapping[str, tuple[Reward, ...]]
) -> Call:
    spans = llm.get(record.call_id)
    span = None if spans is None else _primary(spans)
    outcome = record.outcome
    if spans is not None and outcome is _OK:
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


def _from_spans(call_id: str, spans: list[Span], rewards: Mapping[str, tuple[Reward, ...]]) -> Call:
    span = _primary(spans)
    start, end = (None, None) if span.sequence_start is None else _sequence(span)
    emitted = rewards.get(call_id, ())
    return Call(call_id, 0, _path(span), _outcome(spans), start, end, None, span, emitted)


def _sequence(span: Span) -> tuple[int, int]:
    start = span.sequence_start or 0
    return start, max(start, start if span.sequence_end is None else span.sequence_end)


def _primary(spans: list[Span]) -> Span:
    """Return the span to read a call's data from: the gateway's, or else the earliest span."""
    if len(spans) == 1:
        return spans[0]
    return min(spans, key=lambda s: (s.sequence_start is None, s.sequence_start or 0, *_time(s)))


def _path(span: Span | None) -> str:
    """Return the path of the agent that made a call, from the call's span.

    Attributes in which other programs store an agent's name are read too. The result is
    `UNNAMED_AGENT` if there is no span or no name.
    """
    if span is None:
        return semconv.UNNAMED_AGENT
    path = span.attributes.get(semconv.AGENT_PATH)
    if path:
        return str(path)
    name = semconv.agent_name_of(span.attributes)
    return join_path([name]) if name else semconv.UNNAMED_AGENT


def _outcome(spans: list[Span]) -> CallOutcome:
    """Return the outcome of a call from all its spans.

    Among spans with a sequence number, the last one counts, because a retry may have fetched an
    answer that was not delivered at first. The result is the worst outcome of this span and of all
    spans without a sequence number. A call that was sampled again after a cancelled try is always
    `RESAMPLED`.
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
    *(_UNDELIVERED, CallOutcome.RESAMPLED, CallOutcome.CANCELLED),
    *(CallOutcome.ERROR, CallOutcome.REPLAYED, CallOutcome.OK),
)
"""Outcomes from worst to best; where spans disagree, the worst outcome counts."""


def _sequence_order(span: Span) -> tuple[int, int, int]:
    return *_sequence(span), -_GRAVITY.index(_stated(span))


def _stated(span: Span) -> CallOutcome:
    """Return the outcome that one span of a call states.

    A span that is marked as resampled gives `RESAMPLED`. Otherwise the outcome is that of the
    span's last event that states one, or else that of its attributes. If neither states an outcome,
    the span's status decides.
    """
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
    """Return the calls in the order in which they began, by the gateway's sequence numbers.

    A call without a sequence number is inserted by its start time, for display only. Its place is
    before the first numbered call that started later. Without a start time it is at the end.
    """
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
"""Cached, because a batch has many calls and few paths."""


# --- rewards ----------------------------------------------------------------------------------


def _sort_rewards(
    inputs: _Inputs, notes: list[str]
) -> tuple[list[Reward], dict[str, tuple[Reward, ...]]]:
    """Separate the rewards of the attempt from the rewards of its calls.

    A reward belongs to a call if it names the call's id, span id or response id.

    Args:
        inputs: the sorted spans and records.
        notes: list to which notes are added: on rewards of unknown calls, and on several rewards of
            a call.

    Returns:
        The rewards of the attempt by time; and call id → rewards of the call by time.
    """
    if not inputs.rewards:
        return [], {}
    call_ids = {record.call_id for record in inputs.records} | inputs.llm.keys()
    by_span = {span.span_id: call_id for call_id, spans in inputs.llm.items() for span in spans}
    by_span |= {record.span_id: record.call_id for record in inputs.records if record.span_id}
    on_calls: dict[str, list[Reward]] = defaultdict(list)
    final = []
    for span in sorted(inputs.rewards.values(), key=_time):
        target = _target(span)
        if target is None:
            final.append(reward_of(span.attributes))
            continue
        call_id = target if target in call_ids else by_span.get(target)
        call_id = call_id or _by_response(target, inputs.llm)
        if call_id is None:
            notes.append(f"a reward was emitted on {target}, which is no call: it is unused")
        else:
            on_calls[call_id].append(reward_of(span.attributes))
    for call_id, emitted in sorted(on_calls.items()):
        if len(emitted) > 1:
            notes.append(f"{len(emitted)} rewards on call {call_id}: the last one counts")
    return final, {call_id: tuple(emitted) for call_id, emitted in on_calls.items()}


def _by_response(target: str, llm: Mapping[str, list[Span]]) -> str | None:
    """Return the id of the call whose response has the id `target`; None if there is none.

    Endpoints other than the gateway generate their own response ids. `target` may lack the prefix,
    such as `chatcmpl-`.

    Args:
        target: response id, such as `chatcmpl-123` or `123`.
        llm: call id → its LLM spans.
    """
    for call_id, spans in llm.items():
        for span in spans:
            response_id = str(span.attributes.get(semconv.RESPONSE_ID, ""))
            if response_id == target or response_id.endswith((f"-{target}", f"_{target}")):
                return call_id
    return None


def _target(span: Span) -> str | None:
    """Return the call id or span id on which a reward was emitted.

    None if the reward was emitted for the attempt as a whole.
    """
    named = span.attributes.get(semconv.REWARD_CALL_ID)
    named = named or span.attributes.get(semconv.REWARD_SPAN_ID)
    if named:
        return str(named)
    return span.links[0].span_id if span.links else None


def _final_reward(
    attempt: Attempt, emitted: Sequence[Reward], notes: list[str]
) -> tuple[float | None, Mapping[str, float], RewardSource | None]:
    """Return the final reward of an attempt: its value, its named numbers and its source.

    The app's return value takes precedence over emitted rewards, of which the last counts. Value
    and source may be None.

    Args:
        attempt: the attempt, with the app's return value.
        emitted: rewards emitted for the attempt, by time.
        notes: list to which a note on contradicting rewards is added.
    """
    # rewards emitted before the infrastructure failed concern a part of the attempt only
    if attempt.outcome in _NEVER_SCORED or attempt.status in _UNSCORED:
        return None, {}, None
    last = emitted[-1] if emitted else None
    score = attempt.reward
    if score is not None:
        value = usable(score.value)
        if last is not None and last.value != value:
            notes.append(f"the app returned {score.value} but emitted {last.value}: {value} counts")
        return value, score.dimensions, "returned"
    if last is not None:
        if len({reward.value for reward in emitted}) > 1:
            notes.append(f"{len(emitted)} differing rewards emitted: the last, {last.value}, wins")
        return last.value, last.dimensions, "emitted"
    return None, {}, None


def _time(span: Span) -> tuple[int, str]:
    return span.start_ns, span.span_id
