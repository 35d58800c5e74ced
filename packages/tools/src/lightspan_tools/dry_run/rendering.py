"""Render the report of a dry run as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightspan.errors import PAGE, page_of
from lightspan.lightning.rollout_checks import WAY_OUT
from lightspan.progress import duration, plural

if TYPE_CHECKING:
    from lightspan_tools.dry_run import report_model as model

MAX_ITEMS: Final = 8
"""Maximum number of groups, rewards of a group and failures that are shown."""
MAX_VALUE_LENGTH: Final = 40
"""Maximum length of a shown request value, which may be a whole JSON schema, in characters."""


def render(report: model.DevReport) -> str:
    """Return the report as text; empty sections are omitted."""
    sections = [
        _head(report),
        [f"! {warning} ({page_of(warning) or PAGE})" for warning in report.warnings],
        _agents(report.agents, trains=bool(report.models)),
        _uncaptured(report),
        _overrides(report),
        _rewards(report.rewards, trains=bool(report.models)),
        _rows(report.rows),
        _costs(report),
        _memory(report.memory),
        _replays(report),
        _missing(report.missing),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _head(report: model.DevReport) -> Iterator[str]:
    models = " and ".join(sorted(set(report.models.values())))
    on = f" on {models}" if models else ""
    yield (
        f"dry run of {report.app}: {report.algorithm}{on}, "
        f"{plural(report.tasks, 'task')} x {plural(report.group_size, 'rollout')}, "
        f"{duration(report.seconds)}; nothing was trained"
    )
    yield from report.choices
    if report.folder is not None:
        yield f"rollouts: lightspan inspect {report.folder}"


def _agents(agents: Sequence[model.AgentReport], *, trains: bool) -> Iterator[str]:
    """Describe each agent's calls.

    If the run trains no model, leave out what would be trained of them.
    """
    yield "AGENTS"
    if not agents:
        yield "  none"
        return
    header = ["agent", "trains", "calls", "/rollout", "prompt", "answer"]
    header += ["trained", "frozen", "rejected"]
    rows = [
        [
            agent.path,
            agent.policy or "-",
            str(agent.calls),
            _rate(agent.calls_per_rollout),
            _spread(agent.prompt_tokens),
            _spread(agent.response_tokens),
            str(agent.trained),
            str(agent.frozen),
            str(sum(reason.calls for reason in agent.rejected)),
        ]
        for agent in agents
    ]
    rows = [header, *rows]
    if not trains:
        rows = [[row[0], *row[2:6]] for row in rows]
    yield from _table(rows, left=2 if trains else 1)
    yield "  (prompt, answer: tokens, mean / largest)"
    for agent in agents:
        inside = [a.path for a in agents if a.calls and a.path.startswith(f"{agent.path}/")]
        notes = _agent_notes(agent, inside, trains=trains)
        yield from (f"  {agent.path}: {note}" for note in notes)


def _agent_notes(agent: model.AgentReport, inside: Sequence[str], *, trains: bool) -> Iterator[str]:
    """Yield notes on an agent.

    `inside` has the paths of its sub-agents that called a model.
    """
    if not agent.calls and inside and agent.policy is not None:
        yield f"called no model itself, its sub-agents did: {', '.join(inside)}"
    elif not agent.calls and agent.acted and agent.policy is not None:
        yield (
            "made no call of the OpenAI SDK, of a client that an adapter knows, or to the "
            "attempt's endpoint. If it calls a model by another client, give that one "
            f"{WAY_OUT}"
        )
    elif not agent.calls:
        yield "called no model"
    elif not trains:
        yield f"answered by {', '.join(agent.goes_to)}"
    elif agent.policy is None:
        yield f"frozen, it is not selected; answered by {', '.join(agent.goes_to)}"
    if agent.failed and agent.policy is None:
        yield (
            f"{agent.failed} of {agent.calls} calls to its endpoint failed: {agent.error}. With "
            'frozen="base", the starting weights answer in its place'
        )
    if agent.images:
        tokens = agent.image_tokens
        sizes = "" if tokens is None else f", {_spread(tokens)} prompt tokens each (mean / largest)"
        yield (
            f"{agent.image_calls} of {plural(agent.calls, 'call')} have images: "
            f"{plural(agent.images, 'different image')}{sizes}"
        )
    for reason in agent.rejected:
        yield f"{reason.calls} rejected ({reason.code}): {reason.text}"
    if agent.retried:
        yield (
            f"{agent.retried} trained with failure_reward: the agent ended in an error after them, "
            "and was retried"
        )
    if agent.policy is not None:
        yield from agent.unseen
        yield from agent.side_calls


def _rate(calls_per_rollout: float) -> str:
    return "<0.1" if 0 < calls_per_rollout < 0.1 else f"{calls_per_rollout:.1f}"


def _spread(spread: model.Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.0f} / {spread.max}"


def _uncaptured(report: model.DevReport) -> Iterator[str]:
    if report.uncaptured:
        yield "PAST THE OPENAI AND ANTHROPIC SDKS"
    for each in report.uncaptured:
        unchanged = "it is not selected, so nothing has to change; max_frozen_calls counts none"
        fix = each.fix if each.selected else unchanged
        yield f"  {each.agent}: {plural(each.requests, 'request')} to {each.request}: {fix}"


def _overrides(report: model.DevReport) -> Iterator[str]:
    if report.overrides:
        yield "SAMPLING SET BY TRAINING"
        rows = [
            [
                each.agent,
                each.field,
                "nothing" if each.asked is None else _json(each.asked),
                "left out" if each.used is None else _json(each.used),
                plural(each.calls, "call"),
            ]
            for each in report.overrides
        ]
        yield from _table([["agent", "field", "asked", "used", ""], *rows], left=5)


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"


def _rewards(rewards: model.RewardReport, *, trains: bool) -> Iterator[str]:
    """Describe the rewards.

    If the run trains no model, leave out in how many groups rewards vary.
    """
    yield "REWARDS"
    counts = {"unscored": rewards.unscored, "failed": rewards.failed, "lost": rewards.lost}
    counts |= {"damaged": rewards.damaged}
    others = "".join(f", {count} {what}" for what, count in counts.items() if count)
    groups = plural(len(rewards.groups), "group")
    varying = f"{rewards.varying} of {groups} vary"
    groups = f"{groups}, not compared inside" if rewards.by_batch else varying
    if not trains:
        groups = plural(len(rewards.groups), "task")
    yield (
        f"  mean {_number(rewards.mean)}; {rewards.scored} of {rewards.rollouts} rollouts scored"
        f"{others}; {groups}"
    )
    if rewards.dimensions:
        sizes = {k: f" (n={count:g})" for k, count in rewards.dimension_counts.items()}
        named = [f"{k} {_number(v)}{sizes.get(k, '')}" for k, v in rewards.dimensions.items()]
        yield f"  means of the named rewards: {', '.join(named)}"
    by_batch = rewards.by_batch or not trains
    rows = [_group(group, by_batch=by_batch) for group in rewards.groups[:MAX_ITEMS]]
    yield from _table([["task", "mean", "", "rewards"], *rows], left=1, last=2)
    if len(rewards.groups) > MAX_ITEMS:
        yield f"  and {len(rewards.groups) - MAX_ITEMS} more groups"
    yield from (f"  {failure}" for failure in rewards.failures[:MAX_ITEMS])
    if len(rewards.failures) > MAX_ITEMS:
        yield f"  and {len(rewards.failures) - MAX_ITEMS} other failures"


def _group(group: model.GroupReport, *, by_batch: bool) -> list[str]:
    rewards = " ".join(_number(value) for value in group.rewards[:MAX_ITEMS])
    more = " …" if len(group.rewards) > MAX_ITEMS else ""
    flat = "" if group.varies or by_batch else "teaches nothing"
    return [group.task_id, _number(group.mean), flat, rewards + more]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _rows(report: model.RowReport | None) -> Iterator[str]:
    if report is None:
        return
    yield "ROWS"
    saved = f" instead of {report.call_tokens:,}" if report.merged else ""
    yield (
        f"  {plural(report.calls, 'call')} make {plural(report.rows, 'row')}: {report.merged} go "
        f"on in a row, {report.new} begin a conversation, {report.branch} branch off, "
        f"{report.broken} break; "
        f"{report.row_tokens:,} tokens{saved}, longest row {report.longest_row:,}"
    )
    if report.broken:
        share = report.repeated_tokens / report.row_tokens
        yield f"  breaks repeat {report.repeated_tokens:,} of these tokens ({share:.0%})"
    yield from (
        f"  {path}: {share:.0%} of a rollout's calls are in one row"
        for path, share in report.one_row.items()
    )
    for cause, count in report.causes.items():
        yield f"  {plural(count, 'break')} by {cause}"
    yield from (f"    {example}" for example in report.breaks)


def _costs(report: model.DevReport) -> Iterator[str]:
    costs, rollouts, rewards = report.costs, report.rollouts, report.rewards
    yield "WHAT FIT WOULD CALL"
    yield f"  {costs.rollouts:,} rollouts: {costs.plan}"
    seconds = report.seconds * costs.rollouts / rollouts
    updates = "; updates come on top" if report.models else ""
    yield f"  at this dry run's speed, they take about {duration(seconds)}{updates}"
    rows = [
        [f"tool {each.name}", f"{each.calls / rollouts:.2f}", _about(each.expected_calls), ""]
        for each in costs.tools
    ]
    for each in costs.endpoints:
        prompt, answer = each.expected_prompt_tokens, each.expected_response_tokens
        is_known = prompt is not None and answer is not None
        tokens = f"{_about(prompt)} tokens in, {_about(answer)} out" if is_known else ""
        name = f"{each.name} ({', '.join(each.agents)})"
        rows.append([name, f"{each.calls / rollouts:.2f}", _about(each.expected_calls), tokens])
    if rows:
        yield from _table([["", "/rollout", "in all", ""], *rows], left=1, last=1)
    elif rewards.failed + rewards.lost == rewards.rollouts:
        yield "  calls to tools and endpoints are not known: no rollout ended well"
    elif not costs.unreached:
        yield "  no tool and no endpoint: every call is answered by models of this run"
    if costs.unreached:
        names = ", ".join(costs.unreached)
        yield f"  not known, because no rollout reached them: calls to the endpoints of {names}"
    if costs.endpoints:
        limit = costs.max_frozen_calls
        most = "no limit (max_frozen_calls)" if limit is None else f"max_frozen_calls={limit:,}"
        yield f"  calls to endpoints: about {_about(costs.expected_frozen_calls)}; {most}"


def _about(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _memory(memory: model.MemoryReport | None) -> Iterator[str]:
    if memory is None:
        return
    yield "MEMORY (estimate)"
    yield from _table([[name, _bytes(size)] for name, size in memory.parts.items()], left=1)
    yield (
        f"  {_bytes(memory.total_bytes)} in all; activations and logits of the longest pass come "
        "on top"
    )
    if memory.free_bytes is not None:
        yield f"  free now: {_bytes(memory.free_bytes)}"
    if memory.peak_bytes is not None:
        yield f"  measured here: {_bytes(memory.peak_bytes)} by this process at its peak"
    if memory.runner_bytes is not None:
        yield f"  measured here: {_bytes(memory.runner_bytes)} by the runner processes"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _replays(report: model.DevReport) -> Iterator[str]:
    lines = [] if report.replays is None else report.replays.text()
    if lines:
        yield "REPLAY"
        yield from (f"  {line}" for line in lines)


def _missing(reasons: Sequence[str]) -> Iterator[str]:
    if reasons:
        yield "NOT KNOWN"
        yield from (f"  {reason}" for reason in reasons)


def _table(rows: Sequence[Sequence[str]], *, left: int, last: int = 0) -> Iterator[str]:
    """Format rows of cells as lines with aligned columns.

    The first `left` columns and the last `last` columns are aligned to the left, and the others to
    the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < left or place >= len(row) - last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
