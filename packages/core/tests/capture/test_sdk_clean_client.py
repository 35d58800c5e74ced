"""Test that no setting of the app's client or the environment reaches the gateway."""

from __future__ import annotations

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
            extra_headers={
                "x-extra": SECRET,
                "authorization": SECRET,
                "Idempotency-Key": "mine",
            },
            extra_query={"extra": SECRET},
        )
    [request] = gateway.requests
    return request


def check(request: Request) -> None:
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer t"
    assert request.headers["idempotency-key"] == "mine"
    assert SECRET not in str(request.headers)
    for key in ("x-extra", "cookie", "openai-organization", "openai-project", "x-custom"):
        assert key not in request.headers


async def key() -> str:
    raise AssertionError("the app's key is asked for")


CLIENTS: dict[str, Any] = {
    "default headers": {"default_headers": {"x-default": SECRET, "authorization": SECRET}},
    "default query": {"default_query": {"key": SECRET}},
    "organisation": {"organization": SECRET, "project": SECRET},
    "key": {"api_key": SECRET},
    "callable key": {"api_key": key},
    "HTTP client": {"headers": {"x-http": SECRET}, "cookies": {"session": SECRET}},
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_apps_client_leaks_nothing(kind: str) -> None:
    options = {"base_url": "http://127.0.0.1:9/v1", "api_key": "app-key", **CLIENTS[kind]}
    if kind == "HTTP client":
        http = openai.DefaultHttpxClient(auth=("me", SECRET), **CLIENTS[kind])
        options = {"base_url": "http://127.0.0.1:9/v1", "api_key": "k", "http_client": http}
    with ScriptedServer() as gateway, openai.OpenAI(**options) as client:
        check(ask(client, gateway))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OPENAI_ORG_ID", SECRET),
        ("OPENAI_PROJECT_ID", SECRET),
        ("OPENAI_API_KEY", SECRET),
        ("OPENAI_CUSTOM_HEADERS", f"x-custom: {SECRET}"),
        ("OPENAI_BASE_URL", "http://127.0.0.1:9/elsewhere"),
        ("HTTP_PROXY", "http://127.0.0.1:9"),
    ],
)
def test_the_environment_leaks_nothing(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ScriptedServer() as gateway,
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k") as client,
    ):
        monkeypatch.setenv(variable, value)
        check(ask(client, gateway))
