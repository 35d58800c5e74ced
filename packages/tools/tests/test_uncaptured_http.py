"""Test model requests without an SDK: a dry run notes them, and sends them unchanged."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture._globals import state
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.schema.records import Mode
from lightspan.schema.spans import SpanKind
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.uncaptured_requests import requests_of

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
    assert state.http_patches == state.import_hooks == {}


def noted(send: Callable[[], object], **fields: Any) -> list[list[Any]]:
    """Return the notes of a dry run in which `writer` calls `send`."""
    scope = AttemptContext(rollout_id="r", attempt_id="a", **{"mode": Mode.DEV, **fields})
    with open_scope(scope), lightspan.agent("writer"):
        send()
    spans = scope.recorder.drain()
    assert "secret" not in str([span for span in spans if span.kind is SpanKind.OTHER])
    return [[*request, count] for request, count in requests_of(spans).items()]


def post(url: str, body: Any = ASKED) -> httpx.Response:
    return httpx.post(url, json=body)


# --- what is seen ---------------------------------------------------------------------------
def post_by_httpx(server: ScriptedServer) -> None:
    async def post_async() -> None:
        async with httpx.AsyncClient() as client:
            await client.post(f"{server.url}/chat/completions", json=ASKED)

    host = server.url.removeprefix("http://")
    assert post(f"http://me:hidden@{host}/chat/completions?key=hidden").json()["choices"]
    asyncio.run(post_async())


def post_by_requests(server: ScriptedServer) -> None:
    requests = pytest.importorskip("requests")
    for _ in range(2):
        requests.post(f"{server.url}/chat/completions", json=ASKED)


def post_by_aiohttp(server: ScriptedServer) -> None:
    aiohttp = pytest.importorskip("aiohttp")

    async def post_async(url: str, base: str | None = None) -> None:
        async with aiohttp.ClientSession(base) as session, session.post(url, json=ASKED) as answer:
            assert answer.status == 200

    asyncio.run(post_async(f"{server.url}/chat/completions"))
    asyncio.run(post_async("chat/completions", f"{server.url}/"))


@pytest.mark.parametrize("send", [post_by_httpx, post_by_requests, post_by_aiohttp])
def test_http_clients(server: ScriptedServer, send: Callable[[ScriptedServer], None]) -> None:
    url = f"{server.url}/chat/completions"
    assert noted(lambda: send(server)) == [["writer", HERE, "mine", url, 2]]


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


def test_the_library_that_calls_the_http_client_is_named(server: ScriptedServer) -> None:
    url = f"{server.url}/chat/completions"
    module: dict[str, Any] = {"__name__": "ollama._client", "body": ASKED}
    exec("import httpx\ndef ask(url): return httpx.post(url, json=body)", module)
    assert noted(lambda: module["ask"](url)) == [["writer", "ollama", "mine", url, 1]]


def test_a_client_is_patched_when_the_app_imports_it(tmp_path: Path) -> None:
    """Check that a dry run imports no client: another attempt would find it half imported."""
    (tmp_path / "httpx2.py").write_text(
        "class Client:\n    def send(self, request): return 'sent'\n"
        "class AsyncClient(Client): ...\n"
    )
    code = (
        "import sys\n"
        "from lightspan.capture import sdk_instrumentation\n"
        "from lightspan.capture.context import AttemptContext\n"
        "from lightspan.capture.entry import open_scope\n"
        "from lightspan.schema.records import Mode\n"
        "before = set(sys.modules)\n"
        "for name in 'ab':\n"
        "    with open_scope(AttemptContext(rollout_id='r', attempt_id=name, mode=Mode.DEV)):\n"
        "        if name == 'b': import httpx2\n"
        "    new = set(sys.modules) - before\n"
        "    print(*sorted({'httpx', 'httpx2', 'requests', 'aiohttp'} & new))\n"
        "send = httpx2.Client.send\n"
        "print(send.__module__, httpx2.Client().send(None))\n"
        "sdk_instrumentation.uninstall()\n"
        "print(httpx2.Client.send is send, httpx2.Client.send.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "",
        "httpx2",
        "lightspan_tools.uncaptured_http sent",
        "False httpx2",
    ]


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
    """Check that other modes patch nothing, and note nothing if a dry run has patched HTTP
    before.
    """
    before = vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]
    assert noted(lambda: post(f"{server.url}/chat/completions"), mode=mode) == []
    assert (vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]) == before
    noted(lambda: None)
    assert vars(httpx.Client)["send"] is not before[0]
    assert noted(lambda: post(f"{server.url}/chat/completions"), mode=mode) == []
    sdk_instrumentation.uninstall()
    assert (vars(httpx.Client)["send"], vars(httpx.AsyncClient)["send"]) == before
