"""What all adapters share: versions, installing and undoing, texts that a span can carry."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.capture.adapter import (
    TEXT_LIMIT,
    AdapterInstrumentor,
    Instrumentation,
    as_json,
    require_framework,
    shortened,
    shown,
    subclasses,
    too_new,
)
from lightspan.errors import ConfigError


# --- versions -------------------------------------------------------------------------------
def test_the_installed_version_is_told() -> None:
    assert require_framework("pytest", "1.0") == importlib.metadata.version("pytest")


def test_a_framework_that_is_absent() -> None:
    with pytest.raises(ConfigError) as caught:
        require_framework("no-such-framework", "1.2")
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
        assert require_framework("crew", floor) == found
        return
    with pytest.raises(ConfigError) as caught:
        require_framework("crew", floor)
    assert str(caught.value) == (
        f"crew {found} is older than {floor}, which this needs: pip install 'crew>={floor}'"
    )


def test_a_framework_that_is_too_new() -> None:
    error = too_new("lightspan-crew", "crew", "9.0", ImportError("no module crew.bus"))
    assert isinstance(error, ImportError)
    assert str(error) == (
        "this lightspan-crew does not know crew 9.0 (no module crew.bus): upgrade lightspan-crew, "
        "or install an older crew"
    )


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


def test_subclasses_are_named_once() -> None:
    class Base:
        pass

    class Left(Base):
        pass

    class Right(Base):
        pass

    class Both(Left, Right):
        pass

    assert sorted(one.__name__ for one in subclasses(Base)) == ["Both", "Left", "Right"]


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
    assert shown(value) == text


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert shortened("x" * TEXT_LIMIT) == "x" * TEXT_LIMIT
    assert shortened("x" * 70_000) == "x" * TEXT_LIMIT + "… (70000 characters)"
    assert shown(b"x" * 1_000_000).endswith("… (1000005 characters)")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_what_json_can_say_is_json(value: Any) -> None:
    assert json.loads(as_json(value)) == value
