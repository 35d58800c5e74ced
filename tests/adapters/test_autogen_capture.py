"""What only AutoGen has: managers, societies, runtimes, model clients, direct calls."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
    SocietyOfMindAgent,
    UserProxyAgent,
)
from autogen_agentchat.base import ChatAgent, Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import (
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_agentchat.ui import Console
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_core.models import CreateResult, SystemMessage
from autogen_core.tools import FunctionTool, TextResultContent, ToolResult, Workbench
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

import lightspan
from lightspan import conventions, scope, wire
from lightspan.scope import open_scope
from lightspan.spans import Span, SpanStatus
from lightspan.testing.adapter_suite import Turn, instructions, look, tree
from lightspan.testing.stage import Part, Played, Says, Stage
from lightspan_autogen import LightspanRuntime, _hook, agents, instrument, uninstrument

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
    "multiple_system_messages": True,
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(stage: Stage) -> Iterator[None]:
    instrument()
    yield
    uninstrument()
    assert _hook._wrapped == []
    assert "__init_subclass__" not in vars(ChatAgent)
    assert _hook._open == {}
    assert _hook._runs == {}
    problems, stage.brain.problems = stage.brain.problems, []
    assert problems == []


class Rig:
    """Makes agents, and records one attempt."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = OpenAIChatCompletionClient(
            model="m", base_url=stage.url, api_key="key", model_info=INFO, max_retries=0
        )
        self.played: Played | None = None

    def agent(self, name: str, *tools: Any, **more: Any) -> AssistantAgent:
        return AssistantAgent(
            name, self.client, tools=list(tools), system_message=instructions(name), **more
        )

    async def record(self, says: Says, run: Any, **marks: str) -> Any:
        """Run `run(text)` in an attempt through the gateway; returns what it returns."""
        part = Part(says, {mark: name for name, mark in marks.items()})
        self.played = self.stage.open(part, through_gateway=True)
        with open_scope(self.played.scope):
            value = await run(self.played.text)
        await wire.aclose()
        self.stage.close(self.played)
        return value

    @property
    def spans(self) -> Sequence[Span]:
        assert self.played is not None
        return self.played.spans

    @property
    def tree(self) -> list[str]:
        return tree(self.spans)

    def one(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


@pytest.fixture
def rig(stage: Stage) -> Rig:
    return Rig(stage)


def lines(text: str) -> list[str]:
    return [line[8:] for line in text.splitlines() if line.strip()]


# --- teams ----------------------------------------------------------------------------------
async def test_the_manager_of_a_selector_team_is_the_team(rig: Rig) -> None:
    team = SelectorGroupChat(
        [rig.agent("writer"), rig.agent("checker"), rig.agent("judge")],
        model_client=rig.client,
        name="desk",
        selector_prompt="Select one of {participants} for: {history} {roles}",
        max_turns=2,
    )
    says = {"writer": ["W {task}."], "checker": ["C {task}."], "desk": ["checker", "writer"]}
    await rig.record(says, lambda text: team.run(task=text), desk="Select one of")
    assert rig.tree == lines("""
        invoke_agent desk @desk
          chat @desk
          invoke_agent checker @desk/checker
            chat @desk/checker
          chat @desk
          invoke_agent writer @desk/writer
            chat @desk/writer
    """)
    assert agents(team) == (("desk", "desk/writer", "desk/checker", "desk/judge"), True)


def ledger(speaker: str, *, is_done: bool) -> str:
    def entry(answer: Any) -> dict[str, Any]:
        return {"reason": "so", "answer": answer}

    return json.dumps(
        {
            "is_request_satisfied": entry(is_done),
            "is_in_loop": entry(False),
            "is_progress_being_made": entry(True),
            "next_speaker": entry(speaker),
            "instruction_or_question": entry("write about {task}"),
        }
    )


async def test_the_manager_of_magentic_one_is_the_team(rig: Rig) -> None:
    rig.client._model_info = {**INFO, "json_output": False, "structured_output": False}
    team = MagenticOneGroupChat([rig.agent("writer")], model_client=rig.client, name="magentic")
    says = {
        "magentic": [
            "facts",
            "plan",
            ledger("writer", is_done=False),
            ledger("writer", is_done=True),
            "Done.",
        ],
        "writer": ["W {task}."],
    }
    marks = {"writer": "You are writer.", "magentic": "task-"}
    await rig.record(says, lambda text: team.run(task=text), **marks)
    assert rig.tree == lines("""
        invoke_agent magentic @magentic
          chat @magentic
          chat @magentic
          chat @magentic
          invoke_agent writer @magentic/writer
            chat @magentic/writer
          chat @magentic
          chat @magentic
    """)
    assert agents(team) == (("magentic", "magentic/writer"), True)


async def test_a_society_of_mind_is_an_agent_around_its_team(rig: Rig) -> None:
    inner = RoundRobinGroupChat([rig.agent("writer")], name="inner", max_turns=1)
    society = SocietyOfMindAgent("society", team=inner, model_client=rig.client)
    team = RoundRobinGroupChat([society, rig.agent("judge")], name="team", max_turns=2)
    says = {"writer": ["W {task}."], "society": ["S {task}."], "judge": ["J {task}."]}
    await rig.record(says, lambda text: team.run(task=text), society="Earlier you were asked")
    assert rig.tree == lines("""
        invoke_agent team @team
          invoke_agent society @team/society
            invoke_agent inner @team/society/inner
              invoke_agent writer @team/society/inner/writer
                chat @team/society/inner/writer
            chat @team/society
          invoke_agent judge @team/judge
            chat @team/judge
    """)
    assert agents(team) == (("team/society", "team/society/inner/writer", "team/judge"), True)


async def test_a_team_as_a_tool(rig: Rig) -> None:
    inner = RoundRobinGroupChat([rig.agent("writer")], name="inner", max_turns=1)
    tool = TeamTool(inner, name="inner", description="writes", return_value_as_last_message=True)
    boss = rig.agent("boss", tool, reflect_on_tool_use=True)
    says = {
        "boss": [Turn(calls=[("inner", '{"task": "help with {task}"}')]), "B {task}."],
        "writer": ["W {task}."],
    }
    await rig.record(says, lambda text: boss.run(task=text))
    assert rig.tree == lines("""
        invoke_agent boss @boss
          chat @boss
          execute_tool inner @boss
            invoke_agent inner @boss/inner
              invoke_agent writer @boss/inner/writer
                chat @boss/inner/writer
          chat @boss
    """)
    assert agents(boss) == (("boss", "boss/inner/writer"), True)


async def test_one_agent_in_two_teams(rig: Rig) -> None:
    writer = rig.agent("writer")
    one = RoundRobinGroupChat([writer], name="one", max_turns=1)
    two = RoundRobinGroupChat([writer], name="two", max_turns=1)

    async def run(text: str) -> None:
        await one.run(task=text)
        await two.run(task=text)

    await rig.record({"writer": ["W {task}."]}, run)
    assert [line for line in rig.tree if "chat" in line] == [
        "    chat @one/writer",
        "    chat @two/writer",
    ]


TEAM = """
        invoke_agent team @team
          invoke_agent writer @team/writer
            chat @team/writer
          invoke_agent checker @team/checker
            chat @team/checker
"""
SAYS: Says = {"writer": ["W {task}."], "checker": ["C {task}."]}


def two(rig: Rig, **more: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        [rig.agent("writer"), rig.agent("checker")], name="team", max_turns=2, **more
    )


async def test_a_runtime_that_was_started_outside_the_scope(rig: Rig) -> None:
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
    await runtime.stop_when_idle()
    assert rig.tree == lines(TEAM)


async def test_two_teams_at_once_on_one_runtime(rig: Rig) -> None:
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    one = RoundRobinGroupChat([rig.agent("writer")], name="one", max_turns=1, runtime=runtime)
    other = RoundRobinGroupChat([rig.agent("checker")], name="two", max_turns=1, runtime=runtime)
    says: Says = {
        "writer": [Turn(text="W {task}.", delay_s=0.05)],
        "checker": [Turn(text="C {task}.", delay_s=0.05)],
    }
    await rig.record(says, lambda t: asyncio.gather(one.run(task=t), other.run(task=t)))
    await runtime.stop_when_idle()
    assert tree(rig.spans, ordered=False) == lines("""
        invoke_agent one @one
          invoke_agent writer @one/writer
            chat @one/writer
        invoke_agent two @two
          invoke_agent checker @two/checker
            chat @two/checker
    """)


async def test_a_team_that_is_running_already_stays_what_it_is(rig: Rig) -> None:
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    team = two(rig, runtime=runtime)

    async def run(text: str) -> None:
        first = asyncio.ensure_future(team.run(task=text))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="already running"):
            await team.run(task=text)
        await first

    await rig.record(SAYS, run)
    await runtime.stop_when_idle()
    assert sorted(rig.tree) == sorted([*lines(TEAM), "invoke_agent team @team error"])


async def test_the_runtime_alone(rig: Rig) -> None:
    """Only the teams of its runtime are known by name."""
    uninstrument()
    runtime = LightspanRuntime()
    runtime.start()
    await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
    assert rig.tree == lines(TEAM)
    await rig.record(SAYS, lambda text: two(rig).run(task=text))
    assert rig.tree == ["chat @app", "chat @app"]
    with instrument():
        await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
        assert rig.tree == lines(TEAM)
    await runtime.stop_when_idle()


# --- agents ---------------------------------------------------------------------------------
WRITER = ["invoke_agent writer @writer", "  chat @writer"]


@pytest.mark.parametrize("way", ["run", "run_stream", "on_messages", "on_messages_stream"])
async def test_every_way_to_invoke_an_agent_is_one_invocation(rig: Rig, way: str) -> None:
    writer = rig.agent("writer", model_client_stream=True)

    async def run(text: str) -> None:
        if way.startswith("run"):
            work: Any = getattr(writer, way)(task=text)
        else:
            message = TextMessage(content=text, source="user")
            work = getattr(writer, way)([message], CancellationToken())
        if way.endswith("stream"):
            async for _ in work:
                assert scope.pushed().frames == ()  # type: ignore[union-attr]
        else:
            await work
        assert scope.pushed().frames == ()  # type: ignore[union-attr]

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == WRITER


async def test_a_team_in_the_console(rig: Rig) -> None:
    await rig.record(SAYS, lambda text: Console(two(rig).run_stream(task=text)))
    assert rig.tree == lines(TEAM)


async def test_a_filtered_agent_is_one_agent(rig: Rig) -> None:
    writer = rig.agent("writer")
    last = PerSourceFilter(source="user", position="last", count=1)
    same = MessageFilterAgent("writer", writer, MessageFilterConfig(per_source=[last]))
    await rig.record({"writer": ["W {task}."]}, lambda t: same.run(task=[_said(t)]))
    assert rig.tree == ["invoke_agent writer @writer", "  chat @writer"]
    assert agents(same) == (("writer",), True)


def _said(text: str) -> TextMessage:
    return TextMessage(content=text, source="user")


async def answer(agent: Any, messages: Any) -> Response:
    asked: list[Any] = [SystemMessage(content=instructions(agent.name))]
    asked += [message.to_model_message() for message in messages]
    result = await agent._model_client.create(asked)
    return Response(chat_message=TextMessage(content=result.content, source=agent.name))


class Before(BaseChatAgent):
    """An agent of the user's own, defined before `instrument`."""

    def __init__(self, name: str, client: Any) -> None:
        super().__init__(name, "own")
        self._model_client = client

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
        return await answer(self, messages)

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Nothing is kept."""


async def test_agents_of_the_users_own(rig: Rig) -> None:
    """Defined before `instrument` or after, or while the attempt runs."""

    class After(Before):
        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            return await answer(self, messages)

    for kind in (Before, After):
        agent = kind("writer", rig.client)

        async def run(text: str, agent: Before = agent) -> None:
            await agent.on_messages([_said(text)], CancellationToken())

        await rig.record({"writer": ["W {task}."]}, run)
        assert rig.tree == WRITER
        assert agents(agent) == (("writer",), False)
    uninstrument()
    assert "__wrapped__" not in vars(After.on_messages)


async def test_a_wrapper_on_top_of_ours_stays(rig: Rig) -> None:
    """Somebody wrapped what we had wrapped: theirs is left alone, and ours does nothing more."""
    ours, seen = AssistantAgent.on_messages_stream, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.name)
        return ours(self, *args, **kwargs)

    before: Any = vars(ours)["__wrapped__"]
    AssistantAgent.on_messages_stream = theirs  # type: ignore[assignment,method-assign]
    try:
        uninstrument()
        assert vars(AssistantAgent)["on_messages_stream"] is theirs
        await rig.record({"writer": ["W {task}."]}, lambda t: rig.agent("writer").run(task=t))
        assert rig.tree == ["chat @app"]
        instrument()
        await rig.record({"writer": ["W {task}."]}, lambda t: rig.agent("writer").run(task=t))
        assert rig.tree == WRITER
        assert seen == ["writer", "writer"]
        uninstrument()
    finally:
        AssistantAgent.on_messages_stream = before  # type: ignore[method-assign]


async def test_an_agent_that_is_renamed_while_it_runs(rig: Rig) -> None:
    """Its call stays with the name under which it was invoked; the next one has the new name."""

    def rename(what: str) -> str:
        writer._name = "author"
        return "7"

    writer = rig.agent("writer", rename, reflect_on_tool_use=True)
    says: Says = {"writer": [Turn(calls=[("rename", '{"what": "it"}')]), "W {task}."]}

    async def run(text: str) -> None:
        await writer.run(task=text)
        await writer.run(task=text)

    await rig.record(says, run)
    assert [line.strip() for line in rig.tree if "chat" in line] == [
        "chat @writer",
        "chat @writer",
        "chat @author",
    ]


# --- tools ----------------------------------------------------------------------------------
async def test_a_tool_that_returns_what_no_span_can_carry(rig: Rig) -> None:
    def huge() -> str:
        """Huge."""
        return "x" * 1_000_000

    def binary() -> bytes:
        """Binary."""
        return b"\x00\xff"

    def surrogate() -> str:
        """No text."""
        return "\ud800"

    scout = rig.agent("scout", huge, binary, surrogate)
    for name, shown in (
        ("huge", "x" * 65_536 + "… (1000000 characters)"),
        ("binary", "b'\\x00\\xff'"),
        ("surrogate", "\ufffd"),
    ):
        says: Says = {"scout": [Turn(calls=[(name, "{}")])]}
        await rig.record(says, lambda text: scout.run(task=text))
        result = rig.one(f"execute_tool {name}").attributes["gen_ai.tool.call.result"]
        assert result == shown
        await scout.on_reset(CancellationToken())


async def test_malformed_arguments_call_no_tool(rig: Rig) -> None:
    scout = rig.agent("scout", look)
    await rig.record(
        {"scout": [Turn(calls=[("look", '{"what": 7, "else": {}}')])]},
        lambda text: scout.run(task=text),
    )
    span = rig.one("execute_tool look")
    assert span.status is SpanStatus.ERROR
    assert span.attributes["error.type"] == "ValidationError"


class Own(Workbench):
    """A workbench of the user's own, such as one of an MCP server."""

    component_type = "workbench"

    async def list_tools(self) -> Any:
        empty = {"type": "object", "properties": {}}
        return [{"name": n, "description": n, "parameters": empty} for n in ("good", "bad")]

    async def call_tool(
        self, name: str, arguments: Any = None, cancellation_token: Any = None, call_id: Any = None
    ) -> ToolResult:
        content = [TextResultContent(content=f"{name} result")]
        return ToolResult(name=name, result=content, is_error=name == "bad")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def save_state(self) -> Any: ...

    async def load_state(self, state: Any) -> None: ...


async def test_a_workbench_of_the_users_own(rig: Rig) -> None:
    scout = AssistantAgent(
        "scout", rig.client, workbench=Own(), system_message=instructions("scout")
    )
    says: Says = {"scout": [Turn(calls=[("good", "{}"), ("bad", "{}")])]}
    await rig.record(says, lambda text: scout.run(task=text))
    good, bad = rig.one("execute_tool good"), rig.one("execute_tool bad")
    assert (good.status, bad.status) == (SpanStatus.OK, SpanStatus.ERROR)
    assert bad.attributes["error.type"] == "tool_error"
    assert good.attributes["gen_ai.tool.call.result"] == "good result"
    assert str(good.attributes["gen_ai.tool.call.id"]).startswith("call")


async def test_a_call_of_ones_own_inside_a_tool(rig: Rig) -> None:
    """An OpenAI client in a tool asks for the agent; `lightspan.agent` names it otherwise."""
    import openai

    async def ask() -> str:
        """Ask."""
        messages: Any = [
            {"role": "system", "content": instructions("scout")},
            {"role": "user", "content": rig.played.text},  # type: ignore[union-attr]
        ]
        async with openai.AsyncOpenAI(base_url=rig.stage.url, api_key="key") as client:
            await client.chat.completions.create(model="m", messages=messages)
            with lightspan.agent("idea"):
                await client.chat.completions.create(model="m", messages=messages)
        return "asked"

    scout = rig.agent("scout", ask)
    says: Says = {"scout": [Turn(calls=[("ask", "{}")]), "S {task}."]}
    await rig.record(says, lambda text: scout.run(task=text))
    assert rig.tree == lines("""
        invoke_agent scout @scout
          chat @scout
          execute_tool ask @scout
            chat @scout
            invoke_agent idea @scout/idea
              chat @scout/idea
    """)


# --- streams that are left ------------------------------------------------------------------
async def test_a_stream_that_is_left_early(rig: Rig) -> None:
    async def run(text: str) -> None:
        stream = rig.agent("writer", model_client_stream=True).run_stream(task=text)
        async for message in stream:
            if not isinstance(message, TextMessage):
                break
        await stream.aclose()

    await rig.record({"writer": ["one two three {task}."]}, run)
    assert rig.tree[0] == "invoke_agent writer @writer unset"


async def test_a_stream_that_is_held_when_the_attempt_ends(rig: Rig) -> None:
    """What never ended is recorded so, and its late end is nobody's."""
    held: list[AsyncGenerator[Any, None]] = []

    async def run(text: str) -> None:
        held.append(rig.agent("writer", model_client_stream=True).run_stream(task=text))
        async for message in held[0]:
            if not isinstance(message, TextMessage):
                break

    await rig.record({"writer": ["one two three {task}."]}, run)
    assert rig.tree[0] == "invoke_agent writer @writer unset"
    await held[0].aclose()
    assert rig.played is not None
    assert rig.played.scope.recorder.drain() == []


async def test_the_last_item_of_a_stream_is_its_end(rig: Rig) -> None:
    async def run(text: str) -> None:
        stream = rig.agent("writer").on_messages_stream([_said(text)], CancellationToken())
        async for item in stream:
            if isinstance(item, Response):
                break
        await stream.aclose()

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == WRITER


class Closing(Before):
    """An agent that notices when its stream is closed."""

    closed = False

    async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
        try:
            yield TextMessage(content="1", source=self.name)
            yield await answer(self, messages)
        finally:
            self.closed = True


async def test_closing_a_stream_closes_what_it_streams(rig: Rig) -> None:
    agent = Closing("writer", rig.client)

    async def run(text: str) -> None:
        stream: Any = agent.on_messages_stream([_said(text)], CancellationToken())
        await anext(stream)
        await stream.aclose()
        assert agent.closed

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == ["invoke_agent writer @writer unset"]


async def test_nothing_is_left_behind(rig: Rig) -> None:
    for _ in range(3):
        await rig.record(SAYS, lambda text: two(rig).run(task=text))
    gc.collect()
    assert (_hook._open, _hook._runs) == ({}, {})


# --- model clients --------------------------------------------------------------------------
class Other(ReplayChatCompletionClient):
    """A client that does not use the OpenAI SDK."""


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_bypasses_the_sdk_is_recorded_without_tokens(
    rig: Rig, streamed: bool
) -> None:
    writer = AssistantAgent("writer", Other(["one two"]), model_client_stream=streamed)
    await rig.record({}, lambda text: writer.run(task=text))
    assert rig.tree == WRITER
    (call,) = (span for span in rig.spans if span.kind == "llm")
    assert call.name == "chat Other"
    assert rig.played is not None
    assert rig.played.records == []
    known = {
        key: value
        for key, value in call.attributes.items()
        if key not in (conventions.CALL_ID, conventions.INPUT_MESSAGES)
    }
    assert known == {
        "lightspan.agent.path": "writer",
        "lightspan.route": "app",
        "lightspan.call.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "Other",
        "openinference.span.kind": "LLM",
        "gen_ai.usage.input_tokens": known["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":'
        '"one two"}],"finish_reason":"stop"}]',
    }
    messages = json.loads(str(call.attributes[conventions.INPUT_MESSAGES]))
    assert [message["role"] for message in messages] == ["system", "user"]


async def test_a_client_that_fails(rig: Rig) -> None:
    writer = AssistantAgent("writer", Other([]))

    async def run(text: str) -> None:
        with pytest.raises(ValueError, match="No more mock responses"):
            await writer.run(task=text)

    await rig.record({}, run)
    assert rig.tree == ["invoke_agent writer @writer error", "  chat @writer error"]


class Wrapping(Other):
    """A client around an OpenAI client: the call is that client's."""

    def __init__(self, inner: Any) -> None:
        super().__init__([])
        self._inner = inner

    async def create(self, messages: Any, **more: Any) -> CreateResult:
        result: CreateResult = await self._inner.create(messages, **more)
        return result


async def test_a_client_around_another_records_nothing_twice(rig: Rig) -> None:
    for inner in (rig.client, Other(["one"])):
        writer = AssistantAgent("writer", Wrapping(inner), system_message=instructions("writer"))
        await rig.record({"writer": ["W {task}."]}, lambda t, w=writer: w.run(task=t))
        assert rig.tree == WRITER


# --- our own errors -------------------------------------------------------------------------
async def test_an_error_of_ours_damages_the_attempt_and_never_reaches_the_app(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    for name in ("enter", "span_of"):
        with monkeypatch.context() as patch:
            patch.setattr(_hook, name, bad)
            played = rig.stage.open(Part(SAYS), through_gateway=True)
            with open_scope(played.scope):
                result = await two(rig).run(task=played.text)
            await wire.aclose()
        assert len(result.messages) == 3
        reasons = set(played.scope.recorder.damages())
        assert reasons == {"lightspan_autogen: RuntimeError: a bug of ours"}


# --- the static list ------------------------------------------------------------------------
def test_agents_of_what_cannot_be_seen(rig: Rig) -> None:
    expert = rig.agent("expert")

    async def ask() -> str:
        """Refer to an agent."""
        return str(await expert.run(task="x"))

    def builds() -> str:
        """Build an agent."""
        return str(AssistantAgent("hidden", rig.client))

    assert agents(rig.agent("boss", FunctionTool(ask, "ask"))) == (("boss", "boss/expert"), True)
    assert agents(rig.agent("boss", builds)) == (("boss",), False)
    assert agents(rig.agent("boss", AgentTool(expert))) == (("boss", "boss/expert"), True)
    assert agents(UserProxyAgent("person")) == ((), True)
    assert agents([rig.agent("one"), rig.agent("two")]) == (("one", "two"), True)


def test_unnamed_teams_have_autogens_names(rig: Rig) -> None:
    team = RoundRobinGroupChat(
        [rig.agent("writer")], termination_condition=MaxMessageTermination(2)
    )
    assert agents(team) == (("RoundRobinGroupChat/writer",), True)


def test_the_readme(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app of the README runs and says what the README says it does; its training compiles."""
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    readme = Path(__file__).parents[2] / "packages" / "autogen" / "README.md"
    app, training = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    compile(training, "training", "exec")
    names: dict[str, Any] = {}
    exec(compile(app, "app", "exec"), names)
    assert f"# {agents(names['make_team']())}" in training
