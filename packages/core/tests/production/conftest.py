"""Fixtures for tests of recording: a model that echoes, an app's client, the URL of a new store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from lightspan.capture import context
from lightspan_testing.scripted import Request, ScriptedServer


def echo(request: Request) -> str:
    return f"echo {request.last_text}"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(echo) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="secret-key", max_retries=0) as made:
        yield made


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a store that does not exist yet; check afterwards that recording
    stopped.
    """
    names = ("STORE", "SAMPLE", "REDACT", "IMAGES")
    for name in (*(f"LIGHTSPAN_{each}" for each in names), "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    yield f"sqlite:{tmp_path / 'production.db'}"
    assert context.current_context() is None
