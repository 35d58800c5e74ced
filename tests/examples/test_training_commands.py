"""Test the command `train.py` of every example, and its app in runners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apart_training import trained_apart  # type: ignore[import-not-found]

from lightspan import LightningRL
from lightspan.progress import SilentReporter
from lightspan_examples.example import Run
from lightspan_examples.script import main
from lightspan_examples.small_model import build_tokenizer

NAMES = ("math", "quest", "rag", "router", "sql")


def training_of(name: str) -> Any:
    """Return an example's module `training`."""
    return pytest.importorskip(f"{name}_example.training")


@pytest.mark.parametrize("name", NAMES)
def test_help(
    name: str, script_of: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    training_of(name)
    script = script_of(name)
    with pytest.raises(SystemExit, match="0"):
        main(script.EXAMPLE, script.__doc__, ["--help"])
    printed = capsys.readouterr().out
    for option in ("--seed", "--model", "--device", "--lora", "--folder", "--resume", "--dev"):
        assert option in printed


@pytest.mark.parametrize(
    ("name", "arguments", "sizes", "folder"),
    [
        ("math", (), (2000, 500), "math-unread"),
        ("quest", (), (4, 4), "quest-unread"),
        ("quest", ("--credit", "discounted"), (4, 4), "quest-unread-discounted"),
        ("rag", (), (4, 4), "rag-unread"),
        ("router", (), (384, 320), "router-unread"),
        ("sql", (), (16, 4), "sql-unread"),
        ("sql", ("--air",), (16, 4), "sql-unread-air"),
    ],
)
@pytest.mark.usefixtures("torch_threads")
def test_what_is_measured_is_what_the_command_trains(
    name: str,
    arguments: tuple[str, ...],
    sizes: tuple[int, int],
    folder: str,
    script_of: Callable[[str], Any],
    few_tasks: Callable[[str], Path],
) -> None:
    training, script = training_of(name), script_of(name)
    given = ["--model", "org/unread", "--seed", "3", "--cache", str(few_tasks(name)), *arguments]
    options = script.EXAMPLE.parser("").parse_args(given)
    trainer, tasks, held_out = script.prepare(Run(script.EXAMPLE, options, SilentReporter()))
    recipe = training.rl_options(3, training.REAL_MODEL)
    if arguments:
        recipe |= training.AIR_OPTIONS if name == "sql" else {"credit": "discounted"}
    assert trainer.algorithm.config() == LightningRL("org/unread", **recipe).config()
    assert trainer.settings.steps == training.REAL_MODEL.steps
    assert (len(tasks), len(held_out)) == sizes
    assert str(trainer.folder.path) == f"runs/{folder}-seed3"


@pytest.mark.parametrize(
    ("name", "adapter", "agents"),
    [
        ("math", ("lightspan-autogen",), {"solver"}),
        ("quest", ("lightspan-langgraph",), {"explore"}),
        ("rag", ("lightspan-openai-agents", "openai-agents"), {"researcher"}),
        ("sql", ("lightspan-langgraph",), {"write_query", "check_query"}),
    ],
)
def test_the_app_in_an_environment_without_torch(
    name: str,
    adapter: tuple[str, ...],
    agents: set[str],
    few_tasks: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    training = training_of(name)
    few = {"max_calls": 3, "max_tokens": 8} if name == "quest" else {}
    episodes = trained_apart(
        tmp_path,
        f"{name}_example:answer",
        [{**task, **few} for task in training.load_tasks(few_tasks(name), "train")[:2]],
        [agent for agent in training.TRAINED if agent in agents],
        [f"lightspan-example-{name}", "lightspan-examples", *adapter],
        context=2048,  # the quest's tools alone are long in the words of an untaught model
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} >= agents
    assert all(call.record is not None for call in calls if call.agent_path in training.TRAINED)


@pytest.mark.parametrize(("name", "longest"), [("math", 1024), ("quest", 300), ("sql", 160)])
def test_prompts_and_answers_are_short_enough(name: str, longest: int) -> None:
    training = training_of(name)
    recipe, chats = training.RECIPE, training.chats(200, 3)
    settings = recipe.imitation
    tokenizer = build_tokenizer(chats, vocabulary=settings.vocabulary, context=settings.context)
    for chat in chats:
        asked, whole = (
            tokenizer.apply_chat_template(
                chat["messages"][:count],
                tools=chat.get("tools"),
                add_generation_prompt=count is not None,
                return_dict=False,
            )
            for count in (-1, None)
        )
        assert whole[: len(asked)] == asked
        assert len(asked) <= longest
        assert len(whole) - len(asked) <= recipe.max_tokens
        assert len(whole) <= settings.context
