"""Tests of resolving the agent by spans of OpenTelemetry's SDK: paths, order, nesting, threads,
memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st
from opentelemetry import context as otel_context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

import lightspan
import lightspan_otel as otel
from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import claim_scope, release_scope
from lightspan.capture.context import AgentContext, Frame
from lightspan_otel import open_spans
from lightspan_testing.attempts import captured, make_scope, push
from packages.otel.tests.spans import INVOKES, agent, path, say, tool

# --- one span -------------------------------------------------------------------------------


def test_a_name_that_comes_after_the_start_is_read_at_the_call(tracer: Tracer) -> None:
    with captured() as attempt, tracer.start_as_current_span("run", attributes=INVOKES) as span:
        assert path() == "app"
        span.set_attribute("gen_ai.agent.name", "writer")
        assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer"]


def test_what_was_read_is_kept(tracer: Tracer) -> None:
    """A later attribute with the agent's current action does not change its role."""
    with captured() as attempt, agent(tracer, "writer") as span:
        assert path() == "writer"
        span.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.agent.name": "other"})
        span.update_name("chat m")
        assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer"]


def test_outside_a_scope_nobody_acts(tracer: Tracer) -> None:
    with agent(tracer, "writer"):
        assert context.current_agent() is None


def test_a_process_that_is_connected_to_a_server(tracer: Tracer) -> None:
    """Outside of every attempt the agent determines the policy."""
    connection = AgentContext(replace(make_scope(), is_outside=True))
    context.connect(connection)
    try:
        assert path() == "app"
        with agent(tracer, "boss"), lightspan.agent("middle"), agent(tracer, "expert"):
            assert path() == "boss/middle/expert"
    finally:
        context.disconnect(connection)


def test_what_began_outside_the_attempt_is_no_part_of_it(tracer: Tracer) -> None:
    with agent(tracer, "server"), captured() as attempt:
        assert path() == "app"
        with agent(tracer, "writer"):
            assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer"]


# --- several --------------------------------------------------------------------------------
def test_agents_in_agents_and_tools(tracer: Tracer) -> None:
    with captured() as attempt, agent(tracer, "boss"), tracer.start_as_current_span("step"):
        with tool(tracer, "ask"):
            assert path() == "boss"
            with agent(tracer, "expert"):
                assert path() == "boss/expert"
                lightspan.emit_message("here")
        with tool(tracer, "look"):
            pass
    assert attempt.tree == [
        "invoke_agent boss @boss",
        "  execute_tool ask @boss",
        "    invoke_agent expert @boss/expert",
        "      lightspan.message @boss/expert unset",
        "  execute_tool look @boss",
    ]


def test_equal_neighbours_are_one_agent(tracer: Tracer) -> None:
    """Some frameworks make a span for the run and another for its stream."""
    with captured() as attempt, agent(tracer, "writer"), agent(tracer, "writer"):
        assert path() == "writer"
        with tool(tracer, "look"), tracer.start_as_current_span("stream"):
            assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer", "  execute_tool look @writer"]


@pytest.mark.parametrize("between", ["tool", "agent"])
def test_equal_names_with_something_between_are_two(tracer: Tracer, between: str) -> None:
    def inside() -> AbstractContextManager[Any]:
        return tool(tracer, "ask") if between == "tool" else lightspan.agent("other")

    with captured(), agent(tracer, "writer"), inside(), agent(tracer, "writer"):
        assert path() == ("writer/writer" if between == "tool" else "writer/other/writer")


def test_a_span_that_has_ended_and_is_still_current_is_passed_over(tracer: Tracer) -> None:
    """Some frameworks leave a span current after its stream has ended."""
    with captured() as attempt, agent(tracer, "team"):
        open_stream = tracer.start_span("invoke_agent member", attributes=INVOKES)
        token = otel_context.attach(trace.set_span_in_context(open_stream))
        assert path() == "team/member"
        open_stream.end()
        assert path() == "team"
        with agent(tracer, "other"):
            assert path() == "team/other"
        otel_context.detach(token)
    assert attempt.tree == [
        "invoke_agent team @team",
        "  invoke_agent member @team/member",
        "  invoke_agent other @team/other",
    ]


# --- beside others --------------------------------------------------------------------------


def test_it_is_the_first_resolver_whenever_it_comes() -> None:
    def other(acting: AgentContext) -> AgentContext | None:
        return replace(acting, frames=(*acting.frames, Frame("resolved", "00000000000000f1")))

    for is_late in (True, False):
        with ExitStack() as stack:
            provider = TracerProvider()
            if is_late:
                context.register_resolver(other)
            stack.enter_context(otel.instrument(provider))
            context.register_resolver(other)
            stack.callback(context.unregister_resolver, other)
            assert context.resolvers()[1:] == (other,)
            stack.enter_context(captured())
            stack.enter_context(agent(provider.get_tracer("t"), "writer"))
            assert path() == "writer/resolved"


def test_what_an_adapter_covers_is_not_told_of_twice(provider: TracerProvider) -> None:
    covered, other = provider.get_tracer("covered"), provider.get_tracer("other")
    for name in ("adapter", "other"):
        claim_scope(name, ["covered", "more"])
    release_scope("other")
    with captured() as attempt, agent(other, "a"), agent(covered, "b"), agent(other, "c"):
        assert path() == "a/c"
    release_scope("adapter")
    assert attempt.tree == ["invoke_agent a @a", "  invoke_agent c @a/c"]
    assert not state.claims
    with captured(), agent(covered, "b"):
        assert path() == "b"


LEVELS = st.lists(
    st.tuples(
        st.sampled_from(["span", "agent", "push", "tool", "operation", "other"]),
        st.sampled_from("abc"),
    ),
    max_size=7,
)


HEARD = TracerProvider()


@given(levels=LEVELS)
def test_any_nesting_comes_out_as_it_was_entered(levels: list[tuple[str, str]]) -> None:
    tracer = HEARD.get_tracer("t")
    entered: list[str] = []
    neighbour = ""
    with otel.instrument(HEARD), captured() as attempt, ExitStack() as stack:
        for number, (kind, name) in enumerate(levels):
            stack.enter_context(_level(kind, name, number, tracer))
            if kind in ("agent", "push") or (kind == "span" and neighbour != name):
                entered.append(name)
            if kind != "other":
                neighbour = name if kind == "span" else ""
            assert path() == ("/".join(entered) or "app")
        lightspan.emit_message("here")
    [message] = [span for span in attempt.spans if span.name == "lightspan.message"]
    assert message.attributes["lightspan.agent.path"] == ("/".join(entered) or "app")
    if "push" not in [kind for kind, _ in levels]:  # its span is not recorded
        assert len(attempt.tree) == len(attempt.spans)  # no parent is missing


def _level(kind: str, name: str, number: int, tracer: Tracer) -> AbstractContextManager[Any]:
    makers: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "span": lambda: agent(tracer, name),
        "agent": lambda: lightspan.agent(name),
        "push": lambda: push(Frame(name, f"{number:016x}")),
        "tool": lambda: tool(tracer, name),
        "operation": lambda: lightspan.operation(name),
        "other": lambda: tracer.start_as_current_span(name),
    }
    return makers[kind]()


# --- at once --------------------------------------------------------------------------------


def test_an_agent_of_a_generator_acts_only_while_the_generator_runs(tracer: Tracer) -> None:
    """OpenTelemetry's current span stays with the reader."""
    paths = []

    def items() -> Generator[int]:
        with agent(tracer, "writer"):
            yield 1
            paths.append(path())
            yield 2

    with captured() as attempt:
        reading = items()
        next(reading)
        assert path() == "app"
        next(reading)
        assert paths == ["writer"]
        reading.close()
        assert path() == "app"
    assert attempt.tree == ["invoke_agent writer @writer unset"]


# --- memory ---------------------------------------------------------------------------------
def test_nothing_is_kept_of_spans_that_are_gone(tracer: Tracer) -> None:
    gc.collect()
    before = len(open_spans._by_ids)
    with captured():
        for _ in range(100):
            with agent(tracer, "writer"), tool(tracer, "look"):
                pass
            tracer.start_span("invoke_agent left", attributes=INVOKES)  # never ended
        gc.collect()
        assert len(open_spans._by_ids) == before
    assert not open_spans._open_spans


def test_ended_spans_that_stay_current_are_no_chain(tracer: Tracer) -> None:
    """Each run leaves its ended span in the context of a permanent worker."""
    tokens = []
    with captured():
        for number in range(50):
            span = tracer.start_span(f"invoke_agent a{number}", attributes=INVOKES)
            tokens.append(otel_context.attach(trace.set_span_in_context(span)))
            assert path() == f"a{number}"
            span.end()
        result = open_spans.open_span_of(trace.get_current_span())
        assert result is not None
        assert list(result.upwards()) == []
        assert result._above is None
    for token in reversed(tokens):
        otel_context.detach(token)


def test_a_span_that_is_dropped_is_recorded_as_abandoned(tracer: Tracer) -> None:
    with captured() as attempt:
        span = tracer.start_span("invoke_agent writer", attributes=INVOKES)
        with trace.use_span(span):
            lightspan.emit_message("here")
        del span
        gc.collect()
        assert [span.name for span in attempt.scope.recorder._spans] == [
            "lightspan.message",
            "invoke_agent writer",
        ]
    assert attempt.tree == [
        "invoke_agent writer @writer unset",
        "  lightspan.message @writer unset",
    ]


def test_an_attempt_ends_before_its_spans(tracer: Tracer) -> None:
    with captured() as attempt:
        span = tracer.start_span("invoke_agent writer", attributes=INVOKES)
        with trace.use_span(span):
            lightspan.emit_message("here")
    span.end()
    assert attempt.tree[0] == "invoke_agent writer @writer unset"
    assert attempt.scope.recorder.drain() == []


# --- calls ----------------------------------------------------------------------------------
def test_a_model_call_has_its_agent(tracer: Tracer, client: openai.OpenAI) -> None:
    with captured() as attempt, agent(tracer, "writer"):
        with tool(tracer, "look"), tracer.start_as_current_span("POST"):
            say(client)
        list(say(client, stream=True))
    assert attempt.tree == [
        "invoke_agent writer @writer",
        "  execute_tool look @writer",
        "    chat m @writer",
        "  chat m @writer",
    ]


# --- whom `optimize=` may name --------------------------------------------------------------
def test_the_agents_that_were_seen(tracer: Tracer, client: openai.OpenAI) -> None:
    """Agents that called a model, in order, each once; none of other frameworks."""
    assert otel.agents() == ((), False)
    with captured():
        with agent(tracer, "writer"):
            assert otel.agents().paths == ()  # it has not called a model yet
            with agent(tracer, "critic"):
                say(client)
            say(client)
            say(client)
        with lightspan.agent("other"):
            say(client)
    assert otel.agents() == (("writer/critic", "writer"), False)
