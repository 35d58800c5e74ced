"""What all adapters share: versions, installing and undoing, texts that a span can carry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.capture.adapter import (
    MAX_TEXT_LENGTH,
    AdapterInstrumentor,
    Instrumentation,
    SpanEnd,
    end_span,
    patch_subclasses,
    require_framework,
    truncated_json,
)
from lightspan.capture.context import AgentContext, AttemptContext, Frame
from lightspan.errors import ConfigError
from lightspan.schema import semconv
from lightspan.schema.spans import SpanKind, SpanLink, SpanStatus


# --- versions -------------------------------------------------------------------------------
def test_a_framework_that_is_absent() -> None:
    with (
        pytest.raises(ConfigError) as caught,
        require_framework("lightspan-crew", "no-such-framework", "1.2"),
    ):
        raise AssertionError
    assert str(caught.value) == (
        "no-such-framework is not installed in this environment: "
        "pip install 'no-such-framework>=1.2'"
    )


@pytest.mark.parametrize(
    ("found", "floor", "is_old"),
    [
        ("0.9.12", "0.10", True),
        ("0.10.0", "0.10", False),
        ("0.10rc1", "0.10", False),
        ("1.2", "1.10.3", True),
        ("2.0.0.post1", "1.10.3", False),
    ],
)
def test_a_framework_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, found: str, floor: str, is_old: bool
) -> None:
    """Versions are compared by their numbers, not as text."""
    monkeypatch.setattr("lightspan.capture.adapter.version", lambda name: found)
    if not is_old:
        with require_framework("lightspan-crew", "crew", floor):
            return
    with (
        pytest.raises(ConfigError) as caught,
        require_framework("lightspan-crew", "crew", floor),
    ):
        raise AssertionError
    assert str(caught.value) == (
        f"crew {found} is too old: lightspan-crew needs {floor} or newer: "
        f"pip install 'crew>={floor}'"
    )


def test_a_framework_that_is_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.capture.adapter.version", lambda name: "9.0")
    with (
        pytest.raises(ImportError) as caught,
        require_framework("lightspan-crew", "crew", "1.0"),
    ):
        raise ImportError("no module crew.bus")
    assert str(caught.value) == (
        "this lightspan-crew does not support crew 9.0 (no module crew.bus): "
        "upgrade lightspan-crew, "
        "or install an older crew"
    )


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


def test_the_span_of_a_tool() -> None:
    result = SpanEnd(attributes={semconv.TOOL_CALL_RESULT: "7"})
    arguments = {semconv.TOOL_CALL_ARGUMENTS: "{}"}
    span = end_span(TEAM, SpanKind.TOOL, "look", result, attributes=arguments)
    assert span.name == "execute_tool look"
    assert span.attributes == {
        semconv.OPERATION_NAME: "execute_tool",
        semconv.TOOL_NAME: "look",
        semconv.AGENT_PATH: "team",
        semconv.OPENINFERENCE_KIND: "TOOL",
        **arguments,
        **result.attributes,
    }


def test_the_span_of_something_else_is_as_it_is_given() -> None:
    links = [("2" * 16, {"from": "triage"})]
    span = end_span(TEAM, SpanKind.OTHER, "handoff", attributes={"x": 1}, links=links)
    assert (span.name, span.links) == (
        "handoff",
        [SpanLink("f" * 32, "2" * 16, {"from": "triage"})],
    )
    assert span.attributes == {semconv.AGENT_PATH: "team", "x": 1}


def test_a_closed_generator_is_no_error() -> None:
    assert SpanEnd.from_error(GeneratorExit()) == SpanEnd(SpanStatus.UNSET)


# --- installing -----------------------------------------------------------------------------
def test_a_block_undoes_what_its_call_did() -> None:
    undone: list[str] = []
    with Instrumentation(lambda: undone.append("x")) as entered:
        assert isinstance(entered, Instrumentation)
        assert undone == []
    assert undone == ["x"]
    with pytest.raises(LookupError), Instrumentation(lambda: undone.append("y")):
        raise LookupError
    assert undone == ["x", "y"]


def test_a_call_that_found_everything_installed_undoes_nothing() -> None:
    with Instrumentation(None):
        pass


def test_opentelemetry_calls_with_options_that_say_nothing_to_an_adapter() -> None:
    called: list[str] = []

    def instrument() -> Instrumentation:
        called.append("on")
        return Instrumentation(None)

    def uninstrument() -> None:
        called.append("off")

    class Instrumentor(AdapterInstrumentor):
        on = staticmethod(instrument)
        off = staticmethod(uninstrument)

    instrumentor = Instrumentor()
    instrumentor.instrument(skip_dep_check=True, tracer_provider=None)
    instrumentor.uninstrument()
    assert called == ["on", "off"]


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
class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("Prüferin日本", "Prüferin日本"),
        ({"n": 7, "t": "日"}, '{"n": 7, "t": "日"}'),
        (b"\x00\xff", json.dumps("b'\\x00\\xff'")),
        (None, "null"),
        (Unprintable(), "<Unprintable>"),
        (CIRCLE, "<list>"),
        ({(1, 2): 3}, "<dict>"),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert truncated_json(value) == text


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert truncated_json("x" * MAX_TEXT_LENGTH) == "x" * MAX_TEXT_LENGTH
    assert truncated_json("x" * 70_000) == "x" * MAX_TEXT_LENGTH + "… (70000 characters)"
    assert truncated_json(b"x" * 1_000_000).endswith("… (1000005 characters)")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_what_json_can_say_is_json(value: Any) -> None:
    assert json.loads(truncated_json([value])) == [value]
