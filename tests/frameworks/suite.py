"""Tests of frameworks that are known by their spans, with the real framework and a scripted model.

A test file subclasses `FrameworkSuite` and builds its framework's apps, like the test files of
adapters (`lightspan_testing.adapter_suite`). Only the identity of agents and tools is recorded:
arguments and results of tools are not in their spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lightspan
import lightspan_otel as otel
from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.capture import context, context_propagation, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.routing import agent_name
from lightspan.schema.spans import Attributes, Span, SpanKind
from lightspan.stores import open_store
from lightspan_otel.import_traces import import_file
from lightspan_testing.adapter_harness import Played, Stage
from lightspan_testing.adapter_suite.checks import check_calls, check_names, check_tokens
from lightspan_testing.adapter_suite.scenario_runner import (
    close_clients,
    inside_root,
    part_of,
    play,
    play_outside,
    run_sync,
)
from lightspan_testing.adapter_suite.scenarios import CONCURRENT, ROUTES, SCENARIOS, App, Model
from lightspan_testing.adapter_suite.trees import ordered, without_call_status
from lightspan_testing.attempts import path_of, read_recorded, tree
from tests.adapters.fixtures import openinference
from tests.frameworks.matrix import MATRIX, RESPONSES

EXPORTER: Final = InMemorySpanExporter()
"""Exporter of the app's own provider."""
PROVIDER: Final = TracerProvider()
"""The app's own tracer provider, which is not the global one."""
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))


class FrameworkSuite:
    """Tests of a framework; the module's docstring describes them."""

    name: ClassVar[str]
    """Name of the framework in `otel.instrument` and in `matrix`."""
    scenarios: ClassVar[Sequence[str]]
    modes: ClassVar[Sequence[str]]
    outside: ClassVar[Sequence[str]]
    """Scenarios whose app is one run of the framework; in production it is one attempt."""
    tells_calls: ClassVar[bool] = True
    """Whether the framework's spans include model calls."""
    tells_messages: ClassVar[bool] = True
    """Whether the spans have the messages as attributes. Events and log records are not read."""
    names_agents: ClassVar[bool] = True
    """Whether the spans that the framework sends to a backend name its agents."""

    def __init_subclass__(cls, *, responses: bool = False) -> None:
        row = MATRIX[cls.name]
        assert row.responses or not responses
        cls.scenarios = RESPONSES if responses else row.played
        cls.outside = RESPONSES if responses else row.whole
        cls.modes = row.modes

    # --- hooks ----------------------------------------------------------------------------
    builder: ClassVar[Callable[..., Any]]
    """Function that makes the builder of the apps, from a `Model` and, if it is set, `kind`."""
    kind: ClassVar[Any] = None
    """The framework's class of models to test; None if it has only one."""
    instrumentor: ClassVar[str]
    """OpenInference's instrumentor as `module.Class`, if the framework has no spans itself."""

    def build(self, scenario: str, model: Model) -> App:
        """Return an app that plays the scenario."""
        builder = type(self).builder(*([model] if self.kind is None else [model, self.kind]))
        built: App = getattr(builder, scenario)()
        return built

    def telling(self, provider: TracerProvider) -> AbstractContextManager[Any]:
        """Let the framework send spans to `provider`, as the framework's docs describe it."""
        return openinference(self.instrumentor, tracer_provider=provider)

    def patched(self) -> Any:
        """Return everything that `otel.instrument` changes in the framework."""
        raise NotImplementedError

    def saying(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the framework record messages in its spans, as the framework's docs describe it."""

    def stored_in(self, folder: Path) -> Sequence[Path]:
        """Write the spans that the app has sent to its backend, as a collector does; return the
        files.
        """
        path = folder / "traces.bin"
        path.write_bytes(encode_spans(EXPORTER.get_finished_spans()).SerializeToString())
        return [path]

    # --- helpers --------------------------------------------------------------------------
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls) -> Iterator[Stage]:
        with Stage() as stage:
            yield stage

    @pytest.fixture(autouse=True)
    def _clean(self, stage: Stage) -> Iterator[None]:
        before = self.patched()
        yield
        problems, stage.brain.problems = stage.brain.problems, []
        assert problems == []
        assert context.resolvers() == ()
        assert self.patched() == before
        EXPORTER.clear()

    def app(self, stage: Stage, scenario: str, mode: str = "async") -> App:
        row = SCENARIOS[scenario]
        model = Model(
            base_url=stage.url,
            stream=mode == "stream",
            max_retries=row.max_retries,
            timeout_s=row.timeout_s,
        )
        return self.build(scenario, model)

    def apps(self, stage: Stage, scenario: str, count: int) -> list[App]:
        """Return apps for `count` concurrent attempts; the same one for all if the app is
        `concurrent`.
        """
        app = self.app(stage, scenario)
        return [app if app.concurrent else self.app(stage, scenario) for _ in range(count)]

    def check_names(self, played: Played, app: App) -> None:
        """Check that every call has the name of the agent that its prompt names."""
        check_names(played, app)

    def check(self, played: Played, scenario: str, app: App, stage: Stage) -> None:
        """Check the span tree, names, calls and tokens, and that no tool arguments are recorded."""
        is_ordered = SCENARIOS[scenario].ordered
        expected = textwrap.dedent(app.tree).strip("\n").splitlines()
        lines = tree(played.spans, ordered=is_ordered)
        if played.through_gateway:
            expected, lines = without_call_status(expected), without_call_status(lines)
        assert lines == ordered(expected, is_ordered), "\n".join(lines)
        self.check_names(played, app)
        check_calls(played, stage)
        if played.through_gateway:
            check_tokens(played, stage)
        said = [span for span in played.spans if span.kind is not SpanKind.LLM]
        assert played.tag not in repr([span.attributes for span in said])
        assert not any(c.TOOL_CALL_ARGUMENTS in span.attributes for span in said)

    # --- the table ------------------------------------------------------------------------
    @pytest.mark.parametrize("route", ROUTES)
    def test_scenarios(self, stage: Stage, scenario: str, mode: str, route: str) -> None:
        app = self.app(stage, scenario, mode)
        with otel.instrument(self.name):
            played = play(stage, app, scenario, mode, through_gateway=route == "gateway")
        self.check(played, scenario, app, stage)

    def test_an_app_that_is_traced_already(self, stage: Stage, scenario: str, mode: str) -> None:
        """Check `otel.instrument(provider)`, where the framework's spans go to the app's own
        provider.
        """
        with self.telling(PROVIDER), otel.instrument(PROVIDER):
            app = self.app(stage, scenario, mode)
            played = play(stage, app, scenario, mode, through_gateway=True)
            self.check(played, scenario, app, stage)
            with otel.instrument(self.name):  # too
                app = self.app(stage, scenario, mode)  # some of them remember what was said
                played = play(stage, app, scenario, mode, through_gateway=True)
                self.check(played, scenario, app, stage)
        assert EXPORTER.get_finished_spans()

    # --- at once --------------------------------------------------------------------------
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("scenario", ["agent_as_tool"])
    def test_32_at_once(self, stage: Stage, scenario: str, route: str) -> None:
        if "async" not in self.modes:
            pytest.skip("the framework has no asynchronous way")
        apps = self.apps(stage, scenario, CONCURRENT)
        part = part_of(apps[0], scenario)
        played = [stage.open(part, through_gateway=route == "gateway") for _ in apps]

        async def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                await app.run(attempt.text)

        async def all_of_them() -> None:
            await asyncio.gather(*map(one, apps, played))
            await close_clients([], played[0])

        with otel.instrument(self.name):
            asyncio.run(all_of_them())
        for attempt in played:
            stage.close(attempt)
            self.check(attempt, scenario, apps[0], stage)

    def test_32_threads(self, stage: Stage) -> None:
        """Check 32 threads with an app each, as a runner runs synchronous apps."""
        apps = [self.app(stage, "agent_as_tool", "sync") for _ in range(CONCURRENT)]
        part = part_of(apps[0], "agent_as_tool")
        played = [stage.open(part, through_gateway=True) for _ in apps]

        def one(app: App, attempt: Played) -> None:
            with open_scope(attempt.scope):
                run_sync(app, attempt)

        with otel.instrument(self.name), ThreadPoolExecutor(CONCURRENT) as pool:
            list(pool.map(one, apps, played))
        sdk_instrumentation.close()
        for attempt in played:
            stage.close(attempt)
            self.check(attempt, "agent_as_tool", apps[0], stage)

    def test_in_a_thread_of_the_app(self, stage: Stage) -> None:
        app = self.app(stage, "agent_as_tool", "sync")
        played = stage.open(part_of(app, "agent_as_tool"), through_gateway=True)
        context_propagation.carry()
        try:
            with (
                otel.instrument(self.name),
                open_scope(played.scope),
                ThreadPoolExecutor(1) as pool,
            ):
                pool.submit(run_sync, app, played).result()
        finally:
            context_propagation.stop_carrying()
        sdk_instrumentation.close()
        stage.close(played)
        self.check(played, "agent_as_tool", app, stage)

    # --- privacy --------------------------------------------------------------------------
    def test_the_apps_exporter_gets_not_one_span(self, stage: Stage) -> None:
        """Check that the app's exporter gets only the app's own spans."""
        tracer = PROVIDER.get_tracer("app")
        app = self.app(stage, "agent_as_tool", self.modes[0])
        with (
            otel.instrument(PROVIDER),
            otel.instrument(self.name),
            tracer.start_as_current_span("request"),
        ):
            played = play(stage, app, "agent_as_tool", self.modes[0], through_gateway=True)
        self.check(played, "agent_as_tool", app, stage)
        assert [span.name for span in EXPORTER.get_finished_spans()] == ["request"]

    def test_the_global_provider_is_the_apps(self, stage: Stage) -> None:
        """Check that no global provider is set, because an app may set its own at any time."""
        app = self.app(stage, "single", self.modes[0])
        with otel.instrument(self.name):
            play(stage, app, "single", self.modes[0], through_gateway=True)
            assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)

    # --- installing -----------------------------------------------------------------------
    def test_twice_is_once_and_undone_it_is_undone(self, stage: Stage) -> None:
        before = self.patched()
        app = self.app(stage, "single", self.modes[0])
        with otel.instrument(self.name):
            with otel.instrument(self.name):
                pass
            assert self.patched() != before
            played = play(stage, app, "single", self.modes[0], through_gateway=True)
        self.check(played, "single", app, stage)
        assert self.patched() == before
        app = self.app(stage, "single", self.modes[0])
        played = play(stage, app, "single", self.modes[0], through_gateway=True)
        assert played.calls == ["app"]

    # --- production -----------------------------------------------------------------------
    def test_production(self, stage: Stage, tmp_path: Path, whole: str, mode: str) -> None:
        """Check that a run of the framework is recorded as one attempt, with its whole tree."""
        store = f"sqlite:{tmp_path / 'traces.db'}"
        app = self.app(stage, whole, mode)
        with otel.instrument(self.name), lightspan.record(store):
            played = play_outside(stage, app, whole, mode)
        [found] = read_recorded(store)
        assert found.attempt.capture_errors == []
        assert (found.attempt.status == "failed") is (app.raises is not None)
        self.check(inside_root(found, played), whole, app, stage)

    def test_production_at_once(self, stage: Stage, tmp_path: Path) -> None:
        """Check that concurrent runs are recorded as one attempt each."""
        if "async" not in self.modes:
            pytest.skip("the framework has no asynchronous way")
        store = f"sqlite:{tmp_path / 'traces.db'}"
        apps = self.apps(stage, "agent_as_tool", 8)
        app, part = apps[0], part_of(apps[0], "agent_as_tool")
        played = [stage.open(part, through_gateway=False) for _ in apps]

        async def all_of_them() -> None:
            runs = zip(apps, played, strict=True)
            await asyncio.gather(*(each.run(attempt.text) for each, attempt in runs))
            await close_clients([], played[0])

        with otel.instrument(self.name), lightspan.record(store):
            asyncio.run(all_of_them())
        found = read_recorded(store)
        assert len(found) == len(played)
        for recorded in found:
            [one] = [each for each in played if each.tag in repr(recorded.rollout.task)]
            self.check(inside_root(recorded, one), "agent_as_tool", app, stage)

    # --- stored traces --------------------------------------------------------------------
    def test_stored_traces_say_what_was_said(
        self, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Import the spans that the app has sent to a backend, and check the messages of each
        call.
        """
        if not self.tells_messages:
            pytest.skip("the framework tells messages by events or log records only")
        mode = self.modes[0]
        self.saying(monkeypatch)
        with self.telling(PROVIDER):
            app = self.app(stage, "agent_as_tool", mode)
            played = play_outside(stage, app, "agent_as_tool", mode)
        store = f"sqlite:{tmp_path / 'traces.db'}"
        errors: list[str] = []
        calls, tools = asyncio.run(_imported(store, self.stored_in(tmp_path), errors.append))
        assert errors == []
        asked = [request.body.get("messages") for request in stage.requests_of(played.tag)]
        turns = stage.brain.calls_in(played.tag)
        if not self.tells_calls:
            assert calls == []
            asked = turns = []
        told = [_plain(call.attributes, c.INPUT_MESSAGES) for call in calls]
        assert [each for each in told if played.tag not in str(each)] == []
        if None not in asked:  # in a response's request they have another form
            assert told == [
                [_line(said) for said in each if said["role"] not in SYSTEM] for each in asked
            ]
        assert [_plain(call.attributes, c.OUTPUT_MESSAGES) for call in calls] == [
            [("assistant", turn.turn.text, [(n, json.loads(a)) for n, a in turn.turn.calls])]
            for turn in turns
        ]
        if self.names_agents:
            assert [agent_name(path_of(call)) for call in calls] == [
                app.names.get(turn.agent, turn.agent) for turn in turns
            ]
        made = [call for turn in stage.brain.calls_in(played.tag) for call in turn.turn.calls]
        of_tools = {(tool.attributes[c.TOOL_NAME], _what(tool)) for tool in tools}
        known = {name for name, _ in of_tools}
        assert ("look" in known) == bool(made)  # DSPy's model calls none: it names them in a text
        assert None not in {given for _, given in of_tools}
        assert {(name, _of(arguments)) for name, arguments in made if name in known} <= of_tools


SYSTEM: Final = ("system", "developer")


async def _imported(
    url: str, paths: Sequence[Path], refuse: Callable[[str], None]
) -> tuple[list[Span], list[Span]]:
    """Import files; return the model calls and the tools of the resulting attempts."""
    async with open_store(url) as store:
        for path in paths:
            await import_file(store, path, service="desk", refuse=refuse)
        found = [each async for each in read_attempts(store, Query())]
    spans = sorted((s for each in found for s in each.episode.spans), key=lambda s: s.start_ns)
    kinds = (SpanKind.LLM, SpanKind.TOOL)
    calls, tools = ([span for span in spans if span.kind is kind] for kind in kinds)
    return [call for call in calls if c.CALL_ID in call.attributes], tools


def _plain(attributes: Attributes, key: str) -> list[Any]:
    """Return the messages without instructions, which some libraries do not record."""
    said = genai_messages.load(str(attributes[key]))
    return [_line(message) for message in said if message["role"] not in SYSTEM]


def _line(message: Mapping[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return (role, text, tool calls) of a message."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    if message["role"] == "tool":  # of a result, ADK tells what its client then writes as JSON
        content = _of(content)
    called = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(each["name"], json.loads(each["arguments"])) for each in called]
    return str(message["role"]), content, calls


def _what(tool: Span) -> str | None:
    """Return a tool's arguments as sorted JSON; None if they are not recorded."""
    arguments = tool.attributes.get(c.TOOL_CALL_ARGUMENTS)
    if arguments is None:
        return None
    arguments = str(arguments)
    with contextlib.suppress(ValueError):
        match json.loads(arguments):
            case {"kwargs": given, **rest} if not rest:  # as OpenInference tells LlamaIndex's
                return json.dumps(given, sort_keys=True)
    return _of(arguments)


def _of(arguments: str) -> str:
    """Return the arguments of a tool as sorted JSON; unchanged if they are no JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def columns(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by the suite's scenarios and modes, as `pytest_generate_tests`."""
    suite = metafunc.cls
    if suite is None or not issubclass(suite, FrameworkSuite):
        return
    of = {"scenario": suite.scenarios, "mode": suite.modes, "whole": suite.outside}
    marked = {
        name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[:1]
    }
    for name, values in of.items():
        if name in metafunc.fixturenames and name not in marked:
            metafunc.parametrize(name, values)
