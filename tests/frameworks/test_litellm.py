"""Test LiteLLM's calls that bypass the SDKs, together with calls by the SDK.

OpenInference's and OpenLLMetry's spans report both; each call is recorded once.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lightspan_otel as otel
from lightspan.capture import sdk_instrumentation
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan_testing.attempts import Exchange, Recorded, read_recorded
from lightspan_testing.scripted import ScriptedServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network
litellm = pytest.importorskip("litellm")
openinference = pytest.importorskip("openinference.instrumentation.litellm")
openllmetry = pytest.importorskip("opentelemetry.instrumentation.openai")

pytestmark = pytest.mark.filterwarnings(
    # LiteLLM, of a type of its own, and an event loop that it begins and never closes
    "ignore:Items? .* on TypedDict class:UserWarning",
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning",
    "ignore:Exception ignored in. <function BaseEve:pytest.PytestUnraisableExceptionWarning",
    # OpenLLMetry, of a model of its own
    "ignore:Support for class-based `config`:DeprecationWarning",
)
ASKED: Any = [{"role": "user", "content": "hello"}]
WHO = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer("said") as running:
        yield running


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    with otel.instrument(made, content=True):
        yield made
    sdk_instrumentation.uninstall()
    gc.collect()  # here, where what LiteLLM leaves is known


def recorded(
    url: str, provider: TracerProvider, instrumentor: Any, work: Any, *, is_first: bool
) -> Recorded:
    """Return what is recorded of an agent's `work`.

    Args:
        url: URL of the store.
        provider: tracer provider of the instrumentor.
        instrumentor: instrumentor of the client library.
        work: function that makes the calls.
        is_first: whether the instrumentor is installed before the SDK patch.
    """
    if is_first:
        instrumentor.instrument(tracer_provider=provider)
    with record(url):
        if not is_first:
            instrumentor.instrument(tracer_provider=provider)
        try:
            with provider.get_tracer("app").start_as_current_span("run", attributes=WHO):
                work()
        finally:
            instrumentor.uninstrument()
    attempts = read_recorded(url)
    assert len(attempts) == 1, [each.tree() for each in attempts]
    [found] = attempts
    assert found.attempt.capture_errors == []
    return found


@pytest.mark.parametrize("is_first", [True, False])
def test_calls_past_the_sdks_and_by_them(
    tmp_path: Path,
    provider: TracerProvider,
    server: ScriptedServer,
    exporter: InMemorySpanExporter,
    is_first: bool,
) -> None:
    where: Any = {"api_base": server.url, "api_key": "key", "messages": ASKED}

    def work() -> None:
        litellm.completion(model="hosted_vllm/m", **where)
        litellm.completion(model="openai/m", **where)
        for _ in litellm.completion(model="hosted_vllm/m", stream=True, **where):
            pass
        asyncio.run(litellm.acompletion(model="hosted_vllm/m", **where))
        asyncio.run(litellm.acompletion(model="openai/m", **where))

    url = f"sqlite:{tmp_path / 'a.db'}"
    found = recorded(url, provider, openinference.LiteLLMInstrumentor(), work, is_first=is_first)
    past, by_sdk = "chat hosted_vllm/m", "chat m"
    assert [call.name for call in found.calls] == [past, by_sdk, past, past, by_sdk]
    assert found.answered == [Exchange("hello", "said")] * 5
    assert [c.ROUTE in call.attributes for call in found.calls] == [
        call.name == by_sdk for call in found.calls
    ]
    assert {call.attributes[c.AGENT_PATH] for call in found.calls} == {"writer"}
    assert len(exporter.get_finished_spans()) == 6


@pytest.mark.parametrize("is_first", [True, False])
def test_openllmetry_beside_the_shim(
    tmp_path: Path,
    provider: TracerProvider,
    server: ScriptedServer,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    is_first: bool,
) -> None:
    for kind in (Completions, AsyncCompletions):  # its `uninstrument` leaves them wrapped
        monkeypatch.setattr(kind, "create", kind.create)

    async def asynchronous() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key") as client:
            create: Any = client.chat.completions.create
            await create(model="m", messages=ASKED)
            async for _ in await create(model="m", messages=ASKED, stream=True):
                pass

    def work() -> None:
        with openai.OpenAI(base_url=server.url, api_key="key") as client:
            create: Any = client.chat.completions.create
            create(model="m", messages=ASKED)
            for _ in create(model="m", messages=ASKED, stream=True):
                pass
        asyncio.run(asynchronous())

    url = f"sqlite:{tmp_path / 'a.db'}"
    found = recorded(url, provider, openllmetry.OpenAIInstrumentor(), work, is_first=is_first)
    assert [call.name for call in found.calls] == ["chat m"] * 4
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["openai.chat"] * 4 + ["run"]
