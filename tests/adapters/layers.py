"""Agents of several frameworks that run one another in one process.

Each framework is a *layer*: an agent that calls its model, calls a tool, and calls its model again.
The tool runs the next layer, in another framework.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, Protocol

import openai
import pytest

import lightspan
from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_testing.adapter_harness import Part, Played, Says, Stage
from lightspan_testing.adapter_suite import instructions
from lightspan_testing.adapter_suite.checks import check_calls, check_tokens
from lightspan_testing.adapter_suite.scenario_runner import inside_root
from lightspan_testing.attempts import read_recorded

MODULES = {
    "langgraph": ("langchain", "langchain_openai"),
    "autogen": ("autogen_agentchat", "autogen_ext"),
    "openai_agents": ("agents",),
    "crewai": ("crewai",),
}


def is_installed(name: str) -> bool:
    """Return whether the framework and its adapter can be imported; ignore CrewAI's import
    warnings.
    """
    try:
        for module in (*MODULES[name], f"lightspan_{name}"):
            pytest.importorskip(module)
    except pytest.skip.Exception:
        return False
    return True


FRAMEWORKS = [name for name in MODULES if is_installed(name)]
if "crewai" in FRAMEWORKS:
    # CrewAI warns of fields of its own that it reads itself.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="crewai")

MARKS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    # CrewAI never closes its clients: an asynchronous one outlives its event loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]
"""Marks of every test file."""


# --- layers ---------------------------------------------------------------------------------
class Layer(Protocol):
    """An agent of one framework. If it has a tool, the tool runs the next layer."""

    names: Sequence[str]
    """Names that the layer adds to the path: a team and its agent, or an agent."""

    async def run(self, text: str) -> Any:
        """Run the agent in the current event loop."""

    def run_sync(self, text: str) -> Any:
        """Run the agent in this thread or in a new one."""


class InALoop:
    """Base of layers whose framework needs an event loop."""

    async def run(self, text: str) -> Any:
        raise NotImplementedError

    def run_sync(self, text: str) -> Any:
        async def work() -> Any:
            try:
                return await self.run(text)
            finally:
                await sdk_instrumentation.aclose()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, asyncio.run, work()).result()


def asks(inner: Layer, *, is_async: bool) -> Callable[[str], Any]:
    """Return the tool `ask`, which runs the layer `inner`."""

    def ask(what: str) -> str:
        """Ask somebody else."""
        return str(inner.run_sync(what))

    async def ask_async(what: str) -> str:
        """Ask somebody else."""
        return str(await inner.run(what))

    ask_async.__name__ = "ask"
    return ask_async if is_async else ask


@functools.cache
def client(url: str) -> openai.AsyncOpenAI:
    """Return a client without kept connections, which all layers and event loops can share."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    kept_apart = openai.DefaultAsyncHttpxClient(limits=limits)
    return openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, http_client=kept_apart)


class PlainPython:
    """A layer of plain Python: `with lightspan.agent(…)` around calls of the OpenAI SDK."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        self.names = [name]
        self.url = url
        self.inner = inner

    async def run(self, text: str) -> Any:
        with lightspan.agent(self.names[0]):
            said = await self._ask(text)
            if self.inner is None:
                return said
            return await self._ask(f"{text}: {await self.inner.run(text)}")

    async def _ask(self, text: str) -> str:
        answer = await client(self.url).chat.completions.create(**asked(self.names[0], text))
        return str(answer.choices[0].message.content)

    def run_sync(self, text: str) -> Any:
        with lightspan.agent(self.names[0]):
            said = self._ask_sync(text)
            if self.inner is None:
                return said
            return self._ask_sync(f"{text}: {self.inner.run_sync(text)}")

    def _ask_sync(self, text: str) -> str:
        with openai.OpenAI(base_url=self.url, api_key="key", max_retries=0) as sdk:
            answer = sdk.chat.completions.create(**asked(self.names[0], text))
        return str(answer.choices[0].message.content)


def asked(name: str, text: str) -> Any:
    """Return the request of the agent `name` for `text`."""
    told = {"role": "system", "content": instructions(name)}
    return {"model": "m", "messages": [told, {"role": "user", "content": text}]}


class LangGraphNode(PlainPython):
    """A graph node whose code calls a model and runs the next layer."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from langchain_core.runnables import RunnableLambda
        from langgraph.graph import START, StateGraph

        super().__init__(name, url, inner)
        self.chat = chat_of(url)
        graph: Any = StateGraph(dict)
        node: Any = RunnableLambda(self._node, self._node_async, name=name)
        graph.add_node(name, node)
        graph.add_edge(START, name)
        self.graph = graph.compile()

    async def run(self, text: str) -> Any:
        return (await self.graph.ainvoke({"text": text}))["said"]

    def run_sync(self, text: str) -> Any:
        return self.graph.invoke({"text": text})["said"]

    async def _node_async(self, state: dict[str, str]) -> dict[str, str]:
        text, prompt = state["text"], instructions(self.names[0])
        said = (await self.chat.ainvoke([("system", prompt), ("user", text)])).text
        if self.inner is not None:
            text = f"{text}: {await self.inner.run(text)}"
            said = (await self.chat.ainvoke([("system", prompt), ("user", text)])).text
        return {"said": said}

    def _node(self, state: dict[str, str]) -> dict[str, str]:
        text, prompt = state["text"], instructions(self.names[0])
        said = self.chat.invoke([("system", prompt), ("user", text)]).text
        if self.inner is not None:
            text = f"{text}: {self.inner.run_sync(text)}"
            said = self.chat.invoke([("system", prompt), ("user", text)]).text
        return {"said": said}


def chat_of(url: str) -> Any:
    """Return LangChain's chat model."""
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    return ChatOpenAI(
        model="m",
        base_url=url,
        api_key=SecretStr("key"),
        max_retries=0,
        http_async_client=client(url)._client,
    )


class LangGraph:
    """A prebuilt agent in a graph."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool

        self.names = [name]
        tools = []
        if inner is not None:
            both = [asks(inner, is_async=is_async) for is_async in (False, True)]
            tools.append(StructuredTool.from_function(*both, name="ask"))
        prompt = instructions(name)
        self.graph: Any = create_agent(chat_of(url), tools, name=name, system_prompt=prompt)

    async def run(self, text: str) -> Any:
        return (await self.graph.ainvoke({"messages": [("user", text)]}))["messages"][-1].text

    def run_sync(self, text: str) -> Any:
        return self.graph.invoke({"messages": [("user", text)]})["messages"][-1].text


class AutoGen(InALoop):
    """An AutoGen agent in a team."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from autogen_agentchat.agents import AssistantAgent
        from autogen_agentchat.teams import RoundRobinGroupChat
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        self.names = [f"{name}_team", name]
        flags = ("function_calling", "json_output", "structured_output")
        info: Any = {"vision": False, "family": "unknown", **dict.fromkeys(flags, True)}
        model = OpenAIChatCompletionClient(
            model="m", base_url=url, api_key="key", model_info=info, max_retries=0
        )
        model._client = client(url)
        self.agent = AssistantAgent(
            name,
            model,
            tools=[] if inner is None else [asks(inner, is_async=True)],
            system_message=instructions(name),
            reflect_on_tool_use=inner is not None,
        )
        self.team = RoundRobinGroupChat([self.agent], name=f"{name}_team", max_turns=1)

    async def run(self, text: str) -> Any:
        return (await self.team.run(task=text)).messages[-1].to_text()  # type: ignore[union-attr]


class AutoGenAgent(AutoGen):
    """An AutoGen agent without a team."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        super().__init__(name, url, inner)
        self.names = [name]

    async def run(self, text: str) -> Any:
        return (await self.agent.run(task=text)).messages[-1].to_text()  # type: ignore[union-attr]


class OpenAIAgents:
    """An agent of the OpenAI Agents SDK."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from agents import Agent, OpenAIChatCompletionsModel, function_tool, set_trace_processors

        set_trace_processors([])
        self.names = [name]
        self.agent: Any = Agent(
            name=name,
            instructions=instructions(name),
            model=OpenAIChatCompletionsModel("m", client(url)),
            tools=[] if inner is None else [function_tool(asks(inner, is_async=True))],
        )

    async def run(self, text: str) -> Any:
        from agents import Runner

        return (await Runner.run(self.agent, text)).final_output

    def run_sync(self, text: str) -> Any:
        """Run the agent in a new thread, because the SDK's `run_sync` fails where a loop is
        running.
        """
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, self._run_sync, text).result()

    def _run_sync(self, text: str) -> Any:
        from agents import Runner

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            said = Runner.run_sync(self.agent, text).final_output
            loop.run_until_complete(sdk_instrumentation.aclose())
            return said
        finally:
            asyncio.set_event_loop(None)
            loop.close()


class CrewAI:
    """A CrewAI agent in a crew without a name."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from crewai import LLM, Agent, Crew, Task
        from crewai.tools import tool

        self.names = [name]
        agent = Agent(
            role=name,
            goal="Answer.",
            backstory=instructions(name),
            llm=LLM("m", provider="openai", base_url=url, api_key="key", max_retries=0),
            tools=[] if inner is None else [tool(asks(inner, is_async=False))],
            max_retry_limit=0,
        )
        task = Task(description="{text}", expected_output="An answer.", agent=agent)
        self.crew = Crew(agents=[agent], tasks=[task])

    async def run(self, text: str) -> Any:
        return await self.crew.akickoff(inputs={"text": text})

    def run_sync(self, text: str) -> Any:
        return self.crew.kickoff(inputs={"text": text})


LAYERS: Mapping[str, Callable[[str, str, Layer | None], Layer]] = {
    "langgraph": LangGraph,
    "autogen": AutoGen,
    "openai_agents": OpenAIAgents,
    "crewai": CrewAI,
}


# --- playing ---------------------------------------------------------------------------------
@contextmanager
def instrumented(names: Sequence[str]) -> Iterator[None]:
    """Install the adapters of the frameworks `names` in a block."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(importlib.import_module(f"lightspan_{name}").instrument())
        yield


def attempt_of(
    layer: Layer, says: Says, stage: Stage, mode: str, place: str, folder: Path
) -> Played:
    """Run a layer in an attempt in training or in production; return and check the recorded
    attempt.
    """
    played = stage.open(Part(says), through_gateway=place == "training")
    store = f"sqlite:{folder / played.tag}.db"
    with ExitStack() as stack:
        if place == "training":
            context_propagation.carry()  # as a runner does
            stack.callback(context_propagation.stop_carrying)
            stack.enter_context(open_scope(played.scope))
        else:
            stack.enter_context(lightspan.record(store))
        if mode == "sync":
            layer.run_sync(played.text)
        else:
            asyncio.run(in_this_loop(layer.run(played.text)))
        sdk_instrumentation.close()
    if place == "training":
        stage.close(played)
        check_tokens(played, stage)
    else:
        recorded = read_recorded(store)
        assert len(recorded) == 1, "\n".join(one.tree() for one in recorded)
        [one] = recorded
        assert (one.attempt.status, one.attempt.capture_errors) == ("succeeded", [])
        played = inside_root(one, played)
    check_calls(played, stage)
    return played


async def in_this_loop(work: Awaitable[Any]) -> Any:
    """Await `work`, and close the SDK patch's connections of this event loop."""
    try:
        return await work
    finally:
        await sdk_instrumentation.aclose()
