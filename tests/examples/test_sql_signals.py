"""`--air`: the signal that the SQL app's records give, and what the option does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightspan.lightning.air import AIR
from lightspan.lightning.episode import Call
from lightspan.lightning.history import History
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan_examples.script import main
from lightspan_testing.tiny import tiny_model
from sql_example import training
from sql_example.prompts import check_prompt
from sql_example.signals import draft_error


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
    assert air["credit"] == "discounted(1)"
    changed = {key for key in plain if plain[key] != air[key]}
    assert changed == {"air", "credit", "step_rewards"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_script(
    script_of: Callable[[str], Any],
    torch_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sql_cache: Path,
) -> None:
    """A step with intermediate rewards is like any other, and says what they did."""
    tasks = training.load_tasks(sql_cache, "train")
    texts = [task["schema"] + task["question"] for task in tasks]
    model = tiny_model(tmp_path / "model", seed=0, context=192, texts=texts)
    run = tmp_path / "run"
    arguments = ["--air", "--model", str(model), "--steps", "1", "--cache", str(sql_cache)]
    arguments += ["--folder", str(run), "--held-out", "4", "--runners", "2"]
    fewer = replace(training.REAL_MODEL, group_size=2, tasks_per_step=4)
    monkeypatch.setattr(training, "REAL_MODEL", fewer)
    assert main(script_of("sql").EXAMPLE, "", arguments) == 0
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    step = next(line for line in lines if line["kind"] == "train")
    assert -1.0 <= step["air/draft_error"] <= 0.0
    assert step["air/draft_error/seen"] > 0
