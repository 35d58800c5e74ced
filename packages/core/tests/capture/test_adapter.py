"""Test the base of all adapters: framework versions, installing, and texts for spans."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.capture.adapter import (
    MAX_TEXT_LENGTH,
    SpanEnd,
    end_span,
    patch_subclasses,
    require_framework,
    truncated_json,
)
from lightspan.capture.context import AgentContext, AttemptContext, Frame
from lightspan.schema import semconv
from lightspan.schema.spans import SpanKind, SpanStatus

# --- versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "floor"),
    [("0.10.0", "0.10"), ("0.10rc1", "0.10"), ("1.2", "1.2.0"), ("2.0.0.post1", "1.10.3")],
)
def test_a_framework_that_is_new_enough(
    monkeypatch: pytest.MonkeyPatch, installed: str, floor: str
) -> None:
    """Check that versions are compared by their numbers, not as text."""
    monkeypatch.setattr("lightspan.capture.adapter.version", lambda name: installed)
    with require_framework("lightspan-crew", "crew", floor):
        pass


# --- spans ----------------------------------------------------------------------------------
ATTEMPT = AttemptContext(rollout_id="r", attempt_id="a", trace_id="f" * 32)
TEAM = AgentContext(ATTEMPT, (Frame("team", "1" * 16),), "1" * 16)


def test_the_span_of_an_agent() -> None:
    inside = TEAM.enter_agent("wri/ter")
    end = SpanEnd.from_error(ValueError("no"))._replace(status=SpanStatus.ERROR)
    end = end._replace(attributes={**end.attributes, "x": 1})
    span = end_span(TEAM, SpanKind.AGENT, "wri/ter", end, span_id=inside.parent_span_id, start_ns=1)
    assert (span.name, span.status, span.status_message) == (
        "invoke_agent wri/ter",
        SpanStatus.ERROR,
        "no",
    )
    assert (span.span_id, span.parent_id, span.start_ns) == (inside.frames[-1].span_id, "1" * 16, 1)
    assert span.attributes[semconv.AGENT_PATH] == inside.path == "team/wri%2Fter"
    assert span.attributes[semconv.OPENINFERENCE_PARENT] == "team"
    assert span.attributes[semconv.ERROR_TYPE] == "ValueError"
    assert "x" not in span.attributes


def test_a_closed_generator_is_no_error() -> None:
    assert SpanEnd.from_error(GeneratorExit()) == SpanEnd(SpanStatus.UNSET)


# --- installing -----------------------------------------------------------------------------


def test_subclasses_are_wrapped_once_each_and_later_ones_until_undone() -> None:
    class Base:
        pass

    class Left(Base):
        pass

    class Right(Base):
        pass

    class Both(Left, Right):
        pass

    wrapped: list[str] = []
    patch = patch_subclasses(Base, lambda cls: wrapped.append(cls.__name__))
    assert sorted(wrapped) == ["Base", "Both", "Left", "Right"]
    type("Later", (Left,), {})
    assert wrapped[4:] == ["Later"]
    patch.undo()
    type("Last", (Left,), {})
    assert len(wrapped) == 5
    assert "__init_subclass__" not in vars(Base)


# --- texts ----------------------------------------------------------------------------------


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert truncated_json("Prüferin日本") == "Prüferin日本"
    assert truncated_json("x" * MAX_TEXT_LENGTH) == "x" * MAX_TEXT_LENGTH
    assert truncated_json("x" * 70_000) == "x" * MAX_TEXT_LENGTH + "… (70000 characters)"
    assert truncated_json(b"x" * 1_000_000).endswith("… (1000005 characters)")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_what_json_can_say_is_json(value: Any) -> None:
    assert json.loads(truncated_json([value])) == [value]
