"""Findings: the episodes of a dry run, judged, and the sections of the report that follow.

Each `read_…` is a pure function from the findings to one section.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from lightspan.lightning.advantages import groups_without_variance
from lightspan.lightning.air import (
    AIR,
    Shaping,
    ToolError,
    ToolSuccess,
    ValidArguments,
    shape,
    signal_name,
)
from lightspan.lightning.breaks import Decode, Exchange, Merging, read_merging
from lightspan.lightning.credit import Credit
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.health import (
    LONGEST_DAMAGE,
    LONGEST_REASON,
    app_failed,
    client_of,
    is_unseen,
    refusal_of,
)
from lightspan.lightning.history import Trace
from lightspan.lightning.returns import group_rewards
from lightspan.lightning.rows import merge
from lightspan.lightning.selection import CallCoverage, Coverage, Rejection, Verdict
from lightspan.lightning.states import key_of, state_of
from lightspan.lightning.transitions import Transition, trained_transitions, turn_depths
from lightspan.reports.dry_run.endpoints import PAID, Endpoint, answerer, destination, endpoint_of
from lightspan.reports.dry_run.sections import (
    AgentReport,
    AIRReport,
    BreakReport,
    ClientReport,
    CostReport,
    EndpointReport,
    GroupReport,
    OverrideReport,
    Reason,
    RewardReport,
    RowReport,
    Spread,
    ToolReport,
)
from lightspan.reports.forecast import RunSize
from lightspan.schema import conventions as c, messages
from lightspan.schema.llm import LLM
from lightspan.schema.records import Outcome
from lightspan.schema.routing import Route, Routing
from lightspan.schema.spans import Span, SpanKind, SpanStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The episodes of a dry run, judged."""

    episodes: Sequence[Episode]
    coverages: Sequence[Coverage]
    """One per episode."""
    routing: Routing
    """The algorithm's, whoever answered."""
    endpoint: LLM | None = None
    """Who answered in place of our models; then every token record is an estimate."""

    @property
    def entries(self) -> list[CallCoverage]:
        """Every call."""
        return [entry for coverage in self.coverages for entry in coverage.entries]

    def transitions(self) -> list[Transition]:
        """The calls that would be trained and whose tokens are known, or estimated."""
        pairs = zip(self.episodes, self.coverages, strict=True)
        return [t for episode, coverage in pairs for t in trained_transitions(episode, coverage)]

    def spans(self, kind: SpanKind) -> list[Span]:
        return [s for episode in self.episodes for s in episode.spans if s.kind is kind]


# --- agents -----------------------------------------------------------------------------------
def read_agents(findings: Findings, declared: Iterable[str] | None = None) -> list[AgentReport]:
    """Every agent that acted or called, and those that the app declares; in order of path."""
    calls: dict[str, list[CallCoverage]] = {path: [] for path in declared or ()}
    acted = {str(span.attributes.get(c.AGENT_PATH)) for span in findings.spans(SpanKind.AGENT)}
    for path in acted:
        calls.setdefault(path, [])
    for entry in findings.entries:
        calls.setdefault(entry.call.agent_path, []).append(entry)
    count = len(findings.episodes)
    return [
        _agent(path, entries, findings, count, acted=bool(entries) or path in acted)
        for path, entries in sorted(calls.items())
    ]


def _agent(
    path: str,
    entries: Sequence[CallCoverage],
    findings: Findings,
    rollouts: int,
    *,
    acted: bool,
) -> AgentReport:
    target = findings.routing.target(path)
    tokens = [token_counts(entry.call) for entry in entries]
    rejected = Counter(e.rejection for e in entries if e.rejection is not None)
    texts = {entry.rejection: _why(entry) for entry in reversed(entries)}
    return AgentReport(
        path=path,
        policy=target.policy if target.selected else None,
        route=target.route.value,
        goes_to=sorted({destination(entry.call, target) for entry in entries}),
        answered_by=sorted({answerer(entry.call, target, findings.endpoint) for entry in entries}),
        unseen=_unseen(entries),
        acted=acted,
        tokens_estimated=findings.endpoint is not None
        and any(entry.call.record is not None for entry in entries),
        calls=len(entries),
        calls_per_rollout=len(entries) / rollouts,
        prompt_tokens=Spread.of(prompt for prompt, _ in tokens if prompt is not None),
        response_tokens=Spread.of(answer for _, answer in tokens if answer is not None),
        trained=sum(entry.verdict is Verdict.TRAINED for entry in entries),
        frozen=sum(entry.verdict is Verdict.FROZEN for entry in entries),
        rejected=[
            Reason(code=reason.value, text=texts[reason], calls=number)
            for reason, number in rejected.most_common()
        ],
    )


def _unseen(entries: Iterable[CallCoverage]) -> list[ClientReport]:
    calls = [entry.call for entry in entries if is_unseen(entry.call)]
    clients = Counter(client_of(call.span) for call in calls if call.span is not None)
    return [
        ClientReport(client=client, host=host, calls=count, fix=fix)
        for (client, host, fix), count in clients.most_common()
    ]


def _why(entry: CallCoverage) -> str:
    """Why the call would be rejected; of a failed call also what it failed with."""
    span = entry.call.span
    if span is None or not span.status_message:
        return entry.reason
    if entry.rejection is Rejection.REFUSED:
        return f"{entry.reason}: {refusal_of(span)}"
    if entry.rejection is Rejection.ERROR:
        return f"{entry.reason}: {span.status_message[:LONGEST_REASON]}"
    return entry.reason


def token_counts(call: Call) -> tuple[int | None, int | None]:
    """(tokens of the prompt, of the answer), as recorded, else as the endpoint counted them."""
    if call.record is not None:
        return len(call.record.prompt) // 4, len(call.record.response) // 4
    if call.span is None or call.choice:  # an endpoint counts all choices together
        return None, None
    return c.usage_of(call.span.attributes)


# --- overrides --------------------------------------------------------------------------------
def read_overrides(findings: Findings) -> list[OverrideReport]:
    """What training sets otherwise, by agent and field; each call once, whatever its choices."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for entry in findings.entries:
        call = entry.call
        if call.span is None or call.choice:
            continue
        for field, pair in messages.overrides_of(call.span.attributes).items():
            counts[call.agent_path, field, json.dumps(pair, sort_keys=True)] += 1
    return [
        OverrideReport(agent=agent, field=field, asked=asked, used=used, calls=calls)
        for (agent, field, pair), calls in sorted(counts.items())
        for asked, used in [json.loads(pair)]
    ]


# --- rewards ----------------------------------------------------------------------------------
def read_rewards(findings: Findings) -> RewardReport:
    """What the app was paid, by group."""
    episodes = findings.episodes
    rewards = group_rewards(episodes, findings.coverages)
    flat = set(groups_without_variance(rewards))
    tasks = {episode.group_id: episode.task_id for episode in episodes}
    groups = [_group(tasks[group], values, group not in flat) for group, values in rewards.items()]
    scored = [value for values in rewards.values() for value in values if value is not None]
    mean, std = _moments(scored)
    return RewardReport(
        rollouts=len(episodes),
        scored=len(scored),
        unscored=len(episodes) - len(scored),
        failed=sum(map(app_failed, episodes)),
        lost=sum(not episode.finished for episode in episodes),
        damaged=sum(bool(episode.damage) for episode in episodes),
        mean=mean,
        std=std,
        groups=groups,
        failures=_failures(episodes),
    )


def _group(task_id: str, values: Sequence[float | None], varies: bool) -> GroupReport:
    mean, std = _moments([value for value in values if value is not None])
    return GroupReport(task_id=task_id, rewards=list(values), mean=mean, std=std, varies=varies)


def _moments(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _failures(episodes: Sequence[Episode]) -> list[str]:
    failures: Counter[str] = Counter()
    for episode in episodes:
        if episode.outcome is not Outcome.OK:
            failures[f"{episode.outcome}: {episode.message[:300]}".rstrip(": ")] += 1
        failures.update(f"damaged: {reason[:LONGEST_DAMAGE]}" for reason in episode.damage)
    total = len(episodes)
    return [f"{text} ({count} of {total} rollouts)" for text, count in failures.most_common()]


def read_air(findings: Findings, air: AIR, credit: Credit) -> AIRReport:
    """What each signal saw, and why AIR would do nothing, where it would.

    Raises:
        ConfigError: a signal's function failed, or returned no finite number.
    """
    pairs = list(zip(findings.episodes, findings.coverages, strict=True))
    shapings = [shape(air, credit, episode, coverage) for episode, coverage in pairs]
    seen = {signal_name(signal): 0 for signal in air.signals}
    for shaping in shapings:
        for name, values in shaping.seen.items():
            seen[name] += len(values)
    return AIRReport(seen=seen, idle=_idle(findings, air, shapings, sum(seen.values())))


def check_states(findings: Findings, credit: Credit) -> None:
    """Ask the rule's key, if it has one, of every selected call, as `fit` would.

    Raises:
        ConfigError: it failed, or what it says cannot be compared.
    """
    key = getattr(credit, "key", None)
    if key is None:
        return
    for episode, coverage in zip(findings.episodes, findings.coverages, strict=True):
        calls = [entry.call for entry in coverage.selected]
        for call, turn in zip(calls, turn_depths(calls), strict=True):
            key_of(key, state_of(call, episode.task_id, turn))


def _idle(findings: Findings, air: AIR, shapings: Sequence[Shaping], seen: int) -> str:
    if air.mode == "bonus":
        unplaced = sum(shaping.unplaced for shaping in shapings)
        return "no tool follows a selected call" if unplaced == seen else ""
    if any(callable(signal) for signal in air.signals):  # a function sees every state
        return ""
    pairs = zip(findings.episodes, findings.coverages, strict=True)
    follows = any(_follows(air, episode, coverage) for episode, coverage in pairs)
    return "" if follows else "no selected call follows a tool"


def _follows(air: AIR, episode: Episode, coverage: Coverage) -> bool:
    """Whether a selected call began after something that a built-in signal saw."""
    starts = [entry.call.sequence_start or 0 for entry in coverage.selected]
    trace, last = Trace(episode), max(starts, default=0)
    built_in = (s for s in air.signals if isinstance(s, ToolSuccess | ToolError | ValidArguments))
    places = (observed.after for signal in built_in for observed in signal.see(trace))
    return any(place is not None and place < last for place in places)


# --- rows -------------------------------------------------------------------------------------
def read_rows(
    findings: Findings, transitions: Sequence[Transition], decode: Decode, *, exact: bool
) -> RowReport:
    """How the calls merge, and why they do not."""
    exchanges = {
        (coverage.attempt_id, *entry.call.key): Exchange.of(entry.call)
        for coverage in findings.coverages
        for entry in coverage.entries
        if entry.verdict is Verdict.TRAINED
    }
    merging = read_merging(transitions, exchanges, decode)
    counts = merging.counts()
    lengths = [chain[-1].length for chain in merge(transitions)]
    return RowReport(
        exact=exact,
        calls=len(transitions),
        rows=merging.rows,
        merged=counts["merged"],
        new=counts["new"],
        branch=counts["branch"],
        broken=counts["broken"],
        causes=merging.causes(),
        row_tokens=merging.row_tokens,
        call_tokens=merging.call_tokens,
        longest_row=max(lengths, default=0),
        trained_tokens=sum(transition.tokens for transition in transitions),
        breaks=_breaks(merging, transitions),
    )


def _breaks(merging: Merging, transitions: Sequence[Transition]) -> list[BreakReport]:
    rollouts = {transition.attempt_id: transition.rollout_id for transition in transitions}
    return [
        BreakReport(
            rollout_id=rollouts[broken.following[0]],
            agent=broken.agent_path,
            previous_call=f"{broken.previous[1]}/{broken.previous[2]}",
            following_call=f"{broken.following[1]}/{broken.following[2]}",
            cause=broken.cause.value,
            detail=broken.detail,
            place=broken.place,
            where=broken.where,
            expected_id=broken.expected,
            expected_text=broken.expected_text,
            got_id=broken.got,
            got_text=broken.got_text,
            before=broken.before,
        )
        for broken in merging.breaks
    ]


# --- costs ------------------------------------------------------------------------------------


def read_costs(findings: Findings, size: RunSize, max_frozen_calls: int | None) -> CostReport:
    """What a whole `fit` would call outside, if its rollouts are like those of the dry run."""
    scale = size.rollouts / len(findings.episodes)
    endpoints = _endpoints(findings, scale)
    return CostReport(
        size=size,
        rollouts=size.rollouts,
        tools=_tools(findings, scale),
        endpoints=endpoints,
        expected_frozen_calls=math.fsum(endpoint.expected_calls for endpoint in endpoints),
        max_frozen_calls=max_frozen_calls,
    )


def _tools(findings: Findings, scale: float) -> list[ToolReport]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in findings.spans(SpanKind.TOOL):
        spans[str(span.attributes.get(c.TOOL_NAME) or span.name)].append(span)
    return [
        ToolReport(
            name=name,
            calls=len(calls),
            calls_per_rollout=len(calls) / len(findings.episodes),
            expected_calls=len(calls) * scale,
            failed=sum(span.status is SpanStatus.ERROR for span in calls),
        )
        for name, calls in sorted(spans.items())
    ]


def _endpoints(findings: Findings, scale: float) -> list[EndpointReport]:
    calls: dict[Endpoint, list[Call]] = defaultdict(list)
    for entry in findings.entries:
        target = findings.routing.target(entry.call.agent_path)
        if target.route in PAID and not entry.call.choice:
            calls[endpoint_of(entry.call, target)].append(entry.call)
    return [
        _endpoint(where, made, len(findings.episodes), scale)
        for where, made in sorted(calls.items())
    ]


def _endpoint(
    where: Endpoint, calls: Sequence[Call], rollouts: int, scale: float
) -> EndpointReport:
    counted = [token_counts(call) for call in calls]
    prompt, answer = (_sum(values) for values in zip(*counted, strict=True))
    return EndpointReport(
        host=where.host,
        model=where.model,
        agents=sorted({call.agent_path for call in calls}),
        calls=len(calls),
        calls_per_rollout=len(calls) / rollouts,
        prompt_tokens_per_rollout=None if prompt is None else prompt / rollouts,
        response_tokens_per_rollout=None if answer is None else answer / rollouts,
        expected_calls=len(calls) * scale,
        expected_prompt_tokens=None if prompt is None else prompt * scale,
        expected_response_tokens=None if answer is None else answer * scale,
    )


def _sum(values: Iterable[int | None]) -> int | None:
    counted = [value for value in values if value is not None]
    return sum(counted) if counted else None


# --- what a model of ours would have done -----------------------------------------------------
def as_if_tokens_were_known(coverage: Coverage, episode: Episode, step_rewards: bool) -> Coverage:
    """The coverage of a dry run at an endpoint: its calls lack token ids for no other reason than
    who answered them, so those are judged by the rest alone."""

    def judged(entry: CallCoverage) -> CallCoverage:
        if entry.rejection is not Rejection.NO_TOKENS or entry.call.route is not Route.ENDPOINT:
            return entry
        if not episode.scored(step_rewards):
            return msgspec.structs.replace(entry, rejection=Rejection.UNSCORED)
        return msgspec.structs.replace(entry, verdict=Verdict.TRAINED, rejection=None)

    return Coverage(
        attempt_id=coverage.attempt_id,
        entries=tuple(map(judged, coverage.entries)),
        step_rewards=coverage.step_rewards,
    )
