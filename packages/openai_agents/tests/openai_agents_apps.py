"""Small apps of OpenAI's Agents SDK, and a context manager that installs the adapter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from agents.tool_context import ToolContext
from agents.tracing import Span as SdkSpan, Trace, TracingProcessor, setup

from lightspan.capture import context
from lightspan_openai_agents import _hook, instrument
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall


def async_client(server: ScriptedServer | Stage, **more: Any) -> openai.AsyncOpenAI:
    """Return a client that keeps no connection, so that several event loops can use it."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    http = openai.DefaultAsyncHttpxClient(limits=limits)
    given = {"base_url": server.url, "api_key": "key", "max_retries": 0, "http_client": http}
    return openai.AsyncOpenAI(**{**given, **more})


def chat(server: ScriptedServer, **more: Any) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("m", async_client(server, **more))


def make(server: ScriptedServer, name: str, **more: Any) -> Agent[Any]:
    return Agent(name=name, instructions=f"You are {name}.", model=chat(server), **more)


def who(request: Request) -> str:
    """Return the name of the agent that sends a request, according to its instructions."""
    return str(request.messages[0]["content"]).removeprefix("You are ").removesuffix(".")


Answers = dict[str, Sequence[Reply | str]]


def says(answers: Answers) -> Callable[[Request], Reply | str]:
    """Return a script in which each agent gives its answers in turn, then "done"."""
    left = {name: list(replies) for name, replies in answers.items()}
    lock = threading.Lock()

    def script(request: Request) -> Reply | str:
        with lock:
            known = left.get(who(request))
            return known.pop(0) if known else "done"

    return script


def calls(*names: str, **more: str) -> Reply:
    """Return an answer that calls the tools `names`, with the ids `call_<name>`."""
    arguments = {"ask": '{"input": "why?"}', "look": '{"what": "seven"}'}
    return Reply(
        tool_calls=[
            ToolCall(
                name=name,
                arguments=more.get(name, arguments.get(name.partition("_")[0], "{}")),
                call_id=f"call_{name}",
            )
            for name in names
        ]
    )


@function_tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 7"


def ask_raw(server: ScriptedServer, text: str = "raw") -> None:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


AGENT_WITH_TOOL = [
    "invoke_agent scout @scout",
    "  chat m @scout",
    "  execute_tool look @scout",
    "  chat m @scout",
]
TEAM = [
    "invoke_agent triage @triage",
    "  chat m @triage",
    "  execute_tool ask_expert @triage",
    "    invoke_agent expert @triage/expert",
    "      chat m @triage/expert",
    "  chat m @triage",
    "  handoff @triage",
    "invoke_agent billing @billing",
    "  chat m @billing",
]


def team(server: ScriptedServer) -> Agent[Any]:
    server.script = says({"triage": [calls("ask_expert"), calls("transfer_to_billing")]})
    expert, billing = make(server, "expert"), make(server, "billing")
    tool = expert.as_tool("ask_expert", "Ask.")
    return make(server, "triage", tools=[tool], handoffs=[billing])


# --- three ways to run one ------------------------------------------------------------------
Run = Callable[..., Any]


def run_sync(agent: Agent[Any], text: Any = "go", **more: Any) -> Any:
    def in_a_thread() -> Any:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # the SDK would make one, and leave it open
        try:
            return Runner.run_sync(agent, text, **more)
        finally:
            loop.close()

    with ThreadPoolExecutor(1) as pool:  # not in pytest's own loop's thread
        return pool.submit(copy_context().run, in_a_thread).result()


def run_async(agent: Agent[Any], text: Any = "go", **more: Any) -> Any:
    return asyncio.run(Runner.run(agent, text, **more))


def run_streamed(agent: Agent[Any], text: Any = "go", **more: Any) -> Any:
    async def consume() -> Any:
        result = Runner.run_streamed(agent, text, **more)
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(consume())


HOW = pytest.mark.parametrize("run", [run_sync, run_async, run_streamed])


# --- what the app hears ---------------------------------------------------------------------
class Heard(TracingProcessor):
    """A processor of the app that stores its traces and spans."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self.traces = 0

    def on_trace_start(self, trace: Trace) -> None:
        self.traces += 1

    def on_trace_end(self, trace: Trace) -> None:
        pass

    def on_span_start(self, span: SdkSpan[Any]) -> None:
        pass

    def on_span_end(self, span: SdkSpan[Any]) -> None:
        self.spans.append(span.span_data.type)

    def shutdown(self) -> None:
        pass

    def force_flush(self) -> None:
        pass


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the adapter in an unchanged SDK; check afterwards that the SDK is unchanged again."""
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    maker = vars(ToolContext)["from_agent_context"]
    with instrument():
        yield
    assert not isinstance(setup.GLOBAL_TRACE_PROVIDER, _hook._Provider)
    assert vars(ToolContext)["from_agent_context"] is maker
    assert _hook.adapter.call_listener not in context.call_listeners()
    assert context.current_context() is None
