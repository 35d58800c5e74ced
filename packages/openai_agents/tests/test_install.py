"""Test installing the adapter, and the program on the adapter's page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents")

from agents import set_trace_processors
from agents.models import _openai_shared
from agents.tracing import setup
from agents.tracing.provider import DefaultTraceProvider

from lightspan_openai_agents import LightspanProcessor, agents, instrument, uninstrument
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    TEAM,
    Heard,
    Run,
    async_client,
    make,
    run_async,
    team,
)
from tests.adapters.guide_pages import import_page, shown

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


async def test_the_page(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the app on the page, and compare its agents with those that the page shows."""
    page = import_page("openai-agents", tmp_path, monkeypatch, server.url)
    assert shown("openai-agents") == [str(agents(page["support"].triage))]
    monkeypatch.setattr(_openai_shared, "_default_openai_client", async_client(server))
    monkeypatch.setattr(_openai_shared, "_use_responses_by_default", False)
    says = [
        Reply(tool_calls=[ToolCall(name="transfer_to_billing", call_id="handoff")]),
        Reply(tool_calls=[ToolCall(name="invoice", arguments='{"number": "0"}', call_id="tool")]),
        Reply(text="It was paid on 3 May."),
    ]
    server.script = lambda request: says[len(server.requests) - 1]
    with captured() as run:
        assert await page["learning"].answer(page["train"].tasks[0]) == 1.0
    assert run.calls == ["triage", "billing", "billing"]
