"""From the episodes of a dry run to the sections of its report. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan import conventions as c
from lightspan import messages
from lightspan.dryrun.report import (
    AgentReport,
    AIRReport,
    BreakReport,
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
from lightspan.forecast import RunSize
from lightspan.health import app_failed
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
from lightspan.lightning.batch import group_rewards
from lightspan.lightning.credit import Credit
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.history import Trace
from lightspan.lightning.merging import Decode, Exchange, Merging, read_merging
from lightspan.lightning.rows import merge
from lightspan.lightning.selection import CallCoverage, Coverage, Rejection, Verdict
from lightspan.lightning.transitions import Transition, trained_transitions
from lightspan.llm import LLM
from lightspan.records import Outcome
from lightspan.routing import Route, Routing, Target
from lightspan.spans import Span, SpanKind, SpanStatus

LONGEST_REASON: Final = 300
"""Characters of what a call failed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The episodes of a dry run, judged."""

    episodes: Sequence[Episode]
    coverages: Sequence[Coverage]
    """One per episode."""
    routing: Routing
    """The algorithm's, whoever answered."""
    step_rewards: bool = False
    """The algorithm pays for rewards on calls."""
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
def read_agents(found: Findings, known: Iterable[str] | None = None) -> list[AgentReport]:
    """Every agent that acted or called, and those known that did not; in order of path."""
    calls: dict[str, list[CallCoverage]] = {path: [] for path in known or ()}
    for span in found.spans(SpanKind.AGENT):
        calls.setdefault(str(span.attributes.get(c.AGENT_PATH)), [])
    for entry in found.entries:
        calls.setdefault(entry.call.agent_path, []).append(entry)
    count = len(found.episodes)
    return [_agent(path, entries, found, count) for path, entries in sorted(calls.items())]


def _agent(
    path: str, entries: Sequence[CallCoverage], found: Findings, rollouts: int
) -> AgentReport:
    target = found.routing.target(path)
    tokens = [token_counts(entry.call) for entry in entries]
    rejected = Counter(e.rejection for e in entries if e.rejection is not None)
    texts = {entry.rejection: _why(entry) for entry in reversed(entries)}
    return AgentReport(
        path=path,
        policy=target.policy if target.selected else None,
        route=target.route.value,
        goes_to=sorted({_destination(entry.call, target) for entry in entries}),
        answered_by=sorted({_answerer(entry.call, target, found.endpoint) for entry in entries}),
        tokens_estimated=found.endpoint is not None
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


def _why(entry: CallCoverage) -> str:
    """The reason, and of a failed call what it failed with."""
    said = entry.call.span.status_message if entry.call.span is not None else ""
    if entry.rejection is not Rejection.ERROR or not said:
        return entry.reason
    return f"{entry.reason}: {said[:LONGEST_REASON]}"


def token_counts(call: Call) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer, as recorded, else as the endpoint counted them."""
    if call.record is not None:
        return len(call.record.prompt) // 4, len(call.record.response) // 4
    if call.span is None or call.choice:  # an endpoint counts all choices together
        return None, None
    return c.usage_of(call.span.attributes)


def _destination(call: Call, target: Target) -> str:
    names = {
        Route.POLICY: f"policy {target.policy}",
        Route.BASE: "the starting weights",
        Route.SHARED: f"policy {target.policy}, untrained",
    }
    return names.get(target.route) or str(endpoint_of(call, target))


def _answerer(call: Call, target: Target, endpoint: LLM | None) -> str:
    """Who answered in the dry run."""
    if endpoint is not None and target.route not in PAID:
        target = Target(route=Route.ENDPOINT, endpoint=endpoint)
    return _destination(call, target)


class Endpoint(NamedTuple):
    """Who answers a call that is not ours."""

    host: str
    model: str

    def __str__(self) -> str:
        return f"{self.model or 'a model'} at {self.host or 'an unknown host'}"


def endpoint_of(call: Call, target: Target) -> Endpoint:
    """Where a frozen call goes, as the target or its span says."""
    known = call.span.attributes if call.span is not None else {}
    asked = c.model_of(known) or ""
    if target.endpoint is not None:
        return Endpoint(host_of(target.endpoint.base_url), target.endpoint.model or asked)
    host, port = str(known.get(c.SERVER_ADDRESS, "")), known.get(c.SERVER_PORT)
    return Endpoint(f"{host}:{port}" if port else host, asked)


def host_of(url: str) -> str:
    """Host and port of a URL, without a key that may stand before them."""
    return urlsplit(url).netloc.rpartition("@")[2]


# --- overrides --------------------------------------------------------------------------------
def read_overrides(found: Findings) -> list[OverrideReport]:
    """What training sets otherwise, by agent and field; each call once, whatever its choices."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for entry in found.entries:
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
def read_rewards(found: Findings) -> RewardReport:
    """Rewards, by group."""
    episodes = found.episodes
    rewards = group_rewards(episodes, found.step_rewards)
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
    told: Counter[str] = Counter()
    for episode in episodes:
        if episode.outcome is not Outcome.OK:
            told[f"{episode.outcome}: {episode.message[:300]}".rstrip(": ")] += 1
        told.update(f"damaged: {reason[:300]}" for reason in episode.damage)
    return [f"{text} ({count} of {len(episodes)} rollouts)" for text, count in told.most_common()]


def read_air(found: Findings, air: AIR, credit: Credit) -> AIRReport:
    """What each signal saw, and why AIR would do nothing, where it would.

    Raises:
        ConfigError: a signal's function failed, or returned no finite number.
    """
    pairs = list(zip(found.episodes, found.coverages, strict=True))
    shapings = [shape(air, credit, episode, coverage) for episode, coverage in pairs]
    seen = {signal_name(signal): 0 for signal in air.signals}
    for shaping in shapings:
        for name, values in shaping.seen.items():
            seen[name] += len(values)
    return AIRReport(seen=seen, idle=_idle(found, air, shapings, sum(seen.values())))


def _idle(found: Findings, air: AIR, shapings: Sequence[Shaping], seen: int) -> str:
    if air.mode == "bonus":
        unplaced = sum(shaping.unplaced for shaping in shapings)
        return "no tool follows a selected call" if unplaced == seen else ""
    if any(callable(signal) for signal in air.signals):  # it sees every state
        return ""
    pairs = zip(found.episodes, found.coverages, strict=True)
    follows = any(_follows(air, episode, coverage) for episode, coverage in pairs)
    return "" if follows else "no selected call follows a tool"


def _follows(air: AIR, episode: Episode, coverage: Coverage) -> bool:
    """Whether a selected call began after something that a built-in signal saw."""
    starts = [entry.call.sequence_start or 0 for entry in coverage.selected]
    trace, last = Trace(episode), max(starts, default=0)
    built_in = (s for s in air.signals if isinstance(s, ToolSuccess | ToolError | ValidArguments))
    seen = (one for signal in built_in for one in signal.see(trace))
    return any(one.after is not None and one.after < last for one in seen)


# --- rows -------------------------------------------------------------------------------------
def read_rows(
    found: Findings, transitions: Sequence[Transition], decode: Decode, *, exact: bool
) -> RowReport:
    """How the calls merge, and why they do not."""
    exchanges = {
        (coverage.attempt_id, *entry.call.key): Exchange.of(entry.call)
        for coverage in found.coverages
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
            rollout_id=rollouts[found.following[0]],
            agent=found.agent_path,
            previous_call=f"{found.previous[1]}/{found.previous[2]}",
            following_call=f"{found.following[1]}/{found.following[2]}",
            cause=found.cause.value,
            detail=found.detail,
            place=found.place,
            where=found.where,
            expected_id=found.expected,
            expected_text=found.expected_text,
            got_id=found.got,
            got_text=found.got_text,
            before=found.before,
        )
        for found in merging.breaks
    ]


# --- costs ------------------------------------------------------------------------------------
PAID: Final = (Route.APP, Route.ENDPOINT)
"""Routes of calls that are not ours to answer."""


def read_costs(found: Findings, size: RunSize, max_frozen_calls: int | None) -> CostReport:
    """What a whole `fit` would call outside, if its rollouts are like those of the dry run."""
    scale = size.rollouts / len(found.episodes)
    endpoints = _endpoints(found, scale)
    return CostReport(
        size=size,
        rollouts=size.rollouts,
        tools=_tools(found, scale),
        endpoints=endpoints,
        expected_frozen_calls=math.fsum(endpoint.expected_calls for endpoint in endpoints),
        max_frozen_calls=max_frozen_calls,
    )


def _tools(found: Findings, scale: float) -> list[ToolReport]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in found.spans(SpanKind.TOOL):
        spans[str(span.attributes.get(c.TOOL_NAME) or span.name)].append(span)
    return [
        ToolReport(
            name=name,
            calls=len(calls),
            calls_per_rollout=len(calls) / len(found.episodes),
            expected_calls=len(calls) * scale,
            failed=sum(span.status is SpanStatus.ERROR for span in calls),
        )
        for name, calls in sorted(spans.items())
    ]


def _endpoints(found: Findings, scale: float) -> list[EndpointReport]:
    calls: dict[Endpoint, list[Call]] = defaultdict(list)
    for entry in found.entries:
        target = found.routing.target(entry.call.agent_path)
        if target.route in PAID and not entry.call.choice:
            calls[endpoint_of(entry.call, target)].append(entry.call)
    return [
        _endpoint(where, made, len(found.episodes), scale) for where, made in sorted(calls.items())
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
    known = [value for value in values if value is not None]
    return sum(known) if known else None


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
