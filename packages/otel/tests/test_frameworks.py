"""Tests of switching frameworks on and off by name, with stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import lightspan_otel as otel
from lightspan.capture.entry import open_scope
from lightspan_otel import frameworks
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_testing.attempts import captured, make_scope
from packages.otel.tests.spans import agent, path, say


def proxy() -> trace.Tracer:
    """Return a tracer of the global provider while none is set."""
    return trace.ProxyTracerProvider().get_tracer("its")


class Strands:
    def __init__(self, tracer: trace.Tracer) -> None:
        self.telemetry = SimpleNamespace(tracer=tracer, service_name="strands-agents")

    def switch_on(self) -> frameworks.Switch:
        module = SimpleNamespace(get_tracer=lambda: self.telemetry)
        return frameworks._strands(module)

    @property
    def tracer(self) -> Any:
        return self.telemetry.tracer


class Adk:
    def __init__(self, tracer: trace.Tracer) -> None:
        self.module = SimpleNamespace(tracer=tracer)

    def switch_on(self) -> frameworks.Switch:
        return frameworks._google_adk(self.module)

    @property
    def tracer(self) -> Any:
        return self.module.tracer


class AgentFramework:
    def __init__(self, tracer: trace.Tracer) -> None:
        self.module = SimpleNamespace(get_tracer=lambda: tracer)

    def switch_on(self) -> frameworks.Switch:
        return frameworks._agent_framework(self.module)

    @property
    def tracer(self) -> Any:
        return self.module.get_tracer()


class OpenInference:
    """Stand-in for OpenInference's instrumentation, which the app has switched on."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = SimpleNamespace(__wrapped__=tracer)
        self.is_instrumented_by_opentelemetry = True

    def instrument(self, tracer_provider: Any, config: Any = None) -> None:
        self._tracer = SimpleNamespace(__wrapped__=tracer_provider.get_tracer("its"))
        self.is_instrumented_by_opentelemetry = True

    def uninstrument(self) -> None:
        self.is_instrumented_by_opentelemetry = False

    def switch_on(self) -> frameworks.Switch:
        framework = frameworks._openinference("its", "Instrumentor", "its")
        config = type("TraceConfig", (), {"__dataclass_fields__": {}})
        return framework.switch_on(
            SimpleNamespace(Instrumentor=lambda: self), SimpleNamespace(TraceConfig=config)
        )

    @property
    def tracer(self) -> Any:
        return self._tracer.__wrapped__


class Settings:
    """Stand-in for the instrumentation settings of Pydantic AI."""

    def __init__(self, *, tracer_provider: trace.TracerProvider, **more: Any) -> None:
        self.tracer = tracer_provider.get_tracer("pydantic-ai")


class PydanticAI:
    """Stand-in for Pydantic AI, which the app has switched on."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._instrument_default: Any = Settings(tracer_provider=trace.ProxyTracerProvider())
        self._instrument_default.tracer = tracer

    def instrument_all(self, settings: Any) -> None:
        self._instrument_default = settings

    def switch_on(self) -> frameworks.Switch:
        return frameworks._pydantic_ai(
            SimpleNamespace(Agent=self), SimpleNamespace(InstrumentationSettings=Settings)
        )

    @property
    def tracer(self) -> Any:
        return self._instrument_default.tracer


ALL = [Strands, Adk, AgentFramework, OpenInference, PydanticAI]


@pytest.fixture(params=ALL, ids=lambda factory: factory.__name__)
def factory(request: pytest.FixtureRequest) -> Any:
    """Return the class of a stand-in."""
    return request.param


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the global provider."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)


@pytest.fixture
def instrumented(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that instruments a stand-in by name."""

    def switch_on(stand_in: Any) -> Any:
        framework = frameworks.Framework((), {}, stand_in.switch_on)
        monkeypatch.setattr("lightspan_otel.frameworks.FRAMEWORKS", {"known": framework})
        return otel.instrument("known")

    return switch_on


def test_while_there_is_no_global_provider_it_tells_ours(factory: Any, instrumented: Any) -> None:
    before = proxy()
    stand_in = factory(before)
    with instrumented(stand_in), captured() as attempt, agent(stand_in.tracer, "writer"):
        assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer"]
    assert stand_in.tracer is before


class Foreign(trace.TracerProvider):
    """A global provider that is not the SDK's."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_tracer(self, *names: Any, **more: Any) -> trace.Tracer:
        told = self.told

        class Tracer(trace.NoOpTracer):
            def start_span(self, name: str, *args: Any, **more: Any) -> trace.Span:
                told.append(name)
                return trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)

        return Tracer()


def test_a_global_provider_that_cannot_be_heard_gets_what_it_got(
    factory: Any, instrumented: Any, monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI
) -> None:
    foreign = Foreign()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", foreign)
    stand_in, attempt = factory(foreign.get_tracer()), make_scope()
    with instrumented(stand_in), open_scope(attempt):
        stand_in.tracer.start_span("invoke_agent writer")
        say(client)
    assert foreign.told == ["invoke_agent writer"]
    [reason] = attempt.recorder.capture_errors()
    assert "the global TracerProvider, a Foreign, which is not one of OpenTelemetry's SDK" in reason


def test_a_global_provider_that_is_set_later_gets_its_spans(
    factory: Any, instrumented: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, stand_in = Foreign(), factory(proxy())
    with instrumented(stand_in):
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", foreign)
        stand_in.tracer.start_span("invoke_agent writer")
    assert foreign.told == ["invoke_agent writer"]


def test_a_provider_of_its_own_keeps_it(instrumented: Any, client: openai.OpenAI) -> None:
    for factory in (OpenInference, PydanticAI):
        before = TracerProvider().get_tracer("its")
        stand_in, attempt = factory(before), make_scope()
        with instrumented(stand_in), open_scope(attempt), agent(stand_in.tracer, "writer"):
            assert stand_in.tracer is before
            say(client)
        [reason] = attempt.recorder.capture_errors()
        assert "belongs to a TracerProvider that is not instrumented" in reason


def test_what_the_app_took_over_stays_its_own(instrumented: Any) -> None:
    stand_in = OpenInference(proxy())
    stand_in.uninstrument()
    was_on = []
    for takes_over in (False, True):
        with instrumented(stand_in):
            was_on.append(stand_in.is_instrumented_by_opentelemetry)
            if takes_over:
                stand_in.uninstrument()
                stand_in.instrument(tracer_provider=PROVIDER)
        was_on.append(stand_in.is_instrumented_by_opentelemetry)
    assert was_on == [True, False, True, True]
