"""Tests of undoing `otel.instrument`, among other instrumentations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import lightspan_otel as otel
from lightspan.capture import context
from lightspan_otel import resolver
from lightspan_otel.frameworks import Framework, Switch
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_otel.processor import _processor_of, global_provider, processors
from lightspan_testing.attempts import captured
from packages.otel.tests.spans import agent, path


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register a framework under a name; return the list of its changes ("on", "off")."""
    done: list[str] = []

    def switch_on() -> Switch:
        done.append("on")
        return Switch(lambda: True, lambda: done.append("off"))

    stand_ins = {"known": Framework((), {}, switch_on)}
    monkeypatch.setattr("lightspan_otel.frameworks.FRAMEWORKS", stand_ins)
    return done


@pytest.fixture
def its_global(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    tracer_provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", tracer_provider)
    return tracer_provider


def is_heard(provider: Any) -> bool:
    processor = _processor_of(provider)
    return processor is not None and processor.on


def test_the_global_provider_is_heard_as_long_as_a_name_is_on(
    stand_ins: list[str], its_global: TracerProvider
) -> None:
    other = TracerProvider()
    with otel.instrument(other):
        with otel.instrument("known"):
            assert is_heard(its_global)
        assert (is_heard(its_global), is_heard(other)) == (False, True)
    assert not any(processor.on for processor in processors())
    assert stand_ins == ["on", "off"]


def test_a_handle_that_is_over_undoes_nothing() -> None:
    provider = TracerProvider()
    stale = otel.instrument(provider)
    otel.uninstrument()
    with otel.instrument(provider):
        stale.__exit__(None, None, None)
        assert is_heard(provider)
        assert context.resolvers() == (resolver.resolve,)
    assert not is_heard(provider)


class Refuses:
    """A provider that takes no processor."""

    def add_span_processor(self, processor: Any) -> None:
        raise LookupError("frozen")


def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Refuses())
    otel.instrument("known")


def by_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    otel.instrument(Refuses())  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [by_name, by_provider])
def test_a_provider_that_takes_no_processor_leaves_nothing_half_installed(
    how: Callable[[pytest.MonkeyPatch], None],
    stand_ins: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        with pytest.raises(LookupError, match="frozen"):
            how(monkeypatch)
        assert (context.resolvers(), resolver.switches) == ((), {})
    assert stand_ins == (["on", "off"] * 2 if how is by_name else [])


def test_to_ask_for_the_global_provider_sets_none(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "sdk_tracer_provider")
    with otel.instrument("known"), captured(), agent(PROVIDER.get_tracer("known"), "writer"):
        assert path() == "writer"
    assert trace._TRACER_PROVIDER is global_provider() is None
