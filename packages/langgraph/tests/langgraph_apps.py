"""Small LangGraph apps, and a context manager that installs the adapter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
from langchain_core.tools import tool
from langchain_core.tracers import context as langchain_context
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

from lightspan.capture import context
from lightspan_langgraph import _hook, instrument
from lightspan_testing.adapter_harness import Stage
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

USER: Any = {"messages": [("user", "go")]}


def chat(server: ScriptedServer | Stage, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=server.url, api_key=SecretStr("key"), max_retries=0, **more
    )


def raw_client(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)


def ask_raw(client: openai.OpenAI, text: str = "raw") -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def graph_of(*nodes: tuple[str, Any], **compiled: Any) -> Any:
    """Return a graph whose nodes run one after the other."""
    graph: Any = StateGraph(MessagesState)
    for name, node in nodes:
        graph.add_node(name, node)
    names = [START, *(name for name, _ in nodes), END]
    for before, after in itertools.pairwise(names):
        graph.add_edge(before, after)
    return graph.compile(**compiled)


def asks(model: Any, text: str = "hi") -> Callable[[Any], dict[str, Any]]:
    def node(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke(text)]}

    return node


def asks_async(model: Any, text: str = "hi") -> Callable[[Any], Any]:
    async def node(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(text)]}

    return node


def calls_tool(name: str, arguments: str = "{}") -> Callable[[Request], Reply | str]:
    """Return a script of a model that calls the tool `name` once per question, then answers."""

    def script(request: Request) -> Reply | str:
        wants = request.body.get("tools") and request.messages[-1]["role"] == "user"
        if not wants:
            return "done"
        return Reply(tool_calls=[ToolCall(name=name, arguments=arguments, call_id="call_7")])

    return script


def two_nodes(server: ScriptedServer) -> Any:
    model = chat(server)
    return graph_of(("writer", asks(model)), ("checker", asks(model)))


TWO_NODES = [
    "invoke_agent writer @writer",
    "  chat m @writer",
    "invoke_agent checker @checker",
    "  chat m @checker",
]


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 7"


def human(text: str) -> Any:
    from langchain_core.messages import HumanMessage

    return HumanMessage(text)


@contextmanager
def installed() -> Iterator[None]:
    """Install the adapter in a block; check afterwards that it is removed without a trace."""
    hooks = list(langchain_context._configure_hooks)
    with instrument():
        yield
    assert langchain_context._configure_hooks == hooks
    assert _hook.resolve not in context.resolvers()
    assert _hook._state.patches == []
