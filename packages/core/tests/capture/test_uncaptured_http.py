"""Requests to models that no SDK makes: noted in a dry run, and sent as they are."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.schema.records import Mode
from lightspan_testing.scripted import ScriptedServer

ASKED = {"model": "mine", "messages": [{"role": "user", "content": "a secret"}]}
HERE = __name__.partition(".")[0]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("said") as running:
        yield running


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    sdk_instrumentation.uninstall()
    yield
    sdk_instrumentation.uninstall()
    assert state.http_patches == []


def noted(send: Callable[[], object], **fields: Any) -> list[list[Any]]:
    """What is noted of requests that `writer` sends in a dry run."""
    scope = AttemptContext(rollout_id="r", attempt_id="a", **{"mode": Mode.DEV, **fields})
    with open_scope(scope), lightspan.agent("writer"):
        send()
    assert "secret" not in str(scope.recorder.uncaptured)
    return [[*request, count] for request, count in scope.recorder.uncaptured.items()]


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
        ["writer", HERE, "mine", url, 3],
    ]


def test_requests(server: ScriptedServer) -> None:
    pytest.importorskip("requests")
    url = f"{server.url}/chat/completions"
    assert noted(lambda: post(url, "requests")) == [["writer", HERE, "mine", url, 1]]


def test_aiohttp(server: ScriptedServer) -> None:
    pytest.importorskip("aiohttp")
    url = f"{server.url}/chat/completions"

    def send() -> None:
        asyncio.run(post_by_aiohttp(url))
        asyncio.run(post_by_aiohttp("chat/completions", f"{server.url}/"))

    assert noted(send) == [["writer", HERE, "mine", url, 2]]


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/api/chat", ASKED, "mine"),
        ("/api/generate", {"model": "mine", "prompt": "a secret"}, "mine"),
        ("/v1/messages", ASKED, "mine"),
        ("/v2/chat", ASKED, "mine"),
        ("/v1beta/models/gemini-9:generateContent", {"contents": []}, ""),
        ("/v1beta/models/gemini-9:streamGenerateContent", {"contents": []}, ""),
    ],
)
def test_apis(server: ScriptedServer, path: str, body: Any, model: str) -> None:
    [found] = noted(lambda: post(f"{server.origin}{path}", body=body))
    assert found[2:] == [model, f"{server.origin}{path}", 1]


def test_a_key_before_the_host_is_not_kept(server: ScriptedServer) -> None:
    host = server.origin.removeprefix("http://")
    [found] = noted(lambda: post(f"http://me:hidden@{host}/v1/chat/completions"))
    assert found[3] == f"http://{host}/v1/chat/completions"


def test_the_library_that_calls_the_http_client_is_named(server: ScriptedServer) -> None:
    url = f"{server.url}/chat/completions"
    module: dict[str, Any] = {"__name__": "ollama._client", "body": ASKED}
    exec("import httpx\ndef ask(url): return httpx.post(url, json=body)", module)
    assert noted(lambda: module["ask"](url)) == [["writer", "ollama", "mine", url, 1]]


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


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL, Mode.PRODUCTION])
def test_other_modes(server: ScriptedServer, mode: Mode) -> None:
    """Nothing is patched there, and nothing noted where a dry run has patched it."""
    import httpx

    before = vars(httpx.Client)["send"]
    assert noted(lambda: post(f"{server.url}/chat/completions"), mode=mode) == []
    assert vars(httpx.Client)["send"] is before
    noted(lambda: None)
    assert noted(lambda: post(f"{server.url}/chat/completions"), mode=mode) == []


# --- what is left ---------------------------------------------------------------------------
def test_classes_are_as_they_were(server: ScriptedServer) -> None:
    import httpx

    before = vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]
    noted(lambda: None)
    assert vars(httpx.Client)["send"] is not before[0]
    sdk_instrumentation.uninstall()
    assert (vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]) == before


def test_what_is_wrong_with_a_request_is_the_apps_to_hear(server: ScriptedServer) -> None:
    import httpx

    def send() -> None:
        with httpx.Client() as client, pytest.raises(AttributeError, match="has no attribute"):
            client.send("no request")  # type: ignore[arg-type]

    assert noted(send) == []
