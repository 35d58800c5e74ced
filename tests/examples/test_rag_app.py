"""The real agent and the real index against a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="the OpenAI Agents SDK is in an environment of its own")
pytest.importorskip("tantivy", reason="the index is installed beside the SDK")

from agents import ModelBehaviorError
from openai import AsyncOpenAI

import lightspan_openai_agents
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv
from lightspan_testing.adapter_harness import Part, Stage, Turn
from lightspan_testing.adapter_suite import tree
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from rag_example.app import MAX_SEARCHES, ask, researcher, run_config
from rag_example.command import main
from rag_example.demonstrations import PASSAGES, TOOLS, research
from rag_example.index import Index, Passage
from rag_example.library import NOTHING, Library
from rag_example.prompts import RESEARCH
from rag_example.worlds import generate, load, make_questions, make_world

QUESTION = "What is the birthplace of the author of Silent Garden?"
FIRST, SECOND = "Silent Garden written", "Ada Brook born"
SCRIPT = Path(__file__).parents[2] / "examples" / "rag" / "app.py"


def searches(query: str, call_id: str = "call_1") -> Reply:
    """The model calls the tool; the SDK wants an id of its own for each call."""
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
    """What the app says, and what the model was asked."""
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
    """What the app says, with a client of its own."""
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
    """Message for message: the small model learns to read exactly this."""
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


def test_a_search_without_a_result(library: Library) -> None:
    _, requests = run([searches("zebra"), "Answer: none"], library)
    assert requests[1].last_text == NOTHING


def test_passages_are_cut(library: Library) -> None:
    short = Library(library.index, passages=1, characters=15)
    assert short.search(SECOND) == "Ada Brook: Born..."
    assert Library(library.index, passages=3).search("Ada Brook").count("\n") == 2


def test_arguments_that_are_wrong_are_told_to_the_model(library: Library) -> None:
    wrong = Reply(tool_calls=[ToolCall(name="search", arguments='{"word": "x"}', call_id="c")])
    said, requests = run([wrong, "Answer: Port Alder"], library)
    assert said == "Answer: Port Alder"
    assert "error" in requests[1].last_text.lower()


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


def test_no_search_at_all_is_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="max_searches is 0; at least one search has to be"):
        run([], library, max_searches=0)


def test_an_answer_never_reaches_the_app(tmp_path: Path) -> None:
    """What the model is asked first has the question, and of the answer not a word."""
    generate(tmp_path, worlds={"test": 1}, questions={"test": 8})
    for task in load(tmp_path, "test"):
        documents = Library(Index.load(tmp_path / task["documents"]))
        with ScriptedServer(["Answer: nothing"]) as server:
            asyncio.run(answer(server, task["question"], documents))
            (request,) = server.requests
        assert task["answers"][0] not in json.dumps(dict(request.body))


def test_the_client_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(["Answer: x"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
        monkeypatch.setenv("RAG_MODEL", "named")
        assert main([QUESTION]) == 0
        (request,) = server.requests
    assert request.body["model"] == "named"
    assert request.headers["authorization"] == "Bearer from-environment"
    assert capsys.readouterr() == ("x\n", "")


def test_many_questions_at_once_do_not_mix(library: Library) -> None:
    def script(request: Request) -> str:
        return f"Answer: {request.messages[1]['content']}"

    async def everything(server: ScriptedServer) -> list[str]:
        async with AsyncOpenAI(base_url=server.url, api_key="k") as client:
            config = run_config("m", client=client)
            asked = (ask(f"q{number}", library, config=config) for number in range(16))
            return list(await asyncio.gather(*asked))

    with ScriptedServer(script) as server:
        assert asyncio.run(everything(server)) == [f"Answer: q{n}" for n in range(16)]


def test_the_agent() -> None:
    assert lightspan_openai_agents.agents(researcher).paths == ("researcher",)


def test_the_app_does_not_know_lightspan_or_torch() -> None:
    loaded = (
        "import rag_example.app, rag_example.command, sys;"
        "print(sorted({'lightspan', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", loaded],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    assert done.stdout == "[]\n"


# --- what lightspan records -----------------------------------------------------------------
@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as running, lightspan_openai_agents.instrument():
        yield running


def test_the_exact_record_of_an_attempt(stage: Stage, library: Library) -> None:
    arguments = json.dumps({"query": SECOND})
    turns = [Turn(calls=[("search", arguments)]), Turn(text="Answer: Port Alder")]
    played = stage.open(Part({"r": turns}, {RESEARCH: "r"}), through_gateway=True)

    async def attempt() -> str:
        question = f"{played.text}: where was Ada Brook born?"
        said = await answer(stage, question, library, max_tokens=480)
        await sdk_instrumentation.aclose()
        return said

    with open_scope(played.scope):
        assert asyncio.run(attempt()) == "Answer: Port Alder"
    stage.close(played)
    assert stage.brain.problems == []
    assert tree(played.spans) == [
        "invoke_agent researcher @researcher",
        "  chat @researcher",
        "  execute_tool search @researcher",
        "  chat @researcher",
    ]
    tool = next(span for span in played.spans if span.kind == "tool")
    assert json.loads(str(tool.attributes[semconv.TOOL_CALL_ARGUMENTS])) == {"query": SECOND}
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == library.search(SECOND)
    first, second = sorted(played.records, key=lambda record: record.sequence_start)
    said = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'
    assert stage.tokenizer.decode(first.response_ids) == said
    assert stage.tokenizer.decode(second.response_ids) == "Answer: Port Alder"
    asked = stage.brain.calls_in(played.tag)
    assert [first.prompt_ids, second.prompt_ids] == [one.prompt_ids for one in asked]


# --- the command ----------------------------------------------------------------------------
def _environment(**extra: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "RAG_"))
    }
    paths = [str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **extra}


def test_the_script_answers_about_the_demo() -> None:
    with ScriptedServer([searches("Ada Brook born"), "Answer: Port Alder"]) as server:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "Where was Ada Brook born?", "--model", "named"],
            capture_output=True,
            text=True,
            env=_environment(OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k"),
        )
        assert (done.stdout, done.stderr, done.returncode) == ("Port Alder\n", "", 0)
        assert server.requests[0].body["model"] == "named"
        assert "Ada Brook: A novelist, born in Port Alder." in server.requests[1].last_text


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


def test_the_command_says_that_the_key_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([QUESTION])
    assert "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL" in capsys.readouterr().err


def test_the_command_says_that_the_folder_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(SystemExit, match="2"):
        main([QUESTION, "--documents", str(tmp_path / "absent")])
    said = f"--documents: {tmp_path / 'absent'}: there is no such folder"
    assert said in capsys.readouterr().err


def test_the_command_says_that_the_endpoint_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert main([QUESTION]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "http://127.0.0.1:9/v1 did not answer: Connection error.\n"
