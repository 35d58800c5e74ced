"""What `lightspan fork` found out, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.forks import ForkPoint
from lightspan.lightning.history import Trace
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import joined_text, output_messages_of
from lightspan.schema.routing import Route
from lightspan.schema.token_records import CallOutcome
from lightspan.training.statistics import Interval, clustered_interval

MAX_ANSWER: Final = 60
"""Maximum characters of an answer in the text."""


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call."""

    number: int
    """Its number among the rollout's calls, from 1 on."""
    call_id: str
    agent: str
    answer: str
    """The answer as text, with its tool calls; empty if it was not recorded."""

    @property
    def text(self) -> str:
        return f"call {self.number}, of {self.agent}: {shortened(self.answer)}"


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that repeats the recorded one up to a call, and continues from there."""

    rollout_id: str
    reward: float | None
    """None if it is unscored."""
    answer: str
    """Its answer at the call from which it continues."""
    sampled: int
    """Number of its own calls that the weights answered."""
    endpoint: int
    """Number of its own calls to endpoints of frozen agents, which may cost money."""
    repeated: int
    """Number of recorded calls that were repeated."""
    tokens: int
    """Number of generated tokens."""
    tools: int
    """Number of tool calls before its own calls, which the app ran again: of their spans, or of
    those that the repeated answers ask for if neither rollout has such spans."""
    departed: str = ""
    """Why the app did not repeat the recorded calls; empty if it did. It has no reward then."""
    message: str = ""
    """Error with which the app ended; empty if it did not fail."""


class PointReport(msgspec.Struct, frozen=True, kw_only=True):
    """The continuations from one call."""

    call: CallReport
    """The call that is sampled anew; all calls that ended before it are repeated."""
    continuations: tuple[Continuation, ...]
    mean: Interval | None
    """Mean reward with its 95 % interval; None if no continuation has a reward."""
    successes: int | None = None
    """Number of scored continuations with at least the reward of a success; None without one."""
    share: Interval | None = None
    """Share of successes with its exact 95 % interval; None without any, or without a success."""
    is_again: bool = False
    """Whether the point was tested before; the test confirms that it is lost."""

    @property
    def scored(self) -> list[Continuation]:
        return [each for each in self.continuations if each.reward is not None]


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rollout was lost."""

    calls: tuple[CallReport, ...]
    """The calls after which no continuation succeeded, although some did before them. Several if
    the rollout cannot be continued between them, or they ran at the same time. Empty if no
    continuation succeeded from the first call on, or the search was stopped."""
    last_good: int | None
    """Number of the last call from which a continuation, or a rollout of the group, succeeded; None
    if there is none."""
    first_lost: int | None
    """Number of the call from which none succeeded; None for the end of the rollout, which is known
    to have failed."""
    failures: int = 0
    """Number of scored continuations from `first_lost`, of which none succeeded; 0 for the end. It
    bounds no share of successes: the search chose the call because they failed."""
    group: int = 0
    """Number of rollouts of the same group and weights that succeeded, so that the first call was
    not run; 0 if it was run."""
    reversals: tuple[int, ...] = ()
    """Numbers of calls from which none succeeded at first, and some in a second test."""
    is_complete: bool = True
    """False if the search was stopped."""
    reason: str = ""
    """Why the search could not go on; empty if it ended, or after Ctrl-C."""


class ForkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `lightspan fork`."""

    run: str
    rollout_id: str
    task_id: str
    mode: str
    """Mode of the recorded rollout. Continuations are sampled as in training."""
    calls: int
    """Number of calls of the recorded rollout."""
    reward: float | None
    weights: str
    """Which weights answered."""
    is_exact: bool
    """Whether they are the weights that the rollout used."""
    count: int
    """Continuations per call."""
    success: float | None
    """Reward from which on a rollout counts as a success; None if there is no search and no
    `--success`."""
    success_from: str = ""
    """Where the reward of a success comes from."""
    points: tuple[PointReport, ...]
    """The calls from which it was continued, in the order of the tests."""
    loss: Loss | None = None
    """Where it was lost; None if a call was given."""
    notes: tuple[str, ...] = ()
    is_stopped: bool = False
    """Whether Ctrl-C was pressed."""
    folder: str
    """Folder with the continuations, for `lightspan inspect`."""

    @property
    def continuations(self) -> list[Continuation]:
        return [each for point in self.points for each in point.continuations]

    @property
    def is_scored(self) -> bool:
        """Whether any continuation has a reward."""
        return any(point.scored for point in self.points)

    @property
    def sampled(self) -> int:
        """Number of calls of all continuations that the weights answered."""
        return sum(each.sampled for each in self.continuations)

    @property
    def endpoint(self) -> int:
        """Number of calls of all continuations to endpoints of frozen agents."""
        return sum(each.endpoint for each in self.continuations)

    @property
    def tokens(self) -> int:
        """Number of generated tokens of all continuations."""
        return sum(each.tokens for each in self.continuations)

    def json(self) -> str:
        """Return the report as JSON, with the totals."""
        totals = {
            "continuations": len(self.continuations),
            "departed": sum(bool(each.departed) for each in self.continuations),
            "sampled_calls": self.sampled,
            "endpoint_calls": self.endpoint,
            "repeated_calls": sum(each.repeated for each in self.continuations),
            "generated_tokens": self.tokens,
            "repeated_tool_calls": sum(each.tools for each in self.continuations),
        }
        report = {**msgspec.to_builtins(self), "totals": totals}
        # ASCII only, for any terminal; json.dumps does not escape DEL, which is ASCII too.
        return json.dumps(report).replace("\x7f", "\\u007f")

    def text(self) -> str:
        """Return the report for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        reward = "unscored" if self.reward is None else f"reward {self.reward:.3f}"
        yield f"{self.run}: rollout {self.rollout_id} ({plural(self.calls, 'call')}, {reward})"
        yield f"answered by {self.weights}"
        yield from self.notes
        if self.loss is None:
            for point in self.points:
                yield from _point_lines(point)
        else:
            yield f"a success has a reward of at least {self.success:g}, {self.success_from}"
            yield from self._search_lines(self.loss)
        yield from self._cost_lines()

    def _search_lines(self, loss: Loss) -> Iterator[str]:
        yield "  call  successes  share and its 95% interval"
        for point in self.points:
            count, again = f"{point.successes} of {len(point.scored)}", "  (again)"
            interval = "-" if point.share is None else _bounds(point.share)
            yield f"  {point.call.number:>4}  {count:>9}  {interval}{again * point.is_again}"
        if loss.group:
            yield (
                f"the first call was not run: {plural(loss.group, 'rollout')} of the same group "
                "and weights succeeded from there"
            )
        for number in loss.reversals:
            yield (
                f"not monotone: no continuation from call {number} succeeded at first, and some "
                "did in the second test; more continuations (-n) make that rarer"
            )
        if not loss.is_complete:
            yield "stopped before the search ended: what follows is only what is known so far"
        if loss.reason:
            yield loss.reason
        if loss.last_good is None:
            yield "no continuation succeeded from the first call on: these weights may not be able"
            return
        names = "after one of these calls" if len(loss.calls) > 1 else "after this call"
        yield f"lost {names}:" if loss.is_complete else f"lost {names}, or between:"
        for call in loss.calls:
            yield f"  {call.text}"
        runs = [p for p in self.points if p.call.number == loss.last_good and p.successes]
        before = f"some continuations from call {loss.last_good} succeeded"
        if loss.group and not runs:
            before = f"some rollouts of the group succeeded from call {loss.last_good} on"
        if loss.first_lost is None:
            yield f"{before}, and the rollout itself did not"
        else:
            count = plural(loss.failures, "continuation")
            yield f"{before}, and none of {count} from call {loss.first_lost} did"

    def _cost_lines(self) -> Iterator[str]:
        everything = self.continuations
        departed = [each for each in everything if each.departed]
        if departed:
            yield (
                f"{len(departed)} of {plural(len(everything), 'continuation')} departed from the "
                f"recorded calls, and count nowhere: {departed[0].departed}"
            )
        failed = [each for each in everything if each.message and not each.departed]
        if failed:
            yield f"{len(failed)} failed: {shortened(failed[0].message, 200)}"
        tools = sum(each.tools for each in everything)
        paid = f", {self.endpoint:,} calls to endpoints of frozen agents" if self.endpoint else ""
        yield (
            f"cost: {plural(len(everything), 'continuation')}, {self.sampled:,} calls and "
            f"{self.tokens:,} tokens sampled{paid}; {sum(each.repeated for each in everything):,} "
            f"calls repeated, {plural(tools, 'tool call')} ran again"
        )
        yield f"the continuations: lightspan inspect {self.folder}"


def _point_lines(point: PointReport) -> Iterator[str]:
    yield f"recorded {point.call.text}"
    yield "  reward  calls  instead"
    for each in point.continuations:
        reward = "-" if each.reward is None else f"{each.reward:.3f}"
        answer = f"departed: {each.departed}" if each.departed else shortened(each.answer)
        yield f"  {reward:>6}  {each.sampled:>5}  {answer}"
    if point.mean is not None:
        yield f"mean reward {point.mean}"
    if point.share is not None:
        yield f"successes: {point.successes} of {point.share.n}, {_bounds(point.share)}"


def _bounds(share: Interval) -> str:
    bounds = f" ({share.low:.2f} to {share.high:.2f})" if share.is_known else ""
    return f"{share.mean:.2f}{bounds}"


def shortened(text: str, limit: int = MAX_ANSWER) -> str:
    """Return a text in one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def answer_of(call: Call | None) -> str:
    """Return the answer to a call as text: what it says, then its tool calls."""
    parts: list[str] = []
    for message in _answers(call):
        parts.append(joined_text(message.get("content") or ""))
        for each in message.get("tool_calls") or ():
            function = each.get("function") or {}
            parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(filter(None, parts))


def tools_of(call: Call) -> int:
    """Return the number of tool calls in the answer to a call."""
    return sum(len(message.get("tool_calls") or ()) for message in _answers(call))


def _answers(call: Call | None) -> list[dict[str, Any]]:
    if call is None or call.span is None:
        return []
    answers = output_messages_of(call.span.attributes)
    return answers[call.choice :][:1]


def call_report(point: ForkPoint) -> CallReport:
    """Return the report of the call of a point, which is not the end."""
    assert point.call is not None
    return CallReport(
        number=point.number,
        call_id=point.call.call_id,
        agent=point.call.agent_path,
        answer=answer_of(point.call),
    )


def continuation(episode: Episode, recorded: Episode) -> Continuation:
    """Return the report of a continuation.

    Args:
        episode: the continuation.
        recorded: the rollout that it repeats.
    """
    calls = {call.call_id: call for call in reversed(episode.calls)}
    repeated = [each for each in calls.values() if each.outcome is CallOutcome.REPLAYED]
    forked = [e for e in calls.values() if e.span and e.span.attributes.get(c.REPLAY_FORK)]
    own = [call for call in episode.calls if call.outcome is not CallOutcome.REPLAYED]
    return Continuation(
        rollout_id=episode.rollout_id,
        reward=episode.reward,
        answer=answer_of(forked[0]) if forked else "",
        sampled=len({call.call_id for call in own if _is_sampled(call)}),
        endpoint=len({call.call_id for call in own if call.route in _ENDPOINTS}),
        repeated=len(repeated),
        tokens=sum(len(call.record.response) // 4 for call in own if call.record is not None),
        tools=_tools_before(episode, recorded, forked, repeated),
        departed=episode.departed,
        message=episode.message,
    )


def _tools_before(
    episode: Episode, recorded: Episode, forked: Sequence[Call], repeated: Sequence[Call]
) -> int:
    """Return the number of tool calls that ran before the first call that was sampled.

    Tools whose place among the model calls is unknown count too.

    Args:
        episode: the continuation.
        recorded: the rollout that it repeats.
        forked: the call of the continuation that was sampled first; empty if it departed before.
        repeated: its calls that were answered as recorded.
    """
    placed = Trace(episode).tools
    if not placed and not Trace(recorded).tools:
        sources = {call.call_id: call for call in reversed(recorded.calls)}
        return sum(tools_of(sources[e.call_id]) for e in repeated if e.call_id in sources)
    start = math.inf if not forked else forked[0].sequence_start or 0
    return sum(each.since is None or each.since < start for each in placed)


_ENDPOINTS: Final = (Route.ENDPOINT, Route.APP)
"""Routes of calls to endpoints: those of `frozen=LLM(…)`, and the app's own."""


def _is_sampled(call: Call) -> bool:
    """Return whether a call that was not replayed was sampled by the weights.

    A rejected call was not, and neither was a call to an endpoint.
    """
    is_answered = call.record is not None or call.outcome is not CallOutcome.ERROR
    return is_answered and call.sequence_start is not None and call.route not in _ENDPOINTS


def point_report(
    point: ForkPoint,
    episodes: Sequence[Episode],
    recorded: Episode,
    success: float | None,
    *,
    is_again: bool = False,
) -> PointReport:
    """Return the report of the continuations from a point.

    Args:
        point: the point.
        episodes: the continuations.
        recorded: the rollout that they repeat.
        success: reward from which on a rollout counts as a success; None for no such reward.
        is_again: whether the point was tested before.
    """
    rows = tuple(continuation(episode, recorded) for episode in episodes)
    rewards = [row.reward for row in rows if row.reward is not None]
    reached = [float(reward >= success) for reward in rewards] if success is not None else []
    return PointReport(
        call=call_report(point),
        continuations=rows,
        mean=interval_of(rewards),
        successes=None if success is None else int(math.fsum(reached)),
        share=interval_of(reached),
        is_again=is_again,
    )


def interval_of(rewards: Sequence[float]) -> Interval | None:
    """Return the mean of rewards with its 95 % interval; None without rewards.

    Shares (all rewards 0 or 1) have the exact interval, other rewards Student's.
    """
    values = {str(number): reward for number, reward in enumerate(rewards)}
    return clustered_interval(values, {}, min(0.0, *rewards)) if rewards else None
