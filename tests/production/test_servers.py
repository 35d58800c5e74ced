"""Test that no answered request is lost when an ASGI server stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest
from starlette.applications import Starlette

import lightspan
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer

APP = """
import sys

import openai
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import lightspan
from lightspan.production import store_writer

store_writer._GATHER_S = 2.0  # the store is slower than the stop
lightspan.record()
client = openai.OpenAI(max_retries=0)


def answer(request):
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="m", messages=messages)
    return PlainTextResponse(answer.choices[0].message.content)


app = Starlette(routes=[Route("/", answer)])
if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


def stop_after_requests(
    command: list[str], server: ScriptedServer, url: str, folder: Path, port: int, requests: int
) -> int:
    """Start a server, send requests, stop it at once by SIGTERM, and return its exit status."""
    (folder / "served.py").write_text(APP)
    environment = {
        **os.environ,
        "LIGHTSPAN_STORE": url,
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "k",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    running = subprocess.Popen([sys.executable, *command], env=environment, cwd=folder)
    try:
        for number in range(requests):
            for patience in range(300):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as reply:
                        assert reply.read() == b"echo hello"
                    break
                except OSError:
                    assert (number, running.poll()) == (0, None), patience
                    time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        return running.wait(30)
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_program", [False, True], ids=["uvicorn served:app", "uvicorn.run"])
def test_a_graceful_stop_keeps_every_answered_request(
    server: ScriptedServer, url: str, tmp_path: Path, is_program: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["served.py", f"{port}"]
    if not is_program:
        command = ["-m", "uvicorn", "served:app", "--port", f"{port}", "--log-level", "warning"]
    status = stop_after_requests(command, server, url, tmp_path, port, 8)
    assert status == -signal.SIGTERM  # as without lightspan
    assert [one.attempt.status for one in read_recorded(url)] == ["succeeded"] * 8


async def test_the_lifespan_writes_what_is_recorded(
    client: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    app = Starlette(lifespan=lightspan.lifespan)
    with lightspan.record(url):
        async with app.router.lifespan_context(app):
            for _ in range(4):
                await asyncio.to_thread(
                    client.chat.completions.create, model="m", messages=messages
                )
        stored = await asyncio.to_thread(read_recorded, url)
        assert len(stored) == 4
