"""Test apps that use autogen-core directly: agents that send each other messages by a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_core import (
    AgentId,
    ClosureAgent,
    ClosureContext,
    DefaultSubscription,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core.models import ChatCompletionClient, SystemMessage, UserMessage
from autogen_core.tool_agent import ToolAgent, tool_agent_caller_loop
from autogen_core.tools import FunctionTool

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.production.record import flush
from lightspan.schema.records import AttemptStatus
from lightspan_autogen import agents
from lightspan_testing.adapter_harness import Part, Says, Stage
from lightspan_testing.adapter_suite import Turn, instructions, tree
from lightspan_testing.attempts import read_recorded
from packages.autogen.tests.autogen_apps import SAYS, TEAM, Rig, lines, two

pytestmark = pytest.mark.usefixtures("installed_autogen")


@dataclass
class Question:
    text: str


@dataclass
class Draft:
    text: str


@dataclass
class Answer:
    text: str


async def ask(client: ChatCompletionClient, name: str, text: str) -> str:
    system = SystemMessage(content=instructions(name))
    result = await client.create([system, UserMessage(content=text, source="user")])
    return str(result.content)


class Asking(RoutedAgent):
    def __init__(self, client: ChatCompletionClient) -> None:
        super().__init__("An agent of the user's own.")
        self._client = client

    async def says(self, text: str) -> str:
        return await ask(self._client, self.id.type, text)


class Writer(Asking):
    """An agent that answers any message with a draft, after asking a checker about it."""

    @message_handler
    async def on_question(self, message: Question, ctx: MessageContext) -> Answer:
        draft = await self.says(message.text)
        answer = await self.send_message(Draft(draft), AgentId("checker", self.id.key))
        return Answer(f"{draft} {answer.text}")


class Checker(Asking):
    @message_handler
    async def on_draft(self, message: Draft, ctx: MessageContext) -> Answer:
        return Answer(await self.says(message.text))


async def pair(rig: Rig, runtime: Any = None) -> SingleThreadedAgentRuntime:
    """Return a runtime with a writer that asks a checker."""
    made: SingleThreadedAgentRuntime = runtime or SingleThreadedAgentRuntime()
    await Writer.register(made, "writer", lambda: Writer(rig.client))
    await Checker.register(made, "checker", lambda: Checker(rig.client))
    return made


PAIR = lines("""
        invoke_agent writer @writer
          chat @writer
          invoke_agent checker @writer/checker
            chat @writer/checker
""")


@pytest.fixture
async def runtime(rig: Rig) -> AsyncIterator[SingleThreadedAgentRuntime]:
    """Start a runtime outside of every attempt."""
    made = await pair(rig)
    made.start()
    yield made
    await made.stop()


async def test_a_runtime_that_was_started_before_the_attempt(
    rig: Rig, runtime: SingleThreadedAgentRuntime
) -> None:
    for _ in range(2):
        await rig.record(SAYS, lambda t: runtime.send_message(Question(t), AgentId("writer", "k")))
        assert rig.tree == PAIR


async def test_a_runtime_that_was_started_in_another_attempt(rig: Rig) -> None:
    runtime = await pair(rig)

    async def run(text: str) -> None:
        if runtime._run_context is None:
            runtime.start()
        await runtime.send_message(Question(text), AgentId("writer", "k"))

    await rig.record(SAYS, run)
    first = rig.played
    await rig.record(SAYS, run)
    assert (rig.tree, rig.played is first) == (PAIR, False)
    assert first is not None
    before = len(first.spans)
    part = rig.stage.open(Part(SAYS), through_gateway=False)
    await run(part.text)  # outside every attempt: nobody's
    await runtime.stop()
    await rig.client.close()
    assert first.scope.recorder.drain() == []
    assert len(first.spans) == before


async def test_attempts_at_once_on_one_runtime(
    rig: Rig, stage: Stage, runtime: SingleThreadedAgentRuntime
) -> None:
    parts = [stage.open(Part(SAYS), through_gateway=True) for _ in range(8)]

    async def attempt(number: int) -> None:
        with open_scope(parts[number].scope):
            key = f"{number % 2}"  # two keys: attempts share instances too
            await runtime.send_message(Question(parts[number].text), AgentId("writer", key))

    await asyncio.gather(*map(attempt, range(8)))
    await sdk_instrumentation.aclose()
    for part in parts:
        stage.close(part)
        assert tree(part.spans) == PAIR


# --- published ------------------------------------------------------------------------------


class Relay(Asking):
    """An agent that publishes a draft for another agent, until there were `rounds` drafts."""

    def __init__(self, client: ChatCompletionClient, to: str, done: asyncio.Queue[str]) -> None:
        super().__init__(client)
        self._to, self._done = to, done

    @message_handler
    async def on_draft(self, message: Draft, ctx: MessageContext) -> None:
        said = await self.says(message.text)
        if message.text.count("+") == 3:
            self._done.put_nowait(said)
        else:
            await self.publish_message(Draft(f"{message.text}+"), TopicId(self._to, "default"))


async def relay(rig: Rig, done: asyncio.Queue[str]) -> SingleThreadedAgentRuntime:
    """Return a runtime with two agents that pass a draft back and forth, four times in all."""
    runtime = SingleThreadedAgentRuntime()
    for name, to in (("writer", "checker"), ("checker", "writer")):
        await Relay.register(runtime, name, lambda to=to: Relay(rig.client, to, done))
        await runtime.add_subscription(TypeSubscription(name, name))
    return runtime


RELAY = lines("""
        invoke_agent writer @writer
          chat @writer
        invoke_agent checker @checker
          chat @checker
        invoke_agent writer @writer
          chat @writer
        invoke_agent checker @checker
          chat @checker
""")


async def test_who_handles_what_was_published_is_beside_who_published_it(rig: Rig) -> None:
    """Check that the agent path does not grow, however long agents publish for one another."""
    done: asyncio.Queue[str] = asyncio.Queue()
    runtime = await relay(rig, done)
    runtime.start()

    async def run(text: str) -> None:
        await runtime.publish_message(Draft(text), TopicId("writer", "default"))
        await done.get()

    await rig.record(SAYS, run)
    assert rig.tree == RELAY
    await runtime.stop()


async def test_where_a_conversation_began_is_kept(rig: Rig) -> None:
    done: asyncio.Queue[str] = asyncio.Queue()
    runtime = await relay(rig, done)
    runtime.start()

    async def run(text: str) -> None:
        with lightspan.agent("desk"):
            await runtime.publish_message(Draft(f"{text}++"), TopicId("writer", "default"))
            await done.get()

    await rig.record(SAYS, run)
    assert rig.tree == lines("""
        invoke_agent desk @desk
          invoke_agent writer @desk/writer
            chat @desk/writer
          invoke_agent checker @desk/checker
            chat @desk/checker
    """)
    await runtime.stop()


# --- agents of other kinds ------------------------------------------------------------------
async def test_an_agent_made_of_a_function(rig: Rig) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()

    async def on_draft(agent: ClosureContext, message: Draft, ctx: MessageContext) -> None:
        said.put_nowait(await ask(rig.client, "judge", message.text))

    runtime = SingleThreadedAgentRuntime()
    await ClosureAgent.register_closure(
        runtime, "judge", on_draft, subscriptions=lambda: [DefaultSubscription()]
    )
    runtime.start()

    async def run(text: str) -> None:
        await runtime.publish_message(Draft(text), TopicId("default", "default"))
        await said.get()

    await rig.record({"judge": ["J {task}."]}, run)
    assert rig.tree == ["invoke_agent judge @judge", "  chat @judge"]
    await runtime.stop()


class Caller(Asking):
    """An agent whose tool calls are made by a `ToolAgent`."""

    def __init__(self, client: ChatCompletionClient, tool: Any) -> None:
        super().__init__(client)
        self._tool = tool

    @message_handler
    async def on_question(self, message: Question, ctx: MessageContext) -> Answer:
        system = SystemMessage(content=instructions("scout"))
        messages = await tool_agent_caller_loop(
            self,
            AgentId("tools", self.id.key),
            self._client,
            [system, UserMessage(content=message.text, source="user")],
            [self._tool],
        )
        return Answer(str(messages[-1].content))


async def test_a_tool_agent_calls_tools_for_whoever_asks(rig: Rig) -> None:
    async def consult(what: str) -> str:
        """Ask an expert."""
        return await ask(rig.client, "scout", what)

    tool: Any = FunctionTool(consult, description="Ask.")
    runtime = SingleThreadedAgentRuntime()
    await Caller.register(runtime, "scout", lambda: Caller(rig.client, tool))
    await ToolAgent.register(runtime, "tools", lambda: ToolAgent("Tools.", [tool]))
    runtime.start()
    says: Says = {"scout": [Turn(calls=[("consult", '{"what": "{task}"}')]), "S.", "T."]}
    await rig.record(says, lambda t: runtime.send_message(Question(t), AgentId("scout", "k")))
    assert rig.tree == lines("""
        invoke_agent scout @scout
          chat @scout
          execute_tool consult @scout
            chat @scout
          chat @scout
    """)
    assert agents(runtime) == (("scout",), False)
    await runtime.stop()


class Delegate(RoutedAgent):
    """An agent that delegates its work to an AgentChat agent or team."""

    def __init__(self, inner: Any) -> None:
        super().__init__("Delegates.")
        self._inner = inner

    @message_handler
    async def on_question(self, message: Question, ctx: MessageContext) -> Answer:
        result = await self._inner.run(task=message.text)
        return Answer(result.messages[-1].content)


async def test_an_agent_around_an_agent_of_its_name_is_that_agent(rig: Rig) -> None:
    runtime = SingleThreadedAgentRuntime()
    await Delegate.register(runtime, "writer", lambda: Delegate(rig.agent("writer")))
    await Delegate.register(runtime, "desk", lambda: Delegate(two(rig)))
    runtime.start()
    await rig.record(SAYS, lambda t: runtime.send_message(Question(t), AgentId("writer", "k")))
    assert rig.tree == ["invoke_agent writer @writer", "  chat @writer"]
    await rig.record(SAYS, lambda t: runtime.send_message(Question(t), AgentId("desk", "k")))
    inside = [line.replace("@team", "@desk/team") for line in lines(TEAM)]
    assert rig.tree == ["invoke_agent desk @desk", *(f"  {line}" for line in inside)]
    await runtime.stop()


# --- how it ends ----------------------------------------------------------------------------
async def test_a_handler_that_fails(rig: Rig, runtime: SingleThreadedAgentRuntime) -> None:
    async def run(text: str) -> None:
        with pytest.raises(ValueError, match="no such"):
            await runtime.send_message(Question(text), AgentId("writer", "k"))

    def refuse(self: Any, *args: Any) -> Any:
        raise ValueError("no such draft")

    says = Checker.says
    try:
        Checker.says = refuse  # type: ignore[method-assign]
        await rig.record(SAYS, run)
    finally:
        Checker.says = says  # type: ignore[method-assign]
    assert rig.tree == [
        "invoke_agent writer @writer error",
        "  chat @writer",
        "  invoke_agent checker @writer/checker error",
    ]
    span = rig.one("invoke_agent checker")
    assert (span.status_message, span.attributes["error.type"]) == ("no such draft", "ValueError")


# --- production -----------------------------------------------------------------------------


async def test_in_production_a_conversation_is_one_attempt(rig: Rig, tmp_path: Path) -> None:
    url, done = f"sqlite:{tmp_path / 'store.db'}", asyncio.Queue[str]()
    both, relayed = SingleThreadedAgentRuntime(), await relay(rig, done)
    await pair(rig, both)
    both.start()
    relayed.start()
    texts = [rig.stage.open(Part(SAYS), through_gateway=False).text for _ in range(2)]
    with lightspan.record(url):
        await both.send_message(Question(texts[0]), AgentId("writer", "k"))
        await relayed.publish_message(Draft(texts[1]), TopicId("writer", "default"))
        await both.stop_when_idle()
        await relayed.stop_when_idle()
    await rig.client.close()
    recorded = {
        one.rollout.task["text"]: one for one in await asyncio.to_thread(read_recorded, url)
    }
    assert {text: one.attempt.status for text, one in recorded.items()} == {
        texts[0]: AttemptStatus.SUCCEEDED,
        texts[1]: AttemptStatus.SUCCEEDED,
    }
    first, second = (one.tree().splitlines() for one in recorded.values())
    assert first == lines("""
        invoke_workflow writer
          invoke_agent writer
            chat m @writer
            invoke_agent checker
              chat m @writer/checker
    """)
    assert second == lines("""
        invoke_workflow writer
          invoke_agent writer
            chat m @writer
          invoke_agent checker
            chat m @checker
          invoke_agent writer
            chat m @writer
          invoke_agent checker
            chat m @checker
    """)


async def test_a_conversation_that_a_runtime_drops_ends(rig: Rig, tmp_path: Path) -> None:
    """Check that a published message keeps no attempt open if the runtime stops before handling
    it.
    """
    url, done = f"sqlite:{tmp_path / 'store.db'}", asyncio.Queue[str]()
    runtime = await relay(rig, done)
    text = rig.stage.open(Part(SAYS), through_gateway=False).text
    with lightspan.record(url):
        await runtime.publish_message(Draft(text), TopicId("writer", "default"))
        await runtime.process_next()
        await asyncio.gather(*runtime._background_tasks)
        assert runtime.unprocessed_messages_count == 1
        runtime.start()
        await runtime.stop()
        await rig.client.close()
        assert await asyncio.to_thread(flush)
        (one,) = await asyncio.to_thread(read_recorded, url)
    assert one.attempt.status is AttemptStatus.SUCCEEDED
