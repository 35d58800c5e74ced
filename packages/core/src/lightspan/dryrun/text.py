"""The text form of a report: warnings first, then a short section for each question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lightspan.dryrun.report import (
    AgentReport,
    BreakReport,
    CostReport,
    DevReport,
    GroupReport,
    OverrideReport,
    RewardReport,
    RowReport,
    Spread,
)
from lightspan.forecast import MemoryForecast, TimeForecast
from lightspan.progress import duration

SHOWN: Final = 8
"""Groups that are shown; the rest is counted."""
SHOWN_BREAKS: Final = 2
"""Breaks of one cause that are shown."""
WIDTH: Final = 40
"""Characters of a value that was asked for."""


def report_text(report: DevReport) -> str:
    """See `DevReport.text`."""
    sections = [
        _head(report),
        [f"! {warning}" for warning in report.warnings],
        _agents(report.agents),
        _overrides(report.overrides),
        _rewards(report.rewards),
        _rows(report.rows, kept=report.folder is not None),
        _costs(report.costs),
        _memory(report.memory),
        _time(report.time, report.costs),
        _missing(report.missing),
    ]
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section)


def _head(report: DevReport) -> Iterator[str]:
    models = " and ".join(sorted(set(report.models.values()))) or "no model (none was given)"
    yield (
        f"dry run of {report.app}: {report.algorithm} on {models}, "
        f"{_many(report.tasks, 'task')} x {_many(report.group_size, 'rollout')}, "
        f"{duration(report.seconds)}; nothing was trained"
    )
    if report.endpoint is not None:
        yield (
            f"answered by {report.endpoint}: token ids are not known, so what depends on them is "
            "estimated"
        )
    if report.folder is not None:
        yield f"rollouts: lightspan inspect {report.folder}"


# --- agents -----------------------------------------------------------------------------------
def _agents(agents: Sequence[AgentReport]) -> Iterator[str]:
    yield "AGENTS"
    if not agents:
        yield "  none was seen"
        return
    header = ["agent", "trains", "calls", "/rollout", "prompt", "answer"]
    header += ["trained", "frozen", "rejected"]
    rows = [
        [
            agent.path,
            agent.policy or "-",
            str(agent.calls),
            f"{agent.calls_per_rollout:.1f}",
            _spread(agent.prompt_tokens, estimated=agent.tokens_estimated),
            _spread(agent.response_tokens, estimated=agent.tokens_estimated),
            str(agent.trained),
            str(agent.frozen),
            str(sum(reason.calls for reason in agent.rejected)),
        ]
        for agent in agents
    ]
    yield from _table([header, *rows], left=2)
    marked = any(agent.tokens_estimated for agent in agents)
    how = "; ~ estimated with the tokenizer to train, the others as counted by the endpoint"
    yield f"  (prompt, answer: tokens, mean / largest{how if marked else ''})"
    for agent in agents:
        yield from _agent_notes(agent)


def _agent_notes(agent: AgentReport) -> Iterator[str]:
    if not agent.calls:
        yield f"  {agent.path}: called no model"
    elif agent.policy is None:
        here, later = ", ".join(agent.answered_by), ", ".join(agent.goes_to)
        told = here if here == later else f"{here} here, by {later} in fit"
        yield f"  {agent.path}: frozen, it is not selected; answered by {told}"
    for reason in agent.rejected:
        yield f"  {agent.path}: {reason.calls} rejected ({reason.code}): {reason.text}"


def _spread(spread: Spread | None, *, estimated: bool) -> str:
    mark = "~" if estimated else ""
    return "-" if spread is None else f"{mark}{spread.mean:.0f} / {spread.max}"


# --- overrides --------------------------------------------------------------------------------
def _overrides(overrides: Sequence[OverrideReport]) -> Iterator[str]:
    if not overrides:
        return
    yield "SAMPLING SET BY TRAINING"
    rows = [
        [o.agent, o.field, _value(o.asked), _used(o.used), f"{_many(o.calls, 'call')}"]
        for o in overrides
    ]
    yield from _table([["agent", "field", "asked", "used", ""], *rows], left=5)


def _value(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _used(value: Any) -> str:
    return "left out" if value is None else _value(value)


# --- rewards ----------------------------------------------------------------------------------
def _rewards(rewards: RewardReport) -> Iterator[str]:
    yield "REWARDS"
    odd = {"unscored": rewards.unscored, "failed": rewards.failed, "lost": rewards.lost}
    odd |= {"damaged": rewards.damaged}
    counted = "".join(f", {count} {what}" for what, count in odd.items() if count)
    yield (
        f"  mean {_number(rewards.mean)}, std {_number(rewards.std)}; {rewards.scored} of "
        f"{rewards.rollouts} rollouts scored{counted}; {rewards.varying} of "
        f"{_many(len(rewards.groups), 'group')} vary"
    )
    shown = rewards.groups[:SHOWN]
    yield from _table([["task", "mean", "std", "", "rewards"], *map(_group, shown)], left=1, last=2)
    if len(rewards.groups) > SHOWN:
        yield f"  and {len(rewards.groups) - SHOWN} more groups"
    yield from (f"  {failure}" for failure in rewards.failures[:SHOWN])
    if len(rewards.failures) > SHOWN:
        yield f"  and {len(rewards.failures) - SHOWN} other failures"
    if rewards.air is not None:
        seen = ", ".join(f"{name} saw {count}" for name, count in rewards.air.seen.items())
        yield f"  AIR: {seen}{f'; {rewards.air.idle}' if rewards.air.idle else ''}"


def _group(group: GroupReport) -> list[str]:
    rewards = " ".join(_number(value) for value in group.rewards[:SHOWN])
    more = " …" if len(group.rewards) > SHOWN else ""
    flat = "" if group.varies else "teaches nothing"
    return [group.task_id, _number(group.mean), _number(group.std), flat, rewards + more]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --- rows -------------------------------------------------------------------------------------
def _rows(rows: RowReport | None, *, kept: bool) -> Iterator[str]:
    if rows is None:
        return
    yield "ROWS" if rows.exact else "ROWS (estimated)"
    saved = f" instead of {rows.call_tokens:,}" if rows.merged else ""
    yield (
        f"  {_many(rows.calls, 'call')} make {_many(rows.rows, 'row')}: {rows.merged} go on in a "
        f"row, {rows.new} begin a conversation, {rows.branch} branch off, {rows.broken} break; "
        f"{rows.row_tokens:,} tokens{saved}, longest row {rows.longest_row:,}"
    )
    for cause, count in rows.causes.items():
        if count:
            yield f"  {_many(count, 'break')} by {cause}:"
            found = [one for one in rows.breaks if one.cause == cause]
            for one in found[:SHOWN_BREAKS]:
                yield from _break(one, kept=kept)


def _break(found: BreakReport, *, kept: bool) -> Iterator[str]:
    got = "the end" if found.got_id is None else f"{found.got_text!r} ({found.got_id})"
    yield (
        f"    {found.agent}, token {found.place} ({found.where}), after {found.before!r}: "
        f"{found.expected_text!r} ({found.expected_id}) became {got}"
    )
    yield f"      {found.detail}"
    if kept:
        call = found.following_call.rpartition("/")[0]
        yield f"      look at it: rollout {found.rollout_id}, call {call}"


# --- costs ------------------------------------------------------------------------------------
def _costs(costs: CostReport) -> Iterator[str]:
    size = costs.size
    yield "WHAT FIT WOULD CALL"
    evaluations = f" + {size.evaluations} x {size.val_tasks} evaluated" if size.evaluations else ""
    yield (
        f"  {costs.rollouts:,} rollouts: {_many(size.steps, 'step')} x {size.tasks_per_step} tasks "
        f"x {size.group_size}{evaluations}"
    )
    rows = [
        [f"tool {tool.name}", f"{tool.calls_per_rollout:.2f}", _about(tool.expected_calls), ""]
        for tool in costs.tools
    ]
    for one in costs.endpoints:
        tokens = ""
        if one.expected_prompt_tokens is not None and one.expected_response_tokens is not None:
            prompt, answer = one.expected_prompt_tokens, one.expected_response_tokens
            tokens = f"{_about(prompt)} tokens in, {_about(answer)} out"
        who = f"{one.model or 'a model'} at {one.host or 'an unknown host'} "
        who += f"({', '.join(one.agents)})"
        rows.append([who, f"{one.calls_per_rollout:.2f}", _about(one.expected_calls), tokens])
    if rows:
        yield from _table([["", "/rollout", "in all", ""], *rows], left=1, last=1)
    else:
        yield "  no tool and no endpoint: every call is answered by models of this run"
    if costs.endpoints:
        limit = costs.max_frozen_calls
        most = "no limit (max_frozen_calls)" if limit is None else f"max_frozen_calls={limit:,}"
        yield f"  calls to endpoints: about {_about(costs.expected_frozen_calls)}; {most}"


def _about(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


# --- forecasts --------------------------------------------------------------------------------
def _memory(memory: MemoryForecast | None) -> Iterator[str]:
    if memory is None:
        return
    yield f"MEMORY (forecast, {memory.device})"
    rows = [
        [part.name, _bytes(part.bytes), "" if part.when == "always" else part.when, part.note]
        for part in memory.parts
    ]
    yield from _table(rows, left=1, last=2)
    parts = [f"trainer process at its peak {_bytes(memory.host_bytes)}"]
    if memory.device_bytes is not None:
        parts.append(f"accelerator {_bytes(memory.device_bytes)}")
    if memory.runner_bytes is not None:
        parts.append(f"runner processes {_bytes(memory.runner_bytes)}")
    yield f"  {', '.join(parts)}"
    free = {"host": memory.host_free_bytes, "accelerator": memory.device_free_bytes}
    known = [f"{place} {_bytes(size)}" for place, size in free.items() if size is not None]
    if known:
        yield f"  free now: {', '.join(known)}"
    if memory.measured_peak_bytes is not None:
        yield f"  this process took {_bytes(memory.measured_peak_bytes)} at its peak so far"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _time(forecast: TimeForecast | None, costs: CostReport) -> Iterator[str]:
    if forecast is None:
        return
    yield "TIME (forecast)"
    parts = {
        "start": forecast.start_s,
        "rollouts": forecast.rollouts_s,
        "updates": forecast.updates_s,
        "publishing": forecast.publish_s,
        "checkpoints": forecast.save_s,
        "evaluations": forecast.evaluations_s,
    }
    told = ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items() if value)
    yield f"  {_seconds(forecast.total_s)} in all: {told}"
    speed = forecast.speed
    yield (
        f"  a step {_seconds(forecast.step_s)}: {costs.size.step_rollouts} rollouts of "
        f"{speed.latency_s:.2g} s, {forecast.runners} at once, then "
        f"{costs.size.step_rollouts * speed.tokens_per_rollout * speed.varying:,.0f} tokens at "
        f"{_rate(speed.token_s)}"
    )


def _rate(token_s: float) -> str:
    return f"{1 / token_s:,.0f} tokens/s" if token_s else "no measurable cost"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _missing(missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield "NOT KNOWN"
        yield from (f"  {text}" for text in missing)


# --- tables -----------------------------------------------------------------------------------
def _table(rows: Sequence[Sequence[str]], *, left: int, last: int = 0) -> Iterator[str]:
    """Aligned: the first `left` and the last `last` columns to the left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < left or place >= len(row) - last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
