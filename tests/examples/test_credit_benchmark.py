"""Test the comparisons, the journal and the messages of `benchmarks/credit.py`.

The benchmark itself measures the learning.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import _credit_plan
import _credit_table
import _journal
import _paired
import credit
import pytest
from pages import DOCS  # type: ignore[import-not-found]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


# --- statistics -------------------------------------------------------------------------------
def block_of(
    arms: int,
    seeds: int,
    *,
    tasks: int = 1,
    rng: random.Random | None = None,
    **gains: float,
) -> Any:
    """Return a block of runs with normal rewards: `control`, and arms a0, a1, …

    Args:
        arms: number of arms besides `control`.
        seeds: number of runs of each arm.
        tasks: number of tasks of each run.
        rng: random generator; None for one with a fixed seed.
        gains: arm → its mean reward; 0 for other arms.
    """
    source = rng or random.Random(0)
    names = ["control", *(f"a{n}" for n in range(arms))]
    runs = {
        name: [
            {f"t{n}": source.gauss(gains.get(name, 0.0), 1.0) for n in range(tasks)}
            for _ in range(seeds)
        ]
        for name in names
    }
    return _paired.Block(runs, "control")


def single(block: Any) -> list[Any]:
    return [[("x", arm)] for arm in block.arms]


@pytest.mark.parametrize(
    ("arms", "seeds", "expected", "tolerance"),
    [
        (1, 3, 4.303, 0.15),  # Student's t, 2 degrees of freedom
        (1, 5, 2.776, 0.06),  # and 4
        (2, 6, 2.57, 0.04),  # Dunnett's two-sided 5 % points: 2 treatments, 10 degrees of freedom
        (3, 5, 2.68, 0.04),  # 3 and 12
        (4, 5, 2.71, 0.04),  # 4 and 16
    ],
)
def test_the_correction_is_that_of_the_tables(
    arms: int, seeds: int, expected: float, tolerance: float
) -> None:
    block = block_of(arms, seeds)
    family = _paired.Family({"x": block}, single(block))
    assert family.critical == pytest.approx(expected, abs=tolerance)


def test_the_spread_of_a_run_by_hand() -> None:
    """Check residuals of c 0 0, a 1 3, b 2 2: ±1/3, ±2/3, ±1/3, so 12/9 with 2 degrees of
    freedom.
    """
    runs = {"c": [{"t": 0.0}, {"t": 0.0}], "a": [{"t": 1.0}, {"t": 3.0}]}
    block = _paired.Block({**runs, "b": [{"t": 2.0}, {"t": 2.0}]}, "c")
    assert block.spread == pytest.approx(math.sqrt(2 / 3))
    assert block.gain("a") == pytest.approx((2.0, math.sqrt(2 / 3)))
    assert block.differences("a") == [1.0, 3.0]


def test_seeds_and_clusters_by_hand() -> None:
    """Check differences of .1 .3 and .3 .5 of two seeds, in clusters x and y.

    Seeds: .2 and .4, so .02 / 2 = .01. Clusters: sums ∓.2, so 2 · .08 / 4² = .01; both: -.2 0 0 .2,
    so 4/3 · .08 / 4² = .02/3.
    """
    zero = {"x": 0.0, "y": 0.0}
    runs = {"c": [zero, zero], "a": [{"x": 0.1, "y": 0.3}, {"x": 0.3, "y": 0.5}]}
    gain = _paired.Block(runs, "c").gain("a")
    assert gain.mean == pytest.approx(0.3)
    assert gain.error**2 == pytest.approx(0.01 + 0.01 - 0.02 / 3)
    together = _paired.Block(runs, "c", {"x": "one", "y": "one"}).gain("a")
    assert together.error**2 == pytest.approx(0.01), "one cluster says nothing of clusters"


def test_a_planted_gain_is_found_and_no_other() -> None:
    rng = random.Random(2)
    block = block_of(4, 5, tasks=100, rng=rng, a1=0.5, a3=-0.5)
    found = _paired.Family({"x": block}, single(block)).judge()
    verdicts = ["not told from chance", "better", "not told from chance", "worse"]
    assert [judged.verdict for judged in found] == verdicts
    assert [judged.p < 0.05 for judged in found] == [False, True, False, True]
    assert found[1].mean == pytest.approx(0.5, abs=0.2)


def test_chance_finds_something_in_one_comparison_of_twenty() -> None:
    rng = random.Random(3)
    blocks = [block_of(4, 5, rng=rng) for _ in range(1000)]
    critical = _paired.Family({"x": blocks[0]}, single(blocks[0])).critical
    found = sum(max(abs(b.gain(arm).t) for arm in b.arms) > critical for b in blocks)
    assert 30 <= found <= 70


# --- the design -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "rule", "expected"),
    [
        ("sql", "terminal", ("grpo", "terminal", None)),
        ("sql", "anchor", ("grpo", "anchor(1, key=observation)", None)),
        ("quest", "anchor", ("grpo", "anchor(1, key=_credit_plan:quest_state)", None)),
        ("quest", "critic", ("ppo", "critic(1)", None)),
        ("quest", "air", ("grpo", "discounted(1)", "tool_success")),
        ("sql", "air", ("grpo", "discounted(1)", "sql_example.signals:draft_error")),
    ],
)
def test_the_arms(task: str, rule: str, expected: tuple[Any, ...]) -> None:
    from lightspan import LightningRL

    algorithm = LightningRL("m", **_credit_plan.options_of(task, rule, "agent"))
    signals = None if algorithm.air is None else algorithm.config()["air"]["signals"]
    named = [s if isinstance(s, str) else s["type"] for s in signals or []]  # type: ignore[attr-defined]
    found = (algorithm.estimator, algorithm.credit.name, named[0] if named else None)
    assert found == expected
    assert algorithm.unit == "agent"


# --- rows -------------------------------------------------------------------------------------
def row_of(task: str, rule: str, seed: int, rewards: Any = 0.5, **changes: Any) -> dict[str, Any]:
    found = rewards if isinstance(rewards, dict) else {"0": [rewards], "1": [rewards]}
    scored = [r for each in found.values() for r in each if r is not None]
    unscored = sum(map(len, found.values())) - len(scored)
    held_out = {"sum": math.fsum(scored), "scored": len(scored), "unscored": unscored, "failed": 0}
    training = {"steps": [[8.0, 16], [12.0, 16]], "scored": 32, "unscored": 0, "failed": 1}
    return {
        "task": task,
        "rule": rule,
        "unit": "rollout",
        "seed": seed,
        "settings": "s",
        "arm": rule,
        "warm_start": f"w{seed}",
        "training": None if rule == "start" else training,
        "held_out": {**held_out, "rewards": found},
        "seconds": {"all": 90.0},
        "commit": "abc",
        "date": "2026-11-24",
        **changes,
    }


def failed(row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("task", "rule", "unit", "seed", "settings")}
    return {**kept, "error": "EngineError: lost", "seconds": {"all": 1.0}}


def test_a_row_is_there_when_it_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    journal = _journal.Journal(path, "d")
    journal.add(row_of("sql", "terminal", 0))
    journal.add(row_of("sql", "anchor", 0))
    assert len(path.read_text().splitlines()) == 2
    again = _journal.Journal(path, "d")
    keys = [_journal.Key("sql", rule, "rollout", 0) for rule in ("terminal", "anchor", "critic")]
    assert list(again.done) == keys[:2]
    assert again.left(keys) == keys[2:]
    assert again.done == journal.done


def test_a_row_that_a_crash_cut_short_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    _journal.Journal(path, "d").add(row_of("sql", "terminal", 0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"design":"d","task":"sql","rule":"an')
    journal = _journal.Journal(path, "d")
    assert len(journal.done) == 1
    journal.add(row_of("sql", "anchor", 0))
    assert path.read_bytes().startswith(whole + b'{"design":"d","task":"sql","rule":"anchor"')
    assert len(_journal.Journal(path, "d").done) == 2


def test_rows_of_another_design_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    _journal.Journal(path, "d").add(row_of("sql", "terminal", 0))
    with pytest.raises(SystemExit, match=r"line 1, belongs to another design \(d; this one is e\)"):
        _journal.Journal(path, "e")
    path.write_text('{"design": "e"}\n')
    with pytest.raises(SystemExit, match="line 1, is no row of this script"):
        _journal.Journal(path, "e")


@pytest.mark.parametrize(
    ("rule", "seed", "changes", "name"),
    [
        ("anchor", 1, {"settings": "other"}, "settings"),
        ("terminal", 1, {"arm": "other"}, "arm"),
        ("anchor", 0, {"warm_start": "other"}, "warm_start"),
    ],
)
def test_rows_of_other_settings_are_refused(
    tmp_path: Path, rule: str, seed: int, changes: dict[str, str], name: str
) -> None:
    path = tmp_path / "rows.jsonl"
    journal = _journal.Journal(path, "d")
    journal.add(row_of("sql", "terminal", 0))
    with pytest.raises(SystemExit, match=f"has sql, terminal, seed 0 with another {name}"):
        journal.add(row_of("sql", rule, seed, **changes))
    assert len(path.read_text().splitlines()) == 1
    journal.add(row_of("rag", rule, seed, **changes))  # other tasks have others


def test_what_cannot_be_used_is_made_once_more(tmp_path: Path) -> None:
    journal = _journal.Journal(tmp_path / "rows.jsonl", "d")
    row = row_of("sql", "terminal", 0)
    key = _journal.Key.of(row)
    journal.add(failed(row))
    assert journal.left([key]) == [key]
    nineteen = {"0": [0.5] * 18 + [None, None]}
    journal.add(row_of("sql", "terminal", 0, nineteen))
    assert (journal.left([key]), journal.done) == ([], {})
    assert _journal.is_usable(row_of("sql", "terminal", 0, {"0": [0.5] * 19 + [None]}))
    training = {"steps": [[8.0, 16]], "scored": 16, "unscored": 1, "failed": 0}
    assert not _journal.is_usable(row_of("sql", "terminal", 0, training=training))


# --- what is said -----------------------------------------------------------------------------
def whole(path: Path, keys: Any) -> Any:
    """Write rows of runs in which `anchor` gains .2 on every task, and `critic` loses .2 on
    quests.
    """
    journal = _journal.Journal(path, "d")
    lines = []
    for key in keys:
        rng = random.Random(str(key))
        level = 0.5 + 0.2 * (key.rule == "anchor") - 0.2 * (key[:2] == ("quest", "critic"))
        noise = rng.gauss(0, 0.01)
        rewards = {str(c): [level + noise + rng.gauss(0, 0.02)] for c in range(30)}
        row = row_of(key.task, key.rule, key.seed, rewards, unit=key.unit, arm=str(key[:3]))
        lines.append(json.dumps({"design": "d", **row}) + "\n")
    path.write_text("".join(lines))
    journal.read()
    return journal


def test_the_table_is_whole(tmp_path: Path) -> None:
    journal = whole(tmp_path / "rows.jsonl", _credit_plan.every_run())
    text = _credit_table.table(journal, _credit_plan.SEEDS)
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert len(rows) == 2 + 23 + 4
    tasks = ["quest", "sql", "sql", "rag", "rag-crewai", "mean of quest, sql, rag, rag-crewai"]
    assert [row[0] for row in rows if row[4].endswith(": better")] == tasks
    assert [row[:3] for row in rows if row[4].endswith(": worse")] == [
        ["quest", "`critic`", "rollout"],
        ["mean of quest, sql, rag, rag-crewai", "`critic`", "rollout"],
    ]
    assert "Corrected for 23 gains: 3." in text
    assert "Not complete" not in text


@pytest.mark.parametrize(
    "options", [(), ("--rule", "critic", "--results", str(RESULTS / "credit_critic.jsonl"))]
)
def test_the_tables_of_the_page_are_what_the_committed_rows_say(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["credit.py", "--table", *options])
    assert credit.main() == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(said) > 12
    assert "\n".join(["", *said, ""]) in (DOCS / "evidence/credit-comparison.md").read_text()


# --- a run ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_runs_of_an_untaught_model(tmp_path: Path, sql_cache: Path) -> None:
    """Check runs of one step with a model that had almost no warm start."""
    from sql_example import training

    shutil.copytree(sql_cache, tmp_path / "cache")  # where its warm start is kept too
    imitation = replace(training.RECIPE.imitation, demonstrations=64)
    recipe = replace(training.RECIPE, tasks_per_step=2, imitation=imitation)

    def bench(steps: int) -> Any:
        return credit.Bench(
            "sql",
            tmp_path / "cache",
            tmp_path,
            plan=replace(_credit_plan.PLANS["sql"], steps=steps, held_out=3),
            recipe=recipe,
            split="dev",
        )

    path, first = tmp_path / "rows.jsonl", bench(1)
    keys = [_journal.Key("sql", rule, "rollout", 0) for rule in ("start", "terminal", "critic")]
    for key in keys:
        assert first.run(key, _journal.Journal(path, "d"))
    journal = _journal.Journal(path, "d")
    assert (journal.left(keys), len(journal.done)) == ([], 3)
    start, terminal, critic = (journal.done[key] for key in keys)
    assert start["training"] is None
    assert start["warm_start"] == terminal["warm_start"] == critic["warm_start"]
    assert start["arm"] == terminal["arm"] != critic["arm"]
    for row in (terminal, critic):
        [[total, scored]] = row["training"]["steps"]
        assert (scored, row["training"]["unscored"]) == (16, 0)
        assert 0 <= total <= 16
        assert row["held_out"]["scored"] == 3
        assert [len(rewards) for rewards in row["held_out"]["rewards"].values()] == [3]
        assert row["learning_rate"] == terminal["learning_rate"] > 0
        assert row["versions"]["torch"]
        assert str(tmp_path) not in json.dumps(row)
    with pytest.raises(SystemExit, match="with another settings"):
        bench(2).run(_journal.Key("sql", "anchor", "rollout", 0), journal)
    assert len(_journal.Journal(path, "d").rows) == 3
