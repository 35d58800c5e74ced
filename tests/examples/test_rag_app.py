"""Test the RAG example's agent and index with a scripted model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="the OpenAI Agents SDK is in an environment of its own")
pytest.importorskip("tantivy", reason="the index is installed beside the SDK")

from agents import ModelBehaviorError
from openai import AsyncOpenAI

from lightspan_testing.adapter_harness import Stage
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from rag_example.app import MAX_SEARCHES, ask, run_config
from rag_example.command import main
from rag_example.demonstrations import PASSAGES, TOOLS, research
from rag_example.index import Index, Passage
from rag_example.library import Library
from rag_example.prompts import RESEARCH
from rag_example.worlds import generate, load, make_questions, make_world

QUESTION = "What is the birthplace of the author of Silent Garden?"
FIRST, SECOND = "Silent Garden written", "Ada Brook born"


def searches(query: str, call_id: str = "call_1") -> Reply:
    """Return an answer that calls the tool; the SDK needs a different id for each call."""
    arguments = json.dumps({"query": query})
    return Reply(tool_calls=[ToolCall(name="search", arguments=arguments, call_id=call_id)])


@pytest.fixture(scope="module")
def library() -> Library:
    told = [
        ("Silent Garden", "Written by Ada Brook."),
        ("Silent Garden", "Printed by Delta Press."),
        ("Ada Brook", "Married to Ben Hale."),
        ("Ada Brook", "Born in Port Alder."),
    ]
    passages = [Passage(str(number), *each) for number, each in enumerate(told)]
    return Library(Index.build(passages), passages=2)


def run(
    script: Sequence[Reply | str], library: Library, **options: int
) -> tuple[str, list[Request]]:
    """Run the app; return its answer and the requests to the model."""
    with ScriptedServer(script) as server:
        return asyncio.run(answer(server, QUESTION, library, **options)), server.requests


async def answer(
    server: ScriptedServer | Stage,
    question: str,
    library: Library,
    *,
    max_tokens: int = 48,
    max_searches: int = MAX_SEARCHES,
) -> str:
    """Return the app's answer, with a new client."""
    async with AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as client:
        config = run_config("m", client=client, temperature=0.7, max_tokens=max_tokens)
        return await ask(question, library, config=config, max_searches=max_searches)


# --- the agent ------------------------------------------------------------------------------
def test_two_searches_and_an_answer(library: Library) -> None:
    script = [searches(FIRST, "call_1"), searches(SECOND, "call_2"), "Answer: Port Alder"]
    said, requests = run(script, library)
    assert said == "Answer: Port Alder"
    head = [{"role": "system", "content": RESEARCH}, {"role": "user", "content": QUESTION}]
    settings = {"model": "m", "temperature": 0.7, "max_tokens": 48, "tools": TOOLS}
    shown = [
        "Silent Garden: Written by Ada Brook.\nSilent Garden: Printed by Delta Press.",
        "Ada Brook: Born in Port Alder.\nSilent Garden: Written by Ada Brook.",
    ]
    turns = [
        [_called(query, call_id), {"role": "tool", "tool_call_id": call_id, "content": found}]
        for query, call_id, found in zip((FIRST, SECOND), ("call_1", "call_2"), shown, strict=True)
    ]
    assert [dict(request.body) for request in requests] == [
        {**settings, "messages": head},
        {**settings, "messages": [*head, *turns[0]]},
        {**settings, "messages": [*head, *turns[0], *turns[1]]},
    ]


def _called(query: str, call_id: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_the_demonstrations_are_what_the_sdk_sends() -> None:
    """Compare every message, because the small model is trained to read exactly these."""
    world = make_world("dev", "dev", seed=0)
    library = Library(Index.build(world.passages()), passages=PASSAGES)
    (question,) = make_questions(world, 1, seed=1)
    shown = research(question, library.index, random.Random(3))
    said = [
        Reply(tool_calls=[ToolCall(**call["function"], call_id=call["id"])])
        for message in shown
        for call in message.get("tool_calls", ())
    ]
    with ScriptedServer([*said, shown[-1]["content"]]) as server:
        last_words = asyncio.run(answer(server, question.text, library))
        last = server.requests[-1].body
    assert [*last["messages"], {"role": "assistant", "content": last_words}] == shown
    assert last["tools"] == TOOLS


def test_passages_are_cut(library: Library) -> None:
    short = Library(library.index, passages=1, characters=15)
    assert short.search(SECOND) == "Ada Brook: Born..."
    assert Library(library.index, passages=3).search("Ada Brook").count("\n") == 2


def test_a_tool_that_there_is_not(library: Library) -> None:
    wrong = Reply(tool_calls=[ToolCall(name="browse", arguments="{}", call_id="c")])
    with pytest.raises(ModelBehaviorError, match="browse"):
        run([wrong, "Answer: x"], library)


def test_who_only_searches_has_not_answered(library: Library) -> None:
    said, requests = run(
        [searches(FIRST, str(number)) for number in range(3)], library, max_searches=2
    )
    assert (said, len(requests)) == ("", 3)
    said, requests = run([searches(FIRST), "Answer: x"], library, max_searches=1)
    assert (said, len(requests)) == ("Answer: x", 2)


def test_an_answer_never_reaches_the_app(tmp_path: Path) -> None:
    """Check that the request to the model does not contain the right answer."""
    generate(tmp_path, worlds={"test": 1}, questions={"test": 8})
    for task in load(tmp_path, "test"):
        documents = Library(Index.load(tmp_path / task["documents"]))
        with ScriptedServer(["Answer: nothing"]) as server:
            asyncio.run(answer(server, task["question"], documents))
            (request,) = server.requests
        assert task["answers"][0] not in json.dumps(dict(request.body))


# --- the command ----------------------------------------------------------------------------


def test_the_command_answers_about_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "towns.md").write_text("# Tarn\n\nA river of four bridges.\n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ScriptedServer([searches("Tarn"), "four"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        arguments = ["How many bridges has the Tarn?", "--documents", str(tmp_path)]
        assert main(arguments) == 0
        assert server.requests[1].last_text == "towns / Tarn: A river of four bridges."
    printed = capsys.readouterr()
    assert printed.out == "four\n"
    assert printed.err.startswith("left out photo.png: ")


def test_the_command_says_that_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ScriptedServer([searches("a", "1"), searches("b", "2")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main([QUESTION, "--max-searches", "1"]) == 1
    assert capsys.readouterr() == ("", "no answer after 1 searches\n")
