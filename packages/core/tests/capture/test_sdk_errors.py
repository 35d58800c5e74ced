"""Test installing and removing the wrapper of the OpenAI SDK, and its own errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openai
import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import (
    AgentContext,
    add_call_listener,
    register_resolver,
    remove_call_listener,
    unregister_resolver,
)
from lightspan_testing.scripted import ScriptedServer
from packages.core.tests.capture.clients import WAYS, acting_as, client_of

pytestmark = pytest.mark.usefixtures("unwrapped")


@pytest.mark.parametrize(
    ("add", "remove", "damage"),
    [
        (
            register_resolver,
            unregister_resolver,
            "the acting agent could not be resolved: ValueError('no idea')",
        ),
        (
            add_call_listener,
            remove_call_listener,
            "a listener failed at the start of a model call: ValueError('no idea')",
        ),
    ],
    ids=["resolver", "listener"],
)
def test_what_adapters_add_and_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer, elsewhere: ScriptedServer, add: Any, remove: Any, damage: str
) -> None:
    def failing(current: AgentContext) -> None:
        raise ValueError("no idea")

    add(failing)
    try:
        with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
            assert WAYS["create"](client) == "from the gateway"
    finally:
        remove(failing)
    assert set(scope.recorder.capture_errors()) == {damage}


@pytest.mark.parametrize(
    ("broken", "agent_name", "way", "what"),
    [
        ("schema.genai_attributes.answer_attributes", "checker", "create", "recorded"),
        ("schema.genai_attributes.answer_attributes", "checker", "stream=True", "recorded"),
        ("capture.sdk_instrumentation.sync_client", "writer", "create", "redirected"),
        ("capture.sdk_instrumentation._forwarded_headers", "writer", "create", "redirected"),
    ],
)
def test_a_shim_that_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer,
    elsewhere: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    agent_name: str,
    way: str,
    what: str,
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(f"lightspan.{broken}", fails)
    with client_of(elsewhere) as client, acting_as(gateway, agent_name) as scope:
        assert WAYS[way](client) == "from elsewhere"
    damage = [f"a model call could not be {what}: ValueError('broken')"]
    assert scope.recorder.capture_errors() == damage
    assert gateway.requests == []


# --- installing -----------------------------------------------------------------------------
def test_uninstalling_leaves_the_classes_as_they_were() -> None:
    assert not sdk_instrumentation.installed()
    before = [dict(vars(kind)) for kind in (openai.OpenAI, openai.AsyncOpenAI)]
    sdk_instrumentation.install()
    sdk_instrumentation.install()
    assert sdk_instrumentation.installed()
    assert "request" in vars(openai.OpenAI)
    sdk_instrumentation.uninstall()
    sdk_instrumentation.uninstall()
    assert [dict(vars(kind)) for kind in (openai.OpenAI, openai.AsyncOpenAI)] == before
    assert not sdk_instrumentation.installed()


def test_a_wrapper_on_top_of_ours(
    gateway: ScriptedServer, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a wrapper such as OpenInference's: it sees every call, and remains after ours is
    removed.
    """
    sdk_instrumentation.install()
    ours, seen = openai.OpenAI.request, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(str(args[1].url))
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(openai.OpenAI, "request", theirs)
    with client_of(elsewhere) as client:
        with acting_as(gateway, "writer"):
            assert WAYS["create"](client) == "from the gateway"
        sdk_instrumentation.uninstall()
        assert WAYS["create"](client) == "from elsewhere"
    assert seen == ["/chat/completions"] * 2


def test_importing_patches_nothing_and_stays_light() -> None:
    """Check in a new process that importing lightspan patches nothing and loads no heavy
    package.
    """
    code = (
        "import sys, lightspan, lightspan.capture.sdk_instrumentation, lightspan.capture.emit\n"
        "import lightspan.runners.runner, lightspan.runners.app\n"
        "heavy = {'torch', 'aiohttp', 'openai', 'transformers', 'langchain_core', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import openai\n"
        "print('request' in vars(openai.OpenAI), 'request' in vars(openai.AsyncOpenAI))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "False False"]
