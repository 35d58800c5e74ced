"""An ordinary AutoGen agent that solves word problems with a calculator.

The calculator is a tool of an MCP server. The app starts the server as a child process, or connects
to its URL. The agent calls its model, runs the tool calls of the answer and calls the model again,
at most `max_calls` times; its last message is the answer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ChatCompletionClient, ModelInfo
from autogen_core.tools import Workbench
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams, StreamableHttpServerParams

AGENT: Final = "solver"
SYSTEM: Final = "Use the calculator. End with #### and the answer."
MAX_CALLS: Final = 6
MODEL_VARIABLE: Final = "MATH_MODEL"
SERVER_VARIABLE: Final = "MATH_MCP_URL"
DEFAULT_MODEL: Final = "gpt-5-mini"
TIMEOUT_S: Final = 60.0
"""Timeout of a calculation in seconds; AutoGen's default of 5 is too short on a busy machine."""
ALIVE_TIMEOUT_S: Final = 5.0
"""Timeout in seconds of the request that checks whether a calculator still runs."""


def chat_client(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> OpenAIChatCompletionClient:
    """Return a client of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; None for the environment variable MATH_MODEL, or else the default.
        base_url: URL of the endpoint; None for OPENAI_BASE_URL.
        api_key: key of the endpoint; None for OPENAI_API_KEY.
        temperature: sampling temperature; None for the endpoint's default.
        max_tokens: maximum tokens of an answer; None for the endpoint's default.
    """
    options: dict[str, Any] = {
        "base_url": base_url,
        "api_key": api_key,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    return OpenAIChatCompletionClient(
        model=model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        # AutoGen knows a few names only; of any other model it has to be told what it can do
        model_info=ModelInfo(
            vision=False,
            function_calling=True,
            json_output=False,
            structured_output=False,
            family="unknown",
        ),
        **{name: value for name, value in options.items() if value is not None},
    )


def calculator(url: str | None = None) -> McpWorkbench:
    """Return the calculator's tools; use the result as an async context manager.

    Args:
        url: URL of a running server, such as `http://127.0.0.1:8765/mcp`. None takes MATH_MCP_URL;
            if that is not set, a server is started over stdio and ends with the workbench.
    """
    url = url or os.environ.get(SERVER_VARIABLE)
    if url:
        return McpWorkbench(StreamableHttpServerParams(url=url, timeout=TIMEOUT_S))
    # The server gets no variable but these: it has no business with the app's keys.
    package = str(Path(__file__).resolve().parents[1])
    return McpWorkbench(
        StdioServerParams(
            command=sys.executable,
            args=["-P", "-m", "math_example.server"],
            env={"PYTHONPATH": package},
            read_timeout_seconds=TIMEOUT_S,
        )
    )


def make_agent(
    client: ChatCompletionClient, workbench: Workbench, *, max_calls: int = MAX_CALLS
) -> AssistantAgent:
    """Return an agent for one problem; an agent remembers its conversation.

    Args:
        max_calls: maximum number of calls of the model.

    Raises:
        ValueError: `max_calls` is below 1.
    """
    if max_calls < 1:
        raise ValueError(f"max_calls is {max_calls}; the model has to be asked at least once")
    return AssistantAgent(
        AGENT,
        client,
        workbench=workbench,
        system_message=SYSTEM,
        max_tool_iterations=max_calls,
    )


async def solve(
    problem: str,
    client: ChatCompletionClient,
    workbench: Workbench,
    *,
    max_calls: int = MAX_CALLS,
) -> str:
    """Return the agent's reply to a word problem; empty if its last allowed call called a tool."""
    agent = make_agent(client, workbench, max_calls=max_calls)
    final = (await agent.run(task=problem)).messages[-1]
    return final.content.strip() if isinstance(final, TextMessage) else ""


# --- one calculator for many problems -------------------------------------------------------
class _Kept(NamedTuple):
    """An open calculator of an event loop.

    `keeper` is the generator that holds the calculator open. `started` is the task that returns its
    workbench.
    """

    keeper: AsyncGenerator[McpWorkbench, None]
    started: asyncio.Task[McpWorkbench]


_kept: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Kept]] = WeakKeyDictionary()


@asynccontextmanager
async def shared_calculator() -> AsyncIterator[McpWorkbench]:
    """Yield the calculator of this event loop: the first caller starts it, and it ends with the
    loop.

    A program that solves many problems at once needs one server and one session. If the server
    dies, its current callers fail, and the next caller starts a new server.
    """
    loop = asyncio.get_running_loop()
    kept = _kept.get(loop) or _kept.setdefault(loop, _keep(loop))
    workbench = await asyncio.shield(kept.started)
    try:
        yield workbench
    except Exception:
        if _kept.get(loop) is kept and not await _is_alive(workbench):
            _kept.pop(loop, None)
            await kept.keeper.aclose()
        raise


async def _is_alive(workbench: Workbench) -> bool:
    try:
        await asyncio.wait_for(workbench.list_tools(), ALIVE_TIMEOUT_S)
    except Exception:  # whatever a broken session raises: it has many ways to say so
        return False
    return True


def _keep(loop: asyncio.AbstractEventLoop) -> _Kept:
    keeper = _open()
    # In a context of its own: the session outlives the caller, and must not carry what the
    # caller's context says.
    return _Kept(keeper, loop.create_task(_first(keeper), context=Context()))


async def _open() -> AsyncGenerator[McpWorkbench, None]:
    # `asyncio.run` closes suspended generators before it closes the loop: no server is left
    async with calculator() as workbench:
        yield workbench


async def _first(keeper: AsyncGenerator[McpWorkbench, None]) -> McpWorkbench:
    return await anext(keeper)
