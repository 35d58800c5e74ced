"""Test that `get_current_span()` returns the same with the adapter as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextvars import copy_context
from typing import Any

import pytest

pytest.importorskip("agents")

from agents.tracing import (
    Span as SdkSpan,
    agent_span,
    custom_span,
    function_span,
    generation_span,
    get_current_span,
    trace,
)

from lightspan.capture.entry import open_scope
from lightspan_testing.attempts import captured, make_scope

pytestmark = pytest.mark.usefixtures("installed_openai_agents")

Begun = Callable[[], SdkSpan[Any]]


def agent() -> SdkSpan[Any]:
    return agent_span("writer")


def tool() -> SdkSpan[Any]:
    return function_span("look")


def model_call() -> SdkSpan[Any]:
    return generation_span(model="m")


def other() -> SdkSpan[Any]:
    """Return a span that the adapter does not watch."""
    return custom_span("mine")


def inside_one_another(nest: Sequence[Begun]) -> None:
    around = get_current_span()
    if nest:
        with nest[0]() as span:
            assert get_current_span() is span
            inside_one_another(nest[1:])
            assert get_current_span() is span
    assert get_current_span() is around


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(
    "nest",
    [
        (agent, tool, agent, model_call),
        (other, agent, other, other, tool),
        (agent, other, agent),
        (model_call, other, model_call),
    ],
)
def test_each_span_is_current_inside_itself(nest: Sequence[Begun], disabled: bool) -> None:
    with captured() as attempt, trace("t", disabled=disabled):
        inside_one_another(nest)
        assert get_current_span() is None
    assert not attempt.scope.recorder.capture_errors()


@pytest.mark.parametrize("begin", [agent, tool, model_call, other])
def test_a_span_that_is_not_made_current_is_not(begin: Begun) -> None:
    with captured(), trace("t"), agent() as around:
        aside = begin()
        aside.start()
        assert get_current_span() is around
        with begin() as inside:
            assert get_current_span() is inside
        aside.finish()
        assert get_current_span() is around


def test_in_another_context() -> None:
    with captured(), trace("t"), agent() as span:
        assert copy_context().run(get_current_span) is span

        async def in_tasks() -> Sequence[Any]:
            async def look() -> Any:
                with tool() as own:
                    assert get_current_span() is own
                    await asyncio.sleep(0)
                    assert get_current_span() is own
                return get_current_span()

            return await asyncio.gather(look(), look())

        assert all(found is span for found in asyncio.run(in_tasks()))


def held(begin: Begun) -> Generator[SdkSpan[Any], None, None]:
    with begin() as span:
        yield span


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("begin", [agent, tool, other])
def test_a_generator_that_ends_early(begin: Begun, is_elsewhere: bool) -> None:
    """Check a generator that is closed in another context, where the SDK cannot reset its span."""

    def begin_here() -> None:
        with captured() as attempt, trace("t"):
            steps = held(begin)
            span = next(steps)
            assert get_current_span() is span
            if is_elsewhere:
                copy_context().run(steps.close)
            else:
                steps.close()
            assert get_current_span() is (span if is_elsewhere else None)
        assert not attempt.scope.recorder.capture_errors()

    copy_context().run(begin_here)


def test_outside_every_attempt() -> None:
    with trace("t"):
        inside_one_another((agent, other, model_call))
        with agent() as around:
            with open_scope(make_scope()):
                inside_one_another((agent, other))
                assert get_current_span() is around
            assert get_current_span() is around
