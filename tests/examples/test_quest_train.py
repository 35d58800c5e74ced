"""The command `train.py`, and the app as lightspan runs it."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apart_training import How, trained_apart  # type: ignore[import-not-found]

from lightspan import LightningRL
from lightspan.progress import SilentReporter
from lightspan_examples.data import generated
from lightspan_examples.example import Run
from lightspan_examples.script import main
from lightspan_examples.small_model import build_tokenizer
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from quest_example import training, worlds
from quest_example.app import build_graph, chat_model
from quest_example.player import careful_path
from quest_example.world import World

SCRIPT = Path(__file__).parents[2] / "examples" / "quest" / "train.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def few_quests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with few quests."""
    counts: dict[worlds.Split, int] = {"train": 4, "dev": 1, "test": 4}
    cache = tmp_path_factory.mktemp("quest")
    generated(cache, partial(worlds.generate, counts=counts), "few worlds", None)
    return cache


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch, few_quests: Path) -> Path:
    """The cache; and torch keeps its threads."""
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    return few_quests


def options_of(script: Any, *arguments: str) -> argparse.Namespace:
    parsed: argparse.Namespace = script.EXAMPLE.parser("").parse_args(arguments)
    return parsed


def test_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(script.EXAMPLE, script.__doc__, ["--help"])
    printed = capsys.readouterr().out
    for option in ("--seed", "--steps", "--demonstrations", "--folder", "--credit", "--resume"):
        assert option in printed
    assert "--data" not in printed, "there is no published data of these worlds"


def test_an_unknown_rule_of_credit_is_one_line(
    script: Any, capsys: pytest.CaptureFixture[str], few_tasks: Path
) -> None:
    arguments = ["--model", "org/unread", "--credit", "fair", "--cache", str(few_tasks)]
    assert main(script.EXAMPLE, script.__doc__, arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: credit='fair'")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "quest"),
        (["--credit", "terminal"], "quest"),
        (["--credit", "discounted"], "quest-discounted"),
        (["--model", "org/Some-1B"], "quest-Some-1B"),
    ],
)
def test_names_of_runs(script: Any, arguments: list[str], name: str) -> None:
    assert script.EXAMPLE.run_name(options_of(script, *arguments)) == name


def test_what_is_measured_is_what_the_command_trains(script: Any, few_tasks: Path) -> None:
    arguments = ["--model", "org/unread", "--seed", "3", "--cache", str(few_tasks)]
    run = Run(script.EXAMPLE, options_of(script, *arguments), SilentReporter())
    trainer, quests, held_out = script.prepare(run)
    measured = LightningRL("org/unread", **training.rl_options(3, training.REAL_MODEL))
    assert trainer.algorithm.config() == measured.config()
    assert trainer.settings.steps == training.REAL_MODEL.steps
    assert (len(quests), len(held_out)) == (4, 4)
    assert training.AGENTS == ("explore",)
    assert training.TRAINED == ["explore"]
    other = options_of(script, *arguments, "--credit", "discounted")
    trainer, *_ = script.prepare(Run(script.EXAMPLE, other, SilentReporter()))
    assert str(trainer.algorithm.config()["credit"]).startswith("discounted")


def test_tasks_hold_their_world(few_tasks: Path) -> None:
    tasks = training.load_tasks(few_tasks, "train")
    recipe = training.RECIPE
    assert [(t["max_tokens"], t["max_calls"]) for t in tasks] == [
        (recipe.max_tokens, recipe.max_calls)
    ] * 4
    assert json.loads(json.dumps(tasks)) == tasks
    plans = training.plans_of(tasks)
    assert list(plans) == [task["id"] for task in tasks]
    assert all(12 <= len(plan) <= 14 for plan in plans.values())


def test_the_reward_of_an_attempt(monkeypatch: pytest.MonkeyPatch, few_tasks: Path) -> None:
    task = training.load_tasks(few_tasks, "dev")[0]
    path = careful_path(World.from_json(task["world"]), task["max_calls"])
    assert path is not None
    calls = [
        ToolCall(name=action.tool, arguments=json.dumps(action.arguments), call_id="call_1")
        for _, action in path
    ]
    right = [Reply(tool_calls=[call]) for call in calls]
    with ScriptedServer([*right, *["?"] * 20]) as server:
        model = chat_model("m", base_url=server.url, api_key="k")
        graph = build_graph(model, max_calls=task["max_calls"])
        monkeypatch.setattr(training, "_graph", lambda max_tokens, max_calls: graph)
        assert [training.answer(task), training.answer(task)] == [1.0, 0.0]
        assert len(server.requests) == len(right) + 20


def test_runners_load_no_torch() -> None:
    loaded = "import quest_example.training, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_prompts_and_answers_are_short_enough() -> None:
    settings = training.RECIPE.imitation
    chats = training.chats(300, 3)
    tokenizer = build_tokenizer(chats, vocabulary=settings.vocabulary, context=settings.context)
    for chat in chats:
        asked, whole = (
            tokenizer.apply_chat_template(
                chat["messages"][:count],
                tools=chat["tools"],
                add_generation_prompt=count is not None,
                return_dict=False,
            )
            for count in (-1, None)
        )
        assert whole[: len(asked)] == asked
        assert len(asked) <= 300
        assert len(whole) - len(asked) <= training.RECIPE.max_tokens
        assert len(whole) <= settings.context


@pytest.mark.parametrize("how", ["by the trainer", pytest.param("by hand", marks=pytest.mark.long)])
def test_the_app_in_an_environment_without_torch(few_tasks: Path, tmp_path: Path, how: How) -> None:
    tasks = training.load_tasks(few_tasks, "train")[:2]
    episodes = trained_apart(
        tmp_path,
        "quest_example:answer",
        [{**task, "max_calls": 3, "max_tokens": 8} for task in tasks],
        training.TRAINED,
        how,
        [
            "lightspan-example-quest",
            "lightspan-examples",
            "lightspan-langgraph",
        ],
        context=2048,  # the tools alone are long in the words of an untaught model
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} == {"explore"}
    assert all(call.record is not None for call in calls)
    assert len(calls) == 4 * 3, "two quests, two rollouts of each"
