"""Test rewards by a judge or a function in a `Trainer`, with real apps, HTTP and stores."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import judged_app as judged  # type: ignore[import-not-found]
import pytest
import scripted_judge as script  # type: ignore[import-not-found]

from lightspan import LLM, Judge, Trainer
from lightspan.cli import main
from lightspan.errors import AppError, ConfigError, EngineError, RewardError
from lightspan.progress import SilentReporter
from lightspan.schema.records import Outcome
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run
from tests.reports.ui_numbers import check_run

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedServer]:
    """Run the endpoint of the app's model."""
    with ScriptedServer(judged.counted) as server:
        yield server


def by_number(text: str, place: int) -> int:
    return int(text.rpartition("number ")[2])


@pytest.fixture
def wise() -> Iterator[ScriptedServer]:
    with ScriptedServer(script.gives(by_number)) as server:
        yield server


def trainer(folder: Path, reward: Any, **options: Any) -> Trainer:
    quiet = {"runners": 2, "steps": 1, "folder": folder, "reporter": SilentReporter()}
    return Trainer(judged.Sees(), reward=reward, **{**quiet, **options})


def a_judge(server: ScriptedServer, **options: Any) -> Judge:
    return Judge("More is better.", LLM(base_url=server.url, model="wise"), **options)


# --- a judge --------------------------------------------------------------------------------
def test_an_algorithm_learns_from_the_judge_and_the_apps_own_reward_is_kept(
    model: ScriptedServer, wise: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    folder, own_calls = tmp_path / "run", len(model.requests)
    training = trainer(folder, a_judge(wise), reporter=lines)
    result = training.fit(judged.counts, judged.tasks(model.url, 1, 3), judged.tasks(model.url, 5))
    assert [evaluation.rewards for evaluation in result.evaluations] == [
        {task: 0.5} for task in result.evaluations[0].rewards
    ] * 2
    sees: Any = training.algorithm
    assert sorted(sees.rewards) == sorted([0.1, 0.3, 0.2, 0.4, 0.3, 0.5] * 2)
    assert {e.reward_source for e in sees.episodes} == {"scored"}
    assert {e.dimensions["app"] for e in sees.episodes} == {0.25}
    # the judge's calls are nobody's: the app's are all there is, and none went to the judge
    stored = stored_episodes(folder / "store.db")
    calls = [call for episode in stored for call in episode.calls]
    assert len(calls) == len(model.requests) - own_calls == 12 + 2
    assert {call.agent_path for call in calls} == {"counter"}
    assert {episode.reward for episode in stored} == {0.25}
    assert not any("judge" in str(span.attributes) for e in stored for span in e.spans)
    assert {r.headers["authorization"] for r in wise.requests} == {"Bearer none"}
    asked = [request.last_text for request in wise.requests]
    assert len(asked) == len(set(asked))
    assert not any("0.25" in text for text in asked)
    # what was said is in the run, and shown
    kept = RunFolder(folder).rewards("judge")
    assert {e.rollout_id: e.reward for e in sees.episodes}.items() <= {
        name: scored.value for name, scored in kept.items()
    }.items()
    train = [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]
    assert (train[0]["judge/calls"], train[0]["judge/unscored"]) == (len(asked) - 1, 0)
    assert train[0]["judge/tokens"] > 0
    assert any("held-out reward" in text and ", app 0.25" in text for text in lines.texts)
    shown = inspect_run(folder)
    assert "\nreward judge: mean 0.329 of 14\n" in shown
    one = inspect_run(folder, sees.episodes[0].rollout_id)
    assert f"reward {sees.rewards[0]:g} (scored)\n" in one
    assert "\n  the app's own reward: 0.25\n" in one
    assert one.endswith(f"\nreward judge: {sees.rewards[0]:g}\n  A {{rambling}} sentence.")
    asyncio.run(check_run(folder))


def judge_costs(folder: Path, name: str) -> float:
    """Return the sum of a judge's metric over the run's lines."""
    return sum(line.get(f"judge/{name}", 0) for line in RunFolder(folder).metrics())


@pytest.mark.slow
def test_a_judge_that_was_mended_scores_what_it_had_left_out(
    model: ScriptedServer, wise: ScriptedServer, tmp_path: Path
) -> None:
    """A held-out evaluation without any score is done again, and every answer is in the metrics."""
    mended: Any = wise.script

    def broken(request: Request) -> Any:
        if len(wise.requests) == 1:
            return "Fine."
        return mended(request) if len(wise.requests) < 4 else Reply(status=401)

    wise.script = broken
    folder, tasks = tmp_path / "run", judged.tasks(model.url, 1, 3)
    judge = a_judge(wise, concurrency=1)
    with pytest.raises(EngineError, match="AuthenticationError"):
        trainer(folder, judge).fit(judged.counts, tasks, judged.tasks(model.url, 5))
    [earlier] = RunFolder(folder).evaluations()
    assert (earlier.rewards, earlier.unscored) == ({}, 1)
    [line] = RunFolder(folder).metrics()
    spent = {**line, "cpu_s/engine_evaluation": 1000.0}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(spent)}\n")
    wise.script = mended
    result = trainer(folder, judge).fit(
        judged.counts, tasks, judged.tasks(model.url, 5), resume=True
    )
    assert [[*each.rewards.values()] for each in result.evaluations] == [[0.5], [0.5]]
    held_out = [line for line in RunFolder(folder).metrics() if line["kind"] == "eval"]
    assert [(line["step"], line["mean"]) for line in held_out] == [(0, 0.5), (1, 0.5)]
    assert held_out[0]["cpu_s/engine_evaluation"] >= 1000.0
    answers = [
        json.loads(line) for line in (folder / "journal" / "judge.jsonl").read_text().splitlines()
    ]
    assert judge_costs(folder, "calls") == len(answers)
    assert judge_costs(folder, "tokens") == sum(
        each["input_tokens"] + each["output_tokens"] for each in answers
    )


@pytest.mark.faults
def test_a_killed_run_asks_no_question_twice(model: ScriptedServer, tmp_path: Path) -> None:
    answered: list[str] = []
    killed_at, stop = threading.Event(), threading.Event()
    full = script.gives(by_number)

    def answers(request: Request) -> str:
        if len(answered) == 9 and not stop.is_set():
            killed_at.set()
            stop.wait(60)
            raise ConnectionError  # to the process that is gone
        answered.append(request.last_text)
        said: str = full(request)
        return said

    with ScriptedServer(answers) as server:
        program = [sys.executable, str(APPS / "judged_app.py")]
        process = subprocess.Popen([*program, str(tmp_path / "run"), model.url, server.url])
        assert killed_at.wait(90)
        process.send_signal(signal.SIGKILL)
        process.wait()
        stop.set()
        result = judged.train(tmp_path / "run", model.url, server.url)
    assert result.steps == 2
    assert len(answered) == len(set(answered)) == judge_costs(tmp_path / "run", "calls") == 12


# --- a function -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", [1.0, 3.0, 2.0, 4.0, 3.0, 5.0]),
        ("in_an_array", [1.0, 3.0, 2.0, 4.0, 3.0, 5.0]),
        pytest.param("ranked", [0.0] * 6, marks=pytest.mark.slow),
    ],
)
def test_a_function_gives_the_reward(
    model: ScriptedServer, tmp_path: Path, name: str, expected: list[float]
) -> None:
    training = trainer(tmp_path / "run", f"judged_app:{name}")
    training.fit(judged.counts, judged.tasks(model.url, 1, 3))
    sees: Any = training.algorithm
    assert sorted(sees.rewards) == sorted(expected * 2)
    kept = RunFolder(tmp_path / "run").rewards(name)
    assert [kept[e.rollout_id].value for e in sees.episodes] == sees.rewards
    config = RunFolder(tmp_path / "run").read_config()
    assert config["reward"] == {"name": name, "function": f"judged_app:{name}"}
    if name == "length":
        assert {e.dimensions["letters"] for e in sees.episodes} == {1.0, 3.0}


def test_a_function_that_fails_leaves_rollouts_unscored(
    model: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    training = trainer(tmp_path / "run", judged.moody, reporter=lines)
    failing = [{"q": "qqqqqq", "url": model.url, "fails": True}]
    training.fit(judged.counts, [*judged.tasks(model.url, 1), *failing])
    sees: Any = training.algorithm
    # 1 raises, 2 is None, 3 is NaN; the other's app failed
    rewards = {(e.outcome is Outcome.OK, e.reward) for e in sees.episodes}
    assert (len(sees.rewards), rewards) == (12, {(True, None), (False, 0.0)})
    kept = RunFolder(tmp_path / "run").rewards("moody")
    assert Counter(each.why for each in kept.values()) == {
        "the reward 'moody' raised LookupError: nothing to compare with": 2,
        "the reward 'moody' returned None": 2,
        "the reward 'moody' returned nan": 2,
    }
    [told] = [text for text in lines.texts if "unscored, which is not zero" in text]
    assert "(the reward 'moody' " in told
    [line] = [line for line in RunFolder(tmp_path / "run").metrics() if line["kind"] == "train"]
    assert line["moody/unscored"] == 6


@pytest.mark.slow
def test_what_is_no_reward_is_an_error(model: ScriptedServer, tmp_path: Path) -> None:
    message = r"a reward for each of the 2 episodes, in a list: it returned \[1.0\]"
    with pytest.raises(RewardError, match=message):
        trainer(tmp_path / "run", judged.too_few).fit(judged.counts, judged.tasks(model.url, 1))


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("nowhere:at_all", AppError, "the reward 'nowhere:at_all' cannot be imported"),
        ("judged_app:gone", AppError, "'judged_app' has no 'gone'"),
        (3, ConfigError, "reward=3: give a function"),
        (Judge, ConfigError, "asks for 'rubric', which nothing provides"),
        (lambda run: 1.0, ConfigError, "asks for 'run', which nothing provides; it can ask for "),
    ],
)
def test_what_cannot_reward_is_refused_before_any_rollout(
    tmp_path: Path, reward: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(tmp_path / "run", reward)


# --- every algorithm ------------------------------------------------------------------------
def vowels(answer: str) -> float:
    """Return a reward that differs from the app's own."""
    return float(sum(letter in "aeiou" for letter in answer.lower()))


@pytest.mark.slow
def test_lightning_rl_learns_from_it(
    apps: Any, rl: Callable[..., Any], ask: Callable[..., Any], tmp_path: Path
) -> None:
    quiet: dict[str, Any] = {"runners": 2, "steps": 1, "reporter": SilentReporter()}
    training = Trainer(rl(), folder=tmp_path / "run", reward=vowels, **quiet)
    training.fit(apps.spell, ask(2))
    folder = RunFolder(tmp_path / "run")
    [line] = [line for line in folder.metrics() if line["kind"] == "train"]
    own = stored_episodes(tmp_path / "run" / "store.db")
    kept = {name: scored.value or 0.0 for name, scored in folder.rewards("vowels").items()}
    assert line["reward"] == pytest.approx(sum(kept.values()) / 8)
    assert line["reward"] != pytest.approx(sum(e.reward or 0.0 for e in own) / 8)
    explained = folder.explanations(1)
    varied = {e.group_id for e in own if len({kept[o.rollout_id] for o in own}) > 1}
    for episode in own:
        mean = sum(kept[o.rollout_id] for o in own if o.group_id == episode.group_id) / 4
        for call in episode.calls:
            why = explained.get(f"{episode.attempt_id}/{call.call_id}/{call.choice}")
            if why is not None:
                difference = kept[episode.rollout_id] - mean
                assert (why.advantage > 0) == (difference > 0)
    assert varied
    out = tmp_path / "transitions.jsonl"
    assert main(["export", str(tmp_path / "run"), "transitions", "-o", str(out)]) == 0
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert {row["rollout_id"]: row["rollout_reward"] for row in rows} == kept
