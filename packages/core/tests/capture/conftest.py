"""Fixtures for the wrapper of the OpenAI client: two endpoints, and cleanup after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AgentContext, CallEnd, add_call_listener, remove_call_listener
from lightspan_testing.scripted import Reply, ScriptedServer


@pytest.fixture
def unwrapped() -> Iterator[None]:
    """Undo the wrapping of SDKs after the test, and that of earlier tests (`record`) before it."""
    sdk_instrumentation.uninstall()
    yield
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


@pytest.fixture
def gateway() -> Iterator[ScriptedServer]:
    """Run a server in place of the gateway."""
    with ScriptedServer(lambda request: Reply(text="from the gateway")) as server:
        yield server


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """Run the server that the app's client is configured for."""
    with ScriptedServer(lambda request: Reply(text="from elsewhere")) as server:
        yield server


@pytest.fixture
def call_ends() -> Iterator[list[bool]]:
    """Yield a list that gets, for each ended call, whether it was answered."""
    ends: list[bool] = []

    def listener(_: AgentContext) -> CallEnd:
        return ends.append

    add_call_listener(listener)
    yield ends
    remove_call_listener(listener)
