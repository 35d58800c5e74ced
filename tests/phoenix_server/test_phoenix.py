"""Test spans on a real Phoenix server: sent by `LIGHTSPAN_OTLP`, read by its API, and imported.

`nox -s tests_phoenix` makes the server's environment and names its command in `PHOENIX_COMMAND`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import error, request

import openai
import pytest

import lightspan
from lightspan.algorithms.recorded_attempts import Query, read_attempts
from lightspan.capture import sdk_instrumentation
from lightspan.cli import main
from lightspan.schema import semconv as c
from lightspan.stores import open_store
from lightspan_otel import span_exporter as module
from lightspan_testing.scripted import ScriptedServer

STARTING_S = 300.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def asked(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with request.urlopen(request.Request(url, data=data, headers=headers), timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Phoenix server; yield its URL."""
    folder = tmp_path_factory.mktemp("phoenix")
    port = free_port()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    environment.pop("PYTHONPATH", None)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [os.environ["PHOENIX_COMMAND"], "serve"], env=environment, stdout=log, stderr=log
        )
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + STARTING_S
            while True:
                try:
                    asked(f"{url}/v1/projects")
                    break
                except (error.URLError, ConnectionError):
                    assert server.poll() is None, (folder / "log").read_text()[-2000:]
                    assert time.monotonic() < end, (folder / "log").read_text()[-2000:]
                    time.sleep(0.5)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def run_app(store: str) -> None:
    messages: Any = [{"role": "user", "content": "Where?"}]
    with (
        ScriptedServer("Here.") as server,
        openai.OpenAI(base_url=server.url, api_key="key") as client,
        lightspan.record(store, service="desk") as recording,
    ):
        with lightspan.agent("boss"), lightspan.agent("writer"):
            client.chat.completions.create(model="m", messages=messages)
            lightspan.emit_reward(0.5)
        assert recording.flush()
    sdk_instrumentation.uninstall()


def spans_of(phoenix: str, project: str, form: str, count: int) -> Any:
    """Return a page of Phoenix's API after all spans have been written, which takes a moment."""
    while True:
        try:
            page = asked(f"{phoenix}/v1/projects/{project}/{form}")
        except error.HTTPError as failure:
            failure.close()
            page = {"data": []}
        if len(page["data"]) >= count:
            return page
        time.sleep(0.5)


@pytest.mark.timeout(400)
def test_spans_on_a_real_server(
    phoenix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = "desk"
    monkeypatch.setenv("LIGHTSPAN_OTLP", phoenix)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"openinference.project.name={project}")
    monkeypatch.setattr(module._State, "by_environment", None)
    run_app(f"sqlite:{tmp_path / 'app.db'}")
    handle = module.current()
    assert handle is not None
    assert handle.flush()
    assert handle.lost == 0

    page = spans_of(phoenix, project, "spans", handle.sent)
    found = {span["name"]: span for span in page["data"]}
    call = next(span for span in page["data"] if span["span_kind"] == "LLM")
    writer, boss = found["invoke_agent writer"], found["invoke_agent boss"]
    assert {writer["span_kind"], boss["span_kind"]} == {"AGENT"}
    assert call["parent_id"] == writer["context"]["span_id"]
    assert writer["parent_id"] == boss["context"]["span_id"]
    assert call["attributes"][c.AGENT_PATH] == "boss/writer"
    assert writer["attributes"]["agent.name"] == "writer"
    assert "Where?" in json.dumps(call["attributes"])
    rewards = [span["attributes"].get(c.REWARD_VALUE) for span in page["data"]]
    assert 0.5 in rewards


@pytest.mark.timeout(400)
@pytest.mark.parametrize("form", ["spans", "spans/otlpv1"])
def test_what_a_real_server_exports_is_imported(
    phoenix: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check an app's own spans in OpenInference's format."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from packages.otel.tests.trace_files import GIVES, INVOKES, LOOKS, SAID

    monkeypatch.delenv("LIGHTSPAN_OTLP", raising=False)
    project = "export-" + form.replace("/", "-")
    provider = TracerProvider(resource=Resource({"openinference.project.name": project}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{phoenix}/v1/traces")))
    tracer = provider.get_tracer("a.framework")
    with (
        tracer.start_as_current_span("desk", attributes=GIVES),
        tracer.start_as_current_span(
            "invoke_agent writer", attributes={**INVOKES, "openinference.span.kind": "AGENT"}
        ),
    ):
        tracer.start_span("chat m", attributes=SAID).end()
        tracer.start_span("look", attributes=LOOKS).end()
    provider.shutdown()

    path, url = tmp_path / "phoenix.json", f"sqlite:{tmp_path / 'store.db'}"
    path.write_text(json.dumps(spans_of(phoenix, project, form, 4)))
    assert main(["import", str(path), "--store", url, "--service", "desk"]) == 0
    assert lightspan.tasks_from_store(url) == [{"question": "Where?"}]

    async def agents() -> list[str]:
        async with open_store(url) as store:
            [found] = [each async for each in read_attempts(store, Query(service="desk"))]
            return [call.agent_path for call in found.episode.calls]

    assert asyncio.run(agents()) == ["writer"]
