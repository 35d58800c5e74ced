"""Nothing of the app's client or of the environment reaches the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from lightspan.capture.context import AttemptContext
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.schema.routing import Route, Routing, Target
from lightspan_testing.scripted import Request, ScriptedServer

pytestmark = pytest.mark.usefixtures("unwrapped")

SECRET = "very-secret"
OURS = Routing(default=Target(route=Route.POLICY, policy="policy"))


def ask(client: openai.OpenAI, gateway: ScriptedServer) -> Request:
    scope = AttemptContext(
        rollout_id="r", attempt_id="a", gateway_url=gateway.origin, call_token="t", routing=OURS
    )
    with open_scope(scope), agent("writer"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={"x-extra": SECRET, "authorization": SECRET},
            extra_query={"extra": SECRET},
        )
    [request] = gateway.requests
    return request


def check(request: Request) -> None:
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer t"
    assert SECRET not in str(request.headers)
    for key in ("x-extra", "cookie", "openai-organization", "openai-project", "x-custom"):
        assert key not in request.headers


def _key() -> str:
    raise AssertionError("the app's key is asked for")


CLIENTS: dict[str, Any] = {
    "default headers": {"default_headers": {"x-default": SECRET, "authorization": SECRET}},
    "default query": {"default_query": {"key": SECRET}},
    "organisation": {"organization": SECRET, "project": SECRET},
    "key": {"api_key": SECRET},
    "callable key": {"api_key": _key},
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_apps_client_leaks_nothing(kind: str) -> None:
    options = {"base_url": "http://127.0.0.1:9/v1", "api_key": "app-key", **CLIENTS[kind]}
    with ScriptedServer() as gateway, openai.OpenAI(**options) as client:
        check(ask(client, gateway))


def test_the_apps_http_client_leaks_nothing() -> None:
    http = openai.DefaultHttpxClient(
        headers={"x-http": SECRET}, cookies={"session": SECRET}, auth=("me", SECRET)
    )
    with (
        ScriptedServer() as gateway,
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", http_client=http) as client,
    ):
        check(ask(client, gateway))


@pytest.mark.parametrize(
    "variable",
    [
        "OPENAI_ORG_ID",
        "OPENAI_PROJECT_ID",
        "OPENAI_API_KEY",
        "OPENAI_ADMIN_KEY",
        "OPENAI_CUSTOM_HEADERS",
        "OPENAI_BASE_URL",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
    ],
)
def test_the_environment_leaks_nothing(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ScriptedServer() as gateway,
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k") as client,
    ):
        value = {
            "OPENAI_CUSTOM_HEADERS": f"x-custom: {SECRET}",
            "OPENAI_BASE_URL": "http://127.0.0.1:9/elsewhere",
        }.get(variable, SECRET)
        if "PROXY" in variable.upper():
            value = "http://127.0.0.1:9"
        monkeypatch.setenv(variable, value)
        check(ask(client, gateway))


def test_an_async_callable_key_is_not_asked_for() -> None:
    async def key() -> str:
        raise AssertionError("the app's key is asked for")

    async def main(gateway: ScriptedServer) -> None:
        scope = AttemptContext(
            rollout_id="r", attempt_id="a", gateway_url=gateway.origin, call_token="t", routing=OURS
        )
        url = "http://127.0.0.1:9/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            with open_scope(scope):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}]
                )

    with ScriptedServer() as gateway:
        asyncio.run(main(gateway))
        check(gateway.requests[0])


def test_the_idempotency_key_is_kept() -> None:
    with (
        ScriptedServer() as gateway,
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k") as client,
    ):
        scope = AttemptContext(
            rollout_id="r", attempt_id="a", gateway_url=gateway.origin, call_token="t", routing=OURS
        )
        with open_scope(scope):
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                extra_headers={"Idempotency-Key": "mine"},
            )
        assert gateway.requests[0].headers["idempotency-key"] == "mine"
