"""Test the AutoGen agent and the MCP server of the math example with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence

import pytest

pytest.importorskip("autogen_agentchat", reason="AutoGen is in an environment of its own")
pytest.importorskip("mcp", reason="the MCP library is in the environment of AutoGen's tests")

from autogen_core.models import ChatCompletionClient
from autogen_core.tools import Workbench

from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from math_example.app import SYSTEM, calculator, chat_client, shared_calculator, solve
from math_example.command import main
from math_example.demonstrations import TOOL
from math_example.worlds import make_tasks

PROBLEM = "Ada has 12 plums. She buys 5 more. The number grows 3 times. How many has she?"
EXPRESSION = '{"expression": "(12+5)*3"}'


def ask(expression: str) -> Reply:
    """Return an answer that calls the calculator."""
    arguments = json.dumps({"expression": expression})
    return Reply(tool_calls=[ToolCall(name="calculator", arguments=arguments, call_id="call_1")])


def echoing(request: Request) -> Reply | str:
    """Return a call of the calculator, and then its result as the answer."""
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
    """Run the app; return its answer and the requests to the model."""
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


async def test_who_only_calls_tools_has_not_answered(workbench: Workbench) -> None:
    reply, requests = await run([ask("1+1"), ask("2+2"), ask("3+3")], workbench, max_calls=3)
    assert (reply, len(requests)) == ("", 3)
    with pytest.raises(ValueError, match="max_calls is 0; the model has to be asked at least once"):
        await run([], workbench, max_calls=0)


async def test_an_answer_never_reaches_the_app(workbench: Workbench) -> None:
    task = make_tasks("test", count=1)[0]
    with ScriptedServer(["#### 1"]) as server:
        client = chat_client("m", base_url=server.url, api_key="k")
        await solve(task["problem"], client, workbench)
        await client.close()
        assert f'"{task["answer"]}"' not in json.dumps([dict(r.body) for r in server.requests])


# --- one server for many problems -----------------------------------------------------------
def servers_of(pid: int) -> list[int]:
    """Return the ids of the running calculator processes that `pid` has started."""
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
    """Return the first answer after the failures of calls that used a dead server."""
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


# --- the command ----------------------------------------------------------------------------


def test_the_command_says_that_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer([ask("1+1"), ask("1+1")]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main([PROBLEM, "--model", "named", "--max-calls", "2"]) == 1
    assert capsys.readouterr() == ("", "no answer within 2 calls of the model\n")
