"""The sections of a report as lines of text; a section that has nothing to say has no line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from lightspan.lightning.health import WAY_OUT, UnseenClient
from lightspan.progress import duration, many
from lightspan.reports.dry_run.endpoints import Endpoint
from lightspan.reports.dry_run.sections import (
    AgentReport,
    BreakReport,
    CostReport,
    DetourReport,
    FrameworkReport,
    GroupReport,
    OverrideReport,
    RewardReport,
    RowReport,
    Spread,
)
from lightspan.reports.forecast import MemoryForecast, TimeForecast

SHOWN: Final = 8
"""Groups, rewards of a group and failures that are shown; the rest is counted."""
SHOWN_BREAKS: Final = 2
"""Breaks of one cause that are shown."""
WIDTH: Final = 40
"""Characters that are shown of a value in a request, which may be a whole JSON schema."""


# --- agents -----------------------------------------------------------------------------------
def agent_lines(agents: Sequence[AgentReport]) -> Iterator[str]:
    """A row per agent, and what there is to say of each."""
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
            _often(agent.calls_per_rollout),
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
    if not agent.calls and agent.acted and agent.policy is not None:
        yield (
            f"  {agent.path}: made no call of the OpenAI SDK, of a client that an adapter knows, "
            "or to the attempt's endpoint. If it calls a model by another client, give that one "
            f"{WAY_OUT}"
        )
    elif not agent.calls:
        yield f"  {agent.path}: called no model"
    elif agent.policy is None:
        here, later = ", ".join(agent.answered_by), ", ".join(agent.goes_to)
        who = here if here == later else f"{here} here, by {later} in fit"
        yield f"  {agent.path}: frozen, it is not selected; answered by {who}"
    for reason in agent.rejected:
        yield f"  {agent.path}: {reason.calls} rejected ({reason.code}): {reason.text}"
    for seen in agent.unseen if agent.policy is not None else ():
        client = UnseenClient(seen.client, seen.host, seen.fix)
        yield f"  {agent.path}: {many(seen.calls, 'call')} {client}"


def _spread(spread: Spread | None, *, estimated: bool) -> str:
    mark = "~" if estimated else ""
    return "-" if spread is None else f"{mark}{spread.mean:.0f} / {spread.max}"


# --- frameworks -------------------------------------------------------------------------------
def framework_lines(frameworks: Sequence[FrameworkReport]) -> Iterator[str]:
    """The frameworks, and their agents."""
    if not frameworks:
        return
    yield "FRAMEWORKS"
    for framework in frameworks:
        version = framework.version or "(version not known)"
        named = f"{framework.name} {version}, told by {framework.told_by}"
        yield f"  {named}: {', '.join(framework.agents)}"


def detour_lines(detours: Sequence[DetourReport]) -> Iterator[str]:
    """The requests past the SDKs, and what to change."""
    if not detours:
        return
    yield "PAST THE OPENAI AND ANTHROPIC SDKS"
    for detour in detours:
        fix = detour.fix if detour.selected else _UNCHANGED
        yield f"  {detour.agent}: {many(detour.requests, 'request')} to {detour.asked}: {fix}"


_UNCHANGED: Final = "it is not selected, so nothing has to change; max_frozen_calls counts none"


# --- overrides --------------------------------------------------------------------------------
def override_lines(overrides: Sequence[OverrideReport]) -> Iterator[str]:
    """The fields of requests that training sets otherwise."""
    if not overrides:
        return
    yield "SAMPLING SET BY TRAINING"
    rows = [
        [o.agent, o.field, _value(o.asked), _used(o.used), many(o.calls, "call")] for o in overrides
    ]
    yield from _table([["agent", "field", "asked", "used", ""], *rows], left=5)


def _value(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _teaching(rewards: RewardReport) -> str:
    groups = many(len(rewards.groups), "group")
    return (
        f"{groups}, not compared inside"
        if rewards.by_batch
        else (f"{rewards.varying} of {groups} vary")
    )


def _used(value: Any) -> str:
    return "left out" if value is None else _value(value)


# --- rewards ----------------------------------------------------------------------------------
def reward_lines(rewards: RewardReport) -> Iterator[str]:
    """The rewards over all, and by group."""
    yield "REWARDS"
    odd = {"unscored": rewards.unscored, "failed": rewards.failed, "lost": rewards.lost}
    odd |= {"damaged": rewards.damaged}
    counted = "".join(f", {count} {what}" for what, count in odd.items() if count)
    yield (
        f"  mean {_number(rewards.mean)}, std {_number(rewards.std)}; {rewards.scored} of "
        f"{rewards.rollouts} rollouts scored{counted}; {_teaching(rewards)}"
    )
    shown = rewards.groups[:SHOWN]
    groups = [_group(group, teaches=group.varies or rewards.by_batch) for group in shown]
    yield from _table([["task", "mean", "std", "", "rewards"], *groups], left=1, last=2)
    if len(rewards.groups) > SHOWN:
        yield f"  and {len(rewards.groups) - SHOWN} more groups"
    yield from (f"  {failure}" for failure in rewards.failures[:SHOWN])
    if len(rewards.failures) > SHOWN:
        yield f"  and {len(rewards.failures) - SHOWN} other failures"
    if rewards.air is not None:
        seen = ", ".join(f"{name} saw {count}" for name, count in rewards.air.seen.items())
        yield f"  AIR: {seen}{f'; {rewards.air.idle}' if rewards.air.idle else ''}"


def _group(group: GroupReport, *, teaches: bool) -> list[str]:
    rewards = " ".join(_number(value) for value in group.rewards[:SHOWN])
    more = " …" if len(group.rewards) > SHOWN else ""
    flat = "" if teaches else "teaches nothing"
    return [group.task_id, _number(group.mean), _number(group.std), flat, rewards + more]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --- rows -------------------------------------------------------------------------------------
def row_lines(report: RowReport | None, *, kept: bool) -> Iterator[str]:
    """How calls become rows, with examples of those that broke."""
    if report is None:
        return
    yield "ROWS" if report.exact else "ROWS (estimated)"
    saved = f" instead of {report.call_tokens:,}" if report.merged else ""
    yield (
        f"  {many(report.calls, 'call')} make {many(report.rows, 'row')}: {report.merged} go on "
        f"in a row, {report.new} begin a conversation, {report.branch} branch off, "
        f"{report.broken} break; "
        f"{report.row_tokens:,} tokens{saved}, longest row {report.longest_row:,}"
    )
    for cause, count in report.causes.items():
        if count:
            yield f"  {many(count, 'break')} by {cause}:"
            examples = [broken for broken in report.breaks if broken.cause == cause]
            for broken in examples[:SHOWN_BREAKS]:
                yield from _break(broken, kept=kept)


def _break(broken: BreakReport, *, kept: bool) -> Iterator[str]:
    got = "the end" if broken.got_id is None else f"{broken.got_text!r} ({broken.got_id})"
    yield (
        f"    {broken.agent}, token {broken.place} ({broken.where}), after {broken.before!r}: "
        f"{broken.expected_text!r} ({broken.expected_id}) became {got}"
    )
    yield f"      {broken.detail}"
    if kept:
        call = broken.following_call.rpartition("/")[0]
        yield f"      look at it: rollout {broken.rollout_id}, call {call}"


# --- costs ------------------------------------------------------------------------------------
def cost_lines(costs: CostReport) -> Iterator[str]:
    """What `fit` would call outside, and how often."""
    size = costs.size
    yield "WHAT FIT WOULD CALL"
    evaluations = f" + {size.evaluations} x {size.val_tasks} evaluated" if size.evaluations else ""
    searched = ""
    if size.searches:
        searched = f"{size.search_rollouts:,} at most in {many(size.searches, 'search phase')} + "
    if size.comparisons:
        evaluations += f" + {size.comparisons} x {size.selection_tasks} compared"
    yield (
        f"  {costs.rollouts:,} rollouts: {searched}{many(size.updates, 'step')} x "
        f"{size.tasks_per_step} tasks x {size.group_size}{evaluations}"
    )
    rows = [
        [f"tool {tool.name}", f"{tool.calls_per_rollout:.2f}", _about(tool.expected_calls), ""]
        for tool in costs.tools
    ]
    for endpoint in costs.endpoints:
        prompt, answer = endpoint.expected_prompt_tokens, endpoint.expected_response_tokens
        tokens = ""
        if prompt is not None and answer is not None:
            tokens = f"{_about(prompt)} tokens in, {_about(answer)} out"
        who = f"{Endpoint(endpoint.host, endpoint.model)} ({', '.join(endpoint.agents)})"
        per_rollout, calls = endpoint.calls_per_rollout, endpoint.expected_calls
        rows.append([who, f"{per_rollout:.2f}", _about(calls), tokens])
    if rows:
        yield from _table([["", "/rollout", "in all", ""], *rows], left=1, last=1)
    else:
        yield "  no tool and no endpoint: every call is answered by models of this run"
    for each in costs.reflections:
        yield (
            f"  at most {many(each.most, 'reflection')} by {each.model}: about "
            f"{_about(each.tokens_in)} tokens in, {_about(each.tokens_out)} or more out each"
        )
    if costs.endpoints:
        limit = costs.max_frozen_calls
        most = "no limit (max_frozen_calls)" if limit is None else f"max_frozen_calls={limit:,}"
        yield f"  calls to endpoints: about {_about(costs.expected_frozen_calls)}; {most}"


def _often(calls_per_rollout: float) -> str:
    """Of an agent that is seldom called, not as if it never were."""
    return "<0.1" if 0 < calls_per_rollout < 0.1 else f"{calls_per_rollout:.1f}"


def _about(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


# --- forecasts --------------------------------------------------------------------------------
def memory_lines(forecast: MemoryForecast | None) -> Iterator[str]:
    """The memory forecast, part by part, beside what is free."""
    if forecast is None:
        return
    yield f"MEMORY (forecast, {forecast.device})"
    rows = [
        [part.name, _bytes(part.bytes), "" if part.when == "always" else part.when, part.note]
        for part in forecast.parts
    ]
    yield from _table(rows, left=1, last=2)
    apart = ("rank ", "vLLM")
    further = any(part.name.startswith(apart) for part in forecast.parts)
    ours = "the trainer's processes at their" if further else "trainer process at its"
    parts = [f"{ours} peak {_bytes(forecast.host_bytes)}"]
    parts += [f"{each.device} {_bytes(each.bytes)}" for each in forecast.devices]
    if forecast.runner_bytes is not None:
        parts.append(f"runner processes {_bytes(forecast.runner_bytes)}")
    yield f"  {', '.join(parts)}"
    free = {"host": forecast.host_free_bytes}
    free |= {each.device: each.free_bytes for each in forecast.devices}
    sizes = [f"{place} {_bytes(size)}" for place, size in free.items() if size is not None]
    if sizes:
        yield f"  free now: {', '.join(sizes)}"
    if forecast.measured_peak_bytes is not None:
        yield f"  this process took {_bytes(forecast.measured_peak_bytes)} at its peak so far"


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def time_lines(forecast: TimeForecast | None, costs: CostReport) -> Iterator[str]:
    """The time forecast, part by part."""
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
    spent = ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items() if value)
    yield f"  {_seconds(forecast.total_s)} in all: {spent}"
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


def missing_lines(reasons: Sequence[str]) -> Iterator[str]:
    """What could not be found out."""
    if reasons:
        yield "NOT KNOWN"
        yield from (f"  {reason}" for reason in reasons)


# --- tables -----------------------------------------------------------------------------------
def _table(rows: Sequence[Sequence[str]], *, left: int, last: int = 0) -> Iterator[str]:
    """The rows in aligned columns: the first `left` and the last `last` to the left, the others to
    the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < left or place >= len(row) - last else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
