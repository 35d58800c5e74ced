"""What `lightspan inspect` shows: a run, one attempt's span tree and coverage, one call."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightspan import conventions as c
from lightspan import messages
from lightspan.errors import NotFoundError
from lightspan.folders import RunFolder
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.lightning.selection import CallCoverage, Coverage, cover
from lightspan.lightning.tree import walk
from lightspan.records import RolloutState
from lightspan.resources import routing_of
from lightspan.spans import Span, SpanKind, SpanStatus
from lightspan.store import Store
from lightspan.stores import open_store


@dataclass(frozen=True, slots=True)
class Look:
    """One rollout as it is shown."""

    state: RolloutState
    episode: Episode
    coverage: Coverage
    explanations: Mapping[str, Explanation]
    """`attempt/call/choice` → what the learner was told."""

    def explanation(self, call: Call) -> Explanation | None:
        return self.explanations.get(f"{self.episode.attempt_id}/{call.call_id}/{call.choice}")


def inspect_run(folder: Path, rollout_id: str | None = None, call_id: str | None = None) -> str:
    """The text for a run, or for one of its rollouts, or for one call of that rollout.

    Args:
        rollout_id: or the start of one that no other shares.
        call_id: likewise.

    Raises:
        ConfigError: the folder is no run.
        NotFoundError: no such rollout or call, or the start of several.
    """
    run = RunFolder(folder)
    config = run.read_config()
    return "\n".join(asyncio.run(_inspect(run, config, rollout_id, call_id)))


async def _inspect(
    run: RunFolder, config: Mapping[str, Any], rollout_id: str | None, call_id: str | None
) -> list[str]:
    async with open_store(config.get("store") or run.store_url) as store:
        states = await store.rollouts(run_id=config.get("run_id"))
        if rollout_id is None:
            looks = await _look(run, store, config, states)
            return list(_run_lines(run, config, looks))
        chosen = _one(rollout_id, [state.rollout.rollout_id for state in states], "rollout")
        state = next(s for s in states if s.rollout.rollout_id == chosen)
        (look,) = await _look(run, store, config, [state])
        if call_id is None:
            return list(_rollout_lines(look))
        names = [entry.call.call_id for entry in look.coverage.entries]
        wanted = _one(call_id, names, "call")
        found = [entry for entry in look.coverage.entries if entry.call.call_id == wanted]
        return [line for entry in found for line in _call_lines(look, entry)]


async def _look(
    run: RunFolder, store: Store, config: Mapping[str, Any], states: Sequence[RolloutState]
) -> list[Look]:
    ids = [state.rollout.rollout_id for state in states]
    attempts = {attempt.rollout_id: attempt for attempt in await store.attempts(ids)}
    attempt_ids = [attempt.attempt_id for attempt in attempts.values()]
    spans, records = await store.spans(attempt_ids), await store.token_records(attempt_ids)
    routings = {
        resources_id: routing_of(await store.get_resources(resources_id) if resources_id else {})
        for resources_id in {state.rollout.resources_id for state in states}
    }
    explained = {step: run.explanations(step) for step in {s.rollout.step for s in states}}
    looks = []
    for state in states:
        attempt = attempts.get(state.rollout.rollout_id)
        if attempt is None:
            continue
        episode = build_episode(
            attempt,
            state.rollout,
            spans.get(attempt.attempt_id, []),
            records.get(attempt.attempt_id, []),
            failure_reward=config.get("failure_reward"),
        )
        coverage = cover(
            episode,
            routings[state.rollout.resources_id],
            max_length=config.get("max_length"),
            step_rewards=_step_rewards(config),
        )
        looks.append(Look(state, episode, coverage, explained[state.rollout.step]))
    return looks


def _step_rewards(config: Mapping[str, Any]) -> bool:
    """Whether rewards on calls counted. Runs that did not note it are judged by the rule's name."""
    noted = config.get("step_rewards")
    return config.get("credit", "terminal") != "terminal" if noted is None else bool(noted)


def _one(wanted: str, known: Sequence[str], what: str) -> str:
    found = sorted({name for name in known if name.startswith(wanted)})
    if wanted in found or len(found) == 1:
        return wanted if wanted in found else found[0]
    if not found:
        some = ", ".join(sorted(set(known))[:5]) or "none"
        raise NotFoundError(f"there is no {what} {wanted!r}; there are, for example: {some}")
    raise NotFoundError(f"{len(found)} {what}s start with {wanted!r}: {', '.join(found[:5])}")


# --- a run ----------------------------------------------------------------------------------
def _run_lines(run: RunFolder, config: Mapping[str, Any], looks: Sequence[Look]) -> Iterator[str]:
    yield f"{run.path}: {config.get('algorithm')} on {config.get('model')}"
    yield f"app {config.get('app')}, optimize {config.get('optimize')}"
    for line in run.metrics():
        if line.get("kind") == "eval":
            yield (
                f"step {line['step']}: held-out {config.get('metric', 'reward')} "
                f"{line['mean']:.3f} ({line['low']:.3f}..{line['high']:.3f}, n={line['n']})"
            )
    coverage: Counter[str] = Counter()
    agents: Counter[str] = Counter()
    for look in looks:
        coverage.update(look.coverage.counts())
        agents.update(call.agent_path for call in look.episode.calls)
    yield f"{len(looks)} rollouts; calls by agent: {_counted(agents)}"
    yield f"coverage of calls: {_counted(coverage)}"
    overridden = Counter(
        key for look in looks for call in look.episode.calls for key in _overrides(call)
    )
    if overridden:
        yield f"sampling overridden, in calls: {_counted(overridden)}"
    yield from _rollout_table(looks)


def _rollout_table(looks: Sequence[Look]) -> Iterator[str]:
    width = max((len(look.state.rollout.rollout_id) for look in looks), default=7)
    yield f"{'rollout':<{width}}  mode   step  status     reward  calls  trained"
    for look in looks:
        rollout = look.state.rollout
        yield (
            f"{rollout.rollout_id:<{width}}  {rollout.mode:<5}  {rollout.step:>4}  "
            f"{look.state.status:<9}  {_number(look.episode.reward):>6}  "
            f"{len(look.episode.calls):>5}  {len(look.coverage.trained):>7}"
        )


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{key} {value}" for key, value in ordered) or "none"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# --- a rollout ------------------------------------------------------------------------------
def _rollout_lines(look: Look) -> Iterator[str]:
    episode, rollout = look.episode, look.state.rollout
    yield (
        f"rollout {rollout.rollout_id} ({rollout.mode}, step {rollout.step}, task "
        f"{rollout.task_id}): {look.state.status}"
    )
    source = f" ({episode.reward_source})" if episode.reward_source else ""
    yield f"attempt {episode.attempt_id}: reward {_number(episode.reward)}{source}"
    if episode.message:
        yield f"  {episode.message}"
    yield from (f"  damaged: {reason}" for reason in episode.damage)
    yield from (f"  note: {note}" for note in episode.notes)
    yield ""
    verdicts = {entry.call.span_id: entry for entry in look.coverage.entries}
    for depth, node in walk(episode.tree.roots):
        yield "  " * depth + _span_line(node.span, verdicts.get(node.span.span_id))
    yield ""
    yield f"coverage: {_counted(look.coverage.counts())}"
    for entry in look.coverage.entries:
        yield from _entry_lines(look, entry)


def _span_line(span: Span, entry: CallCoverage | None) -> str:
    parts = [span.name]
    if span.kind is SpanKind.LLM:
        parts.append(f"[{span.attributes.get(c.AGENT_PATH, '')}]")
    if span.kind is SpanKind.REWARD:
        parts.append(_number(_as_float(span.attributes.get(c.REWARD_VALUE))))
    if entry is not None:
        parts.append(f"-> {entry.verdict}")
    if span.status is SpanStatus.ERROR:
        parts.append(f"ERROR {span.status_message}")
    parts.append(f"({1000 * span.duration_s:.1f} ms)")
    return " ".join(parts)


def _as_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _entry_lines(look: Look, entry: CallCoverage) -> Iterator[str]:
    call = entry.call
    who = f"{call.call_id}/{call.choice} {call.agent_path}"
    yield f"  {who}: {entry.verdict} {entry.reason}".rstrip()
    yield from (
        f"    {key}: {asked!r} asked, {used!r} used"
        for key, (asked, used) in sorted(_overrides(call).items())
    )
    explanation = look.explanation(call)
    if explanation is not None:
        yield f"    {explanation}"


def _overrides(call: Call) -> dict[str, tuple[Any, Any]]:
    """Field of the request → what the app asked, and what was used."""
    found = call.span.attributes.get(c.SAMPLING_OVERRIDES) if call.span is not None else None
    return {key: (asked, used) for key, (asked, used) in json.loads(str(found or "{}")).items()}


# --- a call ---------------------------------------------------------------------------------
def _call_lines(look: Look, entry: CallCoverage) -> Iterator[str]:
    call = entry.call
    yield f"call {call.call_id}, choice {call.choice}, agent {call.agent_path}"
    yield f"{entry.verdict} {entry.reason}".rstrip()
    if call.record is not None:
        record = call.record
        runs = ", ".join(f"{count} of version {version}" for version, count in record.versions)
        yield (
            f"policy {record.policy}: {len(record.prompt_ids)} prompt tokens, "
            f"{len(record.response_ids)} sampled ({runs}) at temperature "
            f"{record.sampling.temperature:g}, log-probability {sum(record.logprobs):.4f}"
        )
        yield f"prompt ids {record.prompt_ids}"
        yield f"response ids {record.response_ids}"
    yield from _message_lines(call)
    explanation = look.explanation(call)
    if explanation is not None:
        yield str(explanation)


def _message_lines(call: Call) -> Iterator[str]:
    attributes: Mapping[str, Any] = call.span.attributes if call.span is not None else {}
    overrides = attributes.get(c.SAMPLING_OVERRIDES)
    if overrides:
        yield f"sampling overridden (asked, used): {overrides}"
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        for message in messages.load(str(attributes.get(key, "[]"))):
            yield f"--- {message['role']}"
            yield str(message.get("content") or message.get("tool_calls") or "")
