"""Read the recorded rollouts of a dry run.

Each `read_…` function returns a section of the report.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, TypeVar

from lightspan.lightning.advantages import groups_without_variance
from lightspan.lightning.episode import Call, Episode, dimension_means
from lightspan.lightning.returns import group_rewards
from lightspan.lightning.rollout_checks import (
    FAILURE_WARNING,
    MAX_CAPTURE_ERROR_LENGTH,
    MAX_REASON_LENGTH,
    app_failed,
    client_of,
    is_silent,
    is_uncaptured,
    refusal_of,
)
from lightspan.lightning.rows import merge, row_shares
from lightspan.lightning.selection import CallCoverage, CallStatus, Coverage, Rejection
from lightspan.lightning.transitions import Transition, trained_transitions
from lightspan.progress import plural
from lightspan.protocols.engine import EngineCapabilities
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Json, Outcome, fingerprint, task_id
from lightspan.schema.routing import Route, Routing
from lightspan.schema.semconv import UNNAMED_AGENT
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan_tools.dry_run import report_model as model
from lightspan_tools.dry_run.endpoints import PAID, destination, endpoint_of, target_of
from lightspan_tools.images import references_of
from lightspan_tools.merge_diagnostics import Break, Decode, Merging, exchanges_of, read_merging
from lightspan_tools.sampling_overrides import overrides_of
from lightspan_tools.uncaptured_requests import describe_request, fix_of, host_of, requests_of

T = TypeVar("T")

MAX_EXAMPLES: Final = 2
"""Maximum number of breaks per cause that are reported as examples."""


MAX_BEGIN: Final = 40
"""Characters of a system prompt that distinguish kinds of conversations."""
_HEADER: Final = re.compile(r"\Ax-[\w-]+-header:(?:\s*[\w-]+=[^;\s]*;)+\s*")
"""What Claude Code writes before its system prompts."""
LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields of a request that limit the tokens of an answer."""
LONG_ANSWER: Final = 8_192
"""Tokens that an answer may have above which the limit is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The recorded rollouts (episodes) of a dry run.

    For each episode there is a coverage, which says for each of its calls whether it would be
    trained, and why not.
    """

    episodes: Sequence[Episode]
    coverages: Sequence[Coverage]
    """Coverage of each episode, in order."""
    routing: Routing

    @property
    def entries(self) -> list[CallCoverage]:
        """Return whether each call would be trained, and if not, why."""
        return [entry for coverage in self.coverages for entry in coverage.entries]

    def transitions(self) -> list[Transition]:
        """Return the calls that would be trained and whose tokens were recorded."""
        pairs = zip(self.episodes, self.coverages, strict=True)
        return [t for episode, coverage in pairs for t in trained_transitions(episode, coverage)]

    def spans(self, *kinds: SpanKind) -> list[Span]:
        """Return the spans of the given kinds; all spans if no kind is given."""
        spans = [span for episode in self.episodes for span in episode.spans]
        return [span for span in spans if not kinds or span.kind in kinds]


# --- agents -----------------------------------------------------------------------------------
def read_agents(
    findings: Findings, declared: Iterable[str] | None = None
) -> list[model.AgentReport]:
    """Report on each agent, sorted by path.

    Reported are the agents that acted or called a model, and those in `declared`.

    Args:
        findings: the episodes of the dry run.
        declared: paths of agents that the app is known to have; None for none.
    """
    acted = {str(span.attributes.get(c.AGENT_PATH)) for span in findings.spans(SpanKind.AGENT)}
    calls: dict[str, list[CallCoverage]] = {path: [] for path in (*(declared or ()), *acted)}
    for entry in findings.entries:
        calls.setdefault(entry.call.agent_path, []).append(entry)
    return [
        _agent(path, entries, findings, acted=bool(entries) or path in acted)
        for path, entries in sorted(calls.items())
    ]


def equal_tasks(tasks: Sequence[Json]) -> Iterator[str]:
    """Yield a warning if some training tasks of a search for prompts are equal."""
    if len({fingerprint(task) for task in tasks}) < len(tasks):
        yield "fit counts equal training tasks once while prompts are compared and shown"


def shared_ids(tasks: Sequence[Json], *, searches: bool) -> Iterator[str]:
    """Yield a warning if some training tasks share an `id` and differ in content.

    Args:
        tasks: the training tasks.
        searches: whether the algorithm is a search for prompts, which refuses such tasks.
    """
    first: dict[str, int] = {}
    pairs: dict[str, tuple[int, int]] = {}
    for place, task in enumerate(tasks):
        name = task_id(task)
        other = first.setdefault(name, place)
        if fingerprint(task) != fingerprint(tasks[other]):
            pairs.setdefault(name, (other, place))
    if pairs:
        (name, (one, two)), more = next(iter(pairs.items())), len(pairs) - 1
        others = f" (likewise {plural(more, 'other id')})" if more else ""
        told = (
            "fit refuses them" if searches else "messages, inspect and export show them as one task"
        )
        yield (
            f"train[{one}] and train[{two}] differ and have one id ({name})"
            f"{others}: {told}; give each task an id of its own"
        )


def _agent(
    path: str, entries: Sequence[CallCoverage], findings: Findings, *, acted: bool
) -> model.AgentReport:
    target = findings.routing.target(path)
    tokens = [token_counts(entry.call) for entry in entries]
    rejected = Counter(e.rejection for e in entries if e.rejection is not None)
    texts = {entry.rejection: _rejection_text(entry) for entry in reversed(entries)}
    images = [_image_tokens(entry.call) for entry in entries]
    unseen = Counter(
        client_of(entry.call.span)
        for entry in entries
        if target.selected and entry.call.span is not None and is_uncaptured(entry.call)
    )
    targets = [target_of(entry.call, findings.routing) for entry in entries]
    spans = [
        entry.call.span
        for entry, own in zip(entries, targets, strict=True)
        if own.route is Route.APP and entry.call.span is not None
    ]
    errors = [span.status_message[:MAX_REASON_LENGTH] for span in spans if _has_failed(span)]
    return model.AgentReport(
        path=path,
        policy=target.policy if target.selected else None,
        route=target.route.value,
        goes_to=sorted({destination(entry.call, findings.routing) for entry in entries}),
        calls=len(entries),
        calls_per_rollout=len(entries) / len(findings.episodes),
        prompt_tokens=_spread(prompt for prompt, _ in tokens),
        response_tokens=_spread(answer for _, answer in tokens),
        trained=sum(entry.status is CallStatus.TRAINED for entry in entries),
        frozen=sum(entry.status is CallStatus.FROZEN for entry in entries),
        rejected=[
            model.Reason(code=reason.value, text=texts[reason], calls=number)
            for reason, number in rejected.most_common()
        ],
        unseen=[f"{plural(count, 'call')} {client}" for client, count in unseen.most_common()],
        retried=sum(
            call.agent_path == path and call.key in episode.retried
            for episode, coverage in zip(findings.episodes, findings.coverages, strict=True)
            for call in coverage.trained
        ),
        image_calls=sum(map(bool, images)),
        images=len({digest for tokens in images for digest in tokens}),
        image_tokens=_spread(each for tokens in images for each in tokens.values()),
        acted=acted,
        failed=len(errors),
        error=errors[0] if errors else "",
        side_calls=list(_side_calls(entries)) if target.selected else [],
    )


def _side_calls(entries: Sequence[CallCoverage]) -> Iterator[str]:
    """Describe calls of an agent that belong to another conversation than most of its calls.

    Their system prompts begin differently in the same rollout. Programs write titles, summaries and
    memories so, and run sub-agents.

    Args:
        entries: the calls of one agent.
    """
    calls: Counter[str] = Counter()
    rollouts: dict[str, set[str]] = defaultdict(set)
    for span in (entry.call.span for entry in entries if not entry.call.choice):
        if span is not None and (begin := _begin_of_system(span)):
            calls[begin] += 1
            rollouts[span.attempt_id].add(begin)
    mixed = set().union(*(begins for begins in rollouts.values() if len(begins) > 1))
    for begin, count in calls.most_common()[1:]:
        if begin in mixed:
            yield (
                f"{plural(count, 'call')} of {len(entries)} begin a conversation of another kind "
                f"(system prompt {begin!r}), and are trained with the rollout's reward. If it is "
                "a title or a sub-agent, make it an agent of its own: "
                f'Command(agents={{"NAME": system("{begin}*")}}), or a name in the URL'
            )


def _begin_of_system(span: Span) -> str:
    """Return the first words of a call's system prompt; "" if it has none."""
    messages = genai_messages.input_messages_of(span.attributes)
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return ""
    text = genai_messages.joined_text(messages[0].get("content")).strip()
    text = _HEADER.sub("", text)
    return text.partition("\n")[0][:MAX_BEGIN]


def _has_failed(span: Span) -> bool:
    return span.attributes.get(c.CALL_OUTCOME) == CallOutcome.ERROR.value


def _spread(values: Iterable[int | None]) -> model.Spread | None:
    numbers = _known(values)
    return (
        model.Spread(mean=math.fsum(numbers) / len(numbers), max=max(numbers)) if numbers else None
    )


def _known(values: Iterable[T | None]) -> list[T]:
    """Return the values without None."""
    return [value for value in values if value is not None]


def _rejection_text(entry: CallCoverage) -> str:
    """Return why the call would not be trained. If the call failed, the text contains its error."""
    span = entry.call.span
    if span is None or not span.status_message:
        return entry.reason
    if entry.rejection is Rejection.REFUSED:
        return f"{entry.reason}: {refusal_of(span)}"
    if entry.rejection is Rejection.ERROR:
        return f"{entry.reason}: {span.status_message[:MAX_REASON_LENGTH]}"
    return entry.reason


def token_counts(call: Call) -> tuple[int | None, int | None]:
    """Return the number of prompt tokens and of answer tokens of a call; None if unknown."""
    if call.record is not None:
        return len(call.record.prompt) // 4, len(call.record.response) // 4
    if call.span is None or call.choice:  # an endpoint counts all choices together
        return None, None
    return c.usage_of(call.span.attributes)


def _image_tokens(call: Call) -> dict[str, int | None]:
    """Return digest → number of prompt tokens of each image of a call; None if unknown."""
    if call.record is None:
        return dict.fromkeys(references_of(call))
    tokens: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for run in call.record.images:
        tokens[run.digest] += run.length
        times[run.digest] += not run.first
    return {digest: count // times[digest] for digest, count in tokens.items()}


def digests_of(findings: Findings) -> set[str]:
    """Return the digests of the images in the recorded prompts."""
    records = [entry.call.record for entry in findings.entries]
    return {image.digest for record in records if record for image in record.images}


def read_uncaptured(findings: Findings) -> list[model.UncapturedReport]:
    """Return the requests to a model that the SDKs did not send and that no adapter recorded."""
    spans = findings.spans()
    recorded = {
        (entry.call.agent_path, client_of(entry.call.span).host)
        for entry in findings.entries
        if entry.call.span is not None and is_uncaptured(entry.call)
    }
    return [
        model.UncapturedReport(
            agent=request.agent,
            request=describe_request(request),
            requests=count,
            selected=findings.routing.target(request.agent).selected,
            fix=fix_of(request),
        )
        for request, count in sorted(requests_of(spans).items())
        if recorded.isdisjoint({(request.agent, ""), (request.agent, host_of(request))})
    ]


def read_overrides(findings: Findings) -> list[model.OverrideReport]:
    """Return the request fields that training changes, per agent.

    The app's value of such a field is replaced or left out.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for call in (entry.call for entry in findings.entries):
        if call.span is not None and not call.choice:
            for field, pair in overrides_of(call.span.attributes).items():
                counts[call.agent_path, field, json.dumps(pair, sort_keys=True)] += 1
    return [
        model.OverrideReport(agent=agent, field=field, asked=asked, used=used, calls=calls)
        for (agent, field, pair), calls in sorted(counts.items())
        for asked, used in [json.loads(pair)]
    ]


def answer_limits(findings: Findings, overrides: Sequence[model.OverrideReport]) -> Iterator[str]:
    """Yield which limits of answers apply where `LightningRL(max_tokens=)` is not set.

    Args:
        findings: the episodes of the dry run.
        overrides: fields that training changes.
    """
    advice = "LightningRL(max_tokens=) sets one, which bounds time and memory"
    for each in overrides:
        if each.field in LIMITS and each.used is not None:
            text = "no limit" if each.asked is None else f"{each.asked:,}, more than is left"
            yield (
                f"answers of {each.agent} have at most {each.used:,} tokens, by the sizes of "
                f"context and key-value cache (the app asks for {text}): {advice}"
            )
    largest: dict[str, int] = {}
    for call in (entry.call for entry in findings.entries):
        if call.record is not None and findings.routing.target(call.agent_path).selected:
            limit = call.record.sampling.max_tokens or 0
            largest[call.agent_path] = max(limit, largest.get(call.agent_path, 0))
    for agent, limit in sorted(largest.items()):
        if limit > LONG_ANSWER:
            yield f"answers of {agent} may have {limit:,} tokens: {advice}"


def evaluation_warnings(
    overrides: Sequence[model.OverrideReport],
    capabilities: EngineCapabilities,
    is_refused: Callable[[str, Any], bool],
    *,
    is_evaluated: bool,
) -> Iterator[str]:
    """Warn of request fields that make an evaluation in `fit` fail.

    Training replaces or leaves out these fields. Evaluations send what the app asks for, and the
    engine refuses it.

    Args:
        overrides: fields that training changes.
        capabilities: what the engine supports.
        is_refused: function of a field and its value: whether evaluations refuse the field.
        is_evaluated: whether `fit` evaluates.
    """
    refused: dict[str, list[str]] = defaultdict(list)
    for each in overrides:
        is_unknown = each.used is None and is_refused(each.field, each.asked)
        is_unsupported = each.field in ("top_p", "top_k") and not getattr(capabilities, each.field)
        if is_unknown or is_unsupported:
            refused[each.agent].append(f"{each.field}={json.dumps(each.asked)}"[:300])
    if refused:
        named = "; ".join(f"{', '.join(fields)} of {agent}" for agent, fields in refused.items())
        yield (
            ("fit would stop: its" if is_evaluated else "with held-out tasks, fit would stop: its")
            + f" evaluations sample as the app asks, so they refuse {named}, which training sets "
            "aside. Leave that out of the app's requests"
        )


def evaluated_warnings(episodes: Sequence[Episode]) -> Iterator[str]:
    """Warn of calls that were refused, and of failures, in rollouts of the evaluations' mode."""
    calls = [call for episode in episodes for call in episode.calls]
    refused = [call.span for call in calls if call.span is not None and call.refused is not None]
    if refused:
        yield (
            f"evaluations refused {len(refused)} of {plural(len(calls), 'call')} of a held-out "
            f"task: {refusal_of(refused[0])}"
        )
    for episode in episodes:
        if app_failed(episode) or not episode.finished:
            message = f"{episode.outcome}: {episode.message}".rstrip(": ")
            yield f"the rollout of a held-out task, as in evaluations, failed: {message}"


# --- rewards ----------------------------------------------------------------------------------
def read_rewards(
    findings: Findings, *, by_batch: bool, failure_reward: float | str | None
) -> model.RewardReport:
    """Report the rewards of all rollouts by group; a group is the rollouts of one task.

    Args:
        findings: the episodes of the dry run.
        by_batch: True if training compares a rollout with all rollouts of the step or with a
            critic. False if it compares the rollout only with its group.
        failure_reward: the option of the algorithm.
    """
    episodes = findings.episodes
    rewards, failed = group_rewards(episodes, findings.coverages)
    flat = set(groups_without_variance(rewards, failed))
    tasks = {episode.group_id: episode.task_id for episode in episodes}
    scored = _known(value for values in rewards.values() for value in values)
    kinds = {
        "failed": [episode for episode in episodes if app_failed(episode)],
        "lost": [episode for episode in episodes if not episode.finished],
        "damaged": [episode for episode in episodes if episode.capture_errors],
    }
    return model.RewardReport(
        rollouts=len(episodes),
        scored=len(scored),
        failed=sum(map(app_failed, episodes)),
        lost=sum(not episode.finished for episode in episodes),
        damaged=sum(bool(episode.capture_errors) for episode in episodes),
        mean=_mean(scored),
        dimensions=_named(dimension_means(episodes), "dimension/"),
        dimension_counts=_named(dimension_means(episodes), "dimension_n/"),
        groups=[
            model.GroupReport(
                task_id=tasks[group],
                rewards=list(values),
                mean=_mean(values),
                varies=group not in flat,
            )
            for group, values in rewards.items()
        ],
        failure_reward=failure_reward,
        by_batch=by_batch,
        failures=_failures(episodes, len(episodes)),
        reasons={
            kind: next(
                text
                for text in _failures(part, len(episodes))
                if text.startswith("damaged: ") is (kind == "damaged")
            )
            for kind, part in kinds.items()
            if part
        },
    )


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = _known(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _named(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): metrics[key] for key in metrics if key.startswith(prefix)}


def _failures(episodes: Sequence[Episode], total: int) -> list[str]:
    """Return the reasons of failures and damages with their numbers, the most frequent first.

    Reasons that differ only in words with digits, such as ids and times, are one. The first of them
    is shown. `total` is the number of all rollouts.
    """
    failures: Counter[str] = Counter()
    first: dict[str, str] = {}
    for episode in episodes:
        texts = [f"damaged: {error[:MAX_CAPTURE_ERROR_LENGTH]}" for error in episode.capture_errors]
        if episode.outcome is not Outcome.OK:
            texts.insert(0, f"{episode.outcome}: {episode.message}".rstrip(": "))
        for text in texts:
            key = re.sub(r"\w*\d\w*", "#", text)
            failures[key] += 1
            first.setdefault(key, text)
    return [f"{first[key]} ({count} of {total} rollouts)" for key, count in failures.most_common()]


# --- rows -------------------------------------------------------------------------------------
def read_rows(
    findings: Findings, transitions: Sequence[Transition], decode: Decode
) -> model.RowReport:
    """Report how calls merge into rows (token sequences for training).

    A row may contain several calls of a conversation. The report has examples of calls that begin a
    new row although they continue a conversation.

    Args:
        findings: the episodes of the dry run.
        transitions: the calls that would be trained.
        decode: function that decodes tokens.
    """
    merging = read_merging(transitions, exchanges_of(findings.coverages), decode)
    return model.RowReport(
        calls=len(transitions),
        rows=merging.rows,
        **merging.counts(),
        causes=merging.causes(),
        one_row={path: fmean(own) for path, own in row_shares(transitions).items()},
        row_tokens=merging.row_tokens,
        call_tokens=merging.call_tokens,
        longest_row=max((chain[-1].length for chain in merge(transitions)), default=0),
        breaks=list(_breaks(merging)),
        repeated_tokens=sum(each.repeated for each in merging.breaks),
    )


def _breaks(merging: Merging) -> Iterator[str]:
    by_cause: dict[str, list[Break]] = defaultdict(list)
    for each in merging.breaks:
        by_cause[each.cause].append(each)
    for each in (each for breaks in by_cause.values() for each in breaks[:MAX_EXAMPLES]):
        _, call_id, _ = each.following
        got = "the end" if each.got is None else f"{each.got_text!r} ({each.got})"
        yield (
            f"{each.agent_path}, token {each.place} ({each.where}), after {each.before!r}: "
            f"{each.expected_text!r} ({each.expected}) became {got}: {each.detail} "
            f"(rollout {each.rollout_id}, call {call_id})"
        )


# --- costs ------------------------------------------------------------------------------------
def read_costs(
    findings: Findings,
    agents: Sequence[model.AgentReport],
    rollouts: int,
    plan: str,
    max_frozen_calls: int | None,
) -> model.CostReport:
    """Estimate how often `fit` will call each tool and each model endpoint.

    The estimate is the number of calls per rollout in the dry run, times the rollouts of `fit`.

    Args:
        findings: the episodes of the dry run.
        agents: the report on each agent.
        rollouts: number of rollouts of `fit`.
        plan: how `rollouts` was calculated, as text.
        max_frozen_calls: the option of `fit`; None for no limit.
    """
    scale = rollouts / len(findings.episodes)
    tools: dict[str, list[Span]] = defaultdict(list)
    for span in findings.spans(SpanKind.TOOL):
        tools[str(span.attributes.get(c.TOOL_NAME) or span.name)].append(span)
    endpoints: dict[str, list[Call]] = defaultdict(list)
    for call in (entry.call for entry in findings.entries):
        target = target_of(call, findings.routing)
        if target.route in PAID and not call.choice:
            endpoints[endpoint_of(call, target)].append(call)
    return model.CostReport(
        rollouts=rollouts,
        plan=plan,
        tools=[
            model.ToolReport(name=name, calls=len(spans), expected_calls=len(spans) * scale)
            for name, spans in sorted(tools.items())
        ],
        endpoints=[_endpoint(name, calls, scale) for name, calls in sorted(endpoints.items())],
        max_frozen_calls=max_frozen_calls,
        unreached=_unreached(findings, agents),
    )


def _unreached(findings: Findings, agents: Sequence[model.AgentReport]) -> list[str]:
    """Return the agents and patterns of `frozen=` that go to an endpoint and made no call."""
    callers = {entry.call.agent_path for entry in findings.entries}
    patterns = [
        rule.pattern
        for rule in findings.routing.rules
        if rule.target.route in PAID and not any(map(rule.matches, callers))
    ]
    silent = [
        agent.path
        for agent in agents
        if not agent.calls and not agent.acted and agent.route in PAID and agent.policy is None
    ]
    return list(dict.fromkeys([*patterns, *silent]))


def _endpoint(name: str, calls: Sequence[Call], scale: float) -> model.EndpointReport:
    prompts, answers = zip(*map(token_counts, calls), strict=True)
    return model.EndpointReport(
        name=name,
        agents=sorted({call.agent_path for call in calls}),
        calls=len(calls),
        expected_calls=len(calls) * scale,
        expected_prompt_tokens=_scaled(prompts, scale),
        expected_response_tokens=_scaled(answers, scale),
    )


def _scaled(values: Iterable[int | None], scale: float) -> float | None:
    numbers = _known(values)
    return sum(numbers) * scale if numbers else None


# --- warnings ---------------------------------------------------------------------------------
def failure_warnings(rewards: model.RewardReport) -> Iterator[str]:
    """Warn of rollouts that failed, were lost or are damaged."""
    ends = {"failed": rewards.failed, "lost": rewards.lost, "damaged": rewards.damaged}
    for kind, count in ends.items():
        if count > FAILURE_WARNING * rewards.rollouts:
            verb = {"lost": "were lost", "damaged": "are damaged"}.get(kind, kind)
            why = rewards.reasons.get(kind, "not known")
            scored = _failure_text(rewards.failure_reward) if kind == "failed" else ""
            yield f"{count} of {rewards.rollouts} rollouts {verb}, first of all: {why}{scored}"


def reward_warnings(rewards: model.RewardReport, *, trains: bool) -> Iterator[str]:
    """Warn of missing rewards, and of groups in which all rewards are equal.

    A group is the rollouts of one task.

    Args:
        rewards: rewards of the rollouts.
        trains: whether weights are trained. If not, rewards may be equal.
    """
    if rewards.unscored:
        yield (
            f"{rewards.unscored} of {rewards.rollouts} rollouts have no usable reward: they are "
            "left out, which is not a reward of zero"
        )
    groups = len(rewards.groups)
    if rewards.by_batch or not trains or not groups:
        return
    if max(len(group.rewards) for group in rewards.groups) == 1:
        yield "one rollout per task compares nothing: use group_size=2 or more"
    elif not rewards.varying:
        yield (
            f"no reward varies inside a group ({groups} groups): there is nothing to learn from. "
            "The tasks may be too easy or too hard, or the reward too coarse"
        )
    elif rewards.varying < groups / 2:
        yield f"rewards vary inside {rewards.varying} of {groups} groups only"


def _failure_text(failure_reward: float | str | None) -> str:
    if failure_reward is None:
        return (
            "; failure_reward=None leaves them unscored, so that an answer that makes the app fail "
            'costs less than a wrong one: use failure_reward="lowest"'
        )
    return f"; fit scores those without a reward failure_reward={failure_reward!r}"


def silent_warnings(findings: Findings) -> Iterator[str]:
    """Warn of rollouts that ended well without a call of a policy that `fit` trains."""
    if not any(rule.target.selected for rule in findings.routing.rules):
        return
    silent = sum(is_silent(episode, findings.routing) for episode in findings.episodes)
    if silent > FAILURE_WARNING * len(findings.episodes):
        yield (
            f"{silent} of {len(findings.episodes)} rollouts ended without a call of the policy, so "
            "they teach nothing: if a cache of the app answers, switch it off in rollouts"
        )


def call_warnings(
    agents: Sequence[model.AgentReport], uncaptured: Sequence[model.UncapturedReport]
) -> Iterator[str]:
    """Warn of calls that would not be trained although `fit` trains their agents."""
    selected = [agent for agent in agents if agent.policy is not None]
    trained = sum(agent.trained for agent in selected)
    rejected: Counter[str] = Counter()
    for agent in selected:
        for reason in agent.rejected:
            rejected[f"{reason.code}: {reason.text}"] += reason.calls
    why = "; ".join(f"{count} {text}" for text, count in rejected.most_common(3))
    if not trained:
        yield f"no call would be trained ({why or 'no selected agent called a model'})"
    elif why:
        yield f"{rejected.total()} of {trained + rejected.total()} calls would be rejected ({why})"
    if missed := [report for report in uncaptured if report.selected]:
        names = ", ".join(dict.fromkeys(report.agent for report in missed))
        requests = plural(sum(report.requests for report in missed), "request")
        yield (
            f"{requests} of agents that would be "
            f"trained ({names}) went past the OpenAI and Anthropic SDKs, and cannot be trained: "
            "see below for what to change"
        )


def other_warnings(
    agents: Sequence[model.AgentReport],
    rows: model.RowReport | None,
    costs: model.CostReport,
    memory: model.MemoryReport | None,
) -> Iterator[str]:
    """Warn of a number of other problems.

    These are calls outside of every agent, conversations that become several rows, a limit of calls
    that `fit` would reach, and too little memory.
    """
    unnamed = sum(agent.calls for agent in agents if agent.path == UNNAMED_AGENT)
    total = sum(agent.calls for agent in agents)
    if unnamed not in (0, total):
        yield (
            f"{unnamed} of {total} calls were made outside every agent (their path is "
            f'`{UNNAMED_AGENT}`): if one is an agent\'s, name it by `with lightspan.agent("name"):`'
            " around the call, or as your framework's page in docs/guides says"
        )
    if rows is not None and rows.broken:
        causes = ", ".join(f"{count} {cause}" for cause, count in rows.causes.items())
        yield (
            f"{rows.broken} of {rows.broken + rows.merged} calls that go on with a conversation "
            f"begin a new row ({causes}): the learner computes their history again, "
            f"{rows.repeated_tokens:,} of {rows.row_tokens:,} tokens"
        )
    limit, expected = costs.max_frozen_calls, costs.expected_frozen_calls
    if limit is not None and expected > limit:
        yield (
            f"fit would make about {expected:,.0f} calls to endpoints and stop at "
            f"max_frozen_calls={limit:,}"
        )
    if memory is not None and memory.fits is False:
        yield "the memory that fit would need is more than is free: see below"
