"""Every adapter that can be installed with others, in one process, nested in one another.

Each framework is a *layer*: an agent that asks its model, calls a tool, and asks again. The tool
runs the next layer, in another framework. So the whole tree is known beforehand, in any order.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import itertools
import os
import textwrap
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

import openai
import pytest

from lightspan import threads, wire
from lightspan.scope import open_scope
from lightspan.testing.adapter_suite import (
    App,
    check_attributes,
    check_calls,
    check_names,
    check_tokens,
    instructions,
    tree,
)
from lightspan.testing.stage import Part, Played, Stage, Turn

MODULES = {
    "langgraph": ("langchain", "langchain_openai"),
    "autogen": ("autogen_agentchat", "autogen_ext"),
    "openai_agents": ("agents",),
    "crewai": ("crewai",),
}


def is_installed(name: str) -> bool:
    """Whether the framework and its adapter can be imported; CrewAI warns while it is."""
    try:
        for module in (*MODULES[name], f"lightspan_{name}"):
            pytest.importorskip(module)
    except pytest.skip.Exception:
        return False
    return True


FRAMEWORKS = [name for name in MODULES if is_installed(name)]
if len(FRAMEWORKS) < 2 and not os.environ.get("LIGHTSPAN_EXPECTED"):
    pytest.skip("fewer than two frameworks are installed", allow_module_level=True)
if "crewai" in FRAMEWORKS:
    # CrewAI warns of fields of its own that it reads itself.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="crewai")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    # CrewAI never closes its clients: an asynchronous one outlives its event loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]

CONCURRENT = 32
PAIRS = list(itertools.permutations(FRAMEWORKS, 2))
CYCLES = [FRAMEWORKS[n:] + FRAMEWORKS[:n] for n in range(len(FRAMEWORKS))]


# --- layers ---------------------------------------------------------------------------------
class Layer(Protocol):
    """An agent of one framework; its tool, if it has one, runs the next layer."""

    names: Sequence[str]
    """What it adds to the path: a team and its agent, or an agent."""

    async def run(self, text: str) -> Any:
        """Run it in this event loop."""

    def run_sync(self, text: str) -> Any:
        """Run it in this thread, or in one of its own."""


class InALoop:
    """A framework whose agents need an event loop."""

    async def run(self, text: str) -> Any:
        raise NotImplementedError

    def run_sync(self, text: str) -> Any:
        async def work() -> Any:
            try:
                return await self.run(text)
            finally:
                await wire.aclose()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, asyncio.run, work()).result()


def asks(inner: Layer, *, is_async: bool) -> Callable[[str], Any]:
    """The tool `ask`, which runs the next layer."""

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
    """One for all, which keeps no connection, so that it can go from loop to loop."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    kept_apart = openai.DefaultAsyncHttpxClient(limits=limits)
    return openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0, http_client=kept_apart)


class LangGraph:
    """An agent in a graph."""

    def __init__(self, name: str, url: str, inner: Layer | None) -> None:
        from langchain.agents import create_agent
        from langchain_core.tools import StructuredTool
        from langchain_openai import ChatOpenAI
        from pydantic import SecretStr

        self.names = [name]
        chat = ChatOpenAI(
            model="m",
            base_url=url,
            api_key=SecretStr("key"),
            max_retries=0,
            http_async_client=client(url)._client,
        )
        tools = []
        if inner is not None:
            both = [asks(inner, is_async=is_async) for is_async in (False, True)]
            tools.append(StructuredTool.from_function(*both, name="ask"))
        self.graph: Any = create_agent(chat, tools, name=name, system_prompt=instructions(name))

    async def run(self, text: str) -> Any:
        return (await self.graph.ainvoke({"messages": [("user", text)]}))["messages"][-1].text

    def run_sync(self, text: str) -> Any:
        return self.graph.invoke({"messages": [("user", text)]})["messages"][-1].text


class AutoGen(InALoop):
    """An agent in a team."""

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
        agent = AssistantAgent(
            name,
            model,
            tools=[] if inner is None else [asks(inner, is_async=True)],
            system_message=instructions(name),
            reflect_on_tool_use=inner is not None,
        )
        self.team = RoundRobinGroupChat([agent], name=f"{name}_team", max_turns=1)

    async def run(self, text: str) -> Any:
        return (await self.team.run(task=text)).messages[-1].to_text()  # type: ignore[union-attr]


class OpenAIAgents(InALoop):
    """An agent of the Agents SDK."""

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


class CrewAI:
    """An agent in a crew without a name."""

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
AGENTS = {"langgraph": "planner", "autogen": "analyst", "openai_agents": "expert", "crewai": "poet"}


# --- an app of several layers ---------------------------------------------------------------
@dataclass
class Nested:
    """Frameworks inside one another, outermost first."""

    outermost: Layer
    expected: str
    part: Part

    @property
    def as_app(self) -> App:
        """What the suite's checks need to know."""

        async def run(text: str) -> Any:
            return await self.outermost.run(text)

        return App(run=run, tree=self.expected)


def build(frameworks: Sequence[str], url: str) -> Nested:
    """The app, what is to be recorded of it, and what its agents say."""
    layer: Layer | None = None
    for framework in reversed(frameworks):
        layer = LAYERS[framework](AGENTS[framework], url, layer)
    assert layer is not None
    names = [AGENTS[framework] for framework in frameworks]
    asking: list[Turn | str] = [Turn(calls=[("ask", '{"what": "help with {task}"}')])]
    says = {name: [*asking, f"{name} is done with {{task}}."] for name in names[:-1]}
    part = Part({**says, names[-1]: [f"{names[-1]} knows of {{task}}."]})
    return Nested(layer, "\n".join(expected_of(frameworks)), part)


def expected_of(frameworks: Sequence[str], around: str = "") -> list[str]:
    """The lines of the tree of these layers, inside a path."""
    lines, path = [], around
    name = AGENTS[frameworks[0]]
    for depth, one in enumerate([f"{name}_team", name] if frameworks[0] == "autogen" else [name]):
        path = f"{path}/{one}".lstrip("/")
        lines.append(f"{'  ' * depth}invoke_agent {one} @{path}")
    inside = [f"chat @{path}"]
    if len(frameworks) > 1:
        inner = [f"  {line}" for line in expected_of(frameworks[1:], path)]
        inside += [f"execute_tool ask @{path}", *inner, f"chat @{path}"]
    return lines + [textwrap.indent(line, "  " * len(lines)) for line in inside]


# --- playing --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running
    gc.collect()  # what CrewAI left unclosed is found here, where it is known


@pytest.fixture(autouse=True)
def _in_a_runner() -> Iterator[None]:
    """A runner carries the scope into the threads that an app makes."""
    threads.carry()
    try:
        yield
    finally:
        threads.stop_carrying()


@contextmanager
def instrumented(names: Sequence[str]) -> Iterator[None]:
    """The adapters of all these frameworks."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(importlib.import_module(f"lightspan_{name}").instrument())
        yield


async def in_this_loop(work: Awaitable[Any]) -> Any:
    """Await it and leave no connection of this loop open."""
    try:
        return await work
    finally:
        await wire.aclose()


def check(nested: Nested, played: Played, stage: Stage) -> None:
    """The whole tree, every call under its name and in its attempt, every token."""
    stage.close(played)
    assert stage.brain.problems == []
    lines = tree(played.spans)
    assert lines == nested.expected.splitlines(), "\n".join(lines)
    check_names(played, nested.as_app)
    check_attributes(played)
    check_calls(played, stage)
    if played.through_gateway:
        check_tokens(played, stage)


def play(nested: Nested, stage: Stage, mode: str, *, through_gateway: bool) -> None:
    """One attempt, and everything that must hold of it."""
    played = stage.open(nested.part, through_gateway=through_gateway)
    with open_scope(played.scope):
        if mode == "sync":
            nested.outermost.run_sync(played.text)
        else:
            asyncio.run(in_this_loop(nested.outermost.run(played.text)))
    wire.close()
    check(nested, played, stage)


def named(frameworks: Sequence[str]) -> str:
    return "-".join(frameworks)


# --- tests ----------------------------------------------------------------------------------
def test_which_frameworks_take_part() -> None:
    """All that the nox session names, and no other."""
    expected = os.environ.get("LIGHTSPAN_EXPECTED")
    if not expected:
        pytest.skip("no nox session says which")
    modules = expected.split(",")
    assert [name for name in MODULES if f"lightspan_{name}" in modules] == FRAMEWORKS


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_one_inside_another(stage: Stage, pair: Sequence[str], mode: str) -> None:
    """Every framework inside every other, trained."""
    with instrumented(FRAMEWORKS):
        play(build(pair, stage.url), stage, mode, through_gateway=True)


@pytest.mark.parametrize("route", ["app", "gateway"])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("cycle", CYCLES, ids=named)
def test_all_inside_one_another(stage: Stage, cycle: Sequence[str], mode: str, route: str) -> None:
    """All of them, each outermost once, installed in this order and in the other."""
    for order in (FRAMEWORKS, FRAMEWORKS[::-1]):
        with instrumented(order):
            play(build(cycle, stage.url), stage, mode, through_gateway=route == "gateway")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cycle", [FRAMEWORKS, FRAMEWORKS[::-1]], ids=named)
def test_32_attempts_at_once(stage: Stage, cycle: Sequence[str]) -> None:
    """32 attempts in one event loop: no call lost, doubled, misnamed or in another attempt."""
    apps = [build(cycle, stage.url) for _ in range(CONCURRENT)]
    played = [stage.open(app.part, through_gateway=True) for app in apps]

    async def one(app: Nested, attempt: Played) -> None:
        with open_scope(attempt.scope):
            await app.outermost.run(attempt.text)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for app, attempt in zip(apps, played, strict=True):
                group.create_task(one(app, attempt))

    with instrumented(FRAMEWORKS):
        asyncio.run(in_this_loop(all_of_them()))
    wire.close()
    for app, attempt in zip(apps, played, strict=True):
        check(app, attempt, stage)
    span_ids = [span.span_id for attempt in played for span in attempt.spans]
    assert len(set(span_ids)) == len(span_ids)


def test_all_of_them_at_once(stage: Stage) -> None:
    """One attempt runs every framework at the same time: siblings, none inside another."""
    apps = [build([framework], stage.url) for framework in FRAMEWORKS]
    says = {name: turns for app in apps for name, turns in app.part.says.items()}
    played = stage.open(Part(says), through_gateway=True)

    async def main() -> None:
        await asyncio.gather(*(app.outermost.run(played.text) for app in apps))

    with instrumented(FRAMEWORKS), open_scope(played.scope):
        asyncio.run(in_this_loop(main()))
    wire.close()
    stage.close(played)
    expected = sorted(app.expected.splitlines() for app in apps)
    assert tree(played.spans, ordered=False) == [line for lines in expected for line in lines]
    check_names(played, apps[0].as_app)
    check_calls(played, stage)
    check_tokens(played, stage)
