"""`lightspan inspect` as text: a run, one attempt's span tree and coverage, or one call."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.errors import NotFoundError
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.selection import CallCoverage
from lightspan.lightning.span_tree import walk
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.stores import open_existing
from lightspan.stores.protocol import Store
from lightspan.training.alerts import AlertMonitor
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import OWN
from lightspan_prompts.search.candidates import Found, read_searches
from lightspan_tools.pagination import Page, TableRow, table_lines
from lightspan_tools.rollout_view import RolloutView, read_views, trained_rewards, view_of

_SPLITS: Final = {"eval": "held-out", "selection": "selection"}
"""`kind` of a line of the metrics → which tasks were evaluated."""


def inspect_run(
    folder: Path,
    rollout_id: str | None = None,
    call_id: str | None = None,
    *,
    page: Page = Page(),  # noqa: B008 - immutable
) -> str:
    """The text for a run, or for one of its rollouts, or for one call of that rollout.

    Args:
        rollout_id: its id, or the start or end of it if no other shares that.
        call_id: likewise.
        page: which of the run's rollouts are listed.

    Raises:
        ConfigError: the folder is no run.
        NotFoundError: no such rollout or call, or several.
    """
    run = RunFolder(folder)
    config = run.read_config()
    return "\n".join(asyncio.run(_inspect(run, config, rollout_id, call_id, page)))


def inspect_store(
    url: str,
    attempt_id: str | None = None,
    call_id: str | None = None,
    *,
    query: Query,
    page: Page = Page(),  # noqa: B008 - immutable
) -> str:
    """The text for what production recorded in a store, for one attempt, or for one call of it.

    Args:
        url: the store's.
        attempt_id: its id, or the start or end of it if no other shares that.
        call_id: likewise.
        query: which attempts.
        page: which of those are listed.

    Raises:
        ConfigError: the URL names no store.
        NotFoundError: no such attempt or call, or several.
    """
    return "\n".join(asyncio.run(_inspect_store(url, attempt_id, call_id, query, page)))


async def _inspect_store(
    url: str, attempt_id: str | None, call_id: str | None, query: Query, page: Page
) -> list[str]:
    async with open_existing(url) as store:
        if attempt_id is None:
            return [line async for line in _recorded_lines(store, query, page)]
        attempts = {a.attempt.attempt_id: a async for a in read_attempts(store, query)}
    view = view_of(attempts[_chosen(attempt_id, attempts, "attempt")])
    if call_id is None:
        return list(_rollout_lines(view))
    return _lines_of_call(view, call_id)


async def _recorded_lines(store: Store, query: Query, page: Page) -> AsyncIterator[str]:
    """A line per attempt, then the sums."""
    services: Counter[str] = Counter()
    agents: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    rows = []
    async for state, attempt, episode in read_attempts(store, query):
        services[state.rollout.run_id] += 1
        acting = Counter(call.agent_path for call in episode.calls)
        agents.update(acting)
        calls.update(str(call.outcome) for call in episode.calls)
        # in local time, as a person reads it beside the service's own log
        began = datetime.fromtimestamp(attempt.started_at).isoformat(" ", "seconds")  # noqa: DTZ006
        damaged = "damaged" if episode.capture_errors else ""
        rows.append(
            TableRow(
                row_id=attempt.attempt_id,
                status=str(episode.status),
                reward=episode.reward,
                agents=acting,
                before=f"{state.rollout.run_id:<20}  {began:<19}  ",
                after=f"{_seconds(episode):>7.2f}  {damaged:<7}  ",
            )
        )
    yield f"{store.url}: recorded in production"
    yield f"{services.total()} attempts by service: {_counted(services)}"
    yield f"calls by agent: {_counted(agents)}"
    yield f"calls by outcome: {_counted(calls)}; none is trained by policy gradients"
    # counted first: what is recorded meanwhile is not to pass for a training's
    everything = sum((await store.count()).values())
    others = everything - len(await store.rollouts(mode=Mode.PRODUCTION))
    if others > 0:
        yield f"rollouts of trainings (shown by lightspan inspect RUN_FOLDER): {others}"
    before, after = f"{'service':<20}  {'began':<19}  ", f"{'seconds':>7}  {'':<7}  "
    for line in table_lines(rows, page, "attempt", before, after):
        yield line


def _seconds(episode: Episode) -> float:
    """Time from the first start of a span to the last end. Rewards do not count: feedback may
    arrive days later."""
    spans = [span for span in episode.spans if span.kind is not SpanKind.REWARD]
    if not spans:
        return 0.0
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9


async def _inspect(
    run: RunFolder,
    config: Mapping[str, Any],
    rollout_id: str | None,
    call_id: str | None,
    page: Page,
) -> list[str]:
    async with open_existing(config.get("store") or run.store_url) as store:
        states = await store.rollouts(run_id=config.get("run_id"))
        rewards = trained_rewards(run, config)
        if rollout_id is None:
            views = await read_views(run, store, config, states, rewards)
            return list(_run_lines(run, config, views, page))
        by_id = {state.rollout.rollout_id: state for state in states}
        chosen = by_id[_chosen(rollout_id, by_id, "rollout")]
        (view,) = await read_views(run, store, config, [chosen], rewards)
        if call_id is None:
            return [*_rollout_lines(view), *_reward_lines(run, view.episode)]
        return _lines_of_call(view, call_id)


def _lines_of_call(view: RolloutView, call_id: str) -> list[str]:
    entries = view.coverage.entries
    chosen = _chosen(call_id, {entry.call.call_id for entry in entries}, "call")
    choices = [entry for entry in entries if entry.call.call_id == chosen]
    return [line for entry in choices for line in _call_lines(view, entry)]


def _chosen(wanted: str, ids: Collection[str], what: str) -> str:
    """The id that is meant: a whole one, or one that alone ends, as in tables, or starts so."""
    if wanted in ids:
        return wanted
    ends = [name for name in ids if name.endswith(wanted)]
    if len(ends) == 1:
        return ends[0]
    alike = sorted(name for name in ids if name.startswith(wanted) or name.endswith(wanted))
    if len(alike) == 1:
        return alike[0]
    if not alike:
        some = ", ".join(sorted(ids)[:5]) or "none"
        raise NotFoundError(f"there is no {what} {wanted!r}; there are, for example: {some}")
    raise NotFoundError(
        f"{len(alike)} {what}s start or end with {wanted!r}: {', '.join(alike[:5])}"
    )


# --- a run ----------------------------------------------------------------------------------
def _run_lines(
    run: RunFolder, config: Mapping[str, Any], views: Sequence[RolloutView], page: Page
) -> Iterator[str]:
    on, optimize = config.get("model"), config.get("optimize")
    yield f"{run.path}: {config.get('algorithm')}{f' on {on}' if on else ''}"
    yield f"app {config.get('app')}{f', optimize {optimize}' if optimize else ''}"
    yield from _progress_lines(run, config)
    yield from _prompt_lines(run)
    coverage: Counter[str] = Counter()
    agents: Counter[str] = Counter()
    for view in views:
        coverage.update(view.coverage.counts())
        agents.update(call.agent_path for call in view.episode.calls)
    yield f"{len(views)} rollouts; calls by agent: {_counted(agents)}"
    yield from _forgotten_lines(run, views)
    yield f"coverage of calls: {_counted(coverage)}"
    for name in run.reward_names():
        rewards = [scored.value for scored in run.rewards(name).values()]
        known = [value for value in rewards if value is not None]
        mean = f"{math.fsum(known) / len(known):.3f} of {len(known)}" if known else "-"
        unscored = len(rewards) - len(known)
        yield f"reward {name}: mean {mean}{f', {unscored} unscored' if unscored else ''}"
    overridden = Counter(
        key for view in views for call in view.episode.calls for key in _overrides(call)
    )
    if overridden:
        yield f"sampling overridden, in calls: {_counted(overridden)}"
    rows = [_row_of(view) for view in views]
    yield from table_lines(rows, page, "rollout", "mode   step  ", "trained  ")


def _forgotten_lines(run: RunFolder, views: Sequence[RolloutView]) -> Iterator[str]:
    """Steps before the first that is left: pruning forgets in the order of time."""
    counts = [line for line in run.metrics() if line.get("kind") == "train"]
    steps = {int(line["step"]) for line in counts if line.get("rollouts")}
    left = [view.step for view in views if view.state.rollout.mode is Mode.TRAIN]
    gone = {step for step in steps if not left or step < min(left)}
    if gone:
        steps_gone = f"steps {min(gone)} to {max(gone)}"
        yield f"rollouts of {steps_gone} are no longer in the store, as after lightspan prune"


def _progress_lines(run: RunFolder, config: Mapping[str, Any]) -> Iterator[str]:
    """How training went: the evaluations, which step is kept, and what is wrong."""
    metrics = run.metrics()
    for line in metrics:
        split = _SPLITS.get(line.get("kind", ""))
        if split is not None:
            of = f" with the weights of step {line['weights']}" if "weights" in line else ""
            yield (
                f"step {line['step']}: {split} {config.get('metric', 'reward')}{of} "
                f"{_mean(line, 'mean')} ({_mean(line, 'low')}..{_mean(line, 'high')}, "
                f"n={line.get('n')})"
            )
    kept = (run.read_result() or {}).get("kept")
    if kept is not None:
        yield f"step {kept['step']} is kept, the best by the selection split"
    for alert in AlertMonitor().read(metrics, run.evaluations()):
        yield f"warning, step {alert.step}: {alert.text}"


def _prompt_lines(run: RunFolder) -> Iterator[str]:
    """The candidates of a search for prompts, and what became of each prompt."""
    for name, found in read_searches(run.path).items():
        if name:
            yield f"search of step {int(name.removeprefix('step-'))}:"
        yield from _candidate_lines(found)
    for name, prompt in run.prompts().items():
        yield f"prompt {name}: {'' if prompt.is_changed else 'as it was'}".rstrip()
        yield from (f"  {line}" for line in prompt.diff().splitlines())


def _candidate_lines(found: Found) -> Iterator[str]:
    for number, candidate in enumerate(found.candidates):
        made = f"of {', '.join(map(str, candidate.parents))}" if candidate.parents else "as given"
        chosen = ", chosen" if number == found.chosen else ""
        split = "selection" if candidate.is_whole else "a batch of selection"
        rewards = " ".join(map(_number, candidate.rewards.values()))
        if candidate.again:
            rewards += f"; again {' '.join(map(_number, candidate.again.values()))}"
        yield f"candidate {number}, {made}: {split} {candidate.mean:.3f} ({rewards}){chosen}"
    if texts := found.texts():
        yield texts


def _mean(line: Mapping[str, Any], key: str) -> str:
    """JSON has no NaN, which is the mean where no task was scored."""
    value = line.get(key)
    return f"{math.nan if value is None else value:.3f}"


def _row_of(view: RolloutView) -> TableRow:
    rollout = view.state.rollout
    return TableRow(
        row_id=rollout.rollout_id,
        status=str(view.state.status),
        reward=view.episode.reward,
        agents=Counter(call.agent_path for call in view.episode.calls),
        before=f"{rollout.mode:<5}  {view.step:>4}  ",
        after=f"{len(view.coverage.trained):>7}  ",
    )


def _counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{key} {value}" for key, value in ordered) or "none"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# --- a rollout ------------------------------------------------------------------------------
def _rollout_lines(view: RolloutView) -> Iterator[str]:
    episode, rollout = view.episode, view.state.rollout
    yield (
        f"rollout {rollout.rollout_id} ({rollout.mode}, step {view.step}, task "
        f"{rollout.task_id}): {view.state.status}"
    )
    source = f" ({episode.reward_source})" if episode.reward_source else ""
    yield f"attempt {episode.attempt_id}: reward {_number(episode.reward)}{source}"
    if episode.unscored:
        yield f"  unscored: {episode.unscored}"
    if episode.reward_source == "scored" and OWN in episode.dimensions:
        yield f"  the app's own reward: {_number(episode.dimensions[OWN])}"
    if episode.message:
        yield f"  {episode.message}"
    yield from (f"  damaged: {reason}" for reason in episode.capture_errors)
    yield from (f"  note: {note}" for note in episode.notes)
    yield ""
    verdicts = {entry.call.span_id: entry for entry in view.coverage.entries}
    for depth, node in walk(episode.tree.roots):
        yield "  " * depth + _span_line(node.span, verdicts.get(node.span.span_id))
        yield from ("  " * (depth + 1) + line for line in _output_lines(node.span))
    yield ""
    yield f"coverage: {_counted(view.coverage.counts())}"
    for entry in view.coverage.entries:
        yield from _entry_lines(view, entry)


def _reward_lines(run: RunFolder, episode: Episode) -> Iterator[str]:
    """What the rollout is worth under each reward that the run has beside the app's own."""
    for name in run.reward_names():
        scored = run.rewards(name).get(episode.rollout_id)
        if scored is not None:
            why = f": {scored.why}" if scored.why else ""
            yield f"reward {name}: {_number(scored.value)}{why}"
            yield from (f"  {line}" for line in scored.reasons.splitlines())


def _span_line(span: Span, entry: CallCoverage | None) -> str:
    parts = [span.name]
    if span.kind is SpanKind.LLM:
        parts.append(f"[{span.attributes.get(c.AGENT_PATH, '')}]")
    if span.kind is SpanKind.REWARD:
        parts.append(_number(_as_float(span.attributes.get(c.REWARD_VALUE))))
        if c.FEEDBACK_COMMENT in span.attributes:
            parts.append(repr(span.attributes[c.FEEDBACK_COMMENT]))
    if entry is not None:
        parts.append(f"-> {entry.verdict}")
    if span.status is SpanStatus.ERROR:
        parts.append(f"ERROR {span.status_message}")
    parts.append(f"({1000 * span.duration_s:.1f} ms)")
    return " ".join(parts)


def _output_lines(span: Span) -> Iterator[str]:
    """What a command wrote, as far as it is kept."""
    for key, name in ((c.COMMAND_STDOUT, "stdout"), (c.COMMAND_STDERR, "stderr")):
        for line in str(span.attributes.get(key, "")).rstrip("\n").splitlines():
            yield f"{name}: {line}"


def _as_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _entry_lines(view: RolloutView, entry: CallCoverage) -> Iterator[str]:
    call = entry.call
    who = f"{call.call_id}/{call.choice} {call.agent_path}"
    yield f"  {who}: {entry.verdict} {entry.reason}".rstrip()
    yield from (
        f"    {key}: {asked!r} asked, {used!r} used"
        for key, (asked, used) in sorted(_overrides(call).items())
    )
    explanation = view.explanation(call) or view.mismatch(call)
    if explanation is not None:
        yield f"    {explanation}"


def _overrides(call: Call) -> dict[str, tuple[Any, Any]]:
    """Field of the request → what the app asked, and what was used."""
    return {} if call.span is None else genai_messages.overrides_of(call.span.attributes)


# --- a call ---------------------------------------------------------------------------------
def _call_lines(view: RolloutView, entry: CallCoverage) -> Iterator[str]:
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
    explanation = view.explanation(call) or view.mismatch(call)
    if explanation is not None:
        yield str(explanation)


def _message_lines(call: Call) -> Iterator[str]:
    attributes: Mapping[str, Any] = call.span.attributes if call.span is not None else {}
    overrides = attributes.get(c.SAMPLING_OVERRIDES)
    if overrides:
        yield f"sampling overridden (asked, used): {overrides}"
    if c.PROMPT_APPLIED in attributes:
        original, reason = attributes.get(c.PROMPT_ORIGINAL), attributes.get(c.PROMPT_REASON)
        yield f"told what the app says: {reason}" if reason else f"the app says: {original!r}"
    for message in (
        *genai_messages.input_messages_of(attributes),
        *genai_messages.output_messages_of(attributes),
    ):
        yield f"--- {message['role']}"
        yield str(message.get("content") or message.get("tool_calls") or "")
