"""Models by hub name: the errors when the hub fails, the cache is empty or a licence is missing."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import ModelError
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.hub import locate
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model

NAME = "meta-llama/Llama-3.2-1B-Instruct"
SECRET = "hf_thisIsASecret"


@dataclass
class Hub:
    """A fake hub on the loopback interface: it refuses all requests, or serves one model folder."""

    status: int = 404
    headers: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None
    known: bool = True
    """Whether it lists the files of the model, even if it serves none of them."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and authorisation header (None if absent) of each request."""

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.requests.append((handler.path, handler.headers.get("Authorization")))
        if handler.path.startswith(f"/api/models/{NAME}") and self.known:
            files = sorted(self.folder.iterdir()) if self.folder is not None else []
            names = [file.name for file in files] or ["config.json", "model.safetensors"]
            sizes = [file.stat().st_size for file in files] or [7, 9]
            body: Any = {"id": NAME, "sha": "a" * 40}
            body["siblings"] = [
                {"rfilename": name, "size": size} for name, size in zip(names, sizes, strict=True)
            ]
            if "/tree/" in handler.path:
                body = [
                    {"type": "file", "path": name, "size": size, "oid": name.ljust(40, "0")}
                    for name, size in zip(names, sizes, strict=True)
                ]
            return _send(
                handler, 200, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
        file = self.folder and self.folder / handler.path.rpartition("/")[2]
        if file and file.is_file():
            headers = {"ETag": f'"{file.name}"', "X-Repo-Commit": "a" * 40}
            return _send(handler, 200, file.read_bytes(), headers)
        if self.folder is not None:
            return _send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        return _send(handler, self.status, b"", self.headers)


def _send(
    handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
) -> None:
    handler.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@pytest.fixture(autouse=True)
def fresh_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make the hub's client start with an empty cache, no token and no open connections."""
    import huggingface_hub.utils

    cache = str(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    huggingface_hub.utils.close_session()
    yield
    huggingface_hub.utils.close_session()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _point_to(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def _point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an endpoint at which no server listens, and make the client use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    _point_to(monkeypatch, endpoint)
    return endpoint


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
GONE = {"X-Error-Code": "RepoNotFound"}


def test_a_gated_model_names_its_licence_page_and_the_token(hub: Hub) -> None:
    hub.status, hub.headers = 401, GATED
    with pytest.raises(ModelError) as caught:
        load_tokenizer(NAME)
    assert str(caught.value) == (
        f"cannot fetch the tokenizer and configuration of {NAME} from the Hugging Face hub: it is "
        f"gated. Accept its licence at https://huggingface.co/{NAME} with your account, then set "
        "HF_TOKEN to an access token of it (none is set)"
    )
    assert all(authorisation is None for _, authorisation in hub.requests)
    with pytest.raises(ModelError, match=f"cannot fetch the weights of {NAME} .* is gated"):
        load_model(NAME)


def test_the_token_is_sent_and_never_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.status, hub.headers = 403, GATED
    with pytest.raises(ModelError, match=r"HF_TOKEN to a token that may read it") as caught:
        load_tokenizer(NAME)
    assert {authorisation for _, authorisation in hub.requests} == {f"Bearer {SECRET}"}
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error)
        error = error.__cause__


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (401, GONE, r"there is no such model, or it is private\. Check the"),
        (404, GONE, r"there is no such model, or it is private\. Check the"),
        (403, {}, r"access was refused \(403\): set HF_TOKEN to a"),
        (503, {}, r"answered 503, and the cache .* does not hold them"),
    ],
)
def test_refusals_of_the_hub(hub: Hub, status: int, headers: dict[str, str], message: str) -> None:
    hub.status, hub.headers, hub.known = status, headers, False
    with pytest.raises(ModelError, match=message):
        load_tokenizer(NAME)


@pytest.mark.parametrize("load", [load_tokenizer, load_model])
def test_without_a_network_it_says_what_could_not_be_fetched(closed: str, load: Any) -> None:
    part = "weights" if load is load_model else "tokenizer and configuration"
    began = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load(NAME)
    assert time.monotonic() - began < 5, "it was tried again and again"
    text = str(caught.value)
    assert text.startswith(f"cannot fetch the {part} of {NAME} from the Hugging Face hub: {closed}")
    assert f"does not hold them. Fetch it where there is a network (`hf download {NAME}" in text


def test_offline_by_choice_and_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set, and the cache .* does not"):
        load_tokenizer(NAME)
    with pytest.raises(ModelError, match=r"'no name!' is neither a folder nor a model's name"):
        locate("no name!", "weights")


def test_what_was_fetched_once_needs_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.folder = tiny_model(tmp_path / "served", seed=0)
    prompt = load_tokenizer(hub.folder).render([{"role": "user", "content": "One?"}])
    assert load_tokenizer(NAME).render([{"role": "user", "content": "One?"}]) == prompt
    capfd.readouterr()
    load_model(NAME)
    assert f"fetching the weights of {NAME} (0.0 GiB) from http" in capfd.readouterr().err
    load_model(NAME)
    assert "fetching" not in capfd.readouterr().err, "it was in the cache"
    _point_to(monkeypatch, "http://127.0.0.1:9")
    assert load_tokenizer(NAME).render([{"role": "user", "content": "One?"}]) == prompt
    load_model(NAME)
