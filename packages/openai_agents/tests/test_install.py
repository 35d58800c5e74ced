"""Installing, and many attempts at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import Runner, set_trace_processors
from agents.tracing import get_current_span, setup
from agents.tracing.provider import DefaultTraceProvider

import lightspan_openai_agents
from lightspan.capture.entry import open_scope
from lightspan_openai_agents import LightspanProcessor, _hook, instrument, uninstrument
from lightspan_testing.attempts import Captured, captured, make_scope
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    TEAM,
    Heard,
    Run,
    calls,
    make,
    run_async,
    run_sync,
    team,
    who,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


def test_installing_twice_records_once(server: ScriptedServer) -> None:
    with instrument():
        pass
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.tree == ["invoke_agent writer @writer", "  chat m @writer"]


def test_the_processor_beside_instrument_records_once(server: ScriptedServer) -> None:
    set_trace_processors([LightspanProcessor()])
    with captured() as attempt:
        run_async(team(server))
    assert attempt.tree == TEAM


@HOW
def test_the_processor_alone(server: ScriptedServer, run: Run) -> None:
    uninstrument()
    set_trace_processors([LightspanProcessor()])
    with captured() as attempt:
        run(team(server))
    assert attempt.tree == TEAM
    instrument()


def test_uninstalled_nothing_is_recorded_but_the_call(server: ScriptedServer) -> None:
    uninstrument()
    assert setup.GLOBAL_TRACE_PROVIDER is None
    set_trace_processors([])
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.tree == ["chat m @app"]
    uninstrument()
    instrument()


def test_the_apps_provider_is_back_afterwards(server: ScriptedServer) -> None:
    uninstrument()
    mine = DefaultTraceProvider()
    setup.set_trace_provider(mine)
    with instrument():
        assert setup.GLOBAL_TRACE_PROVIDER is not mine
        set_trace_processors([heard := Heard()])
        with captured():
            run_async(make(server, "writer"))
    assert setup.GLOBAL_TRACE_PROVIDER is mine
    run_async(make(server, "writer"))
    assert heard.traces == 2
    instrument()


def test_outside_a_scope_nothing_happens(server: ScriptedServer) -> None:
    set_trace_processors([heard := Heard()])
    run_async(make(server, "writer"))
    assert Counter(heard.spans)["agent"] == 1
    assert not isinstance(get_current_span(), _hook._Watched)
    assert _hook._watched.get() is None


def test_agents_built_before_instrument(server: ScriptedServer) -> None:
    uninstrument()
    triage = team(server)
    with instrument(), captured() as attempt:
        run_async(triage)
    assert attempt.tree == TEAM
    instrument()


def test_an_attempt_leaves_nothing_behind(server: ScriptedServer) -> None:
    with captured() as attempt:
        run_async(team(server))
    recorder = attempt.scope.recorder
    assert recorder._pending == {}
    assert len(_hook._state.handoffs.get(recorder, {})) == 0


def test_an_error_of_ours_damages_the_attempt_only(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **more: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(_hook, "begin", failing)
    current = make_scope()
    with open_scope(current):
        assert run_async(make(server, "writer")).final_output == "go"
    assert "lightspan_openai_agents: RuntimeError: ours" in current.recorder.capture_errors()


def test_opentelemetry_loads_it(server: ScriptedServer) -> None:
    from importlib.metadata import entry_points

    found = entry_points(group="opentelemetry_instrumentor", name="lightspan_openai_agents")
    (point,) = found
    uninstrument()
    instrumentor = point.load()()
    instrumentor.instrument(skip_dep_check=True)
    with captured() as attempt:
        run_async(make(server, "writer"))
    assert attempt.calls == ["writer"]
    instrumentor.uninstrument()
    assert not _hook._is_installed()
    instrument()


def test_public_names() -> None:
    assert lightspan_openai_agents.__all__ == [
        "LightspanProcessor",
        "agents",
        "instrument",
        "uninstrument",
    ]


# --- many at once ---------------------------------------------------------------------------
def test_32_attempts_at_once_have_no_cross_talk(server: ScriptedServer) -> None:
    triage = team(server)

    def script(request: Request) -> Reply | str:
        asked = sum(message["role"] == "tool" for message in request.messages)
        if who(request) == "triage":
            return calls("ask_expert") if asked == 0 else calls("transfer_to_billing")
        return "done"

    server.script = script

    async def attempt(number: int) -> Captured:
        with captured() as found:
            await Runner.run(triage, f"task {number}")
        return found

    async def main() -> list[Captured]:
        return await asyncio.gather(*(attempt(number) for number in range(32)))

    for number, found in enumerate(asyncio.run(main())):
        assert found.tree == TEAM
        first = min((s for s in found.spans if s.kind == "llm"), key=lambda s: s.start_ns)
        assert f"task {number}" in str(first.attributes["gen_ai.input.messages"])


def test_attempts_in_threads(server: ScriptedServer) -> None:
    def attempt(number: int) -> list[str]:
        with captured() as found:  # a client of its own: httpx's are not for several loops at once
            run_sync(make(server, "writer"), str(number))
        return found.tree

    with ThreadPoolExecutor(8) as pool:
        trees = list(pool.map(attempt, range(16)))
    assert trees == [["invoke_agent writer @writer", "  chat m @writer"]] * 16


def test_two_event_loops(server: ScriptedServer) -> None:
    for _ in range(2):
        with captured() as attempt:
            run_async(make(server, "writer"))
        assert attempt.calls == ["writer"]
