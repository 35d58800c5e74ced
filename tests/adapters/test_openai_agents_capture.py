"""The adapter with the real SDK, the real OpenAI client and a real HTTP server."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import pytest

pytest.importorskip("agents")

import openai
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    Model,
    ModelResponse,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    Usage,
    add_trace_processor,
    function_tool,
    generation_span,
    handoff,
    input_guardrail,
    output_guardrail,
    set_default_openai_api,
    set_trace_processors,
    set_tracing_disabled,
    trace,
)
from agents.tool_context import ToolContext
from agents.tracing import Span as SdkSpan
from agents.tracing import Trace, TracingProcessor, get_current_span, processors, setup
from agents.tracing.provider import DefaultTraceProvider
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

import lightspan
import lightspan_openai_agents
from lightspan import emit, scope, wire
from lightspan.lightning.episode import build_episode
from lightspan.lightning.selection import Rejection, cover
from lightspan.records import Attempt, AttemptStatus, Rollout
from lightspan.routing import Route, Routing, Target
from lightspan.scope import Scope, open_scope
from lightspan.spans import Span, SpanLink, SpanStatus
from lightspan.testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan.testing.stage import ROOT_ID, Part, Stage, Turn
from lightspan_openai_agents import LightspanProcessor, _hook, agents, instrument, uninstrument


# --- helpers --------------------------------------------------------------------------------
def echo(request: Request) -> str:
    return request.last_text


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(echo) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A framework that nobody touched, with the adapter; it is left as it was."""
    monkeypatch.setattr(setup, "GLOBAL_TRACE_PROVIDER", None)
    maker = vars(ToolContext)["from_agent_context"]
    with instrument():
        yield
    assert not isinstance(setup.GLOBAL_TRACE_PROVIDER, _hook._Provider)
    assert vars(ToolContext)["from_agent_context"] is maker
    assert _hook._resolve not in scope.resolvers()
    assert _hook._operation.get() is None


def make_scope(**more: Any) -> Scope:
    return Scope(rollout_id="r", attempt_id=uuid.uuid4().hex, root_span_id=ROOT_ID, **more)


class Captured:
    """The spans of one attempt."""

    def __init__(self, current: Scope) -> None:
        self.scope = current
        self.spans: list[Span] = []

    def close(self) -> None:
        self.spans = self.scope.recorder.drain()
        assert self.scope.recorder.damages() == []

    @property
    def tree(self) -> list[str]:
        """Every span, indented by depth: name, path, and the status where it is not ok."""
        ids = {span.span_id for span in self.spans}
        assert all(span.parent_id in ids | {ROOT_ID} for span in self.spans), "an orphan"
        lines = list(self._lines(ROOT_ID, 0))
        assert len(lines) == len(self.spans), "a cycle"
        return lines

    def _lines(self, parent: str, depth: int) -> Iterator[str]:
        children = [span for span in self.spans if span.parent_id == parent]
        for span in sorted(children, key=lambda span: (span.start_ns, span.name)):
            status = "" if span.status is SpanStatus.OK else f" {span.status}"
            yield f"{'  ' * depth}{span.name} @{path_of(span)}{status}"
            yield from self._lines(span.span_id, depth + 1)

    @property
    def calls(self) -> list[str]:
        """The agent path of every model call, in order."""
        found = [span for span in self.spans if span.kind == "llm"]
        return [path_of(span) for span in sorted(found, key=lambda span: span.start_ns)]

    def one(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def path_of(span: Span) -> str:
    return str(span.attributes["lightspan.agent.path"])


@contextmanager
def captured(**more: Any) -> Iterator[Captured]:
    result = Captured(make_scope(**more))
    with open_scope(result.scope):
        yield result
    result.close()


def async_client(server: ScriptedServer | Stage, **more: Any) -> openai.AsyncOpenAI:
    """A client that keeps no connection, so that it can go from loop to loop."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    http = openai.DefaultAsyncHttpxClient(limits=limits)
    given = {"base_url": server.url, "api_key": "key", "max_retries": 0, "http_client": http}
    return openai.AsyncOpenAI(**{**given, **more})


def chat(server: ScriptedServer, **more: Any) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("m", async_client(server, **more))


def make(server: ScriptedServer, name: str, **more: Any) -> Agent[Any]:
    return Agent(name=name, instructions=f"You are {name}.", model=chat(server), **more)


def who(request: Request) -> str:
    """The agent that asks, by its instructions."""
    return str(request.messages[0]["content"]).removeprefix("You are ").removesuffix(".")


Answers = dict[str, Sequence[Reply | str]]


def says(answers: Answers) -> Callable[[Request], Reply | str]:
    """Each agent gives its answers in turn, then says "done"."""
    left = {name: list(replies) for name, replies in answers.items()}
    lock = threading.Lock()

    def script(request: Request) -> Reply | str:
        with lock:
            known = left.get(who(request))
            return known.pop(0) if known else "done"

    return script


def calls(*names: str, **more: str) -> Reply:
    """The model calls these tools; ids are `call_<name>`."""
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


# --- one agent ------------------------------------------------------------------------------
@HOW
def test_a_single_agent(server: ScriptedServer, run: Run) -> None:
    writer = make(server, "writer")
    with captured() as attempt:
        result = run(writer, "a haiku")
    assert result.final_output == "a haiku"
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]
    assert bool(server.requests[0].body.get("stream")) is (run is run_streamed)
    span = attempt.one("invoke_agent writer")
    assert span.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "writer",
        "lightspan.agent.path": "writer",
        "openinference.span.kind": "AGENT",
        "agent.name": "writer",
        "graph.node.id": "writer",
    }
    assert (span.rollout_id, span.attempt_id, span.trace_id) == (
        "r",
        attempt.scope.attempt_id,
        attempt.scope.trace_id,
    )
    assert agents(writer) == (("writer",), True)


AGENT_WITH_TOOL = [
    "invoke_agent scout @scout",
    "  chat m @scout",
    "  execute_tool look @scout",
    "  chat m @scout",
]


@HOW
def test_an_agent_with_a_tool(server: ScriptedServer, run: Run) -> None:
    server._script = says({"scout": [calls("look")]})
    with captured() as attempt:
        run(make(server, "scout", tools=[look]))
    assert attempt.tree == AGENT_WITH_TOOL
    assert attempt.one("execute_tool look").attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": "call_look",
        "gen_ai.tool.call.arguments": '{"what": "seven"}',
        "gen_ai.tool.call.result": "seven: 7",
        "lightspan.agent.path": "scout",
        "openinference.span.kind": "TOOL",
    }


def test_parallel_tools(server: ScriptedServer) -> None:
    """They run at once, each with its own span and id, and may themselves ask a model."""
    server._script = says({"scout": [calls("first", "second")]})
    meet = threading.Barrier(2, timeout=10)

    @function_tool
    def first() -> str:
        """One."""
        meet.wait()
        ask_raw(server, "first")
        return "1"

    @function_tool
    def second() -> str:
        """Two."""
        meet.wait()
        ask_raw(server, "second")
        return "2"

    with captured() as attempt:
        run_async(make(server, "scout", tools=[first, second]))
    assert sorted(attempt.tree) == sorted(
        [
            "invoke_agent scout @scout",
            "  chat m @scout",
            "  execute_tool first @scout",
            "    chat m @scout",
            "  execute_tool second @scout",
            "    chat m @scout",
            "  chat m @scout",
        ]
    )
    for name in ("first", "second"):
        span = attempt.one(f"execute_tool {name}")
        assert span.attributes["gen_ai.tool.call.id"] == f"call_{name}"
        inside = [s for s in attempt.spans if s.parent_id == span.span_id]
        assert [name in str(s.attributes["gen_ai.input.messages"]) for s in inside] == [True]


# --- several agents -------------------------------------------------------------------------
@HOW
def test_a_handoff(server: ScriptedServer, run: Run) -> None:
    """The agents stand side by side; the span says who handed over."""
    server._script = says({"triage": [calls("transfer_to_billing")]})
    billing = make(server, "billing")
    triage = make(server, "triage", handoffs=[billing])
    with captured() as attempt:
        result = run(triage)
    assert result.final_output == "done"
    assert attempt.tree == [
        "invoke_agent triage @triage",
        "  chat m @triage",
        "  handoff @triage",
        "invoke_agent billing @billing",
        "  chat m @billing",
    ]
    span, source = attempt.one("invoke_agent billing"), attempt.one("invoke_agent triage")
    assert span.links == [
        SpanLink(attempt.scope.trace_id, source.span_id, {"lightspan.handoff.from": "triage"})
    ]
    assert attempt.one("handoff").attributes == {
        "lightspan.handoff.from": "triage",
        "lightspan.handoff.to": "billing",
        "lightspan.agent.path": "triage",
        "openinference.span.kind": "CHAIN",
    }
    assert agents(triage) == (("triage", "billing"), True)


@HOW
def test_handed_there_and_back(server: ScriptedServer, run: Run) -> None:
    server._script = says(
        {"triage": [calls("transfer_to_billing")], "billing": [calls("transfer_to_triage")]}
    )
    billing = make(server, "billing")
    triage = make(server, "triage", handoffs=[billing])
    billing.handoffs.append(handoff(triage))
    with captured() as attempt:
        run(triage)
    assert attempt.calls == ["triage", "billing", "triage"]
    found = [span for span in attempt.spans if span.kind == "agent"]
    found.sort(key=lambda span: span.start_ns)
    links = [[link.span_id for link in span.links] for span in found]
    assert links == [[], [found[0].span_id], [found[1].span_id]]
    assert agents(triage).paths == ("triage", "billing")


@HOW
def test_an_agent_as_a_tool(server: ScriptedServer, run: Run) -> None:
    server._script = says({"manager": [calls("ask_expert")]})
    expert = make(server, "expert")
    manager = make(server, "manager", tools=[expert.as_tool("ask_expert", "Ask.")])
    with captured() as attempt:
        run(manager)
    assert attempt.tree == [
        "invoke_agent manager @manager",
        "  chat m @manager",
        "  execute_tool ask_expert @manager",
        "    invoke_agent expert @manager/expert",
        "      chat m @manager/expert",
        "  chat m @manager",
    ]
    span = attempt.one("invoke_agent expert")
    assert span.attributes["graph.node.parent_id"] == "manager"
    assert span.links == []
    assert agents(manager) == (("manager", "manager/expert"), True)


def test_an_expert_that_hands_off_inside_a_tool(server: ScriptedServer) -> None:
    server._script = says(
        {"manager": [calls("ask_expert")], "expert": [calls("transfer_to_writer")]}
    )
    writer = make(server, "writer")
    expert = make(server, "expert", handoffs=[writer])
    manager = make(server, "manager", tools=[expert.as_tool("ask_expert", "Ask.")])
    with captured() as attempt:
        run_async(manager)
    assert attempt.calls == ["manager", "manager/expert", "manager/writer", "manager"]
    (link,) = attempt.one("invoke_agent writer").links
    assert link.span_id == attempt.one("invoke_agent expert").span_id
    assert agents(manager).paths == ("manager", "manager/expert", "manager/writer")


def test_two_agents_of_one_name_are_told_apart_by_path(server: ScriptedServer) -> None:
    server._script = says(
        {"one": [calls("ask_1"), calls("transfer_to_two")], "two": [calls("ask_2")]}
    )
    first, second = make(server, "helper"), make(server, "helper")
    two = make(server, "two", tools=[second.as_tool("ask_2", "Ask.")])
    one = make(server, "one", tools=[first.as_tool("ask_1", "Ask.")], handoffs=[two])
    with captured() as attempt:
        run_async(one)
    assert attempt.calls == ["one", "one/helper", "one", "two", "two/helper", "two"]
    assert agents(one).paths == ("one", "one/helper", "two", "two/helper")


def test_parallel_experts(server: ScriptedServer) -> None:
    """Two agents as tools at once: no call is taken for another's."""
    server._script = says({"manager": [calls("ask_a", "ask_b")]})
    experts = [make(server, name) for name in ("a", "b")]
    manager = make(server, "manager", tools=[e.as_tool(f"ask_{e.name}", "Ask.") for e in experts])
    with captured() as attempt:
        run_async(manager)
    assert sorted(attempt.calls) == ["manager", "manager", "manager/a", "manager/b"]
    for name in ("a", "b"):
        agent, tool = attempt.one(f"invoke_agent {name}"), attempt.one(f"execute_tool ask_{name}")
        assert agent.parent_id == tool.span_id


# --- guardrails -----------------------------------------------------------------------------
def guarded(server: ScriptedServer, *, trips: bool = False) -> Agent[Any]:
    checker = make(server, "checker")

    @input_guardrail(name="on_topic")
    async def on_topic(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        result = await Runner.run(checker, text)
        return GuardrailFunctionOutput(output_info=result.final_output, tripwire_triggered=trips)

    return make(server, "writer", input_guardrails=[on_topic])


@HOW
def test_an_agent_in_a_guardrail(server: ScriptedServer, run: Run) -> None:
    writer = guarded(server)
    with captured() as attempt:
        run(writer)
    assert sorted(attempt.tree) == sorted(
        [
            "invoke_agent writer @writer",
            "  guardrail on_topic @writer",
            "    invoke_agent checker @writer/checker",
            "      chat m @writer/checker",
            "  chat m @writer",
        ]
    )
    assert attempt.one("guardrail on_topic").attributes == {
        "lightspan.guardrail.triggered": False,
        "lightspan.agent.path": "writer",
        "openinference.span.kind": "GUARDRAIL",
    }
    assert agents(writer) == (("writer", "writer/checker"), True)


@HOW
def test_a_guardrail_that_trips(server: ScriptedServer, run: Run) -> None:
    writer = guarded(server, trips=True)
    with captured() as attempt, pytest.raises(InputGuardrailTripwireTriggered):
        run(writer)
    assert attempt.one("guardrail on_topic").attributes["lightspan.guardrail.triggered"] is True
    span = attempt.one("invoke_agent writer")
    assert span.status is SpanStatus.ERROR
    assert span.attributes["error.type"] in ("InputGuardrailTripwireTriggered", "AgentError")
    assert "writer/checker" in attempt.calls


@HOW
def test_an_output_guardrail(server: ScriptedServer, run: Run) -> None:
    @output_guardrail(name="polite")
    def polite(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    writer = make(server, "writer", output_guardrails=[polite])
    with captured() as attempt, pytest.raises(OutputGuardrailTripwireTriggered):
        run(writer)
    assert attempt.calls == ["writer"]
    assert attempt.one("guardrail polite").attributes["lightspan.guardrail.triggered"] is True
    assert attempt.one("invoke_agent writer").status is SpanStatus.ERROR


# --- tracing that the app turned off, or elsewhere --------------------------------------------
class Heard(TracingProcessor):
    """What the app's own processor hears."""

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
    server._script = says({"triage": [calls("ask_expert"), calls("transfer_to_billing")]})
    expert, billing = make(server, "expert"), make(server, "billing")
    tool = expert.as_tool("ask_expert", "Ask.")
    return make(server, "triage", tools=[tool], handoffs=[billing])


@HOW
def test_with_tracing_disabled(server: ScriptedServer, run: Run) -> None:
    heard = Heard()
    set_trace_processors([heard])
    set_tracing_disabled(True)
    with captured() as attempt:
        run(team(server))
    assert attempt.tree == TEAM
    (link,) = attempt.one("invoke_agent billing").links
    assert link.span_id == attempt.one("invoke_agent triage").span_id
    assert (heard.spans, heard.traces) == ([], 0)


@HOW
def test_with_tracing_disabled_for_a_run(server: ScriptedServer, run: Run) -> None:
    heard = Heard()
    set_trace_processors([heard])
    with captured() as attempt:
        run(team(server), run_config=RunConfig(tracing_disabled=True))
    assert attempt.tree == TEAM
    assert heard.traces == 0


def test_with_tracing_disabled_by_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    heard = Heard()
    set_trace_processors([heard])
    with captured() as attempt:
        run_async(team(server))
    assert attempt.tree == TEAM
    assert heard.traces == 0


def test_errors_are_known_with_tracing_disabled(server: ScriptedServer) -> None:
    server._script = says({"scout": [calls("broken")]})

    @function_tool
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    set_tracing_disabled(True)
    with captured() as attempt:
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.one("execute_tool broken").status is SpanStatus.ERROR


def test_it_survives_other_processors(server: ScriptedServer) -> None:
    heard = Heard()
    set_trace_processors([heard])
    with captured() as attempt:
        run_async(team(server))
    assert attempt.tree == TEAM
    assert Counter(heard.spans)["agent"] == 3
    assert heard.traces == 1


def test_another_provider_is_reported_and_taken_in(server: ScriptedServer) -> None:
    """A call made meanwhile has no known agent: the attempt is damaged, the next one is not."""
    writer = make(server, "writer")
    setup.set_trace_provider(DefaultTraceProvider())
    first = make_scope()
    with open_scope(first):
        run_async(writer)
    assert [path_of(span) for span in first.recorder.drain()] == ["app"]
    (damage,) = first.recorder.damages()
    assert "set_trace_provider() after instrument()" in damage
    with captured() as attempt:
        run_async(writer)
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]


def test_the_app_sees_its_own_spans(server: ScriptedServer) -> None:
    """What the SDK tells a tool of its span is the same with the adapter."""
    seen: list[Any] = []
    heard = Heard()
    set_trace_processors([heard])

    @function_tool
    def peek() -> str:
        """Look at the span."""
        seen.append(get_current_span())
        return "ok"

    server._script = says({"scout": [calls("peek")]})
    with captured():
        run_async(make(server, "scout", tools=[peek]))
    (span,) = seen
    assert span.span_data.name == "peek"
    assert span.span_id.startswith("span_")
    assert span.parent_id.startswith("span_")
    assert span.trace_id.startswith("trace_")
    assert span.export()["span_data"]["name"] == "peek"


# --- nothing is uploaded ----------------------------------------------------------------------
class Uploads(TracingProcessor):
    """Stands where the SDK's uploading processor is."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_trace_start(self, trace: Trace) -> None:
        self.events.append("trace")

    def on_trace_end(self, trace: Trace) -> None:
        self.events.append("trace end")

    def on_span_start(self, span: SdkSpan[Any]) -> None:
        self.events.append("span")

    def on_span_end(self, span: SdkSpan[Any]) -> None:
        self.events.append("span end")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def force_flush(self) -> None:
        self.events.append("flush")


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """In place of the default processor, before anything is traced."""
    monkeypatch.setattr(processors, "_global_processor", made := Uploads())
    return made


@pytest.mark.parametrize("when", ["lazy", "made before instrument()", "set after it"])
def test_nothing_of_a_rollout_is_uploaded(
    server: ScriptedServer, uploads: Uploads, when: str
) -> None:
    if when == "set after it":
        set_trace_processors([processors.default_processor()])
    if when == "made before instrument()":
        uninstrument()
        setup.get_trace_provider()
        instrument()
    heard = Heard()
    add_trace_processor(heard)
    writer = make(server, "writer")
    with captured():
        run_async(writer)
    assert uploads.events == []
    assert "agent" in heard.spans
    run_async(writer)
    assert "trace" in uploads.events
    uninstrument()
    provider: Any = setup.GLOBAL_TRACE_PROVIDER
    assert provider._multi_processor._processors == (uploads, heard)
    if when == "lazy":
        with instrument():
            pass
        instrument()


def test_a_serving_process_is_no_rollout(server: ScriptedServer, uploads: Uploads) -> None:
    writer = make(server, "writer")
    connected = scope.Acting(make_scope(recorder=scope.Unrecorded()))
    before = scope.set_ambient(connected)
    try:
        run_async(writer)
    finally:
        scope.set_ambient(before)
    assert "trace" in uploads.events


# --- around and inside ------------------------------------------------------------------------
def test_plain_python_around_and_inside(server: ScriptedServer) -> None:
    """`lightspan.agent` and the SDK's agents make one path, in the order of entering."""
    server._script = says({"scout": [calls("think")]})

    @function_tool
    def think() -> str:
        """Think."""
        with lightspan.agent("idea"):
            ask_raw(server)
        return "ok"

    with captured() as attempt, lightspan.agent("outer"):
        run_async(make(server, "scout", tools=[think]))
    assert attempt.calls == ["outer/scout", "outer/scout/idea", "outer/scout"]
    assert emit.current_agent() is None


def test_a_raw_client_in_a_tool_acts_for_the_agent(server: ScriptedServer) -> None:
    server._script = says({"scout": [calls("raw")]})

    @function_tool
    def raw() -> str:
        """Ask."""
        ask_raw(server)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, ask_raw, server).result()
        return "ok"

    with captured() as attempt:
        run_async(make(server, "scout", tools=[raw]))
    assert attempt.calls == ["scout"] * 4


def test_several_runs_in_one_trace(server: ScriptedServer) -> None:
    async def main() -> None:
        with trace("one flow"):
            await Runner.run(make(server, "first"), "go")
            await Runner.run(make(server, "second"), "go")

    with captured() as attempt:
        asyncio.run(main())
    assert attempt.calls == ["first", "second"]


def test_concurrent_runs_in_one_attempt(server: ScriptedServer) -> None:
    async def main() -> None:
        writers = [make(server, f"w{n}") for n in range(8)]
        await asyncio.gather(*(Runner.run(writer, writer.name) for writer in writers))

    with captured() as attempt:
        asyncio.run(main())
    assert sorted(attempt.calls) == [f"w{n}" for n in range(8)]
    for span in attempt.spans:
        if span.kind == "llm":
            assert path_of(span) in str(span.attributes["gen_ai.input.messages"])


def test_a_renamed_agent(server: ScriptedServer) -> None:
    """The name counts with which a run of the agent begins; the next run has the new one."""
    server._script = says({"scout": [calls("rename")]})

    @function_tool
    def rename() -> str:
        """Rename."""
        agent.name = "ranger"
        return "ok"

    agent = make(server, "scout", tools=[rename])
    with captured() as attempt:
        run_async(agent)
        run_async(agent)
    assert attempt.calls == ["scout", "scout", "ranger"]
    assert agents(agent) == (("ranger",), False)


@pytest.mark.parametrize("name", ["Schlüssel 🔑", "a/b", "50 %", "名前", " "])
def test_names_of_any_kind(server: ScriptedServer, name: str) -> None:
    with captured() as attempt:
        run_async(make(server, name))
    path = agents(make(server, name)).paths[0]
    assert attempt.calls == [path]
    assert "/" not in path


def test_an_agent_without_a_name_is_the_app(server: ScriptedServer) -> None:
    with captured() as attempt:
        run_async(make(server, ""))
    assert attempt.tree == ["chat m @app"]
    assert agents(make(server, "")).paths == ("app",)


# --- tools that misbehave ---------------------------------------------------------------------
def test_a_tool_that_raises(server: ScriptedServer) -> None:
    """By default the SDK tells the model; the run goes on."""
    server._script = says({"scout": [calls("broken")]})

    @function_tool
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    with captured() as attempt:
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.tree == [
        "invoke_agent scout @scout",
        "  chat m @scout",
        "  execute_tool broken @scout error",
        "  chat m @scout",
    ]
    span = attempt.one("execute_tool broken")
    assert span.attributes["error.type"] == "ToolError"
    assert span.status_message.startswith("Error running tool (non-fatal)")
    assert "error" in str(span.attributes["gen_ai.tool.call.result"])


def test_a_tool_whose_error_ends_the_run(server: ScriptedServer) -> None:
    server._script = says({"scout": [calls("broken")]})

    @function_tool(failure_error_function=None)
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    with captured() as attempt, pytest.raises(Exception, match="broken"):
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.tree == [
        "invoke_agent scout @scout error",
        "  chat m @scout",
        "  execute_tool broken @scout error",
    ]
    assert attempt.one("execute_tool broken").attributes["exception.message"]


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        ("x" * 100_000, "x" * 65_536 + "… (100000 characters)"),
        (b"\x00\xff", "\"b'\\\\x00\\\\xff'\""),
        ({"n": 7}, '{"n": 7}'),
        ("null \ud800 lone", "null \ufffd lone"),
    ],
)
def test_a_tool_that_returns_anything(server: ScriptedServer, returned: Any, kept: str) -> None:
    @function_tool
    def odd() -> Any:
        """Odd."""
        return returned

    server._script = says({"scout": [calls("odd")]})
    with captured() as attempt:
        try:
            run_async(make(server, "scout", tools=[odd], tool_use_behavior="stop_on_first_tool"))
        except UnicodeError:
            assert "\ud800" in returned
    assert attempt.one("execute_tool odd").attributes["gen_ai.tool.call.result"] == kept


def test_without_sensitive_data_the_arguments_are_known(server: ScriptedServer) -> None:
    server._script = says({"scout": [calls("look")]})
    config = RunConfig(trace_include_sensitive_data=False)
    with captured() as attempt:
        run_async(make(server, "scout", tools=[look]), run_config=config)
    found = attempt.one("execute_tool look").attributes
    assert found["gen_ai.tool.call.arguments"] == '{"what": "seven"}'
    assert found["gen_ai.tool.call.id"] == "call_look"


# --- the Responses API through the gateway ----------------------------------------------------
@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running
        assert running.brain.problems == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_that_the_gateway_keeps(stage: Stage, streamed: bool) -> None:
    """With `auto_previous_response_id` the SDK sends only what is new; the model sees it all."""
    turn = Turn(text="Let me see.", calls=[("look", '{"what": "seven"}')])
    played = stage.open(Part({"scout": [turn, "Seven, {task}."]}), through_gateway=True)
    model = OpenAIResponsesModel("m", async_client(stage))
    scout = Agent(name="scout", instructions="You are scout.", model=model, tools=[look])

    async def main() -> None:
        more: Any = {"auto_previous_response_id": True}
        if streamed:
            result = Runner.run_streamed(scout, played.text, **more)
            async for _ in result.stream_events():
                pass
        else:
            await Runner.run(scout, played.text, **more)
        await wire.aclose()

    with open_scope(played.scope):
        asyncio.run(main())
    stage.close(played)
    attempt = Captured(played.scope)
    attempt.spans = played.spans
    assert attempt.tree == AGENT_WITH_TOOL
    first, second = sorted(played.records, key=lambda record: record.sequence_start)
    prompt = stage.tokenizer.decode(second.prompt_ids)
    for told in ("You are scout.", played.text, "Let me see.", '"seven"', "seven: 7"):
        assert prompt.count(told) >= 1
    # the first prompt, but for what asks for an answer, begins the second: nothing was lost
    asks = len(stage.tokenizer.encode("assistant:"))
    assert second.prompt_ids[: len(first.prompt_ids) - asks] == first.prompt_ids[:-asks]


@pytest.mark.parametrize("model", ["gpt-4.1-mini", "gpt-5", None])
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
def test_an_app_that_names_a_model_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, api: Any, model: str | None
) -> None:
    """The SDK's own provider and client, with the placeholder for a key that runners have.

    For some models the SDK adds settings (a verbosity, a reasoning effort) that no engine has.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "placeholder")
    set_default_openai_api(api)
    played = stage.open(Part({"writer": ["Done, {task}."]}), through_gateway=True)
    writer = Agent(name="writer", instructions="You are writer.", model=model)

    async def main() -> Any:
        try:
            return await Runner.run(writer, played.text)
        finally:
            await wire.aclose()

    try:
        with open_scope(played.scope):
            assert asyncio.run(main()).final_output == f"Done, {played.tag}."
    finally:
        set_default_openai_api("responses")
    stage.close(played)
    assert [record.agent_path for record in played.records] == ["writer"]


# --- model clients that bypass the OpenAI SDK -------------------------------------------------
class Silent(Model):
    """A model client of the user's own, which tells the SDK's tracing nothing."""

    def __init__(self, *says: str | Exception) -> None:
        self.left = list(says)

    def answer(self) -> ModelResponse:
        said = self.left.pop(0)
        if isinstance(said, Exception):
            raise said
        part = ResponseOutputText(text=said, type="output_text", annotations=[])
        message = ResponseOutputMessage(
            id="1", content=[part], role="assistant", status="completed", type="message"
        )
        usage = Usage(requests=1, input_tokens=5, output_tokens=2, total_tokens=7)
        return ModelResponse(output=[message], usage=usage, response_id=None)

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        return self.answer()

    def stream_response(self, *args: Any, **more: Any) -> Any:
        raise NotImplementedError


class Telling(Silent):
    """One that has a span of its own for each call, as the SDK's LiteLLM client has."""

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        asked = [{"role": "user", "content": "go"}]
        with generation_span(model="mine", input=asked) as span:
            answer = self.answer()
            span.span_data.output = [{"role": "assistant", "content": "fine"}]
            span.span_data.usage = {"input_tokens": 5, "output_tokens": 2}
            return answer


BYPASSED = {
    "lightspan.agent.path": "writer",
    "lightspan.route": "app",
    "lightspan.call.outcome": "ok",
    "gen_ai.operation.name": "chat",
    "gen_ai.usage.input_tokens": 5,
    "gen_ai.usage.output_tokens": 2,
    "openinference.span.kind": "LLM",
}


@pytest.mark.parametrize("disabled", [False, True])
def test_a_client_that_bypasses_the_sdk_is_recorded_as_structure(disabled: bool) -> None:
    set_tracing_disabled(disabled)
    writer = Agent(name="writer", model=Telling("fine"))
    with captured() as attempt:
        run_async(writer)
    assert attempt.tree == ["invoke_agent writer @writer", "  chat mine @writer"]
    found = dict(attempt.one("chat mine").attributes)
    assert str(found.pop("lightspan.call.id")).startswith("call")
    assert "go" in str(found.pop("gen_ai.input.messages"))
    assert "fine" in str(found.pop("gen_ai.output.messages"))
    assert found == {
        **BYPASSED,
        "gen_ai.request.model": "mine",
        "gen_ai.response.finish_reasons": ["stop"],
    }
    rollout = Rollout(rollout_id="r", task={}, task_id="t")
    ended = Attempt(
        rollout_id="r",
        attempt_id=attempt.scope.attempt_id,
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
    )
    episode = build_episode(ended, rollout, attempt.spans, [])
    trained = Routing(default=Target(route=Route.POLICY, policy="policy"))
    (entry,) = cover(episode, trained).rejected
    assert entry.rejection is Rejection.NO_TOKENS


def test_a_client_that_says_nothing_is_known_by_its_turns() -> None:
    writer = Agent(name="writer", model=Silent("fine"))
    with captured() as attempt:
        run_async(writer)
    assert attempt.tree == ["invoke_agent writer @writer", "  chat @writer"]
    found = dict(attempt.one("chat").attributes)
    assert str(found.pop("lightspan.call.id")).startswith("call")
    found.pop("gen_ai.usage.input_tokens"), found.pop("gen_ai.usage.output_tokens")
    assert found.items() <= BYPASSED.items() | {("gen_ai.request.model", "")}


def test_a_client_that_says_nothing_and_calls_a_tool() -> None:
    """The tool's span is no sign that the SDK was asked."""

    class Calling(Silent):
        def answer(self) -> ModelResponse:
            if len(self.left) == 1:
                return super().answer()
            self.left.pop(0)
            call = ResponseFunctionToolCall(
                name="look", arguments="{}", call_id="c1", type="function_call"
            )
            return ModelResponse(output=[call], usage=Usage(), response_id=None)

    @function_tool
    def look() -> str:
        """Look."""
        return "7"

    with captured() as attempt:
        run_async(Agent(name="scout", model=Calling("", "fine"), tools=[look]))
    assert sorted(attempt.tree[1:]) == [
        "  chat @scout",
        "  chat @scout",
        "  execute_tool look @scout",
    ]


def test_a_bypassing_client_that_fails() -> None:
    writer = Agent(name="writer", model=Telling(ConnectionError("no")))
    with captured() as attempt, pytest.raises(ConnectionError):
        run_async(writer)
    assert attempt.tree == ["invoke_agent writer @writer error", "  chat mine @writer error"]
    assert attempt.one("chat mine").attributes["error.type"] == "ConnectionError"


def test_a_guardrail_that_stops_a_turn_makes_no_call(server: ScriptedServer) -> None:
    @input_guardrail(name="closed", run_in_parallel=False)
    def closed(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    writer = make(server, "writer", input_guardrails=[closed])
    with captured() as attempt, pytest.raises(InputGuardrailTripwireTriggered):
        run_async(writer)
    assert attempt.calls == []


# --- failures ---------------------------------------------------------------------------------
@HOW
def test_an_error_of_the_model(server: ScriptedServer, run: Run) -> None:
    server._script = lambda request: Reply(text="no", status=400)
    with captured() as attempt, pytest.raises(openai.BadRequestError):
        run(make(server, "writer"))
    assert attempt.tree == ["invoke_agent writer @writer error", "  chat m @writer error"]
    assert attempt.one("invoke_agent writer").attributes["error.type"] == "BadRequestError"


def test_an_error_that_is_handled_around_is_not_the_agents(server: ScriptedServer) -> None:
    with captured() as attempt:
        try:
            raise ValueError("earlier")
        except ValueError:
            run_async(make(server, "writer"))
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]


@HOW
def test_too_many_turns(server: ScriptedServer, run: Run) -> None:
    server._script = lambda request: calls("look")
    with captured() as attempt, pytest.raises(MaxTurnsExceeded):
        run(make(server, "scout", tools=[look]), max_turns=2)
    assert attempt.calls == ["scout", "scout"]
    assert attempt.one("invoke_agent scout").status is SpanStatus.ERROR


async def test_cancellation(server: ScriptedServer) -> None:
    server._script = lambda request: Reply(text="late", delay_s=0.5)
    with captured() as attempt:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Runner.run(make(server, "writer"), "go"), 0.2)
        await asyncio.sleep(0.05)
    assert attempt.tree == ["invoke_agent writer @writer error", "  chat m @writer error"]
    assert attempt.one("invoke_agent writer").attributes["error.type"] == "CancelledError"


async def test_a_cancelled_stream(server: ScriptedServer) -> None:
    server._script = lambda request: "one two three four"
    client = async_client(server)
    writer = Agent(name="writer", model=OpenAIChatCompletionsModel("m", client))
    with captured() as attempt:
        result = Runner.run_streamed(writer, "go")
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                result.cancel()
        await asyncio.sleep(0.1)
        attempt.scope.recorder.give_up()
    await client.close()
    assert [path_of(span) for span in attempt.spans if span.kind == "agent"] == ["writer"]
    assert set(attempt.calls) <= {"writer"}


async def test_an_abandoned_stream(server: ScriptedServer) -> None:
    """The run goes on without us; what has not ended when the attempt ends is recorded so."""
    server._script = lambda request: Reply(text="late", delay_s=0.4)
    attempt = Captured(make_scope())
    with open_scope(attempt.scope):
        result = Runner.run_streamed(make(server, "writer"), "go")
        await asyncio.sleep(0.1)
    attempt.scope.recorder.give_up()
    attempt.close()
    (span,) = (span for span in attempt.spans if span.kind == "agent")
    assert span.status is SpanStatus.UNSET
    async for _ in result.stream_events():
        pass
    late = [span.kind for span in attempt.scope.recorder.drain()]
    assert "agent" not in late


def test_a_retry_of_the_sdk_is_one_call(server: ScriptedServer) -> None:
    answers = iter([Reply(status=500, text="no")])
    server._script = lambda request: next(answers, "ok")
    agent = Agent(name="writer", model=chat(server, max_retries=2))
    with captured() as attempt:
        run_async(agent)
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]
    assert len(server.requests) == 2


# --- many at once -----------------------------------------------------------------------------
def test_32_attempts_at_once_have_no_cross_talk(server: ScriptedServer) -> None:
    triage = team(server)

    def script(request: Request) -> Reply | str:
        asked = sum(message["role"] == "tool" for message in request.messages)
        if who(request) == "triage":
            return calls("ask_expert") if asked == 0 else calls("transfer_to_billing")
        return "done"

    server._script = script

    async def attempt(number: int) -> Captured:
        with captured() as found:
            await Runner.run(triage, f"task {number}")
        return found

    async def main() -> list[Captured]:
        return await asyncio.gather(*(attempt(number) for number in range(32)))

    for number, found in enumerate(asyncio.run(main())):
        assert found.tree == TEAM
        first = min((s for s in found.spans if s.kind == "llm"), key=lambda s: s.start_ns)
        assert f"task {number}" in str(first.attributes["gen_ai.input.messages"])


def test_attempts_in_threads(server: ScriptedServer) -> None:
    def attempt(number: int) -> list[str]:
        with captured() as found:  # a client of its own: httpx's are not for several loops at once
            run_sync(make(server, "writer"), str(number))
        return found.tree

    with ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(attempt, range(16)))
    assert trees == [["invoke_agent writer @writer", "  chat m @writer"]] * 16


def test_two_event_loops(server: ScriptedServer) -> None:
    for _ in range(2):
        with captured() as attempt:
            run_async(make(server, "writer"))
        assert attempt.calls == ["writer"]


# --- installing -------------------------------------------------------------------------------
def test_installing_twice_records_once(server: ScriptedServer) -> None:
    with instrument():
        pass
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]


def test_the_processor_beside_instrument_records_once(server: ScriptedServer) -> None:
    set_trace_processors([LightspanProcessor()])
    with captured() as attempt:
        run_async(team(server))
    assert attempt.tree == TEAM


@HOW
def test_the_processor_alone(server: ScriptedServer, run: Run) -> None:
    uninstrument()
    set_trace_processors([LightspanProcessor()])
    with captured() as attempt:
        run(team(server))
    assert attempt.tree == TEAM
    instrument()


def test_uninstalled_nothing_is_recorded_but_the_call(server: ScriptedServer) -> None:
    uninstrument()
    assert setup.GLOBAL_TRACE_PROVIDER is None
    set_trace_processors([])
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.tree == ["chat m @app"]
    uninstrument()
    instrument()


def test_the_apps_provider_is_back_afterwards(server: ScriptedServer) -> None:
    uninstrument()
    mine = DefaultTraceProvider()
    setup.set_trace_provider(mine)
    with instrument():
        assert setup.GLOBAL_TRACE_PROVIDER is not mine
        set_trace_processors([heard := Heard()])
        with captured():
            run_async(make(server, "writer"))
    assert setup.GLOBAL_TRACE_PROVIDER is mine
    run_async(make(server, "writer"))
    assert heard.traces == 2
    instrument()


def test_outside_a_scope_nothing_happens(server: ScriptedServer) -> None:
    set_trace_processors([heard := Heard()])
    run_async(make(server, "writer"))
    assert Counter(heard.spans)["agent"] == 1
    assert not isinstance(get_current_span(), _hook._Watched)
    assert _hook._watched.get() is None


def test_agents_built_before_instrument(server: ScriptedServer) -> None:
    uninstrument()
    triage = team(server)
    with instrument(), captured() as attempt:
        run_async(triage)
    assert attempt.tree == TEAM
    instrument()


def test_an_attempt_leaves_nothing_behind(server: ScriptedServer) -> None:
    with captured() as attempt:
        run_async(team(server))
    recorder = attempt.scope.recorder
    assert recorder._pending == {}
    assert len(_hook._handed.get(recorder, {})) == 0


def test_an_error_of_ours_damages_the_attempt_only(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **more: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(_hook, "begin", failing)
    current = make_scope()
    with open_scope(current):
        assert run_async(make(server, "writer")).final_output == "go"
    assert "lightspan_openai_agents: RuntimeError: ours" in current.recorder.damages()


def test_opentelemetry_loads_it(server: ScriptedServer) -> None:
    from importlib.metadata import entry_points

    found = entry_points(group="opentelemetry_instrumentor", name="lightspan_openai_agents")
    (point,) = found
    uninstrument()
    instrumentor = point.load()()
    instrumentor.instrument(skip_dep_check=True)
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.calls == ["writer"]
    instrumentor.uninstrument()
    assert not _hook._is_installed()
    instrument()


def test_public_names() -> None:
    assert lightspan_openai_agents.__all__ == [
        "LightspanProcessor",
        "agents",
        "instrument",
        "uninstrument",
    ]
