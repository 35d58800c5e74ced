"""Test the RAG app as a crew: CrewAI's requests, the acting agent, and the trained calls."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from apart_training import trained_apart  # type: ignore[import-not-found]
from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]

# Before CrewAI is imported: it asks the internet otherwise.
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_DISABLE_TRACKING"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
pytest.importorskip("crewai", reason="CrewAI is in an environment of its own")
pytest.importorskip("tantivy", reason="the index is installed beside CrewAI")

import lightspan_crewai
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Part, Stage, Turn
from lightspan_testing.adapter_suite import tree
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from rag_example import crew_training
from rag_example.crew import ask, build_crew, chat_model
from rag_example.crew_demonstrations import TOOLS, work
from rag_example.demonstrations import PASSAGES
from rag_example.index import Index, Passage
from rag_example.library import Library
from rag_example.worlds import make_questions, make_world

# CrewAI warns of fields of its own that it reads itself, and never closes its clients.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(scope="module")
def library() -> Library:
    told = [("Winter", "Written by Ada."), ("Winter", "Printed by Delta."), ("Ada", "Born in Oak.")]
    passages = [Passage(str(number), *each) for number, each in enumerate(told)]
    return Library(Index.build(passages), passages=2)


def replies(messages: list[dict[str, Any]]) -> Iterator[Reply]:
    """Yield the model's answers of a chat."""
    for message in messages:
        if message["role"] == "assistant":
            calls = [
                ToolCall(**call["function"], call_id=call["id"])
                for call in message.get("tool_calls", ())
            ]
            yield Reply(text=message["content"], tool_calls=calls)


def plain(messages: Any) -> list[dict[str, Any]]:
    """Return messages without the parts that chat templates do not render."""
    kept = ("role", "content", "tool_calls", "tool_call_id")
    return [{key: message[key] for key in kept if key in message} for message in messages]


def test_the_demonstrations_are_what_crewai_sends() -> None:
    """Compare every message, because the small model is trained to read exactly these."""
    world = make_world("dev-00", "dev", seed=0)
    documents = Library(Index.build(world.passages()), passages=PASSAGES)
    (question,) = make_questions(world, 1, seed=1)
    searcher, answerer = work(question, documents.index, random.Random(3))
    script = [*replies(searcher["messages"]), *replies(answerer["messages"])]
    with ScriptedServer(script) as server:
        llm = chat_model("m", base_url=server.url, api_key="k", temperature=0.7, max_tokens=48)
        said = ask(question.text, build_crew(documents, llm))
        *_, last_search, answer = server.requests
    assert plain(last_search.messages) == searcher["messages"][:-1]
    assert last_search.body["tools"] == TOOLS == searcher["tools"]
    assert plain(answer.messages) == answerer["messages"][:-1]
    assert "tools" not in answer.body
    assert said == answerer["messages"][-1]["content"]
    settings = {"model": "m", "temperature": 0.7, "max_tokens": 48}
    assert settings.items() <= answer.body.items()


def test_the_exact_record_of_an_attempt(library: Library) -> None:
    says = {
        "searcher": [
            Turn(calls=[("search", '{"query": "Ada born"}')]),
            Turn(text="Ada: Born in Oak."),
        ],
        "answerer": [Turn(text="Answer: Oak")],
    }
    with Stage() as stage, lightspan_crewai.instrument():
        played = stage.open(Part(says), through_gateway=True)
        llm = chat_model("m", base_url=stage.url, api_key="k", temperature=0.7, max_tokens=480)
        with open_scope(played.scope):
            crew = build_crew(library, llm)
            assert ask(f"{played.text}: where was Ada born?", crew) == "Answer: Oak"
        stage.close(played)
        assert stage.brain.problems == []
        paths = [line.split("@")[1] for line in tree(played.spans) if "chat" in line]
        assert paths == ["searcher", "searcher", "answerer"]
        assert len(played.records) == 3


def test_the_app_in_an_environment_without_torch(
    tmp_path: Path, few_tasks: Callable[[str], Path]
) -> None:
    episodes = trained_apart(
        tmp_path,
        "rag_example.crew_training:answer",
        crew_training.load_tasks(few_tasks("rag"), "train")[:2],
        crew_training.TRAINED,
        ["lightspan-example-rag", "lightspan-examples", "lightspan-crewai", "crewai"],
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} == set(crew_training.AGENTS)
    trained = [call for call in calls if call.agent_path in crew_training.TRAINED]
    assert all(call.record is not None for call in trained)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_structured_crew_learns(tmp_path: Path) -> None:
    """Check a crew whose every model call has structured output."""
    check_it_learns("crewai", tmp_path)


@pytest.mark.controls
@pytest.mark.timeout(3600)
def test_permuted_rewards_teach_nothing(tmp_path: Path) -> None:
    check_control("crewai", tmp_path)
