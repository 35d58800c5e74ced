"""How training runs the app: its tasks, its reward, its recipe, and the command `train.py`."""

from __future__ import annotations

import argparse
import asyncio
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apart_training import How, trained_apart  # type: ignore[import-not-found]

pytest.importorskip("agents", reason="the OpenAI Agents SDK is in an environment of its own")

from lightspan import LightningRL
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.progress import PlainReporter
from lightspan_examples.data import generated
from lightspan_examples.example import Run
from lightspan_testing.adapter_harness import Part, Stage, Turn
from rag_example import recipes, training
from rag_example.index import Index
from rag_example.options import trained_agents
from rag_example.prompts import RESEARCH
from rag_example.worlds import SPLITS, generate

SCRIPT = Path(__file__).parents[2] / "examples" / "rag" / "train.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with little in it."""
    folder = tmp_path_factory.mktemp("cache")
    one, four = dict.fromkeys(SPLITS, 1), dict.fromkeys(SPLITS, 4)
    generated(folder, partial(generate, worlds=one, questions=four), "few questions", None)
    return folder


@pytest.fixture(scope="module")
def script() -> Any:
    """`train.py` as a module."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_tasks(cache: Path) -> None:
    tasks = training.load_tasks(cache, "test")
    assert len(tasks) == 4
    recipe = training.RECIPE
    for task in tasks:
        assert task["max_tokens"] == recipe.max_tokens
        assert task["max_searches"] == recipe.max_searches == 3
        library = recipes.library_of(task)
        assert recipes.library_of(task) is library
        assert library.passages == recipe.passages == 1
        assert len(library.index) > 180


@pytest.mark.parametrize(
    ("said", "reward"), [("Answer: {gold}", 1.0), ("{gold}", 0.9), ("Answer: nobody", 0.1)]
)
def test_the_reward_of_an_attempt(cache: Path, said: str, reward: float) -> None:
    """Through the gateway: the client that points nowhere asks the model that learns."""
    task = dict(training.load_tasks(cache, "test")[0])
    text = said.format(gold=task["answers"][0])  # type: ignore[index]
    with Stage() as stage:
        played = stage.open(Part({"r": [Turn(text=text)]}, {RESEARCH: "r"}), through_gateway=True)
        task["question"] = f"{played.text}: {task['question']}"

        async def attempt() -> float:
            found = await training.answer(task)
            await sdk_instrumentation.aclose()
            return float(found)

        with open_scope(played.scope):
            assert asyncio.run(attempt()) == pytest.approx(reward)
        stage.close(played)
        assert stage.brain.problems == []
        assert len(played.records) == 1


def test_the_recipe_makes_an_algorithm() -> None:
    assert training.AGENTS == ("researcher",)
    options = training.rl_options(3)
    assert options["optimize"] == training.TRAINED == ["researcher"]
    algorithm = LightningRL("unread", **options)
    assert algorithm.seed == 3
    assert algorithm.group_size == training.RECIPE.group_size == 8
    assert algorithm.failure_reward == 0.0


def test_runners_load_no_torch() -> None:
    loaded = "import rag_example.training, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_all_calls_of_an_attempt_are_one_row() -> None:
    """Each prompt of the small model begins with the prompt and the answer before it."""
    pytest.importorskip("transformers", reason="only the learning environment has it")
    from lightspan_examples.small_model import build_tokenizer

    chats = training.chats(120, 0)
    tokenizer = build_tokenizer(chats)

    def ids(count: int, chat: dict[str, Any], *, prompt: bool) -> list[int]:
        rendered: list[int] = tokenizer.apply_chat_template(
            chat["messages"][:count],
            tools=chat["tools"],
            add_generation_prompt=prompt,
            return_dict=False,
        )
        return rendered

    for chat in chats:
        before: list[int] = []
        for position, message in enumerate(chat["messages"]):
            if message["role"] == "assistant":
                asked = ids(position, chat, prompt=True)
                assert asked[: len(before)] == before
                answered = ids(position + 1, chat, prompt=False)
                assert answered[: len(asked)] == asked
                before = answered[: answered.index(tokenizer.eos_token_id, len(asked)) + 1]


def test_data_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "handbook"
    folder.mkdir()
    (folder / "towns.md").write_text("# Tarn\n\nA river of four bridges.\n")
    (folder / "train.jsonl").write_text(
        '{"question": "How many bridges?", "answer": "four", "answer_aliases": ["4"]}\n'
    )
    said: list[str] = []

    class Noted(PlainReporter):
        def line(self, text: str) -> None:
            said.append(text)

    cached = tmp_path / "cache"
    (task,) = recipes.load_data(folder, "train", Noted(), recipes.REAL_MODEL, cache=cached)
    assert (task["question"], task["answers"]) == ("How many bridges?", ["four", "4"])
    assert task["passages"] == recipes.REAL_MODEL.passages
    assert len(Index.load(Path(task["data"]) / task["documents"])) == 1
    assert recipes.library_of(task).search("bridges") == "towns / Tarn: A river of four bridges."
    assert said == ["train: 1 questions of train.jsonl, 1 passages"]


# --- the command ----------------------------------------------------------------------------
def test_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.EXAMPLE.parser(script.__doc__).parse_args(["--help"])
    printed = capsys.readouterr().out
    for option in ("--framework", "--optimize", "--data", "--dev", "--resume", "--lora"):
        assert option in printed


def options_of(script: Any, *arguments: str) -> argparse.Namespace:
    parsed: argparse.Namespace = script.EXAMPLE.parser("").parse_args(arguments)
    return parsed


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "rag"),
        (["--framework", "crewai"], "rag-crewai"),
        (["--framework", "crewai", "--optimize", "searcher"], "rag-crewai-searcher"),
        (["--model", "org/Some-1B"], "rag-Some-1B"),
    ],
)
def test_names_of_runs(script: Any, arguments: list[str], name: str) -> None:
    assert script.EXAMPLE.run_name(options_of(script, *arguments)) == name


def test_what_the_command_trains(script: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    example = script.EXAMPLE
    options = options_of(script, "--cache", str(cache), "--model", "org/unread")
    assert example.module(options) is training
    run = Run(example, options, PlainReporter())
    assert trained_agents(run) == ["researcher"]
    trainer, questions, held_out = script.prepare(run)
    measured = LightningRL("org/unread", **training.rl_options(0, training.REAL_MODEL))
    assert trainer.algorithm.config() == measured.config()
    assert len(questions) == len(held_out) == 4
    assert list(training.AGENTS) == ["researcher"]
    assert len(training.load_tasks(cache, "test", training.RECIPE, PlainReporter())) == 4
    assert training.REAL_MODEL is recipes.REAL_MODEL


@pytest.mark.parametrize("how", ["by the trainer", pytest.param("by hand", marks=pytest.mark.long)])
def test_the_app_in_an_environment_without_torch(cache: Path, tmp_path: Path, how: How) -> None:
    episodes = trained_apart(
        tmp_path,
        "rag_example:answer",
        training.load_tasks(cache, "train")[:2],
        training.TRAINED,
        how,
        [
            "lightspan-example-rag",
            "lightspan-examples",
            "lightspan-openai-agents",
            "openai-agents",
        ],
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} == {"researcher"}
    trained = [call for call in calls if call.agent_path in training.TRAINED]
    assert all(call.record is not None for call in trained)
