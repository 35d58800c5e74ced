"""Run the adapter suite with LangGraph: the real framework in every scenario."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypedDict

import openai
import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool, tool
from langchain_core.tracers import context as langchain_context
from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from pydantic import SecretStr

from lightspan.capture import context
from lightspan_langgraph import _hook
from lightspan_langgraph._cache import METHODS
from lightspan_testing.adapter_suite import (
    OTHER_MEANS,
    AdapterSuite,
    App,
    Impossible,
    Model,
    broken,
    by_other_means,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.scenarios import BOSS, FAILED, SCOUT, WRITER


class Texts(TypedDict):
    text: str
    said: Annotated[list[str], operator.add]


class Cast:
    """Create the graphs of one scenario."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.chat = ChatOpenAI(
            model=model.name,
            base_url=model.base_url,
            api_key=SecretStr(model.api_key),
            max_retries=model.max_retries,
            timeout=model.timeout_s,
            streaming=model.stream,
            # LangChain would share one among all models, which the first event loop binds
            http_async_client=openai.DefaultAsyncHttpxClient(),
        )

    def node(self, name: str, chat: Any = None) -> Any:
        """Return a node that calls the model as the agent `name`, synchronously or
        asynchronously.
        """

        chat, prompt = chat or self.chat, instructions(name)

        def messages(state: Texts) -> list[tuple[str, str]]:
            return [("system", prompt), ("user", state["text"])]

        def ask(state: Texts) -> dict[str, Any]:
            return {"said": [chat.invoke(messages(state)).text]}

        async def ask_async(state: Texts) -> dict[str, Any]:
            return {"said": [(await chat.ainvoke(messages(state))).text]}

        return RunnableLambda(ask, ask_async, name=name)

    def chain(self, *nodes: tuple[str, Any]) -> Any:
        """Return a graph whose nodes run one after the other."""
        graph: Any = StateGraph(Texts)
        before = START
        for name, node in nodes:
            graph.add_node(name, node)
            graph.add_edge(before, name)
            before = name
        graph.add_edge(before, END)
        return graph.compile()

    def agent(self, name: str, *tools: Callable[..., Any]) -> Any:
        prompt = instructions(name)
        return create_agent(self.chat, [*tools], name=name, system_prompt=prompt)


BUILDERS: dict[str, Callable[[Cast], App]] = {}


def scenario(build: Callable[[Cast], App]) -> Callable[[Cast], App]:
    BUILDERS[build.__name__] = build
    return build


def app(graph: Any, tree: str, **more: Any) -> App:
    """Return the app of a graph whose state is a text or a list of messages."""

    def given(text: str) -> Any:
        return {"text": text, "said": [], "messages": [("user", text)]}

    async def run(text: str) -> Any:
        return await graph.ainvoke(given(text))

    def run_sync(text: str) -> Any:
        return graph.invoke(given(text))

    return App(run=run, run_sync=run_sync, tree=tree, target=graph, **more)


@scenario
def single(cast: Cast) -> App:
    return app(cast.chain(("writer", cast.node("writer"))), WRITER)


@scenario
def team(cast: Cast) -> App:
    return app(
        cast.chain(("writer", cast.node("writer")), ("checker", cast.node("checker"))),
        """
        invoke_agent writer @writer
          chat @writer
        invoke_agent checker @checker
          chat @checker
        """,
    )


@scenario
def nested(cast: Cast) -> App:
    inner = cast.chain(("writer", cast.node("writer")), ("checker", cast.node("checker")))
    return app(
        cast.chain(("drafting", inner), ("judge", cast.node("judge"))),
        """
        invoke_agent drafting @drafting
          invoke_agent writer @drafting/writer
            chat @drafting/writer
          invoke_agent checker @drafting/checker
            chat @drafting/checker
        invoke_agent judge @judge
          chat @judge
        """,
    )


@scenario
def parallel(cast: Cast) -> App:
    graph: Any = StateGraph(Texts)
    for name in ("planner", "left", "right", "joiner"):
        graph.add_node(name, cast.node(name))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "left")
    graph.add_edge("planner", "right")
    graph.add_edge(["left", "right"], "joiner")
    return app(
        graph.compile(),
        """
        invoke_agent planner @planner
          chat @planner
        invoke_agent left @left
          chat @left
        invoke_agent right @right
          chat @right
        invoke_agent joiner @joiner
          chat @joiner
        """,
    )


@scenario
def tools(cast: Cast) -> App:
    return app(
        cast.agent("scout", look),
        SCOUT,
    )


@scenario
def parallel_tools(cast: Cast) -> App:
    return app(
        cast.agent("scout", look, count),
        """
        invoke_agent scout @scout
          chat @scout
          chat @scout
          execute_tool count @scout
          execute_tool look @scout
        """,
    )


@scenario
def handoff(cast: Cast) -> App:
    """Return an app whose handoff tool returns a command to the parent graph, like the prebuilt
    one.
    """

    @tool
    def transfer_to_expert() -> Any:
        """Hand off to the expert."""
        return Command(goto="expert", graph=Command.PARENT)

    graph: Any = StateGraph(MessagesState)
    graph.add_node("triage", cast.agent("triage", transfer_to_expert), destinations=("expert",))
    graph.add_node("expert", cast.agent("expert"))
    graph.add_edge(START, "triage")
    graph.add_edge("expert", END)
    return app(
        graph.compile(),
        """
        invoke_agent triage @triage unset
          chat @triage
          execute_tool transfer_to_expert @triage
        invoke_agent expert @expert
          chat @expert
        """,
    )


@scenario
def agent_as_tool(cast: Cast) -> App:
    inner = cast.agent("expert", look)

    def ask(task: str) -> str:
        """Ask the expert."""
        return str(inner.invoke({"messages": [("user", task)]})["messages"][-1].text)

    async def ask_async(task: str) -> str:
        """Ask the expert."""
        return str((await inner.ainvoke({"messages": [("user", task)]}))["messages"][-1].text)

    expert = StructuredTool.from_function(ask, ask_async, name="expert")
    return app(
        cast.agent("boss", expert),
        BOSS,
    )


@scenario
def same_name(cast: Cast) -> App:
    one = cast.chain(("writer", cast.node("writer")))
    two = cast.chain(("writer", cast.node("writer")))
    return app(
        cast.chain(("one", one), ("two", two)),
        """
        invoke_agent one @one
          invoke_agent writer @one/writer
            chat @one/writer
        invoke_agent two @two
          invoke_agent writer @two/writer
            chat @two/writer
        """,
    )


@scenario
def unicode(cast: Cast) -> App:
    return app(
        cast.chain(("Prüferin日本", cast.node("Prüferin日本"))),
        WRITER.replace("writer", "Prüferin日本"),
    )


@scenario
def tool_error(cast: Cast) -> App:
    return app(
        cast.agent("scout", broken),
        """
        invoke_agent scout @scout error
          chat @scout
          execute_tool broken @scout error
        """,
        raises=LookupError,
    )


@scenario
def model_error(cast: Cast) -> App:
    graph = cast.chain(("writer", cast.node("writer")))
    return app(graph, FAILED, raises=openai.APIStatusError)


@scenario
def retry(cast: Cast) -> App:
    return single(cast)


@scenario
def timeout(cast: Cast) -> App:
    graph = cast.chain(("writer", cast.node("writer")))
    return app(graph, FAILED, raises=openai.APITimeoutError)


@scenario
def cancelled(cast: Cast) -> App:
    return app(cast.chain(("writer", cast.node("writer"))), FAILED)


class Own(BaseChatModel):
    """A custom model client that does not use the OpenAI SDK, or not for every answer."""

    answer: Callable[[Any], str]

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.answer(messages)))])

    def _stream(self, messages: Any, *args: Any, **more: Any) -> Iterator[ChatGenerationChunk]:
        for word in re.findall(r"\S+ ?", self.answer(messages)):
            yield ChatGenerationChunk(message=AIMessageChunk(word))


def own(name: str, cast: Cast) -> App:
    client = Own(answer=by_other_means(name, cast.model), disable_streaming=not cast.chat.streaming)
    return app(cast.chain(("writer", cast.node("writer", client))), OTHER_MEANS[name])


BUILDERS.update({name: partial(own, name) for name in OTHER_MEANS})


class TestSuite(AdapterSuite):
    framework: ClassVar[str] = "langgraph"
    notes_starts = (_hook, "_record_start")

    def build(self, scenario: str, model: Model) -> App:
        if scenario not in BUILDERS:
            raise Impossible(scenario)
        cast = Cast(model)
        built = BUILDERS[scenario](cast)
        return replace(built, close=cast.chat.root_async_client.close)

    def patched(self) -> Mapping[str, Any]:
        """Return LangChain's hooks for run configuration, lightspan's resolvers, and the caches'
        methods.
        """
        caches = [(kind, name) for kind in (BaseCache, InMemoryCache) for name in METHODS]
        caches += [(NodeCache, name) for name in ("get", "set", "aget", "aset")]
        return {
            **{
                f"{kind.__module__}.{kind.__name__}.{name}": vars(kind)[name]
                for kind, name in caches
            },
            "BaseCache.__init_subclass__": vars(BaseCache).get("__init_subclass__"),
            "langchain_core.tracers.context._configure_hooks": [
                *langchain_context._configure_hooks
            ],
            "lightspan.capture.context.resolvers": list(context.resolvers()),
        }

    program_root = "invoke_workflow LangGraph"
    program = """
    import sys
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    chat = ChatOpenAI(model="m", base_url=sys.argv[1], api_key="key")

    def writer(state):
        return {"messages": [chat.invoke([("system", "You are writer."), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", writer)
    graph.add_edge(START, "writer")
    done = graph.compile().invoke({"messages": [("user", sys.argv[2])]})
    print(done["messages"][-1].text)
    """

    def openinference(self) -> AbstractContextManager[Any]:
        from tests.adapters.fixtures import openinference

        return openinference("langchain.LangChainInstrumentor", "openai.OpenAIInstrumentor")
