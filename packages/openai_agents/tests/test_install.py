"""Test installing the adapter, and many concurrent attempts."""

from __future__ import annotations

import pytest

pytest.importorskip("agents")

from agents import set_trace_processors
from agents.tracing import setup
from agents.tracing.provider import DefaultTraceProvider

from lightspan_openai_agents import LightspanProcessor, instrument, uninstrument
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    TEAM,
    Heard,
    Run,
    make,
    run_async,
    team,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


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
