"""Tests of exporting: spans, counters, and that a failing backend causes no delay."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lightspan
import lightspan_otel as otel
from lightspan.capture import sdk_instrumentation
from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.spans import Span, SpanKind, SpanLink, SpanStatus
from lightspan_otel import span_exporter as module
from lightspan_otel.normalize import normalized_arrival
from lightspan_otel.otlp import PROTOBUF, decode_request, encode_answer
from lightspan_otel.span_exporter import current, enqueue
from lightspan_otel.to_otel import to_otel
from lightspan_testing.scripted import ScriptedServer
from packages.otel.tests.backend import Backend

VARIABLES = ("LIGHTSPAN_OTLP", "LIGHTSPAN_STORE", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
SPAN = Span(
    span_id="eee19b7ec3c1b174",
    trace_id="5b8efff798038103d269b633813fc60c",
    parent_id="eee19b7ec3c1b173",
    name="chat m",
    kind=SpanKind.LLM,
    status=SpanStatus.ERROR,
    start_ns=1,
    end_ns=2,
    attributes={c.AGENT_PATH: "writer"},
    links=[SpanLink("5b8efff798038103d269b633813fc60d", "eee19b7ec3c1b175")],
)


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend_ = Backend()
    yield backend_
    backend_.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    sdk_instrumentation.uninstall()
    module._close()
    module._State.by_environment = None


def test_what_is_sent(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", backend.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "openinference.project.name=desk")
    enqueue([SPAN])
    handle = current()
    assert handle is not None
    assert handle.flush()
    assert (handle.sent, handle.lost, handle.pending) == (1, 0, 0)
    [(headers, _)] = backend.requests
    assert (headers["path"], headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
    assert headers["authorization"] == "Bearer key"
    assert backend.spans() == [SPAN.replace(resource={"openinference.project.name": "desk"})]


@pytest.mark.parametrize("images", [True, False])
def test_images_of_an_app(backend: Backend, tmp_path: Path, images: bool) -> None:
    """Check the convention's `content` of a `blob`, which `lightspan import` reads."""
    data = base64.b64decode("R0lGODlhAgADAIAAAAAAAP///yH5BAAAAAAALAAAAAACAAMAAAIDhB8FADs=")
    url = f"data:image/gif;base64,{base64.b64encode(data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    exporter = OTLPSpanExporter(endpoint=f"{backend.url}/v1/traces")
    with (
        otel.send(exporter, images=images) as handle,
        ScriptedServer("a picture") as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        lightspan.record(f"sqlite:{tmp_path / 'app.db'}") as recording,
    ):
        client.chat.completions.create(model="m", messages=messages)
        assert recording.flush()
        assert handle.flush()
    [span] = [span for span in backend.spans() if span.kind is SpanKind.LLM]
    [_, blob] = json.loads(str(span.attributes[c.INPUT_MESSAGES]))[0]["parts"]
    assert blob == {
        "type": "blob",
        "modality": "image",
        "mime_type": "image/gif",
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **({"content": base64.b64encode(data).decode()} if images else {}),
    }
    [(headers, body)] = backend.requests
    arrivals = [
        normalized_arrival(each) for each in decode_request(body, headers["content-type"]).arrivals
    ]
    found = [image.data for arrival in arrivals for image in arrival.images]
    assert found == [data] * images


def test_images_are_references_while_many_spans_wait(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the memory that images may take while the backend does not answer."""
    monkeypatch.setattr(module, "_MAX_WAITING_IMAGES", 2)
    image = Image.of(b"GIF8", "image/gif")
    messages = f'[{{"role":"user","parts":[{{"type":"blob","sha256":"{image.digest}"}}]}}]'
    span = SPAN.replace(attributes={c.INPUT_MESSAGES: messages})
    backend.held.clear()
    with otel.send(OTLPSpanExporter(endpoint=backend.url), images=True) as handle:
        handle.enqueue([span] * 3, [image])
        backend.held.set()
        assert handle.flush()
    texts = [str(each.attributes[c.INPUT_MESSAGES]) for each in backend.spans()]
    assert ["content" in text for text in texts] == [True, True, False]


def test_a_text_that_is_no_message_is_sent_as_it_is(backend: Backend) -> None:
    """A hook of the user may cut the messages of a span."""
    image = Image.of(b"GIF8", "image/gif")
    cut = f'[{{"role":"user","parts":[{{"type":"blob","sha256":"{image.digest}"}}'
    with otel.send(OTLPSpanExporter(endpoint=backend.url), images=True) as handle:
        handle.enqueue([SPAN.replace(attributes={c.INPUT_MESSAGES: cut})], [image])
        assert handle.flush()
    [span] = backend.spans()
    assert span.attributes[c.INPUT_MESSAGES] == cut


def test_a_wrong_switch_of_images_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", "http://127.0.0.1:4318")
    monkeypatch.setenv("LIGHTSPAN_OTLP_IMAGES", "yes")
    with pytest.raises(ConfigError, match="LIGHTSPAN_OTLP_IMAGES='yes': give 1 to send images"):
        module.check()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of lightspan's loggers."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("lightspan")
    ]


def test_failed_batches_are_counted(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", f"{backend.url}/?api_key=TOPSECRET")
    backend.reply = lambda number: (401, {}, b"<html>")
    enqueue([SPAN] * 300)
    handle = current()
    assert handle is not None
    assert handle.flush()
    handle.close()
    assert (handle.sent, handle.lost) == (0, 300)
    assert warnings(caplog) == [f"lightspan: 300 spans were not sent to {backend.url}/v1/traces"]


class Stuck(SpanExporter):
    """An exporter that blocks until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.released.wait(60)
        self.spans += len(spans)
        return SpanExportResult.SUCCESS


def test_spans_that_the_backend_rejects_are_counted(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """Check OTLP's partial success, which has the status 200."""
    backend.reply = lambda number: (200, {}, encode_answer(PROTOBUF, ["no such attempt"]))
    exporter = OTLPSpanExporter(endpoint=f"{backend.url}/v1/traces")
    with otel.send(exporter) as handle, caplog.at_level(logging.WARNING):
        handle.enqueue([SPAN, SPAN])
        assert handle.flush()
        handle.enqueue([SPAN])
        assert handle.flush()
        assert (handle.sent, handle.lost) == (1, 2)
    assert caplog.text.count("OTLPSpanExporter rejected 1 spans: no such attempt") == 1


def test_a_full_queue_drops_and_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUE_SIZE", 300)
    exporter = Stuck()
    with otel.send(exporter) as handle:
        for _ in range(50):
            enqueue([SPAN] * 100)  # returns, whatever the exporter does
        assert (handle.pending, handle.lost) == (300, 4_700)
        [once] = warnings(caplog)
        assert "are dropped: the queue is full (300 spans)" in once
        exporter.released.set()
        assert handle.flush()
    assert (handle.sent, handle.lost, exporter.spans) == (300, 4_700, 300)
    assert warnings(caplog)[1:] == ["lightspan: 4700 spans were not sent to Stuck"]


def test_close_does_not_wait_for_a_stuck_exporter() -> None:
    exporter = Stuck()
    handle = otel.send(exporter)
    enqueue([SPAN] * 600)
    handle.close(timeout_s=0.5)
    enqueue([SPAN])  # dropped: no exporter is left
    handle.enqueue([SPAN])
    assert (handle.sent, handle.lost, handle.pending) == (0, 601, 0)
    exporter.released.set()
    handle.close()


class Failing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("boom")


def test_an_exporter_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    with otel.send(Failing()) as handle:
        enqueue([SPAN])
        assert handle.flush()
    assert (handle.sent, handle.lost) == (0, 1)
    assert "RuntimeError('boom')" in warnings(caplog)[0]


@pytest.mark.parametrize("odd", [InMemorySpanExporter, "otlp", None])
def test_what_is_no_exporter(odd: Any) -> None:
    with pytest.raises(ConfigError, match="give an exporter of OpenTelemetry's SDK"):
        otel.send(odd)


def test_one_exporter_at_once() -> None:
    with otel.send(InMemorySpanExporter()), pytest.raises(ConfigError, match="already"):
        otel.send(InMemorySpanExporter())


@pytest.mark.parametrize(
    "url", ["localhost:4318", "grpc://a", "http://", "http://[::1", "http://a:b"]
)
def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", url)
    with pytest.raises(ConfigError, match="give a URL such as"):
        lightspan.record(f"sqlite:{tmp_path / 'a.db'}")
    enqueue([SPAN])  # never into the app


@pytest.mark.parametrize("url", ["http://user:TOPSECRET@host/", "grpc://user:TOPSECRET@host"])
def test_what_is_wrong_is_told_without_keys(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", url)
    with pytest.raises(ConfigError, match="LIGHTSPAN_OTLP") as caught:
        current()
    assert "SECRET" not in str(caught.value)


def test_a_missing_exporter_is_told_when_recording_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("LIGHTSPAN_OTLP", "http://127.0.0.1:1/")
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry's OTLP exporter .*core\[otel\]"):
        lightspan.record(f"sqlite:{tmp_path / 'a.db'}")


def test_the_end_of_a_process_sends_its_last_attempts(backend: Backend, tmp_path: Path) -> None:
    code = (
        "import lightspan\nfrom lightspan.production.record import hold\nhold('test')\n"
        "with lightspan.agent('writer'):\n    lightspan.emit_reward(0.5)\n"
    )
    wanted = {"LIGHTSPAN_OTLP": backend.url, "LIGHTSPAN_STORE": f"sqlite:{tmp_path / 'a.db'}"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **wanted}, check=True)
    assert SpanKind.REWARD in {span.kind for span in backend.spans()}


FORKED = """
import multiprocessing, os, sys
import lightspan
from lightspan.production.record import hold

def work(name):
    with lightspan.agent(name):
        lightspan.emit_reward(0.5)

if __name__ == "__main__":
    hold("test")
    work("parent")
    child = os.fork()
    if child == 0:
        work("forked")
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    process = multiprocessing.get_context("fork").Process(target=work, args=("process",))
    process.start()
    process.join()
    assert process.exitcode == 0
    work("parent again")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_children_of_a_fork_send_what_they_do(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(FORKED)
    wanted = {"LIGHTSPAN_OTLP": backend.url, "LIGHTSPAN_STORE": f"sqlite:{tmp_path / 'a.db'}"}
    environment = {**os.environ, **wanted}
    subprocess.run([sys.executable, tmp_path / "app.py"], env=environment, check=True)
    paths = [s.attributes[c.AGENT_PATH] for s in backend.spans() if s.kind is SpanKind.REWARD]
    assert sorted(map(str, paths)) == ["forked", "parent", "parent again", "process"]


# --- whose spans they are -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "given", "service"),
    [
        ({}, None, "unknown_service"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=de%20sk,team=a"}, None, "de sk"),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=desk", "OTEL_SERVICE_NAME": "shop"},
            None,
            "shop",
        ),
        ({"OTEL_SERVICE_NAME": "shop"}, "code", "code"),
    ],
)
def test_the_service_of_production_is_what_the_user_says(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    given: str | None,
    service: str,
) -> None:
    """OpenTelemetry's precedence: code, OTEL_SERVICE_NAME, resource attributes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    with otel.send(exporter) as handle:
        with lightspan.record(f"sqlite:{tmp_path / 'a.db'}", service=given) as recording:
            with lightspan.agent("writer"):
                pass
            assert recording.flush()
        assert handle.flush()
    for span in exporter.get_finished_spans():
        more = {"team": "a"} if "team" in str(environment) else {}
        assert dict(span.resource.attributes) == {"service.name": service, **more}


# --- whose spans are sent ---------------------------------------------------------------------
def run_app(url: str, **more: Any) -> None:
    messages: Any = [{"role": "user", "content": "Where?"}]
    with (
        ScriptedServer("Here.") as server,
        openai.OpenAI(base_url=server.url, api_key="key") as client,
        lightspan.record(url, service="desk", **more) as recording,
    ):
        with lightspan.agent("writer"):
            client.chat.completions.create(model="m", messages=messages)
            lightspan.emit_reward(0.5)
        assert recording.flush()


def test_production_is_sent_as_it_is_kept(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_app(f"sqlite:{tmp_path / 'off.db'}")
    assert current() is None  # off by default
    monkeypatch.setenv("LIGHTSPAN_OTLP", f"{backend.url}/own/path")
    run_app(f"sqlite:{tmp_path / 'on.db'}")
    handle = current()
    assert handle is not None
    assert handle.flush()
    assert {headers["path"] for headers, _ in backend.requests} == {"/own/path"}
    by_kind = {span.kind: span for span in backend.spans()}
    call = by_kind[SpanKind.LLM]
    assert (call.attributes[c.AGENT_PATH], call.resource["service.name"]) == ("writer", "desk")
    assert "Where?" in str(call.attributes[c.INPUT_MESSAGES])
    assert by_kind[SpanKind.REWARD].attributes[c.REWARD_VALUE] == 0.5
    assert by_kind[SpanKind.AGENT].span_id == call.parent_id


def test_user_session_and_tags_are_sent_under_their_usual_names() -> None:
    values: dict[str, Any] = {"user": "u7", "session": "s1", "tags": ["beta", "eu"], "other": 1}
    span = SPAN.replace(attributes={c.ANNOTATION + key: value for key, value in values.items()})
    attributes = dict(to_otel(span).attributes or {})
    assert (attributes["user.id"], attributes["session.id"]) == ("u7", "s1")
    assert attributes["tag.tags"] == attributes["langfuse.trace.tags"] == ("beta", "eu")


def test_a_redacted_span_is_sent_redacted(tmp_path: Path) -> None:
    def hide(span: Any) -> Any:
        return lightspan.map_text(span, lambda text: text.replace("Where", "***"))

    exporter = InMemorySpanExporter()
    with otel.send(exporter) as handle:
        run_app(f"sqlite:{tmp_path / 'a.db'}", redact=hide)
        assert handle.flush()
    sent = str([dict(span.attributes or {}) for span in exporter.get_finished_spans()])
    assert "***?" in sent
    assert "Where" not in sent
