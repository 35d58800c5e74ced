"""Rewards by a judge or a function in a `Trainer`: real apps, real HTTP, a real store."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM, Judge, Trainer
from lightspan.cli import main
from lightspan.errors import AppError, BudgetError, ConfigError, RewardError
from lightspan.progress import SilentReporter
from lightspan.training.collector import stored_episodes
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_tools.inspect import inspect_run

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def judged() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("judged_app")


@pytest.fixture(scope="module")
def script() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("scripted_judge")


@pytest.fixture(scope="module")
def model(judged: Any) -> Iterator[ScriptedServer]:
    """The app's own model."""
    with ScriptedServer(judged.counted) as server:
        yield server


def by_number(text: str, place: int) -> int:
    return int(text.rpartition("number ")[2])


@pytest.fixture
def wise(script: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(script.gives(by_number)) as server:
        yield server


def trainer(judged: Any, folder: Path, reward: Any, **options: Any) -> Trainer:
    quiet = {"runners": 2, "steps": 1, "folder": folder, "reporter": SilentReporter()}
    return Trainer(judged.Sees(), reward=reward, **{**quiet, **options})


def a_judge(server: ScriptedServer, **options: Any) -> Judge:
    return Judge("More is better.", LLM(base_url=server.url, model="wise"), **options)


# --- a judge --------------------------------------------------------------------------------
def test_an_algorithm_learns_from_the_judge_and_the_apps_own_reward_is_kept(
    judged: Any, model: ScriptedServer, wise: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    folder, own_calls = tmp_path / "run", len(model.requests)
    training = trainer(judged, folder, a_judge(wise), reporter=lines)
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
    assert any("the app's own reward there: 0.250 of 1 rollouts" in text for text in lines.texts)
    shown = inspect_run(folder)
    assert "\nreward judge: mean 0.329 of 14\n" in shown
    one = inspect_run(folder, sees.episodes[0].rollout_id)
    assert f"reward {sees.rewards[0]:g} (scored)\n  the app's own reward: 0.25\n" in one
    assert one.endswith(f"\nreward judge: {sees.rewards[0]:g}\n  A {{rambling}} sentence.")


@pytest.mark.slow
def test_what_the_judge_fails_at_is_unscored_counted_and_told_once(
    judged: Any, script: Any, model: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    def answers(request: Request) -> str:
        if "user: qqq" in request.last_text:
            return "Who am I to judge?"
        said: str = script.gives(by_number)(request)
        return said

    with ScriptedServer(answers) as server:
        training = trainer(judged, tmp_path / "run", a_judge(server), steps=2, reporter=lines)
        training.fit(judged.counts, judged.tasks(model.url, 1, 3))
    sees: Any = training.algorithm
    assert Counter(sees.rewards) == {0.1: 2, 0.2: 2, 0.3: 2, None: 6}
    told = [text for text in lines.texts if "unscored, which is not zero" in text]
    assert len(told) == 1
    assert "(the judge's answer has no line of JSON: 'Who am I to judge?')" in told[0]
    train = [line for line in RunFolder(tmp_path / "run").metrics() if line["kind"] == "train"]
    assert [line["judge/unscored"] for line in train] == [6, 6]
    assert [line["judge/calls"] for line in train] == [6, 0]


def test_a_run_that_spent_its_budget_goes_on_and_asks_nothing_twice(
    judged: Any, model: ScriptedServer, wise: ScriptedServer, tmp_path: Path
) -> None:
    folder, given = tmp_path / "run", judged.tasks(model.url, 1, 2, 3, 4)
    few = trainer(judged, folder, a_judge(wise, max_calls=8), steps=2)
    with pytest.raises(BudgetError, match=r"judge has answered 6 questions .*exceed max_calls=8"):
        few.fit(judged.counts, given)
    assert len(wise.requests) == 6
    more = trainer(judged, folder, a_judge(wise, max_calls=100), steps=2)
    more.fit(judged.counts, given, resume=True)
    asked = [request.last_text for request in wise.requests]
    assert len(asked) == len(set(asked)) == 12
    other = trainer(judged, folder, a_judge(wise, orders=3), steps=3)
    with pytest.raises(ConfigError, match="started with other settings"):
        other.fit(judged.counts, given, resume=True)


@pytest.mark.faults
def test_a_killed_run_asks_no_question_twice(
    judged: Any, script: Any, model: ScriptedServer, tmp_path: Path
) -> None:
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
    assert len(answered) == len(set(answered)) == 12


@pytest.mark.slow
def test_a_dry_run_judges_too(
    judged: Any, model: ScriptedServer, wise: ScriptedServer, tmp_path: Path
) -> None:
    report = trainer(judged, tmp_path / "run", a_judge(wise)).dev(
        judged.counts, judged.tasks(model.url, 4), count=1, group_size=2
    )
    assert "0.4" in report.text()
    assert not (tmp_path / "run").exists()
    assert len(wise.requests) == 1


# --- a function -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", [1.0, 3.0, 2.0, 4.0, 3.0, 5.0]),
        pytest.param("ranked", [0.0] * 6, marks=pytest.mark.slow),
    ],
)
def test_a_function_gives_the_reward(
    judged: Any, model: ScriptedServer, tmp_path: Path, name: str, expected: list[float]
) -> None:
    training = trainer(judged, tmp_path / "run", f"judged_app:{name}")
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
    judged: Any, model: ScriptedServer, tmp_path: Path, lines: Any
) -> None:
    training = trainer(judged, tmp_path / "run", judged.moody, reporter=lines)
    failing = [{"q": "qqqqqq", "url": model.url, "fails": True}]
    training.fit(judged.counts, [*judged.tasks(model.url, 1), *failing])
    sees: Any = training.algorithm
    assert sees.rewards == [None] * 12  # 1 raises, 2 is None, 3 is NaN; the other's app failed
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
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("texts", "the reward 'texts' returned: a reward must be a number, not the text 'good'"),
        ("too_few", r"a reward for each of the 2 episodes, in a list: it returned \[1.0\]"),
    ],
)
def test_what_is_no_reward_is_an_error(
    judged: Any, model: ScriptedServer, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        trainer(judged, tmp_path / "run", getattr(judged, name)).fit(
            judged.counts, judged.tasks(model.url, 1)
        )


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("nowhere:at_all", AppError, "the reward 'nowhere:at_all' cannot be imported"),
        ("judged_app:gone", AppError, "'judged_app' has no 'gone'"),
        ("judged_app", ConfigError, "name a function or a Judge, as in my_rewards:exact"),
        ("judged_app:__name__", ConfigError, "is the text 'judged_app', and no function"),
        (3, ConfigError, "reward=3: give a function"),
        (Judge, ConfigError, "asks for 'rubric', which nothing provides"),
        (lambda run: 1.0, ConfigError, "asks for 'run', which nothing provides; it can ask for "),
        (lambda: 1.0, ConfigError, "has to ask for task, answer or episode"),
        (lambda answer, episodes: 1.0, ConfigError, "or for the episodes of a group"),
    ],
)
def test_what_cannot_reward_is_refused_before_any_rollout(
    judged: Any, tmp_path: Path, reward: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer(judged, tmp_path / "run", reward)


# --- every algorithm ------------------------------------------------------------------------
def vowels(answer: str) -> float:
    """Other than what the app says of itself."""
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


def loud(answer: str) -> float:
    """What the toy's app does not pay for."""
    return float(answer.isupper())


@pytest.mark.slow
def test_gepa_learns_from_it(tmp_path: Path) -> None:
    from lightspan import GEPA, PromptTemplate

    toy = importlib.import_module("gepa_toy")
    prompt_apps = importlib.import_module("prompt_apps")
    with ScriptedServer(toy.speaks) as own, ScriptedServer(toy.reflects) as thinker:
        algorithm = GEPA(
            {"rules": PromptTemplate("Speak."), "form": PromptTemplate("Q: {q}")},
            LLM(base_url=thinker.url, model="thinker"),
            max_rollouts=60,
            minibatch=2,
        )
        training = Trainer(
            algorithm, runners=2, folder=tmp_path / "run", reward=loud, reporter=SilentReporter()
        )
        result = training.fit(prompt_apps.told, toy.tasks(own.url, *range(8)))
    assert "SHOUT" in result.prompts["rules"].template
    assert result.prompts["form"].template == "Q: {q}"  # backwards, which only the app pays for
    assert "Reward: 0\n  app: 0" in thinker.requests[0].last_text
