"""Test the RAG example's training: tasks, reward, recipe, and the command `train.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="the OpenAI Agents SDK is in an environment of its own")

from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.progress import PlainReporter
from lightspan_testing.adapter_harness import Part, Stage, Turn
from rag_example import recipes, training
from rag_example.index import Index
from rag_example.prompts import RESEARCH


@pytest.fixture(scope="module")
def cache(few_tasks: Callable[[str], Path]) -> Path:
    return few_tasks("rag")


@pytest.fixture
def script(script_of: Callable[[str], Any]) -> Any:
    return script_of("rag")


@pytest.mark.parametrize(
    ("said", "reward"), [("Answer: {gold}", 1.0), ("{gold}", 0.9), ("Answer: nobody", 0.1)]
)
def test_the_reward_of_an_attempt(cache: Path, said: str, reward: float) -> None:
    """Check the reward of an attempt whose calls go to the gateway."""
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


def test_all_calls_of_an_attempt_are_one_row() -> None:
    """Check that each prompt begins with the previous prompt and answer."""
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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "rag"),
        (["--framework", "crewai"], "rag-crewai"),
        (["--framework", "crewai", "--optimize", "searcher"], "rag-crewai-searcher"),
    ],
)
def test_names_of_runs(script: Any, arguments: list[str], name: str) -> None:
    options = script.EXAMPLE.parser("").parse_args(arguments)
    assert script.EXAMPLE.run_name(options) == name
