"""Serve the app of docs/guides/fastapi.md by uvicorn, and read what it recorded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from pages import blocks  # type: ignore[import-not-found]

from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

PAGE = "guides/fastapi.md"


def start(folder: Path, port: int, **environment: str) -> subprocess.Popen[bytes]:
    [(name, text)] = [(name, text) for _, name, text in blocks(PAGE) if name]
    (folder / name).write_text(text)
    command = [sys.executable, "-m", "uvicorn", "served:app", "--log-level", "warning"]
    return subprocess.Popen(
        [*command, "--port", f"{port}"], cwd=folder, env={**os.environ, **environment}
    )


def get(port: int, path: str, running: subprocess.Popen[bytes]) -> bytes:
    """Return the body of an answer; wait for the server to start."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
                return bytes(reply.read())
        except OSError:
            assert running.poll() is None
            time.sleep(0.1)
    raise TimeoutError


@pytest.mark.slow
def test_each_request_is_an_attempt(server: ScriptedServer, url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = start(
        tmp_path, port, LIGHTSPAN_STORE=url, OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k"
    )
    try:
        answered = get(port, "/ask?q=hello+%40%20home", running)
        assert get(port, "/stream?q=hello", running) == b"echo Begin: helloecho End: hello"
        running.send_signal(signal.SIGTERM)
        running.wait(30)
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()
    asked, streamed = read_recorded(url)
    assert (
        answered
        == f'{{"answer":"echo hello @ home","attempt":"{asked.attempt.attempt_id}"}}'.encode()
    )
    assert asked.rollout.task == {"path": "/ask", "query": {"q": "hello @ home"}}
    assert [call.asked for call in asked.answered] == ["hello @ home"]
    assert [call.asked for call in streamed.answered] == ["Begin: hello", "End: hello"]
    assert asked.attempt.status == streamed.attempt.status == "succeeded"


def test_the_other_blocks_compile() -> None:
    for kind, _, text in blocks(PAGE):
        if kind == "python":
            compile(text, PAGE, "exec")
