"""The real AutoGen agent and the real MCP server against a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("autogen_agentchat", reason="AutoGen is in an environment of its own")
pytest.importorskip("mcp", reason="the MCP library is in the environment of AutoGen's tests")

from autogen_core.models import ChatCompletionClient
from autogen_core.tools import Workbench

import lightspan_autogen
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv
from lightspan_testing.adapter_harness import Part, Stage, Turn
from lightspan_testing.adapter_suite import tree
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from math_example.app import SYSTEM, calculator, chat_client, make_agent, shared_calculator, solve
from math_example.command import main
from math_example.demonstrations import SYSTEM as DEMONSTRATED_SYSTEM, TOOL
from math_example.worlds import make_tasks
from tests.examples.test_math_server import http_server

PROBLEM = "Ada has 12 plums. She buys 5 more. The number grows 3 times. How many has she?"
EXPRESSION = '{"expression": "(12+5)*3"}'
SCRIPT = Path(__file__).parents[2] / "examples" / "math" / "app.py"


def ask(expression: str) -> Reply:
    """The model calls the calculator."""
    arguments = json.dumps({"expression": expression})
    return Reply(tool_calls=[ToolCall(name="calculator", arguments=arguments, call_id="call_1")])


def echoing(request: Request) -> Reply | str:
    """A model that calls the calculator, and answers with what it said."""
    if request.messages[-1]["role"] == "tool":
        return f"#### {request.last_text}"
    return ask("(12+5)*3")


@pytest.fixture
async def workbench() -> AsyncIterator[Workbench]:
    async with calculator() as opened:
        yield opened


async def run(
    script: Sequence[Reply | str], workbench: Workbench, **options: int
) -> tuple[str, list[Request]]:
    """What the app says, and what the model was asked."""
    with ScriptedServer(script) as server:
        client = chat_client("m", base_url=server.url, api_key="k", temperature=0.7, max_tokens=48)
        reply = await solve(PROBLEM, client, workbench, **options)
        await client.close()
        return reply, server.requests


# --- the agent ------------------------------------------------------------------------------
async def test_a_call_of_the_calculator_and_an_answer(workbench: Workbench) -> None:
    reply, requests = await run([ask("(12+5)*3"), "It is 51.\n#### 51"], workbench)
    assert reply == "It is 51.\n#### 51"
    head = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "name": "user", "content": PROBLEM},
    ]
    settings = {
        "model": "m",
        "stream": False,
        "max_tokens": 48,
        "temperature": 0.7,
        "tool_choice": "auto",
        "tools": [TOOL],
    }
    function = {"name": "calculator", "arguments": EXPRESSION}
    call = {"id": "call_1", "type": "function", "function": function}
    assert [dict(request.body) for request in requests] == [
        {**settings, "messages": head},
        {
            **settings,
            "messages": [
                *head,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "51"},
            ],
        },
    ]


def test_demonstrations_show_what_the_app_says() -> None:
    assert DEMONSTRATED_SYSTEM == SYSTEM


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2/3", "2/3"),
        ("9**9**9", "Error executing tool calculator: 9**387420489 is too large"),
        ("1/0", "Error executing tool calculator: division by zero"),
    ],
)
async def test_the_model_reads_what_the_calculator_says(
    workbench: Workbench, expression: str, result: str
) -> None:
    _, requests = await run([ask(expression), "#### 1"], workbench)
    assert requests[1].last_text == result


async def test_a_tool_that_does_not_exist(workbench: Workbench) -> None:
    wrong = Reply(tool_calls=[ToolCall(name="eval", arguments="{}", call_id="call_1")])
    reply, requests = await run([wrong, "#### 1"], workbench)
    assert reply == "#### 1"
    assert "eval" in requests[1].last_text


async def test_who_only_calls_tools_has_not_answered(workbench: Workbench) -> None:
    reply, requests = await run([ask("1+1"), ask("2+2"), ask("3+3")], workbench, max_calls=3)
    assert (reply, len(requests)) == ("", 3)
    reply, requests = await run([ask("1+1")], workbench, max_calls=1)
    assert (reply, len(requests)) == ("", 1)


async def test_no_call_at_all_is_refused(workbench: Workbench) -> None:
    client = chat_client("m", base_url="http://127.0.0.1:9/v1", api_key="k")
    with pytest.raises(ValueError, match="max_calls is 0; the model has to be asked at least once"):
        make_agent(client, workbench, max_calls=0)
    await client.close()


async def test_an_answer_never_reaches_the_app(workbench: Workbench) -> None:
    task = make_tasks("test", count=1)[0]
    with ScriptedServer(["#### 1"]) as server:
        client = chat_client("m", base_url=server.url, api_key="k")
        await solve(task["problem"], client, workbench)
        await client.close()
        assert f'"{task["answer"]}"' not in json.dumps([dict(r.body) for r in server.requests])


async def test_the_client_reads_the_environment(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer(["#### 1"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
        monkeypatch.setenv("MATH_MODEL", "named")
        client = chat_client()
        assert await solve(PROBLEM, client, workbench) == "#### 1"
        await client.close()
        assert server.requests[0].body["model"] == "named"
        assert server.requests[0].headers["authorization"] == "Bearer from-environment"


def test_the_app_does_not_know_lightspan_or_torch() -> None:
    loaded = (
        "import math_example.app, math_example.command, sys;"
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


# --- one server for many problems -----------------------------------------------------------
def servers_of(pid: int) -> list[int]:
    """The calculators that a process has started and that live."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True
    )
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, command in lines if "math_example.server" in command]


async def solve_shared(client: ChatCompletionClient) -> str:
    async with shared_calculator() as workbench:
        return await solve(PROBLEM, client, workbench)


def test_many_problems_share_one_server_that_ends_with_the_loop() -> None:
    seen: set[int] = set()

    async def attempt(client: ChatCompletionClient) -> str:
        reply = await solve_shared(client)
        seen.update(servers_of(os.getpid()))
        return reply

    async def work(url: str) -> list[str]:
        client = chat_client("m", base_url=url, api_key="k")
        replies = [await attempt(client)]
        replies += await asyncio.gather(*[attempt(client) for _ in range(12)])
        await client.close()
        return replies

    with ScriptedServer(echoing) as server:
        for loops in (1, 2):
            assert asyncio.run(work(server.url)) == ["#### 51"] * 13
            assert len(seen) == loops
            assert servers_of(os.getpid()) == []


async def _first_answer(client: ChatCompletionClient) -> str:
    """Those who were using a dead server fail; soon one finds another."""
    failures = 0
    while failures < 5:
        try:
            reply = await solve_shared(client)
        except Exception:
            failures += 1
            continue
        if failures:
            return reply
    raise AssertionError("five attempts failed")


@pytest.mark.faults
async def test_a_server_that_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("math_example.app.TIMEOUT_S", 30.0)
    with ScriptedServer(echoing) as server:
        client = chat_client("m", base_url=server.url, api_key="k")
        assert await solve_shared(client) == "#### 51"
        (first,) = servers_of(os.getpid())
        os.kill(first, signal.SIGKILL)
        assert await _first_answer(client) == "#### 51"
        (second,) = servers_of(os.getpid())
        assert second != first
        await client.close()


@pytest.mark.faults
def test_no_server_survives_an_app_that_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from math_example.app import shared_calculator\n"
        "async def main():\n"
        "    async with shared_calculator() as workbench:\n"
        "        await workbench.list_tools()\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=_environment()
    ) as app:
        assert app.stdout is not None
        assert app.stdout.readline() == "ready\n"
        (server,) = servers_of(app.pid)
        app.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{server}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists()


# --- what lightspan records -----------------------------------------------------------------
@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as running, lightspan_autogen.instrument():
        yield running


async def test_the_exact_record_of_an_attempt(stage: Stage, workbench: Workbench) -> None:
    turns = [Turn(calls=[("calculator", EXPRESSION)]), Turn(text="#### 51")]
    part = Part({"solver": turns}, {"Use the calculator": "solver"})
    played = stage.open(part, through_gateway=True)
    client = chat_client("m", base_url=stage.url, api_key="k", temperature=0.7)
    with open_scope(played.scope):
        assert await solve(f"{played.text}: 12 + 5, 3 times", client, workbench) == "#### 51"
    await sdk_instrumentation.aclose()
    await client.close()
    stage.close(played)
    assert stage.brain.problems == []
    assert tree(played.spans) == [
        "invoke_agent solver @solver",
        "  chat @solver",
        "  execute_tool calculator @solver",
        "  chat @solver",
    ]
    (tool,) = (span for span in played.spans if span.name == "execute_tool calculator")
    assert json.loads(str(tool.attributes[semconv.TOOL_CALL_ARGUMENTS])) == {
        "expression": "(12+5)*3"
    }
    assert tool.attributes[semconv.TOOL_CALL_RESULT] == "51"
    said = f'<tool_call>\n{{"name": "calculator", "arguments": {EXPRESSION}}}\n</tool_call>'
    assert [stage.tokenizer.decode(record.response_ids) for record in played.records] == [
        said,
        "#### 51",
    ]
    asked = stage.brain.calls_in(played.tag)
    assert [record.prompt_ids for record in played.records] == [one.prompt_ids for one in asked]


@pytest.mark.filterwarnings("ignore:Use `streamable_http_client`:DeprecationWarning")  # AutoGen's
async def test_a_calculator_that_runs_already() -> None:
    with http_server() as url:
        async with calculator(url) as workbench:
            reply, requests = await run([ask("(12+5)*3"), "#### 51"], workbench)
    assert reply == "#### 51"
    assert requests[1].last_text == "51"
    assert requests[1].body["tools"] == [TOOL]


# --- the command ----------------------------------------------------------------------------
def _environment(**extra: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "MATH_"))
    }
    return {**kept, "PYTHONPATH": str(SCRIPT.parent), **extra}


def test_the_script_solves_a_problem() -> None:
    with ScriptedServer(echoing) as server:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), PROBLEM, "--model", "named"],
            capture_output=True,
            text=True,
            env=_environment(OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k"),
        )
        assert (done.stdout, done.stderr, done.returncode) == ("#### 51\n", "", 0)
        assert server.requests[0].body["model"] == "named"


def test_the_command_says_that_the_key_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([PROBLEM])
    assert "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL" in capsys.readouterr().err


def test_the_command_says_that_the_endpoint_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert main([PROBLEM]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "http://127.0.0.1:9/v1 did not answer: Connection error.\n"


def test_the_command_says_that_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer([ask("1+1"), ask("1+1")]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main([PROBLEM, "--model", "named", "--max-calls", "2"]) == 1
    assert capsys.readouterr() == ("", "no answer within 2 calls of the model\n")


def test_bad_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(SystemExit, match="2"):
        main([PROBLEM, "--max-calls", "0"])
    assert "--max-calls is 0; the model has to be asked at least once" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "OPENAI_BASE_URL  an OpenAI-compatible endpoint" in capsys.readouterr().out
