"""Compare the tables of benchmarks/README.md with the result files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    return tables


def test_the_page_has_the_tables_of_the_results() -> None:
    command = [sys.executable, "benchmarks/tables.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    assert subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def test_a_table_of_figures_and_one_of_sessions(tables: Any) -> None:
    run = {"date": "2026-01-02", "commit": "abc", "machine": "m", "load": 0.5, "python": "3.11.7"}
    figure = {"what": "a | b", "unit": "ms", "ours": 2.0, "peer": "p", "theirs": 9.0, "at_least": 5}
    session = {"seconds": 90, "passed": 7, "failed": 1, "error": 1, "skipped": 3}
    results = {
        "store": {**run, "figures": [figure]},
        "tests_ray": {**run, "versions": {"ray": "2.60.0"}, **session},
    }
    assert tables.figures_table(results).splitlines()[2:] == [
        "| **[`store.py`](store.py)**, 2026-01-02, abc, m, Python 3.11.7, load 0.5 | | | | | | | |",
        r"| a \| b | ms | 2 | p | 9 | 4.5x | >= 5x | MISSED |",
    ]
    assert tables.sessions_table(results).splitlines()[2:] == [
        "| `tests_ray` | 7 | 2 | 3 | 2 | 2026-01-02, abc, m, Python 3.11.7, load 0.5, ray 2.60.0 |"
    ]


def test_a_table_of_families(tables: Any) -> None:
    run = {"date": "2026-01-02", "commit": "abc", "machine": "m", "load": 0.5, "python": "3.11.7"}
    exact = {"engine": {"error": 3.2e-6}, "learner": {"error": 1e-5, "note": "in trees"}}
    refused = {"engine": {"refusal": "AForCausalLM cannot: x"}, "learner": {"failure": "a | b"}}
    families = {"A": refused, "B": exact, "C": None}
    results = {
        "families": {**run, "versions": {"transformers": "5.23.0"}, "families": families},
        "families_5.0.0": {
            "versions": {"transformers": "5.0.0"},
            "families": {"A": exact, "B": None, "C": None},
        },
    }
    assert tables.families_table(results["families"]).splitlines() == [
        "<!-- 2026-01-02, abc, m, Python 3.11.7, load 0.5, transformers 5.23.0 -->",
        "",
        "With transformers 5.23.0:",
        "",
        "| family | engine | learner |",
        "|---|---|---|",
        "| A | refused | **failed** |",
        "| B | 3e-06 | 1e-05 |",
        "| C | not in transformers 5.23.0 | |",
        "",
        "| cell | families | what it says |",
        "|---|---|---|",
        "| engine | A | … cannot: x |",
        r"| learner | A | a \| b |",
        "| learner | B | in trees |",
    ]
    assert tables.versions_table(results).splitlines()[2:] == [
        "| 5.0.0, 3 run | engine | A | exact |",
        "| 5.0.0, 3 run | learner | A | exact |",
        "| 5.0.0, 3 run |  | B | not there |",
    ]


def test_tables_of_training_runs(tables: Any) -> None:
    run = {
        "seed": 0,
        "points": [[0, 0.5], [2, 0.625]],
        "gain": "+0.500 (+0.100..+0.900)",
        "engine_cpu_s": 30.1,
        "learner_cpu_s": 5.2,
        "warm_start_cpu_s": 197.9,
        "wall_s": 90.0,
        "before": {"a": 0.0, "b": 0.0},
        "after": {"a": 1.0, "b": 0.0},
        "kinds": {"a": "logic", "b": "missing"},
        "circumstances": {"date": "2026-01-02", "commit": "abc", "load": 3.5},
    }
    permuted = {**run, "name": "rewards permuted"}
    figures = {"RL, seed 0": {**run, "name": "RL"}, "permuted, seed 0": permuted, "constant": {}}
    cells = (
        "0 | 0.000 → 0.500 | +0.500 (+0.100..+0.900) | 0.50, 0.62 | 30.1 + 5.2 | 198 | 1.5 "
        "| 2026-01-02, abc, 3.5 |"
    )
    result = {"figures": figures}
    assert tables.learning.runs(result).splitlines()[2:] == [f"| {cells}"]
    assert tables.learning.controls(result).splitlines()[2:] == [f"| rewards permuted | {cells}"]
    assert tables.learning.kinds(result).splitlines() == [
        "| run | seed | logic | missing |",
        "|---|---|---|---|",
        "| RL | 0 | 0.00 → 1.00 | 0.00 → 0.00 |",
        "| rewards permuted | 0 | 0.00 → 1.00 | 0.00 → 0.00 |",
    ]


def test_a_session_writes_its_result(tmp_path: Path) -> None:
    path, another = tmp_path / "result.json", test_a_table_of_figures_and_one_of_sessions.__name__
    command = [sys.executable, "-m", "pytest", "-q", f"{Path(__file__)}::{another}"]
    environment = {**os.environ, "LIGHTSPAN_RESULT": str(path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    result = json.loads(path.read_text())
    counts = {key: result[key] for key in ("passed", "failed", "error", "skipped")}
    assert counts == {"passed": 1, "failed": 0, "error": 0, "skipped": 0}
    assert result["versions"]["opentelemetry-sdk"]


@pytest.mark.parametrize("check", [True, False])
def test_a_page_that_is_out_of_date(
    tables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: bool
) -> None:
    """With `--check` it is reported and left as it is; without, it is written."""
    current, page = (ROOT / "benchmarks/README.md").read_text("utf-8"), tmp_path / "README.md"
    old = tables.fill(current, {"sessions": "old"})
    page.write_text(old, "utf-8")
    of_results = tables.pages
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(
        tables, "pages", lambda results: {page: of_results(results)[tables.HERE / "README.md"]}
    )
    monkeypatch.setattr(sys, "argv", ["tables.py", *["--check"] * check])
    assert tables.main() == int(check)
    assert page.read_text("utf-8") == (old if check else current)
