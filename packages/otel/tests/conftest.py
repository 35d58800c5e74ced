"""Fixtures of the OpenTelemetry tests: an observed provider, and spans of agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer

import lightspan_otel as otel
from lightspan.capture import context, sdk_instrumentation
from lightspan.capture._globals import state
from lightspan_testing.scripted import ScriptedServer


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstrument adapters that an earlier test of this process has installed."""
    for name in ("resolvers", "call_listeners", "entry_listeners"):
        monkeypatch.setattr(state, name, [])
    monkeypatch.setattr(state, "claims", {})


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    """An app's observed provider, released after the test."""
    tracer_provider = TracerProvider()
    with otel.instrument(tracer_provider):
        yield tracer_provider
    assert context.resolvers() == context.call_listeners() == ()


@pytest.fixture
def tracer(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("some.framework")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("said") as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as tracer_provider:
        yield tracer_provider
    sdk_instrumentation.uninstall()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a store; unset the environment variables that affect recording."""
    for name in ("LIGHTSPAN_STORE", "LIGHTSPAN_SAMPLE", "LIGHTSPAN_REDACT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    return f"sqlite:{tmp_path / 'production.db'}"
