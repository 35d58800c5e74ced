"""The command `train.py`, and the app as lightspan runs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apart_training import How, trained_apart  # type: ignore[import-not-found]

pytest.importorskip("torch", reason="training needs the learning environment")
pytest.importorskip("autogen_agentchat", reason="AutoGen is in an environment of its own")
pytest.importorskip("mcp", reason="the MCP library is in the environment of AutoGen's tests")

import runpy

import lightspan_autogen
from lightspan import LightningRL
from lightspan.errors import DataError
from lightspan.progress import SilentReporter
from lightspan_examples.example import Run
from lightspan_examples.script import main
from lightspan_testing.scripted import ScriptedServer
from math_example import training
from math_example.app import calculator, chat_client, make_agent
from math_example.demonstrations import demonstrate

SCRIPT = Path(__file__).parents[2] / "examples" / "math" / "train.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(script.EXAMPLE, script.__doc__, ["--help"])
    printed = capsys.readouterr().out
    for option in ("--seed", "--model", "--device", "--lora", "--data", "--resume", "--dev"):
        assert option in printed


def test_data_needs_a_model(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(script.EXAMPLE, script.__doc__, ["--data", "gsm8k"])
    assert "--data needs --model" in capsys.readouterr().err


def test_errors_are_one_line(
    script: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    arguments = ["--model", "some/model", "--data", str(tmp_path / "absent")]
    assert main(script.EXAMPLE, script.__doc__, arguments) == 1
    error = f"train.py: --data {tmp_path / 'absent'}: there is no such folder\n"
    assert capsys.readouterr().err == error


def test_the_agents_are_those_of_the_app() -> None:
    client = chat_client("m", base_url="http://127.0.0.1:9/v1", api_key="k")
    agent = make_agent(client, calculator("http://127.0.0.1:9/mcp"))
    assert lightspan_autogen.agents(agent).paths == training.AGENTS


def test_what_is_measured_is_what_the_command_trains(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    options = script.EXAMPLE.parser("").parse_args(["--model", "org/unread", "--seed", "3"])
    trainer, _, held_out = script.prepare(Run(script.EXAMPLE, options, SilentReporter()))
    measured = LightningRL("org/unread", **training.rl_options(3, training.REAL_MODEL))
    assert trainer.algorithm.config() == measured.config()
    assert len(held_out) == 500


def test_published_data_as_tasks(tmp_path: Path) -> None:
    record = {"question": "What is 3 times 4?", "answer": "3*4=<<3*4=12>>12\n#### 12"}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    reporter = SilentReporter()
    assert training.load_data(tmp_path, "train", reporter, training.REAL_MODEL) == [
        {
            "id": "train.jsonl:1",
            "problem": "What is 3 times 4?",
            "answer": "12",
            "max_tokens": 512,
            "max_calls": 6,
        }
    ]
    with pytest.raises(DataError, match="no file of the split test"):
        training.load_data(tmp_path, "test", reporter, training.REAL_MODEL)


def test_the_reward_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = training.load_tasks(Path(), "dev")[:1]
    answers = [f"#### {task['answer']}.0", "#### 0", "I do not know."]
    with ScriptedServer(answers) as server:

        async def attempts() -> list[float]:
            client = chat_client("m", base_url=server.url, api_key="k")
            monkeypatch.setattr(training, "_client", lambda max_tokens: client)
            rewards = [await training.answer(task) for _ in answers]
            await client.close()
            return rewards

        assert asyncio.run(attempts()) == [1.0, 0.0, 0.0]


def test_demonstrations_are_short_enough() -> None:
    from lightspan_examples.small_model import build_tokenizer

    settings = training.RECIPE.imitation
    chats = demonstrate(200, 3)
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
        assert len(whole) - len(asked) <= training.RECIPE.max_tokens
        assert len(whole) < settings.context - training.RECIPE.max_tokens


@pytest.mark.parametrize("how", ["by the trainer", pytest.param("by hand", marks=pytest.mark.long)])
def test_the_app_in_an_environment_without_torch(tmp_path: Path, how: How) -> None:
    episodes = trained_apart(
        tmp_path,
        "math_example:answer",
        training.load_tasks(tmp_path, "train")[:2],
        training.TRAINED,
        how,
        [
            "lightspan-example-math",
            "lightspan-examples",
            "lightspan-autogen",
        ],
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} == set(training.TRAINED)
    trained = [call for call in calls if call.agent_path in training.TRAINED]
    assert all(call.record is not None for call in trained)
