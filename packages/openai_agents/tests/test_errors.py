"""Test errors: tools that raise, models that fail, runs that are abandoned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    MaxTurnsExceeded,
    RunConfig,
    Runner,
    function_tool,
)

from lightspan.capture.entry import open_scope
from lightspan.schema.spans import SpanStatus
from lightspan_testing.attempts import Captured, captured, make_scope
from lightspan_testing.scripted import Reply, ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    HOW,
    Run,
    calls,
    look,
    make,
    run_async,
    says,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


def test_a_tool_that_raises(server: ScriptedServer) -> None:
    """Check that the SDK passes the error to the model by default, and that the run continues."""
    server.script = says({"scout": [calls("broken")]})

    @function_tool
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    with captured() as attempt:
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.tree == [
        "invoke_agent scout @scout",
        "  chat m @scout",
        "  execute_tool broken @scout error",
        "  chat m @scout",
    ]
    span = attempt.one("execute_tool broken")
    assert span.attributes["error.type"] == "ToolError"
    assert span.status_message.startswith("Error running tool (non-fatal)")
    assert "error" in str(span.attributes["gen_ai.tool.call.result"])


def test_a_tool_whose_error_ends_the_run(server: ScriptedServer) -> None:
    server.script = says({"scout": [calls("broken")]})

    @function_tool(failure_error_function=None)
    def broken() -> str:
        """Break."""
        raise ValueError("broken")

    with captured() as attempt, pytest.raises(Exception, match="broken"):
        run_async(make(server, "scout", tools=[broken]))
    assert attempt.tree == [
        "invoke_agent scout @scout error",
        "  chat m @scout",
        "  execute_tool broken @scout error",
    ]
    assert attempt.one("execute_tool broken").attributes["exception.message"]


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        ("x" * 100_000, "x" * 65_536 + "… (100000 characters)"),
        (b"\x00\xff", "\"b'\\\\x00\\\\xff'\""),
        ({"n": 7}, '{"n": 7}'),
        ("null \ud800 lone", "null \ufffd lone"),
    ],
)
def test_a_tool_that_returns_anything(server: ScriptedServer, returned: Any, kept: str) -> None:
    @function_tool
    def odd() -> Any:
        """Odd."""
        return returned

    server.script = says({"scout": [calls("odd")]})
    with captured() as attempt:
        try:
            run_async(make(server, "scout", tools=[odd], tool_use_behavior="stop_on_first_tool"))
        except UnicodeError:
            assert "\ud800" in returned
    assert attempt.one("execute_tool odd").attributes["gen_ai.tool.call.result"] == kept


def test_without_sensitive_data_the_arguments_are_known(server: ScriptedServer) -> None:
    server.script = says({"scout": [calls("look")]})
    config = RunConfig(trace_include_sensitive_data=False)
    with captured() as attempt:
        run_async(make(server, "scout", tools=[look]), run_config=config)
    found = attempt.one("execute_tool look").attributes
    assert found["gen_ai.tool.call.arguments"] == '{"what": "seven"}'
    assert found["gen_ai.tool.call.id"] == "call_look"


# --- failures -------------------------------------------------------------------------------


@HOW
def test_too_many_turns(server: ScriptedServer, run: Run) -> None:
    server.script = lambda request: calls("look")
    with captured() as attempt, pytest.raises(MaxTurnsExceeded):
        run(make(server, "scout", tools=[look]), max_turns=2)
    assert attempt.calls == ["scout", "scout"]
    assert attempt.one("invoke_agent scout").status is SpanStatus.ERROR


async def test_an_abandoned_stream(server: ScriptedServer) -> None:
    """Check that a run without an end is recorded as unfinished when the attempt ends."""
    server.script = lambda request: Reply(text="late", delay_s=0.4)
    attempt = Captured(scope=make_scope())
    with open_scope(attempt.scope):
        result = Runner.run_streamed(make(server, "writer"), "go")
        await asyncio.sleep(0.1)
    attempt.scope.recorder.cancel_pending()
    attempt.close()
    (span,) = (span for span in attempt.spans if span.kind == "agent")
    assert span.status is SpanStatus.UNSET
    async for _ in result.stream_events():
        pass
    late = [span.kind for span in attempt.scope.recorder.drain()]
    assert "agent" not in late
