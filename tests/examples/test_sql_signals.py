"""`--air`: the signal that the SQL app's records give, and what the option does."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightspan import conventions as c
from lightspan.lightning.air import AIR
from lightspan.lightning.episode import Call
from lightspan.lightning.history import History
from lightspan.messages import dump
from lightspan.records import CallOutcome
from lightspan.spans import Span, SpanKind, SpanStatus
from lightspan.testing.tiny import tiny_model
from sql_example import training, worlds
from sql_example.prompts import check_prompt
from sql_example.signals import draft_error

SCRIPT = Path(__file__).parents[2] / "examples" / "sql" / "train.py"


def call_of(agent: str, prompt: str) -> Call:
    span = Span(
        span_id="1" * 16,
        trace_id="0" * 32,
        parent_id=None,
        name="chat",
        kind=SpanKind.LLM,
        rollout_id="ro",
        attempt_id="at",
        start_ns=1,
        end_ns=2,
        status=SpanStatus.OK,
        attributes={c.INPUT_MESSAGES: dump([{"role": "user", "content": prompt}])},
    )
    return Call(
        call_id="c", choice=0, agent_path=agent, outcome=CallOutcome.OK, sequence_start=1, span=span
    )


def seen(*calls: Call) -> float:
    return draft_error(History(task_id="t", turn=len(calls), calls=calls, tools=()))


def test_whether_the_newest_draft_failed() -> None:
    wrote = call_of("write_query", "Write one SQLite query.\nError: no words of mine")
    good = call_of("check_query", check_prompt("How many?", "SELECT\n1", "1"))
    bad = call_of("check_query", check_prompt("How many?", "SELEC 1", 'Error: near "SELEC"'))
    assert seen() == 0.0
    assert seen(wrote) == 0.0
    assert seen(wrote, good) == 0.0
    assert seen(wrote, bad) == -1.0
    assert seen(wrote, bad, wrote, good) == 0.0
    assert seen(wrote, good, wrote, bad) == -1.0
    bare = Call(call_id="c", choice=0, agent_path="check_query", outcome=CallOutcome.OK)
    assert seen(bare) == 0.0


def test_the_option_turns_it_on(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", seed=0, texts=["a"])
    plain = training.make_algorithm(model, 0).config()
    air = training.make_algorithm(model, 0, air=True).config()
    assert (plain["air"], plain["credit"]) == (None, "terminal")
    expected = training.AIR_OPTIONS["air"]
    assert isinstance(expected, AIR)
    assert air["air"] == expected.config()
    assert air["credit"] == f"discounted({training.AIR_OPTIONS['gamma']:g})"
    changed = {key for key in plain if plain[key] != air[key]}
    assert changed == {"air", "credit", "step_rewards"}


def script() -> Any:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_its_runs_have_a_folder_of_their_own() -> None:
    example = script().EXAMPLE
    parser: argparse.ArgumentParser = example.parser("")
    assert str(example.folder(parser.parse_args([]))) == "runs/sql-seed0"
    assert str(example.folder(parser.parse_args(["--air"]))) == "runs/sql-air-seed0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script(tmp_path: Path) -> None:
    """A step with intermediate rewards is like any other, and says what they did."""
    cache = tmp_path / "cache"
    (cache / "data").mkdir(parents=True)
    sizes: dict[worlds.Split, int] = {"train": 4, "dev": 1, "test": 1}
    worlds.generate(cache / "data", worlds=sizes, questions_per_world=4)
    (cache / "data" / "complete").touch()
    tasks = training.load_tasks(cache, "train")
    texts = [task["schema"] + task["question"] for task in tasks]
    model = tiny_model(tmp_path / "model", seed=0, context=192, texts=texts)
    run = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), "--air", "--model", str(model), "--steps", "1"]
    command += ["--cache", str(cache), "--folder", str(run), "--held-out", "4", "--runners", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    step = next(line for line in lines if line["kind"] == "train")
    assert -1.0 <= step["air/draft_error"] <= 0.0
    assert step["air/draft_error/seen"] > 0
