"""Compare what the web page's API answers about a run with what `lightspan inspect` prints."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

import lightspan_ui.views as v
from lightspan.algorithms.recorded_attempts import Query
from lightspan_tools.inspect import inspect_run, inspect_store
from lightspan_tools.pagination import Page
from packages.ui.tests.ui_client import Client, eventually, serving

Lines = list[str]


async def check_run(folder: Path, calls_of: int = 5) -> None:
    """Check that the numbers of a run's pages are those that `lightspan inspect` prints.

    Args:
        folder: folder of the run.
        calls_of: number of the newest rollouts whose calls are compared one by one.
    """
    printed = (await _inspect(folder)).splitlines()
    async with serving(folder) as client:
        [summary] = (await client.get("/places", v.Places)).runs
        path = f"/runs/{quote(summary.name, safe='')}"

        async def counted() -> v.RunDetail | None:
            run = await client.get(path, v.RunDetail)
            assert not run.error
            return run if run.coverage_of == run.rollouts else None

        run = await eventually(counted)
        assert run.summary.error == ""
        _check_evaluations(run.summary, printed)
        _check_alerts(run.summary, printed)
        _check_coverage(run, printed)
        assert run.pruned in ("", *printed)
        rows = await _rows(client, path)
        _check_rows(rows, printed)
        for row in rows[:calls_of]:
            await _check_rollout(client, path, row, folder)


async def _inspect(folder: Path, *ids: str) -> str:
    return await asyncio.to_thread(inspect_run, folder, *ids, page=Page(limit=0))


def _check_evaluations(summary: v.RunSummary, printed: Lines) -> None:
    pattern = re.compile(r"step (\d+): (held-out|selection) .* (\S+) \((\S+|no CI), n=(\d+)")
    found = [match.groups() for line in printed if (match := pattern.match(line))]
    assert found == [
        (
            str(each.step),
            each.split,
            _text(each.reward.mean),
            "no CI"
            if each.reward.low is None
            else f"{_text(each.reward.low)}..{_text(each.reward.high)}",
            str(each.reward.n),
        )
        for each in summary.evaluations
    ]


def _text(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"


def _check_alerts(summary: v.RunSummary, printed: Lines) -> None:
    warnings = [line for line in printed if line.startswith("warning, step ")]
    alerts = [each for each in summary.alerts if each.name != "stopped"]  # inspect cannot tell
    assert warnings == [f"warning, step {each.step}: {each.text} ({each.page})" for each in alerts]


def _verdict(call: v.CallRow) -> str:
    """Return what `lightspan inspect` prints of a call, which knows fewer fates."""
    if call.fate == "recorded":  # of a search for prompts
        return f"frozen agent {call.agent} is not selected"
    fate = "rejected" if call.fate == "evaluation" else call.fate
    return f"{fate} {call.reason}".rstrip()


def _check_coverage(run: v.RunDetail, printed: Lines) -> None:
    fates: Counter[str] = Counter()
    for agent in run.agents:
        frozen = agent.frozen + agent.recorded
        fates.update({"trained": agent.trained, "frozen": frozen})
        fates.update({f"rejected:{reason}": n for reason, n in agent.rejected.items()})
        fates["rejected:mode_not_train"] += agent.evaluation
        rejected = sum(agent.rejected.values()) + agent.evaluation
        assert agent.calls == agent.trained + frozen + rejected
    [line] = [line for line in printed if line.startswith("coverage of calls: ")]
    assert _counts(line.removeprefix("coverage of calls: ")) == +fates
    overridden = [line for line in printed if line.startswith("sampling overridden, in calls: ")]
    text = overridden[0].partition(": ")[2] if overridden else "none"
    assert _counts(text) == Counter(run.overrides)


def _counts(text: str) -> Counter[str]:
    if text == "none":
        return Counter()
    pairs = [part.rpartition(" ") for part in text.split(", ")]
    return Counter({name: int(n.replace(",", "")) for name, _, n in pairs})


async def _rows(client: Client, path: str) -> list[v.RolloutRow]:
    rows: list[v.RolloutRow] = []
    cursor = ""
    while True:
        page = await client.get(f"{path}/rollouts", v.RolloutPage, limit=200, cursor=cursor)
        rows += page.rows
        cursor = page.cursor
        if not cursor:
            assert len({row.rollout_id for row in rows}) == len(rows) == page.total
            return rows


def _check_rows(rows: list[v.RolloutRow], printed: Lines) -> None:
    """Check mode, step, status and reward of each rollout."""
    pattern = re.compile(r"(\S+) +(train|val|dev|fork) +(\d+) +(\S+) +(-|[-\d.e+]+) ")
    table = [match.groups() for line in printed if (match := pattern.match(line))]
    claimed = [row for row in rows if row.attempt_id]
    assert len(table) == len(claimed)
    expected = Counter(groups[1:] for groups in table)
    assert expected == Counter(
        (
            "fork" if row.fork_of else row.mode,
            str(row.step),
            row.status,
            "-" if row.reward is None else f"{row.reward:.6g}",
        )
        for row in claimed
    )


async def _check_rollout(client: Client, path: str, row: v.RolloutRow, folder: Path) -> None:
    """Check the calls of a rollout, their advantages and why."""
    if not row.attempt_id:
        return
    printed = (await _inspect(folder, row.rollout_id)).splitlines()
    detail = await client.get(f"{path}/rollouts/{row.rollout_id}", v.RolloutDetail)
    assert detail.row == row
    reward = "-" if row.reward is None else f"{row.reward:g}"
    source = f" ({detail.source})" if detail.source else ""
    assert f"attempt {row.attempt_id}: reward {reward}{source}" in printed
    for call in detail.calls:
        name = f"  {call.call_id}/{call.choice} {call.agent}"
        assert f"{name}: {_verdict(call)}" in printed
        if call.why:
            assert f"    {call.why}" in printed
        name = quote(call.call_id, safe="")
        page = await client.get(f"{path}/rollouts/{row.rollout_id}/calls/{name}", v.CallDetail)
        [choice] = [each for each in page.choices if each.call.choice == call.choice]
        assert choice.call == call
        if choice.reasons is not None:
            assert f"credit {choice.reasons.credit:g} " in call.why
            assert any(mate.is_this for mate in choice.mates)


async def check_store(url: str) -> None:
    """Check that the rows of a store of production are those that `lightspan inspect` prints."""
    text = await asyncio.to_thread(inspect_store, url, query=Query(), page=Page(limit=0))
    pattern = re.compile(
        r"\S+ +(\S+) +(\d{4}-\S+ \S+) +(\S+) +(\S+) +(\d+) +([\d.]+) *(damaged)? *"
    )
    printed = [match.groups() for line in text.splitlines() if (match := pattern.match(line))]
    async with serving(url) as client:
        [store] = (await client.get("/places", v.Places)).stores
        rows = await _rows(client, f"/stores/{store.name}")
        assert Counter(printed) == Counter(
            (
                row.run_id,
                datetime.fromtimestamp(row.started or 0).isoformat(" ", "seconds"),  # noqa: DTZ006
                row.status,
                "-" if row.reward is None else f"{row.reward:.6g}",
                str(sum(row.agents.values())),
                f"{row.seconds or 0:.2f}",
                "damaged" if row.damaged else None,
            )
            for row in rows
        )
        for row in rows:
            path = f"/stores/{store.name}/rollouts/{row.attempt_id}"
            detail = await client.get(path, v.RolloutDetail)
            lines = await asyncio.to_thread(inspect_store, url, row.attempt_id, query=Query())
            reward = "-" if row.reward is None else f"{row.reward:g}"
            source = f" ({detail.source})" if detail.source else ""
            assert f"attempt {row.attempt_id}: reward {reward}{source}" in lines.splitlines()
