"""Describe a run, an attempt or a call as text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightspan.algorithms.critic_warmup import describe_critic
from lightspan.algorithms.recorded_attempts import (
    Query,
    read_attempts,
    score_of_attempt,
)
from lightspan.errors import NotFoundError, how_to_install
from lightspan.lightning.episode import Call, Episode, named_means
from lightspan.lightning.selection import CallCoverage
from lightspan.lightning.span_tree import walk
from lightspan.progress import plural
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_existing
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan.training.results import SILENT
from lightspan.training.rewards import OWN
from lightspan_tools.alerts import latest_step_fails, run_alerts
from lightspan_tools.images import image_lines, read_images, references_of, write_images
from lightspan_tools.inspect_report import (
    call_reports,
    rollout_report,
    run_report,
    store_report,
)
from lightspan_tools.overview import (
    Overview,
    newest_failure,
    production_overview,
    pruned_text,
    run_overview,
    status_of,
)
from lightspan_tools.pagination import Page, table_lines
from lightspan_tools.placeholders import placeholder_note
from lightspan_tools.rollout_view import (
    FORK,
    RolloutView,
    ViewReader,
    reward_names,
    trained_rewards,
    view_of,
)
from lightspan_tools.sampling_overrides import overrides_of
from lightspan_tools.tokenizer_files import open_decoder

_SPLITS: Final = {"eval": "held-out", "selection": "selection"}
"""`kind` of a line of the metrics → name of the evaluated split."""

if TYPE_CHECKING:
    from lightspan_prompts.search.candidates import SearchResult


def inspect_run(
    folder: Path,
    rollout_id: str | None = None,
    call_id: str | None = None,
    *,
    page: Page = Page(),  # noqa: B008 - immutable
    as_json: bool = False,
    images: Path | None = None,
) -> str:
    """Describe a run, one of its rollouts, or one call of the rollout.

    Args:
        folder: folder of the run.
        rollout_id: id of the rollout, or a unique prefix or suffix of it; None to describe the run.
        call_id: id of the call, or a unique prefix or suffix of it; None to describe the rollout.
        page: which rollouts to list in the description of a run.
        as_json: whether to return JSON (`inspect_report`) instead of text.
        images: folder to which the images of the call are written; None for none.

    Raises:
        DataError: the folder of images cannot be written.
        ConfigError: the folder holds no run.
        NotFoundError: there is no such rollout or call, or several match.
    """
    run = RunFolder(folder)
    config = run.read_config()
    subject = asyncio.run(_read_run(run, config, rollout_id, call_id, page))
    if isinstance(subject, Overview):
        if as_json:
            return _json(run_report(run, config, subject, page))
        return "\n".join(_run_lines(run, config, subject, page))
    if call_id is None and not as_json:
        return "\n".join([*_rollout_lines(subject), *_reward_lines(run, subject.episode)])
    return _describe(subject, call_id, images, as_json=as_json)


def inspect_store(
    url: str,
    attempt_id: str | None = None,
    call_id: str | None = None,
    *,
    query: Query,
    page: Page = Page(),  # noqa: B008 - immutable
    as_json: bool = False,
    images: Path | None = None,
) -> str:
    """Describe the attempts of production in a store, one attempt, or one call of it.

    Args:
        url: URL of the store.
        attempt_id: id of the attempt, or a unique prefix or suffix of it; None to describe the
            store.
        call_id: id of the call, or a unique prefix or suffix of it; None to describe the attempt.
        query: which attempts of the store to describe.
        page: which attempts to list in the description of the store.
        as_json: whether to return JSON (`inspect_report`) instead of text.
        images: folder to which the images of the call are written; None for none.

    Raises:
        DataError: the folder of images cannot be written.
        ConfigError: the URL names no store.
        NotFoundError: there is no such attempt or call, or several match.
    """
    subject = asyncio.run(_read_store(url, attempt_id, call_id, query, page))
    if isinstance(subject, Overview):
        if as_json:
            return _json(store_report(subject, page))
        return "\n".join(_production_lines(subject, page))
    return _describe(subject, call_id, images, as_json=as_json)


def _describe(view: RolloutView, call_id: str | None, images: Path | None, *, as_json: bool) -> str:
    """Describe a rollout or an attempt; one of its calls unless `call_id` is None."""
    if call_id is None:
        return _json(rollout_report(view)) if as_json else "\n".join(_rollout_lines(view))
    entries = view.coverage.entries
    full_id = find_id(call_id, {entry.call.call_id for entry in entries}, "call")
    choices = [entry for entry in entries if entry.call.call_id == full_id]
    if images is not None:
        digests = {digest for entry in choices for digest in references_of(entry.call)}
        write_images(
            [view.images[digest] for digest in sorted(digests & view.images.keys())], images
        )
    if as_json:
        return _json(call_reports(view, choices))
    return "\n".join(line for entry in choices for line in _call_lines(view, entry))


def _json(report: object) -> str:
    return msgspec.json.encode(report).decode()


async def _read_store(
    url: str, attempt_id: str | None, call_id: str | None, query: Query, page: Page
) -> Overview | RolloutView:
    async with open_existing(url, read_only=True) as store:
        if attempt_id is None:
            return await production_overview(store, query, page)
        view = await _read_attempt(store, query, attempt_id)
        return await _with_images(view, store, call_id)


async def _read_attempt(store: Store, query: Query, attempt_id: str) -> RolloutView:
    """Return the view of the attempt of production with an id, or with a part of its id."""
    rows = (await store.summaries(query.service, mode=Mode.PRODUCTION)).rows
    ids = {str(row.attempt_id): row.rollout_id for row in rows if query.matches(row)}
    rollout_id = ids[find_id(attempt_id, ids, "attempt")]
    [recorded] = [each async for each in read_attempts(store, query, [rollout_id])]
    return view_of(recorded)


def _production_lines(overview: Overview, page: Page) -> list[str]:
    """Return counts of attempts and calls, and a table of the attempts."""
    services, scope = overview.services, overview.scope
    lines = [
        f"{overview.url}: recorded in production",
        f"{services.total()} attempts by service: {_counted(services)}",
        f"calls by agent{scope}: {_counted(overview.agents)}",
        f"calls by outcome{scope}: {_counted(overview.calls)}; none is trained by policy gradients",
        *_scope_lines(overview),
    ]
    if overview.others > 0:
        lines.append(
            f"rollouts of trainings (shown by lightspan inspect RUN_FOLDER): {overview.others}"
        )
    before, after = f"{'service':<20}  {'began':<19}  ", f"{'seconds':>7}  {'':<7}  "
    return [*lines, *table_lines(overview.rows, page, "attempt", before, after)]


def _scope_lines(overview: Overview) -> Iterator[str]:
    """Say which rows the counts of calls leave out. Yield no line if they cover all rows."""
    if not overview.is_whole:
        yield (
            f"calls of {overview.read} of {len(overview.rows)} are counted, those shown below; "
            "--all counts every call, which takes longer"
        )


async def _read_run(
    run: RunFolder,
    config: Mapping[str, Any],
    rollout_id: str | None,
    call_id: str | None,
    page: Page,
) -> Overview | RolloutView:
    async with open_existing(config.get("store") or run.store_url, read_only=True) as store:
        run_id = config.get("run_id")
        reader = ViewReader(run, store, config, trained_rewards(run, config))
        if rollout_id is None:
            overview = await run_overview(
                reader, store, run_id, page, open_decoder(run.path, config)
            )
            if latest_step_fails(run.metrics()) is not None:
                overview.failure = await newest_failure(store, run_id)
            return overview
        view = await _read_rollout(reader, store, run_id, rollout_id)
        return await _with_images(view, store, call_id)


async def _read_rollout(
    reader: ViewReader, store: Store, run_id: str | None, rollout_id: str
) -> RolloutView:
    """Return the view of a run's rollout with an id, or with a part of its id."""
    ids = [row.rollout_id for row in (await store.summaries(run_id)).rows]
    full_id = find_id(rollout_id, ids, "rollout")
    [view] = await reader.read(await store.rollouts([full_id]))
    return view


async def _with_images(view: RolloutView, store: Store, call_id: str | None) -> RolloutView:
    """Return the view with the images of the call with a part of an id; None for no images."""
    calls = list(view.episode.calls) if call_id is not None else []
    calls = [call for call in calls if str(call_id) in call.call_id]
    return replace(view, images=await read_images(store, calls))


def find_id(part: str, ids: Collection[str], what: str) -> str:
    """Return the id that equals `part`, or else the only id that ends or starts with `part`.

    Raises:
        NotFoundError: no id or several ids match; `what` names the kind of id in the message.
    """
    if part in ids:
        return part
    endings = [name for name in ids if name.endswith(part)]
    if len(endings) == 1:
        return endings[0]
    matching = sorted(name for name in ids if name.startswith(part) or name.endswith(part))
    if len(matching) == 1:
        return matching[0]
    if not matching:
        examples = ", ".join(sorted(ids)[:5]) or "none"
        raise NotFoundError(f"there is no {what} {part!r}; there are, for example: {examples}")
    raise NotFoundError(
        f"{len(matching)} {what}s start or end with {part!r}: {', '.join(matching[:5])}"
    )


# --- a run ----------------------------------------------------------------------------------
def _run_lines(
    run: RunFolder, config: Mapping[str, Any], overview: Overview, page: Page
) -> Iterator[str]:
    model, optimize = config.get("model"), _agents_text(config.get("optimize"))
    yield f"{run.path}: {config.get('algorithm')}{f' on {model}' if model else ''}"
    yield f"app {config.get('app')}{f', optimize {optimize}' if optimize else ''}"
    if config.get("algorithm") == FORK:
        yield "continuations by lightspan fork, which train nothing"
    yield from _critic_lines(run, config)
    yield from _progress_lines(run, config, overview.failure)
    yield from _prompt_lines(run)
    scope = overview.scope
    count, agents = f"{len(overview.rows)} rollouts", _counted(overview.agents)
    count += f", {overview.forks} of them forks or replays" if overview.forks else ""
    yield f"{count}; calls by agent{scope}: {agents}"
    if pruned := pruned_text(run.metrics(), overview.first_trained_step):
        yield pruned
    yield f"coverage of calls{scope}: {_counted(overview.calls)}"
    yield from _scope_lines(overview)
    yield from _row_lines(overview)
    for name in reward_names(run):
        rewards = run.rewards(name).values()
        values = [reward.value for reward in rewards if reward.value is not None]
        mean = f"{math.fsum(values) / len(values):.3f} of {len(values)}" if values else "-"
        unscored = len(rewards) - len(values)
        yield f"reward {name}: mean {mean}{f', {unscored} unscored' if unscored else ''}"
    if overview.overridden:
        yield f"sampling overridden, in calls{scope}: {_counted(overview.overridden)}"
    yield from table_lines(overview.rows, page, "rollout", "mode   step  ", "trained  ")


def _row_lines(overview: Overview) -> Iterator[str]:
    """Say how much of the rollouts is in one row, and why calls begin new rows."""
    if overview.one_row:
        shares = (f"{path} {share:.0%}" for path, share in overview.one_row_means.items())
        yield f"share of a rollout's calls in one row{overview.scope}: {', '.join(shares)}"
    if overview.breaks:
        counts = _counted(overview.breaks_by_cause)
        yield f"calls that continue a conversation in a new row{overview.scope}: {counts}"
    examples = {each.cause: each for each in reversed(overview.breaks)}
    for cause, each in sorted(examples.items()):
        _, call_id, _ = each.following
        place = f"{each.agent_path}, rollout {each.rollout_id}, call {call_id}"
        yield f"  {cause}: {each.detail} ({place})"


def _agents_text(optimize: Any) -> str:
    """Return the setting `optimize` of a run as text, such as `writer (big), editor (small)`."""
    if not isinstance(optimize, Mapping):
        return ", ".join(optimize) if isinstance(optimize, list) else str(optimize or "")
    names = {
        agent: (each.get("name") or each.get("model")) if isinstance(each, Mapping) else each
        for agent, each in optimize.items()
    }
    return ", ".join(f"{agent} ({name})" if name else agent for agent, name in names.items())


def _progress_lines(run: RunFolder, config: Mapping[str, Any], failure: str) -> Iterator[str]:
    """Describe the evaluations, the alerts, and the step whose weights are kept as the best.

    Args:
        run: folder of the run.
        config: settings of the run.
        failure: message of a rollout that failed; empty if none is known.
    """
    metrics = run.metrics()
    for line in metrics:
        split = _SPLITS.get(line.get("kind", ""))
        if split is not None:
            of = f" with the weights of step {line['weights']}" if "weights" in line else ""
            yield (
                f"step {line['step']}: {split} {config.get('metric', 'reward')}{of} "
                f"{_mean(line, 'mean')} ({_bounds(line)}, n={line.get('n')}"
                f"{_failure_count(line)}){_silent(line)}"
                f"{named_means(line)}"
            )
    trained = [line for line in metrics if line["kind"] == "train" and named_means(line)]
    for line in trained[:: max(1, len(trained) - 1)]:  # the first and the last
        yield f"step {line['step']}: training reward {_mean(line, 'reward')}{named_means(line)}"
    yield from _failure_lines(metrics, config)
    yield from _choice_lines(metrics)
    kept = (run.read_result() or {}).get("kept")
    if kept is not None:
        yield f"step {kept['step']} is kept, the best by the selection split"
    for alert in run_alerts(metrics, run.evaluations(), failure):
        yield f"warning, step {alert.step}: {alert.text} ({alert.page})"


def _failure_lines(
    metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> Iterator[str]:
    """Report how often the app failed in training. Yield no line if it never failed."""
    lines = [line for line in metrics if line["kind"] == "train" and line.get("rollouts")]
    failed = sum(line.get("failed", 0) for line in lines)
    if not failed:
        return
    total = sum(line["rollouts"] for line in lines)
    ends = [f"{100 * e.get('failed', 0) / e['rollouts']:.0f} % in step {e['step']}" for e in lines]
    steps = f"; {ends[0]}, {ends[-1]}" if len(ends) > 1 else ""
    own = sum(line.get("failed_scored", 0) for line in lines)
    setting = config.get("failure_reward")
    value = lines[-1].get("failure_reward")
    now = "" if value is None else f", now {value:g}"
    scored = "unscored" if setting is None else f"scored failure_reward={setting!r}{now}"
    if own:
        others = f", the other {failed - own} {scored}" if failed > own else ""
        scored = f"{own} with a reward of their own, which counts{others}"
    yield (
        f"the app failed in {failed} of {total} rollouts of training ({100 * failed / total:.0f} "
        f"%{steps}): {scored}"
    )


def _critic_lines(run: RunFolder, config: Mapping[str, Any]) -> Iterator[str]:
    """Describe the critic of a run, as its latest step used it; yield no line without one."""
    critic = config.get("critic")
    if not isinstance(critic, Mapping):
        return
    # not decoded into a `Critic`, which may refuse settings that an earlier version took
    text = describe_critic(critic.get("lam"))
    lines = [line for line in run.metrics() if line.get("learner/lambda") is not None]
    if lines:
        text += f"; in step {lines[-1]['step']} lambda {lines[-1]['learner/lambda']:g}"
        if (explained := lines[-1].get("learner/explained_variance")) is not None:
            text += f", explained variance {explained:.2f}"
    yield text


def _choice_lines(metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe adaptive tasks and replay, a line each; yield none of a setting that is not used."""

    def share(key: str, of: str) -> str:
        """Return the share `key` over all steps, weighted by each step's number `of`."""
        parts = [(line[key], line.get(of) or 0) for line in metrics if line.get(key) is not None]
        total = math.fsum(size for _, size in parts)
        return f"{100 * math.fsum(x * size for x, size in parts) / total if total else 0:.0f} %"

    if any("tasks/zero_gradient_predicted" in line for line in metrics):
        yield (
            f"tasks='adaptive': {share('tasks/zero_gradient', 'rollouts')} of groups had no "
            f"gradient (predicted {share('tasks/zero_gradient_predicted', 'rollouts')}, for "
            f"shuffled order {share('tasks/zero_gradient_shuffled', 'rollouts')})"
        )
    lines = [line for line in metrics if "replay/groups" in line]
    if lines:
        groups = sum(line["replay/groups"] for line in lines)
        ages = math.fsum(line["replay/groups"] * line["replay/age"] for line in lines)
        age = f"after {ages / groups:.1f} steps on average, " if groups else ""
        rows = share("replay/row_share", "batch/rows")
        yield f"replay: {groups} groups trained again, {age}{rows} of the rows"


def _failure_count(line: Mapping[str, Any]) -> str:
    """Describe how many rollouts of an evaluation failed, and the mean reward of the others.

    Return "" if none failed.
    """
    key = "mean_without_failures"
    without = f", {_mean(line, key)} without these" if key in line else ""
    own = line.get("failed_scored")
    without = f", {own} with a reward of their own{without}" if own else without
    return f", {line['failed']} failed{without}" if line.get("failed") else ""


def _prompt_lines(run: RunFolder) -> Iterator[str]:
    """Show how each prompt was changed and, after a search for prompts, the candidates."""
    if run.prompts():
        yield from _search_lines(run)
    for name, prompt in run.prompts().items():
        yield f"prompt {name}: {'' if prompt.is_changed else 'as it was'}".rstrip()
        yield from (f"  {line}" for line in prompt.diff().splitlines())
        if note := placeholder_note(prompt):
            yield f"  {note}"


def _search_lines(run: RunFolder) -> Iterator[str]:
    try:
        from lightspan_prompts.search.candidates import read_searches
    except ModuleNotFoundError:
        yield f"to see the candidates of its search: {how_to_install('prompts')}"
        return
    for name, search in read_searches(run.path).items():
        if name:
            yield f"search of step {int(name.removeprefix('step-'))}:"
        yield from _candidate_lines(search)


def _candidate_lines(search: SearchResult) -> Iterator[str]:
    for number, candidate in enumerate(search.candidates):
        parents = ", ".join(map(str, candidate.parents))
        origin = f"of {parents}" if parents else "as given"
        chosen = ", chosen" if number == search.chosen else ", best" * (number == search.best)
        split = "selection" if candidate.is_whole else "a batch of selection"
        rewards = " ".join(map(_number, candidate.rewards.values()))
        if candidate.again:
            rewards += f"; again {' '.join(map(_number, candidate.again.values()))}"
        yield f"candidate {number}, {origin}: {split} {candidate.mean:.3f} ({rewards}){chosen}"
    for proposal in search.proposals:
        if proposal.candidate is None:
            yield f"proposal: {proposal.line()}"
    yield search.verdict()
    yield from search.spending()
    if texts := search.texts():
        yield texts


def _bounds(line: Mapping[str, Any]) -> str:
    is_known = line.get("low") is not None
    return f"{_mean(line, 'low')}..{_mean(line, 'high')}" if is_known else "no CI"


def _silent(line: Mapping[str, Any]) -> str:
    """Describe in how many tasks no call used the trained model; "" if there is no such task."""
    return f", {line['silent']} {SILENT}" if line.get("silent") else ""


def _mean(line: Mapping[str, Any], key: str) -> str:
    """Return the number `key` in a line of metrics as text; `nan` if it is null."""
    value = line.get(key)
    return f"{math.nan if value is None else value:.3f}"


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
        f"{rollout.task_id}): {status_of(view)}"
    )
    if rollout.fork is not None:
        point = f"up to call {rollout.fork.call_id}" if rollout.fork.call_id else "as a whole"
        yield f"repeats rollout {rollout.fork.rollout_id or rollout.fork.attempt_id} {point}"
    is_production = rollout.mode is Mode.PRODUCTION
    is_rated = is_production and any(c.is_feedback(span) for span in episode.spans)
    reason = "feedback" if is_rated else episode.reward_source
    source = f" ({reason})" if reason else ""
    reward = score_of_attempt(episode) if is_production else episode.reward
    yield f"attempt {episode.attempt_id}: reward {_number(reward)}{source}"
    if episode.runner and not is_production:
        yield f"  run by {episode.runner}"
    if episode.unscored:
        yield f"  unscored: {episode.unscored}"
    own = OWN if episode.reward_source == "scored" else ""
    for name, value in sorted(episode.dimensions.items()):
        title = "the app's own reward" if name == own else name
        yield f"  {title}: {_number(value)}"
    if episode.message:
        yield f"  {episode.message}"
    yield from (f"  damaged: {reason}" for reason in episode.capture_errors)
    yield from (f"  note: {note}" for note in episode.notes)
    yield ""
    entries = {entry.call.span_id: entry for entry in view.coverage.entries}
    for depth, node in walk(episode.tree):
        entry = None if is_production else entries.get(node.span.span_id)
        yield "  " * depth + _span_line(node.span, entry)
        yield from ("  " * (depth + 1) + line for line in _output_lines(node.span))
    yield ""
    if is_production:
        yield f"calls: {len(view.coverage.entries)} recorded in production, which trains none"
    else:
        yield f"coverage: {_counted(view.coverage.counts())}"
    for entry in view.coverage.entries:
        yield from _entry_lines(view, entry)


def _reward_lines(run: RunFolder, episode: Episode) -> Iterator[str]:
    """Yield the score that each reward stored in the run gave to the rollout."""
    for name in reward_names(run):
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
        if c.FEEDBACK_CORRECTION in span.attributes:
            parts.append(f"better: {span.attributes[c.FEEDBACK_CORRECTION]!r}")
    if entry is not None:
        parts.append(f"-> {entry.status}")
    if span.status is SpanStatus.ERROR:
        parts.append(f"ERROR {span.status_message}")
    parts.append(f"({(span.end_ns - span.start_ns) / 1e6:.1f} ms)")
    return " ".join(parts)


def _output_lines(span: Span) -> Iterator[str]:
    """Yield the recorded output of a command."""
    for key, name in ((c.COMMAND_STDOUT, "stdout"), (c.COMMAND_STDERR, "stderr")):
        for line in str(span.attributes.get(key, "")).rstrip("\n").splitlines():
            yield f"{name}: {line}"


def _as_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _entry_lines(view: RolloutView, entry: CallCoverage) -> Iterator[str]:
    call = entry.call
    name = f"{call.call_id}/{call.choice} {call.agent_path}"
    yield f"  {name}: {_status_of(view, entry)}"
    yield from (
        f"    {key}: {asked!r} asked, {used!r} used"
        for key, (asked, used) in sorted(_overrides(call).items())
    )
    if call.span is not None and (again := call.span.attributes.get(c.CALL_REPEATS)):
        times = plural(int(str(again)), "time")
        yield f"    the SDK sent it again {times}; the usage is the answer's alone"
    if call.key in view.episode.retried:
        yield "    its agent ended in an error and was retried"
    yield from (f"    {line}" for line in view.explanation_lines(call))


def _status_of(view: RolloutView, entry: CallCoverage) -> str:
    """Return whether a call is trained, with the reason.

    For a call recorded in production, return its outcome, such as success or failure.
    """
    if view.state.rollout.mode is Mode.PRODUCTION:
        return str(entry.call.outcome)
    return f"{entry.status} {entry.reason}".rstrip()


def _overrides(call: Call) -> dict[str, tuple[Any, Any]]:
    """Return the request fields that training overrode: field → (value of the app, value used)."""
    return {} if call.span is None else overrides_of(call.span.attributes)


# --- a call ---------------------------------------------------------------------------------
def _call_lines(view: RolloutView, entry: CallCoverage) -> Iterator[str]:
    call = entry.call
    yield f"call {call.call_id}, choice {call.choice}, agent {call.agent_path}"
    yield _status_of(view, entry)
    if call.outcome is CallOutcome.REPLAYED and call.span is not None:
        parent = call.span.attributes.get(c.REPLAYED_ROLLOUT, "")
        yield f"its texts and tokens: the call of this id of rollout {parent}"
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
    yield from (f"image {line}" for line in image_lines(call, view.images))
    yield from _message_lines(call)
    yield from view.explanation_lines(call)


def _message_lines(call: Call) -> Iterator[str]:
    attributes: Mapping[str, Any] = call.span.attributes if call.span is not None else {}
    overrides = attributes.get(c.SAMPLING_OVERRIDES)
    if overrides:
        yield f"sampling overridden (asked, used): {overrides}"
    if c.PROMPT_APPLIED in attributes:
        original, reason = attributes.get(c.PROMPT_ORIGINAL), attributes.get(c.PROMPT_REASON)
        yield f"prompt as in the app: {reason}" if reason else f"prompt in the app: {original!r}"
    for message in (
        *genai_messages.input_messages_of(attributes),
        *genai_messages.output_messages_of(attributes),
    ):
        yield f"--- {message['role']}"
        if message.get("reasoning_content"):
            yield f"(thoughts) {message['reasoning_content']}"
        shown = [message[key] for key in ("content", "tool_calls") if message.get(key)]
        yield from map(str, shown or [""])
