"""Requests to models that no SDK makes: noted with who sent what where, and let go as they are."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import lightspan
from lightspan.capture import wire
from lightspan.capture.entry import open_scope
from lightspan.capture.scope import Scope
from lightspan.capture.state import state
from lightspan.schema import conventions as c
from lightspan.schema.records import Mode
from lightspan.testing.scripted import ScriptedServer

ASKED = {"model": "mine", "messages": [{"role": "user", "content": "a secret"}]}
HERE = __name__


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("said") as running:
        yield running


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    wire.uninstall()
    yield
    wire.uninstall()
    assert state.watches == state.watched == []


def noted(send: Callable[[], object], **fields: Any) -> list[list[Any]]:
    """What is noted of requests that `writer` sends in a rollout."""
    scope = Scope(rollout_id="r", attempt_id="a", **{"mode": Mode.TRAIN, **fields})
    with open_scope(scope), lightspan.agent("writer"):
        send()
    said = scope.recorder.sightings.attributes()
    assert list(said) in ([], [c.REQUESTS_PAST])
    assert "secret" not in str(said)
    found: list[list[Any]] = json.loads(str(said.get(c.REQUESTS_PAST, "[]")))
    return found


def post(url: str, module: str = "httpx", body: Any = ASKED) -> Any:
    return importlib.import_module(module).post(url, json=body)


async def post_async(url: str, module: str) -> None:
    async with importlib.import_module(module).AsyncClient() as client:
        await client.post(url, json=ASKED)


async def post_by_aiohttp(url: str, base: str | None = None) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    async with aiohttp.ClientSession(base) as session, session.post(url, json=ASKED) as answer:
        assert answer.status == 200


# --- what is seen ---------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["httpx", "httpx2"])
def test_httpx(server: ScriptedServer, module: str) -> None:
    pytest.importorskip(module)
    url = f"{server.url}/chat/completions"

    def send() -> None:
        assert post(f"{url}?key=hidden", module).json()["choices"]
        post(url, module)
        asyncio.run(post_async(url, module))

    assert noted(send) == [
        ["writer", f"{module}.Client", HERE, "", "mine", url, 2],
        ["writer", f"{module}.AsyncClient", HERE, "", "mine", url, 1],
    ]


def test_requests(server: ScriptedServer) -> None:
    pytest.importorskip("requests")
    url = f"{server.url}/chat/completions"
    assert noted(lambda: post(url, "requests")) == [
        ["writer", "requests.Session", HERE, "", "mine", url, 1]
    ]


def test_aiohttp(server: ScriptedServer) -> None:
    pytest.importorskip("aiohttp")
    url = f"{server.url}/chat/completions"

    def send() -> None:
        asyncio.run(post_by_aiohttp(url))
        asyncio.run(post_by_aiohttp("chat/completions", f"{server.url}/"))

    assert noted(send) == [["writer", "aiohttp.ClientSession", HERE, "", "mine", url, 2]]


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/api/chat", ASKED, "mine"),
        ("/api/generate", {"model": "mine", "prompt": "a secret"}, "mine"),
        ("/v1/messages", ASKED, "mine"),
        ("/v2/chat", ASKED, "mine"),
        ("/v1beta/models/gemini-9:generateContent", {"contents": []}, "gemini-9"),
        ("/v1beta/models/gemini-9:streamGenerateContent", {"contents": []}, "gemini-9"),
        ("/model/nova/converse-stream", {"messages": []}, "nova"),
    ],
)
def test_apis(server: ScriptedServer, path: str, body: Any, model: str) -> None:
    [found] = noted(lambda: post(f"{server.origin}{path}", body=body))
    assert found[4:] == [model, f"{server.origin}{path}", 1]


def test_a_key_before_the_host_is_not_kept(server: ScriptedServer) -> None:
    host = server.origin.removeprefix("http://")
    [found] = noted(lambda: post(f"http://me:hidden@{host}/v1/chat/completions"))
    assert found[5] == f"http://{host}/v1/chat/completions"


def test_a_library_that_is_known_is_named_and_not_who_called_it(server: ScriptedServer) -> None:
    url = f"{server.url}/chat/completions"
    module: dict[str, Any] = {"__name__": "ollama._client", "post": post}
    exec("def ask(url): return post(url)", module)
    assert noted(lambda: module["ask"](url)) == [["writer", "ollama", "", "", "mine", url, 1]]


# --- what is not ----------------------------------------------------------------------------
def test_the_sdk_is_seen_by_the_wire_shim(server: ScriptedServer) -> None:
    def send() -> None:
        with openai.OpenAI(base_url=server.url, api_key="key") as client:
            client.chat.completions.create(**ASKED)

    assert noted(send) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "mine", "input": "a secret"}),
        ("/forms/9/responses", {"answers": []}),
        ("/v1/chat/completions", None),
    ],
)
def test_others(server: ScriptedServer, path: str, body: Any) -> None:
    assert noted(lambda: post(f"{server.origin}{path}", body=body)) == []


def test_the_attempts_own_endpoint(server: ScriptedServer) -> None:
    assert noted(lambda: post(f"{server.url}/chat/completions"), gateway_url=server.url) == []


def test_production(server: ScriptedServer) -> None:
    assert noted(lambda: post(f"{server.url}/chat/completions"), mode=Mode.PRODUCTION) == []


def test_outside_every_attempt(server: ScriptedServer) -> None:
    wire.install()
    assert post(f"{server.url}/chat/completions").status_code == 200


# --- what is left ---------------------------------------------------------------------------
def test_classes_are_as_they_were(server: ScriptedServer) -> None:
    import httpx

    before = vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]
    wire.install()
    assert vars(httpx.Client)["send"] is not before[0]
    wire.uninstall()
    assert (vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]) == before


def test_what_is_wrong_with_a_request_is_the_apps_to_hear(server: ScriptedServer) -> None:
    import httpx

    def send() -> None:
        with httpx.Client() as client, pytest.raises(AttributeError, match="has no attribute"):
            client.send("no request")  # type: ignore[arg-type]

    assert noted(send) == []


def test_a_client_that_is_imported_later(server: ScriptedServer) -> None:
    pytest.importorskip("requests")
    code = f"""
import sys
from lightspan.capture.entry import open_scope
from lightspan.capture.scope import Scope
scope = Scope(rollout_id="r", attempt_id="a")
with open_scope(scope):
    assert "requests" not in sys.modules
    import requests
    requests.post("{server.url}/chat/completions", json={{"model": "mine"}})
print(scope.recorder.sightings.attributes())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    told = f'[["app", "requests.Session", "__main__", "", "mine", "{server.url}/chat/completions"'
    assert done.stdout == f"{{'{c.REQUESTS_PAST}': '{told}, 1]]'}}\n"
