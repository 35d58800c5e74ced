"""Tests of what `otel.instrument` changes, and that exporters, providers and the app's traces stay
unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode, Tracer

import lightspan
import lightspan_otel as otel
from lightspan.capture import context
from lightspan.capture.adapter import claim_scope, release_scope
from lightspan.capture.entry import open_scope
from lightspan.errors import ConfigError
from lightspan_otel.frameworks import FRAMEWORKS, Framework, Switch
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_testing.attempts import captured, make_scope, tree
from packages.otel.tests.spans import INVOKES, agent, path, say, tool


class Exported:
    """An app's provider with the spans of its exporter."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("app")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def shown(self) -> list[tuple[Any, ...]]:
        """Return name, parent's name, attributes, status and events."""
        names = {span.context.span_id: span.name for span in self.spans if span.context}
        return [
            (
                span.name,
                span.parent and names.get(span.parent.span_id, "missing"),
                dict(span.attributes or {}),
                span.status.status_code,
                [event.name for event in span.events],
            )
            for span in self.spans
        ]


def an_app(tracer: Tracer) -> None:
    with tracer.start_as_current_span("request"), agent(tracer, "boss") as span:
        span.set_attribute("gen_ai.input.messages", "prompt")
        with tool(tracer, "ask"), pytest.raises(LookupError), agent(tracer, "expert"):
            raise LookupError(str(context.current_agent()))


# --- the app's provider ---------------------------------------------------------------------
def test_exporters_get_what_they_got() -> None:
    plain, observed = Exported(), Exported()
    an_app(plain.tracer)
    with otel.instrument(observed.provider), captured():
        an_app(observed.tracer)
    assert observed.shown() == plain.shown()
    assert [name for name, *_ in observed.shown()] == [
        "invoke_agent expert",
        "execute_tool ask",
        "invoke_agent boss",
        "request",
    ]


def test_twice_is_once_and_the_end_is_the_end() -> None:
    provider = TracerProvider()
    tracer = provider.get_tracer("t")
    with otel.instrument(provider):
        with otel.instrument(provider):
            pass
        with captured() as attempt, agent(tracer, "writer"):
            assert path() == "writer"
        assert attempt.tree == ["invoke_agent writer @writer"]
    processors = provider._active_span_processor._span_processors
    assert len(processors) == 1
    with captured() as attempt, agent(tracer, "writer"):
        assert path() == "app"
    assert attempt.spans == []
    with otel.instrument(provider), captured(), agent(tracer, "writer"):
        assert path() == "writer"
    assert provider._active_span_processor._span_processors == processors


def test_a_provider_that_takes_its_exporter_out_when_another_is_added() -> None:
    """Phoenix's provider does this."""

    class Provider(TracerProvider):
        def add_span_processor(self, processor: Any) -> None:
            self._active_span_processor.shutdown()
            self._active_span_processor._span_processors = ()
            super().add_span_processor(processor)

    provider, exporter = Provider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with otel.instrument(provider), captured(), agent(provider.get_tracer("t"), "writer"):
        assert path() == "writer"
    assert [span.name for span in exporter.get_finished_spans()] == ["invoke_agent writer"]


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        (
            "langfuse",
            "the supported names are 'pydantic-ai', 'smolagents', 'agno', 'strands-agents', "
            "'google-adk', 'agent-framework', 'llama-index', 'dspy'; for another",
        ),
        (None, "give the name of a framework or a TracerProvider of OpenTelemetry's SDK"),
        (trace.ProxyTracerProvider(), "give the name of a framework or a TracerProvider"),
    ],
)
def test_what_it_does_not_take(what: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        otel.instrument(what)
    assert context.resolvers() == ()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr("lightspan_otel.frameworks.version", version)
    for module in FRAMEWORKS[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"otel.instrument\('{name}'\) needs .*: pip install"):
        otel.instrument(name)
    assert context.resolvers() == ()


# --- a provider of ours ---------------------------------------------------------------------
@pytest.fixture
def ours() -> Iterator[Tracer]:
    """Yield a tracer of our private provider, while the app's provider is observed too."""
    with otel.instrument(TracerProvider()):
        yield PROVIDER.get_tracer("some.framework")


def test_who_acts_in_spans_of_ours(ours: Tracer) -> None:
    with captured() as attempt, agent(ours, "boss"), tool(ours, "ask"), agent(ours, "expert"):
        assert path() == "boss/expert"
        lightspan.emit_message("here")
    assert attempt.tree == [
        "invoke_agent boss @boss",
        "  execute_tool ask @boss",
        "    invoke_agent expert @boss/expert",
        "      lightspan.message @boss/expert unset",
    ]


def test_spans_of_ours_forget_what_was_said(ours: Tracer) -> None:
    with captured() as attempt, agent(ours, "writer") as span:
        span.set_attributes({"gen_ai.input.messages": "secret", "input.value": "secret"})
        span.add_event("gen_ai.choice", {"message": "secret"})
        span.set_status(StatusCode.ERROR, "secret")
        span.record_exception(LookupError("secret"))
        assert "secret" not in repr(vars(span))
    [span_] = attempt.spans
    assert (span_.status, span_.attributes["error.type"]) == ("error", "LookupError")
    assert "secret" not in repr(span_)


def test_the_apps_spans_inside_have_the_parents_that_they_had(ours: Tracer) -> None:
    """The app's traces have no gap, and its exporter gets no additional span."""
    app = Exported()
    with otel.instrument(app.provider), captured() as attempt:
        with (
            app.tracer.start_as_current_span("request"),
            agent(ours, "boss"),
            app.tracer.start_as_current_span("query"),
            agent(ours, "expert"),
            app.tracer.start_as_current_span("POST"),
        ):
            assert path() == "boss/expert"
        with agent(ours, "alone"), app.tracer.start_as_current_span("its own"):
            assert path() == "alone"
    assert [(name, parent) for name, parent, *_ in app.shown()] == [
        ("POST", "query"),
        ("query", "request"),
        ("request", None),
        ("its own", None),
    ]
    assert attempt.tree == [
        "invoke_agent boss @boss",
        "  invoke_agent expert @boss/expert",
        "invoke_agent alone @alone",
    ]


def test_a_sampled_out_app_does_not_hide_spans_of_ours(ours: Tracer, client: openai.OpenAI) -> None:
    sampled_out = TracerProvider(sampler=ALWAYS_OFF).get_tracer("app")
    with captured(), sampled_out.start_as_current_span("request"), agent(ours, "writer"):
        assert path() == "writer"
        say(client)


# --- who acts is not known ------------------------------------------------------------------
def damage_of(inside: Callable[[], Any]) -> list[str]:
    attempt = make_scope()
    with open_scope(attempt):
        inside()
        inside()
    assert tree(attempt.recorder.drain()) == ["chat @app"] * 2
    return attempt.recorder.capture_errors()


def test_an_app_that_is_sampled_out_is_no_app_without_agents(client: openai.OpenAI) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)

    def inside() -> None:
        with agent(provider.get_tracer("t"), "writer"):
            say(client)

    with otel.instrument(provider):
        [reason] = damage_of(inside)
    assert reason.startswith("lightspan_otel: cannot tell which agent made a model call: the ")
    assert "OTEL_TRACES_SAMPLER=always_on" in reason


def test_a_provider_that_is_not_heard(provider: TracerProvider, client: openai.OpenAI) -> None:
    other = TracerProvider().get_tracer("t")

    def inside() -> None:
        with other.start_as_current_span("hidden", attributes=INVOKES):
            say(client)

    [reason] = damage_of(inside)
    assert "the current span, 'hidden', belongs to a TracerProvider that is not" in reason


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """Yield the tracer of a framework instrumented by name, in an app without a global provider."""
    framework = Framework((), {}, lambda: Switch(lambda: True, lambda: None))
    monkeypatch.setattr("lightspan_otel.frameworks.FRAMEWORKS", {"known": framework})
    with otel.instrument("known"):
        yield PROVIDER.get_tracer("known")


def test_a_span_that_may_hide_an_agent_of_ours(by_name: Tracer, client: openai.OpenAI) -> None:
    """The app's span inside the agent's is sampled out, or its provider is not observed."""
    off, other = TracerProvider(sampler=ALWAYS_OFF), TracerProvider()
    for hiding, complaint in ((off, "sampler drops spans"), (other, "is not instrumented")):
        tracer = hiding.get_tracer("app")

        def inside(tracer: Tracer = tracer) -> None:
            with agent(by_name, "writer"), tracer.start_as_current_span("query"):
                say(client)

        attempt = make_scope()
        with open_scope(attempt):
            inside()
        [reason] = attempt.recorder.capture_errors()
        assert complaint in reason


def test_what_an_adapter_covers_hides_nobody(
    provider: TracerProvider, client: openai.OpenAI
) -> None:
    other = TracerProvider().get_tracer("covered")

    def inside() -> None:
        with agent(other, "writer"):
            say(client)

    claim_scope("some.adapter", ("covered",))
    try:
        assert damage_of(inside) == []
    finally:
        release_scope("some.adapter")
    assert len(damage_of(inside)) == 1


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_span_of_a_library_that_says_nothing(
    ours: Tracer, is_heard: bool, client: openai.OpenAI
) -> None:
    """The library's span copies the ids of the span around ours."""
    app, library = TracerProvider(), trace.NoOpTracerProvider().get_tracer("library")
    attempt = make_scope()
    with otel.instrument(app), open_scope(attempt), ExitStack() as around:
        if is_heard:
            around.enter_context(app.get_tracer("app").start_as_current_span("request"))
        with agent(ours, "boss"), library.start_as_current_span("step"):
            assert path() == "boss"
            with agent(ours, "expert"), library.start_as_current_span("step"):
                assert path() == "boss/expert"
                say(client)
        assert path() == "app"
    assert attempt.recorder.capture_errors() == []


def test_a_span_without_ids_that_hides_an_agent(ours: Tracer, client: openai.OpenAI) -> None:
    attempt = make_scope()
    with open_scope(attempt), agent(ours, "writer"), trace.use_span(trace.INVALID_SPAN):
        say(client)
    [reason] = attempt.recorder.capture_errors()
    assert "a library made a span without ids the current one, which hides the agent" in reason


def test_the_global_provider_is_heard_from_the_next_attempt_on(
    by_name: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app may set the global provider, and switch its framework on for it, at any time."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with captured() as attempt, agent(provider.get_tracer("t"), "writer"):
        assert path() == "writer"
    assert attempt.tree == ["invoke_agent writer @writer"]


def test_a_provider_that_cannot_be_hashed() -> None:
    """logfire's provider is a dataclass, which has no hash."""

    class Provider(TracerProvider):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

    provider = Provider()
    for _ in range(2):
        with otel.instrument(provider), captured(), agent(provider.get_tracer("t"), "writer"):
            assert path() == "writer"
    assert len(provider._active_span_processor._span_processors) == 1


def test_opentelemetry_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, client: openai.OpenAI
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider = TracerProvider()

    def inside() -> None:
        with agent(provider.get_tracer("t"), "writer"):
            say(client)

    with otel.instrument(provider):
        [reason] = damage_of(inside)
    assert "OTEL_SDK_DISABLED=true disables OpenTelemetry" in reason
    with otel.instrument(provider), captured(), agent(PROVIDER.get_tracer("t"), "writer"):
        assert path() == "writer"  # not ours


def test_calls_without_any_agent_are_nobodys_fault(
    provider: TracerProvider, client: openai.OpenAI
) -> None:
    assert damage_of(lambda: say(client)) == []
    remote = trace.SpanContext(1, 1, is_remote=True)

    def inside() -> None:
        with trace.use_span(trace.NonRecordingSpan(remote)):
            say(client)

    assert damage_of(inside) == []
    with provider.get_tracer("app").start_as_current_span("request"):  # before the attempt
        assert damage_of(lambda: say(client)) == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_that_is_too_old_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it is not accepted, and that no installed version is called missing."""
    for module in ("lightspan.capture.adapter", "lightspan_otel.frameworks"):
        monkeypatch.setattr(f"{module}.version", lambda distribution: "0.0.1")
    distribution, floor = next(iter(FRAMEWORKS[name].floors.items()))
    with pytest.raises(ConfigError) as raised:
        otel.instrument(name)
    assert str(raised.value) == (
        f"{distribution} 0.0.1 is too old: lightspan-otel needs {floor} or newer: "
        f"pip install '{distribution}>={floor}'"
    )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_of_another_structure_is_not_called_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lightspan.capture.adapter", "lightspan_otel.frameworks"):
        monkeypatch.setattr(f"{module}.version", lambda distribution: "99.0.0")
    for module in FRAMEWORKS[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"does not support .* 99.0.0 .*: upgrade lightspan-otel"):
        otel.instrument(name)
