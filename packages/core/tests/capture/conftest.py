"""What tests of the OpenAI client's shim share: two endpoints, and a client left unwrapped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AgentContext, CallEnd, add_call_listener, remove_call_listener
from lightspan_testing.scripted import Reply, ScriptedServer


@pytest.fixture
def unwrapped() -> Iterator[None]:
    """After the test the OpenAI client is what it was."""
    yield
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


@pytest.fixture
def gateway() -> Iterator[ScriptedServer]:
    """What stands where the gateway is."""
    with ScriptedServer(lambda request: Reply(text="from the gateway")) as server:
        yield server


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """Where the app pointed its client."""
    with ScriptedServer(lambda request: Reply(text="from elsewhere")) as server:
        yield server


@pytest.fixture
def call_ends() -> Iterator[list[bool]]:
    """Whether each call was answered, as a listener hears it."""
    ends: list[bool] = []

    def listener(_: AgentContext) -> CallEnd:
        return ends.append

    add_call_listener(listener)
    yield ends
    remove_call_listener(listener)
