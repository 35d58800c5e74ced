"""Test the SDK's own tracing: disabled, with another provider, and never uploaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    RunConfig,
    add_trace_processor,
    function_tool,
    set_trace_processors,
    set_tracing_disabled,
)
from agents.tracing import (
    processors,
    setup,
    trace,
)
from agents.tracing.provider import DefaultTraceProvider

import lightspan
from lightspan.capture import context
from lightspan.capture.entry import open_scope
from lightspan.capture.recorder import NullRecorder
from lightspan.schema.spans import SpanStatus
from lightspan_openai_agents import instrument, uninstrument
from lightspan_testing.attempts import captured, make_scope, path_of, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    TEAM,
    Heard,
    Run,
    calls,
    make,
    run_async,
    says,
    team,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


OFF: Mapping[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "on": lambda monkeypatch: {},
    "set_tracing_disabled": lambda monkeypatch: set_tracing_disabled(True) or {},
    "RunConfig": lambda monkeypatch: {"tracing_disabled": True},
    "environment": lambda monkeypatch: (
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1") or {}
    ),
}


@pytest.mark.parametrize("off", [name for name in OFF if name != "on"])
@HOW
def test_with_tracing_disabled(
    server: ScriptedServer, run: Run, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    set_trace_processors([heard])
    config = RunConfig(**OFF[off](monkeypatch))
    with captured() as attempt:
        run(team(server), run_config=config)
    assert attempt.tree == TEAM
    (link,) = attempt.one("invoke_agent billing").links
    assert link.span_id == attempt.one("invoke_agent triage").span_id
    assert (heard.spans, heard.traces) == ([], 0)


def test_errors_are_known_with_tracing_disabled(server: ScriptedServer) -> None:
    server.script = says({"scout": [calls("broken")]})

    @function_tool
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    set_tracing_disabled(True)
    with captured() as attempt:
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.one("execute_tool broken").status is SpanStatus.ERROR


def test_it_survives_other_processors(server: ScriptedServer) -> None:
    heard = Heard()
    set_trace_processors([heard])
    with captured() as attempt:
        run_async(team(server))
    assert attempt.tree == TEAM
    assert Counter(heard.spans)["agent"] == 3
    assert heard.traces == 1


def test_another_provider_is_reported_and_taken_in(server: ScriptedServer) -> None:
    """Check that a call without a known agent damages its attempt, and that the next one is
    whole.
    """
    writer = make(server, "writer")
    setup.set_trace_provider(DefaultTraceProvider())
    first = make_scope()
    with open_scope(first):
        run_async(writer)
    assert [path_of(span) for span in first.recorder.drain()] == ["app"]
    (damage,) = first.recorder.capture_errors()
    assert "set_trace_provider() after instrument()" in damage
    with captured() as attempt:
        run_async(writer)
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]


# --- nothing is uploaded --------------------------------------------------------------------
@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Replace the SDK's uploading processor by one that stores its spans."""
    monkeypatch.setattr(processors, "_global_processor", made := Heard())
    return made


@pytest.mark.parametrize("when", ["lazy", "made before instrument()", "set after it"])
def test_nothing_of_a_rollout_is_uploaded(
    server: ScriptedServer, uploads: Heard, when: str
) -> None:
    if when == "set after it":
        set_trace_processors([processors.default_processor()])
    if when == "made before instrument()":
        uninstrument()
        setup.get_trace_provider()
        instrument()
    heard = Heard()
    add_trace_processor(heard)
    writer = make(server, "writer")
    with captured():
        run_async(writer)
    assert (uploads.spans, uploads.traces) == ([], 0)
    assert "agent" in heard.spans
    run_async(writer)
    assert uploads.traces == 1
    uninstrument()
    provider: Any = setup.GLOBAL_TRACE_PROVIDER
    assert provider._multi_processor._processors == (uploads, heard)
    if when == "lazy":
        with instrument():
            pass
        instrument()


def test_a_serving_process_is_no_rollout(server: ScriptedServer, uploads: Heard) -> None:
    writer = make(server, "writer")
    connected = context.AgentContext(make_scope(recorder=NullRecorder(), is_outside=True))
    context.connect(connected)
    try:
        run_async(writer)
    finally:
        context.disconnect(connected)
    assert uploads.traces == 1


# --- the names of attempts in production ----------------------------------------------------
@pytest.mark.parametrize("name", ["Agent workflow", "Support"])
@pytest.mark.parametrize("off", OFF)
def test_an_attempt_has_the_name_of_its_workflow(
    server: ScriptedServer, off: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check the name with tracing enabled and disabled, where the SDK's traces have no name."""
    set_trace_processors([])
    config = {
        **OFF[off](monkeypatch),
        **({} if name == "Agent workflow" else {"workflow_name": name}),
    }
    store = f"sqlite:{tmp_path / 'traces.db'}"
    with lightspan.record(store):
        run_async(team(server), run_config=RunConfig(**config))
    [found] = read_recorded(store)
    assert found.tree().splitlines()[:2] == [f"invoke_workflow {name}", "  invoke_agent triage"]


@pytest.mark.parametrize("off", OFF)
def test_an_attempt_has_the_name_of_the_apps_own_trace(
    server: ScriptedServer, off: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_trace_processors([])
    config = OFF[off](monkeypatch)
    store = f"sqlite:{tmp_path / 'traces.db'}"
    with lightspan.record(store), trace("Support"):
        run_async(make(server, "scout"), run_config=RunConfig(**config))
        run_async(make(server, "writer"), run_config=RunConfig(**config))
    [found] = read_recorded(store)
    assert found.tree().splitlines() == [
        "invoke_workflow Support",
        "  invoke_agent scout",
        "    chat m @scout",
        "  invoke_agent writer",
        "    chat m @writer",
    ]
