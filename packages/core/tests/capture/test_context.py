"""Test the attempt's scope: frames of agents, resolvers, and the recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import (
    AgentContext,
    AttemptContext,
    Frame,
    Resolver,
    connect,
    current_agent,
    current_context,
    disconnect,
    make_span,
    register_resolver,
    resolve_agent,
    set_agent,
    unregister_resolver,
)
from lightspan.capture.entry import open_scope
from lightspan.capture.recorder import Recorder
from lightspan.schema.spans import SpanKind

SCOPE = AttemptContext(rollout_id="r", attempt_id="a", root_span_id="00000000000000aa")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    sdk_instrumentation.uninstall()


@contextmanager
def push(frame: Frame) -> Iterator[AgentContext]:
    current = current_context()
    assert current is not None
    inside = current.within(frame.span_id, (*current.frames, frame))
    leave = set_agent(inside)
    try:
        yield inside
    finally:
        leave()


def test_frames() -> None:
    with open_scope(SCOPE) as scope:
        assert scope is SCOPE
        assert current_agent() == current_context() == AgentContext(SCOPE, (), "00000000000000aa")
        with push(Frame("team", "1")), push(Frame("a/b", "2")) as inner:
            assert current_agent() is inner
            assert inner == AgentContext(SCOPE, (Frame("team", "1"), Frame("a/b", "2")), "2")
            assert inner.path == "team/a%2Fb"
        assert current_agent() == AgentContext(SCOPE, (), "00000000000000aa")
    assert current_agent() is None


def test_resolvers_are_asked_in_order_up_to_one_that_is_named() -> None:
    def named(name: str) -> Resolver:
        return lambda one: replace(one, frames=(*one.frames, Frame(name, name)))

    resolvers = [named("a"), named("b"), named("c")]
    for resolver in resolvers:
        register_resolver(resolver)
    try:
        with open_scope(SCOPE):
            current = current_context()
            assert current is not None
            assert current_agent() == resolve_agent(current)
            assert resolve_agent(current).path == "a/b/c"
            assert resolve_agent(current, before=resolvers[1]).path == "a"
    finally:
        for resolver in resolvers:
            unregister_resolver(resolver)


def test_the_recorder_counts_what_does_not_fit() -> None:
    recorder = Recorder(limit=2)
    spans = [make_span(AgentContext(SCOPE), str(n), SpanKind.OTHER, {}) for n in range(4)]
    for span in spans:
        recorder.add(span)
    assert recorder.drain() == spans[:2]
    recorder.add_capture_error("broken")
    assert recorder.capture_errors() == ["broken", "2 spans dropped"]
    recorder.add(spans[2])
    assert recorder.drain() == [spans[2]]
    assert recorder.drain() == []


def test_connections_may_end_in_any_order() -> None:
    scopes = [AttemptContext(rollout_id=name, attempt_id="", is_outside=True) for name in "ab"]
    first, second = map(AgentContext, scopes)
    connect(first)
    connect(second)
    disconnect(first)
    assert current_context() is second
    disconnect(second)
    assert current_context() is None
