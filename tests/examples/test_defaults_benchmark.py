"""Test the plan, the rule of choice and the tables of `benchmarks/defaults.py`, and the app's call.

The benchmark itself measures the learning.
"""

from __future__ import annotations

import http.server
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import _defaults_plan as plan
import _defaults_table as table
import _reasoning_tasks as tasks
import defaults
import peers_learning
import pytest

from lightspan import LLM


# --- the plan -----------------------------------------------------------------------------------
def test_all_arms_have_equal_rollouts() -> None:
    for task in plan.TASKS.values():
        for arm in plan.ARMS.values():
            each = arm.options.get("group_size", 8) * arm.options.get("tasks_per_step", 16)
            assert arm.steps(task.steps) * each == task.steps * plan.ROLLOUTS
    with pytest.raises(ValueError, match="no whole number of steps of 136"):
        plan.Arm(options={"group_size": 17, "tasks_per_step": 8}).steps(10)


def test_the_stages_share_no_seed_and_no_split() -> None:
    screening, confirmation = plan.STAGES.values()
    assert (screening.split, confirmation.split) == ("dev", "test")
    assert not set(screening.seeds) & set(confirmation.seeds)
    assert {key.arm for key in plan.runs("confirmation", "tasks-4")} == {
        "today",
        "tasks-4",
        "permuted",
    }
    assert {key.task for key in plan.runs("screening")} == set(plan.SCREENED)
    assert {key.task for key in plan.runs("confirmation")} == set(plan.TASKS)
    lora = {key.task for key in plan.runs("confirmation", "lora") if key.arm == "lora"}
    assert lora == {name for name, task in plan.TASKS.items() if task.model == "tiny"}


def test_an_arm_differs_from_the_defaults_by_what_it_says(tmp_path: Path, tiny: Path) -> None:
    def settings(arm: str) -> dict[str, Any]:
        key = plan.Key("screening", "gcd", arm, 3)
        return dict(defaults.algorithm_of(key, tiny, {"failure_reward": 0.0}).config())

    today = settings("today")
    assert (today["seed"], today["failure_reward"], today["minibatches"]) == (3, 0.0, 1)
    rate = today["optimizer"]["learning_rate"]
    assert settings("rate-x3")["optimizer"]["learning_rate"] == pytest.approx(3 * rate)
    warm = settings("minibatches-4-warmup")
    assert (warm["optimizer"]["learning_rate"], warm["optimizer"]["warmup_steps"]) == (rate, 8)
    assert settings("minibatches-4-clip")["loss"]["clip_high"] == 0.2
    bounded = settings("minibatches-4-kl")
    assert {name for name, value in bounded.items() if value != today[name]} == {
        "minibatches",
        "target_kl",
    }
    assert settings("lora")["lora"] is not None


# --- the rule of choice -------------------------------------------------------------------------
@pytest.fixture
def two_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give screening a second seed, so that a missing one can be told."""
    stage = replace(plan.STAGES["screening"], seeds=(0, 1))
    monkeypatch.setitem(cast("dict[str, plan.Stage]", plan.STAGES), "screening", stage)


def row(task: str, arm: str, seed: int, start: float, end: float) -> dict[str, Any]:
    """Return a row of 100 held-out tasks, of which the shares `start` and `end` are solved."""
    solved = [[1] * round(100 * share) + [0] * round(100 * (1 - share)) for share in (start, end)]
    ends = [
        {"mean": share, "exact": None, "rewards": rewards}
        for share, rewards in zip((start, end), solved, strict=True)
    ]
    training = {"approx_kl": [0.01, 0.03]}
    spent = {"process": 20.0, "children": 5.0}
    key = plan.Key("screening", task, arm, seed)._asdict()
    both = {"start": ends[0], "end": ends[1], "clusters": []}
    return {**key, **both, "training": training, "cpu_s": spent}


def results(**ends: float) -> list[dict[str, Any]]:
    """Return rows of six tasks with both seeds, all from 0.3, that end as `ends` says by arm."""
    return [
        row(task, arm.replace("_", "-"), seed, 0.3, end)
        for task in plan.SCREENED[:6]
        for seed in (0, 1)
        for arm, end in ends.items()
    ]


def choose(rows: list[dict[str, Any]]) -> str | None:
    return table.choice(table.usable(rows, "screening"), "screening")


@pytest.mark.usefixtures("two_seeds")
def test_the_highest_gain_is_chosen() -> None:
    rows = results(today=0.5, minibatches_4=0.6, tasks_4=0.55, rate_third=0.4)
    assert choose(rows) == "minibatches-4"
    assert choose(results(today=0.5, rate_third=0.4)) is None
    # five tasks are too few, as is one seed of the sixth
    assert choose([each for each in rows if each["task"] != "gcd"]) is None
    assert choose([each for each in rows if (each["task"], each["seed"]) != ("gcd", 1)]) is None


@pytest.mark.usefixtures("two_seeds")
def test_an_arm_that_collapses_once_is_not_chosen() -> None:
    rows = results(today=0.5, minibatches_4=0.9, tasks_4=0.55)
    fallen = [each for each in rows if (each["task"], each["arm"]) == ("gcd", "minibatches-4")]
    fallen[1].update(row("gcd", "minibatches-4", 1, 0.3, 0.1))
    assert table.is_collapsed(fallen[1])
    assert not table.is_collapsed(row("gcd", "today", 0, 0.3, 0.29))
    assert choose(rows) == "tasks-4"


@pytest.mark.usefixtures("two_seeds")
def test_the_control_is_never_chosen() -> None:
    assert choose(results(today=0.5, permuted=0.9)) is None


@pytest.mark.usefixtures("two_seeds")
def test_the_tables_say_what_is_missing() -> None:
    rows = results(today=0.5, minibatches_4=0.6)
    rows.append({"stage": "screening", "task": "gcd", "constant": "1", "score": 0.325})
    rows.append({**plan.Key("screening", "rag", "today", 0)._asdict(), "error": "OSError: full"})
    text = table.stage_report(rows, "screening")
    assert "| gcd | minibatches-4 | 0, 1 | 0.300 → 0.600 |" in text
    assert "| gcd | a constant answer |  | 0.325 |" in text
    assert "| minibatches-4 | 6 | +0.100 (+0.100..+0.100) | 6 of 6 | 0 |" in text
    assert "Chosen: `minibatches-4`." in text
    assert "- gcd: 22 of 26 runs (tasks-4, " in text
    assert "- rag: 26 of 26 runs (all; 0.9 CPU-h)" in text
    assert "screening, rag, today, seed 0 failed: OSError: full" in text
    assert table.stage_report(rows, "confirmation") == "Nothing has been run yet."


def test_results_of_another_design_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = defaults.Journal(path)
    key = plan.Key("screening", "gcd", "today", 0)
    journal.add({**key._asdict(), "error": "once"})
    assert defaults.Journal(path).left([key]) == [key]
    journal.add({**key._asdict(), "error": "twice"})
    assert defaults.Journal(path).left([key]) == []
    path.write_text(json.dumps({"design": "another", **key._asdict()}) + "\n")
    with pytest.raises(SystemExit, match="is of the design another"):
        defaults.Journal(path)


def test_the_tables_are_those_of_the_rows() -> None:
    """Check that the committed tables were made after the last committed row."""
    rows = [json.loads(line) for line in defaults.RESULTS.read_text().splitlines()]
    written = json.loads(defaults.RESULTS.with_suffix(".json").read_text())["stages"]
    assert written == {stage: table.stage_report(rows, stage) for stage in plan.STAGES}
    rows = [json.loads(line) for line in peers_learning.RESULTS.read_text().splitlines()]
    written = json.loads(peers_learning.RESULTS.with_suffix(".json").read_text())["table"]
    assert written == peers_learning.table(rows)


# --- tasks and the app --------------------------------------------------------------------------
def test_wrong_demonstrations_are_near_the_right_answer() -> None:
    import random

    rng = random.Random(0)
    numbers = {tasks.mistake("12", ["7"], rng) for _ in range(200)}
    assert numbers == {"2", "10", "11", "13", "14", "22", "7"}
    assert {tasks.mistake("a, b", ["c"], rng) for _ in range(50)} == {"b, a", "a"}
    assert tasks.mistake("son", ["aunt"], rng) == "aunt"


def test_examples_are_turns_before_the_question() -> None:
    assert tasks.messages("q", []) == [{"role": "user", "content": "q"}]
    roles = [turn["role"] for turn in tasks.messages("q", [{"question": "a", "answer": 1}])]
    assert roles == ["system", "user", "assistant", "user"]


def test_a_closed_connection_is_opened_again() -> None:
    """Check that a request is sent again if the server has closed the connection since."""
    asked: list[Any] = []

    class Endpoint(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = json.dumps({"choices": [{"message": {"content": " 12 "}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
            self.close_connection = True  # without telling the client

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        llm = LLM(base_url=f"http://127.0.0.1:{server.server_port}/v1", model="policy")
        turns = [{"role": "user", "content": "q"}]
        assert [tasks.ask(llm, turns, 5) for _ in range(2)] == ["12", "12"]
        server.shutdown()
    assert [body["max_tokens"] for body in asked] == [5, 5]


# --- against the peer ---------------------------------------------------------------------------
def test_the_table_of_a_comparison() -> None:
    row = {
        "task": "leg_counting",
        "steps": 12,
        "rollouts": 1536,
        "rewards": [0.1, 0.1, 0.2, 0.2, 0.3, 0.5],
        "start": 0.2,
        "wall_s": 30.0,
        "peak_mib": 600,
    }
    parts = {"engine": 5.0, "learner": 2.0, "runners": 10.0, "process": 15.0}
    rows = [
        {**row, "seed": seed, "side": side, "end": end, "cpu_s": cpu, "parts": parts}
        for seed in (0, 1)
        for side, end, cpu in (("trl-1.16.0", 0.3, 20.0), ("lightspan", 0.32, 25.0))
    ]
    text = peers_learning.table(rows)
    assert (
        "| leg_counting | lightspan | 0, 1 | 1,536 | 0.200 → 0.320 | 0.100, 0.400 | 25 | 30 | 600 |"
    ) in text
    assert "ends +0.020 (+0.020..+0.020) from TRL, over 2 seeds; TRL takes 0.80 times" in text
    assert "runners with the app 10, gateway, store and start 8 CPU-s" in text
    assert "- `leg_counting`, lightspan-http: 3 of 3 seeds" in text
    assert [each.reached for each in peers_learning.figures(rows)] == [False]
