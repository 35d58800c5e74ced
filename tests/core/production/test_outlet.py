"""Spans sent to a backend: what arrives, and that nobody waits for a backend that fails."""

from __future__ import annotations

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
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.core.production.backend import Backend

import lightspan
from lightspan import otel
from lightspan.capture import wire
from lightspan.errors import ConfigError
from lightspan.otel.otlp import JSON, PROTOBUF
from lightspan.production import outlet as module
from lightspan.production.otlp_sender import OtlpSender
from lightspan.production.outlet import Outlet, put
from lightspan.schema import conventions as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind, SpanLink, SpanStatus
from lightspan.testing.scripted import ScriptedServer

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
    made = Backend()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "PAUSES_S", (0.0,) * 5)
    yield
    wire.uninstall()
    module._close()
    module._State.by_environment = None
    module._State.lost = 0


@pytest.mark.parametrize(("protocol", "kind"), [("http/json", JSON), ("http/protobuf", PROTOBUF)])
def test_what_is_sent(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, protocol: str, kind: str
) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", backend.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "openinference.project.name=desk")
    put([SPAN])
    outlet = module.current()
    assert outlet is not None
    assert outlet.flush()
    assert (outlet.sent, outlet.lost) == (1, 0)
    [(headers, body)] = backend.requests
    assert (headers["path"], headers["content-type"]) == ("/v1/traces", kind)
    assert headers["authorization"] == "Bearer key"
    assert backend.spans() == [SPAN.replace(resource={"openinference.project.name": "desk"})]
    if kind == PROTOBUF:
        [sent] = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
        assert sent.span_id.hex() == SPAN.span_id
        return
    [told] = json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ids = (told["traceId"], told["spanId"], told["parentSpanId"])
    assert ids == (SPAN.trace_id, SPAN.span_id, SPAN.parent_id)
    assert told["links"][0]["spanId"] == SPAN.links[0].span_id
    assert (told["kind"], told["status"]["code"]) == (3, 2)


def sent_to(backend: Backend, *, count: int = 1, timeout_s: float = 30.0) -> tuple[int, int]:
    """How many spans have arrived, and how many never will."""
    outlet = Outlet(OtlpSender(f"{backend.url}/v1/traces", timeout_s=timeout_s), backend.url)
    outlet.put([SPAN] * count)
    assert outlet.flush()
    outlet.close()
    return outlet.sent, outlet.lost


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_may_be_sent_again_is(
    backend: Backend, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    backend.reply = lambda number: (
        (200, {}, b"") if number > 2 else (status, {"Retry-After": "0"}, b"")
    )
    assert sent_to(backend) == (1, 0)
    assert len(backend.requests) == 3
    [once] = told(caplog)
    assert f"spans do not get to {backend.url}: it answered {status} " in once


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (401, 1), (500, 1), (302, 1), (503, 6)])
def test_what_is_refused_is_counted_and_told_of_once(
    backend: Backend, caplog: pytest.LogCaptureFixture, status: int, tries: int
) -> None:
    """A redirect is not followed: the key in the headers is for nobody else."""
    backend.reply = lambda number: (status, {"Location": "http://127.0.0.1:9/"}, b"<html>")
    assert sent_to(backend, count=300) == (0, 300)
    assert len(backend.requests) == 2 * tries
    first, last = told(caplog)
    assert f"it answered {status}" in first
    assert last == f"lightspan: 300 spans did not get to {backend.url}"


def test_spans_that_a_backend_leaves_out_are_counted(backend: Backend) -> None:
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 2
    backend.reply = lambda number: (200, {}, answer.SerializeToString())
    assert sent_to(backend, count=3) == (1, 2)


def test_garbage_with_200_is_yes(backend: Backend) -> None:
    backend.reply = lambda number: (200, {}, b"\xff<html>")
    assert sent_to(backend) == (1, 0)


def test_a_backend_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend()
    backend.close()
    assert sent_to(backend) == (0, 1)
    assert len(told(caplog)) == 2


def test_a_backend_that_is_down_is_told_of_once_however_often_it_is_sent_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Backend()
    backend.close()
    outlet = Outlet(OtlpSender(f"{backend.url}/v1/traces"), backend.url)
    for _ in range(8):
        outlet.put([SPAN])
        assert outlet.flush()
    outlet.close()
    once, last = told(caplog)
    assert f"spans do not get to {backend.url}" in once
    assert last == f"lightspan: 8 spans did not get to {backend.url}"


def test_what_is_offered_is_taken_whole_or_not_at_all(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 4)
    backend.held.clear()
    outlet = Outlet(OtlpSender(f"{backend.url}/v1/traces"), backend.url)
    outlet.begin()
    assert outlet.offer([SPAN] * 9)  # more than there is ever room for, and nothing waits
    while outlet._queue:  # until it is on its way
        threading.Event().wait(0.01)
    assert outlet.offer([SPAN] * 3)
    assert not outlet.has_room
    assert not outlet.offer([SPAN] * 2)
    assert outlet.offer([SPAN])
    assert (outlet.unsent, outlet.lost) == (13, 0)
    backend.held.set()
    assert outlet.flush()
    outlet.close()
    assert (outlet.sent, outlet.lost, outlet.unsent) == (13, 0, 0)
    assert outlet.offer([SPAN])
    assert outlet.lost == 1  # it was closed


def test_a_backend_that_does_not_answer_fills_a_queue_that_is_bounded(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 300)
    backend.held.clear()
    outlet = Outlet(OtlpSender(f"{backend.url}/v1/traces"), backend.url)
    for _ in range(50):
        outlet.put([SPAN] * 100)  # returns, whatever the backend does
    assert len(outlet._queue) <= 300
    [once] = told(caplog)
    assert "the queue is full" in once
    backend.held.set()
    assert outlet.flush()
    outlet.close()
    assert outlet.sent + outlet.lost == 5_000
    assert 300 <= outlet.sent <= 900


class Failing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise RuntimeError("boom")


def test_an_exporter_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    with otel.send(Failing()) as sending:
        put([SPAN])
        assert sending.flush()
    assert (sending.sent, sending.lost) == (0, 1)
    assert "RuntimeError('boom')" in told(caplog)[0]


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
    put([SPAN])  # never into the app


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHTSPAN_OTLP", "http://user:TOPSECRET@host/"),
        ("LIGHTSPAN_OTLP", "grpc://user:TOPSECRET@host"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20TOP%0ASECRET"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=TOPSECRET%E2%82%AC"),
        *[("OTEL_EXPORTER_OTLP_TIMEOUT", each) for each in ("nan", "0", "-1", "inf")],
    ],
)
def test_what_is_wrong_is_told_without_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("LIGHTSPAN_OTLP", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name) as caught:
        module.current()
    assert "SECRET" not in str(caught.value)


def test_all_text_of_a_span_counts() -> None:
    event = SpanEvent("e", 1, {"a": "x" * 1_000})
    span = SPAN.replace(
        attributes={"many": ["x" * 1_000]}, events=[event], status_message="x" * 1_000
    )
    assert module._size(span) == 3_308


def test_a_child_of_a_fork_sends_by_itself() -> None:
    with otel.send(InMemorySpanExporter()):
        held = threading.Lock()
        module._State.lock, before = held, module._State.lock
        explicit = module._State.explicit
        held.acquire()
        module._after_fork()  # what a child calls, somebody else holding the lock
        with otel.send(InMemorySpanExporter()) as sending:
            put([SPAN])
            assert sending.flush()
        assert sending.sent == 1
        module._State.lock, module._State.explicit = before, explicit


def test_a_thread_that_could_not_start_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outlet = Outlet(module.ExporterSender(InMemorySpanExporter()), "memory")

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        outlet.put([SPAN])
    outlet.put([SPAN])
    assert outlet.flush()
    outlet.close()
    assert (outlet.sent, outlet.lost) == (2, 0)
    assert "can't start new thread" in told(caplog)[0]


def test_an_address_that_becomes_wrong_costs_the_store_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(module, "current", fail)
    put([SPAN])  # never into the app, nor between an attempt and its store
    put([SPAN, SPAN])
    assert module.offer([SPAN])
    assert told(caplog) == ["lightspan: spans could not be sent: RuntimeError"]
    module._close()
    assert told(caplog)[1:] == [
        "lightspan: 4 spans could not be sent, nor handed to who sends them"
    ]


def test_an_encoder_that_cannot_be_imported_is_told_when_recording_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the packages of an app do not fit each other, say."""
    monkeypatch.setitem(sys.modules, "google.protobuf.json_format", None)
    monkeypatch.setenv("LIGHTSPAN_OTLP", "http://127.0.0.1:1/")
    with pytest.raises(ConfigError, match=r"json_format cannot be imported .*pip install"):
        lightspan.record(f"sqlite:{tmp_path / 'a.db'}")


def test_a_query_is_not_told() -> None:
    assert OtlpSender("http://h:1/v1/traces?api_key=TOPSECRET").place == "http://h:1/v1/traces"


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
    """As OpenTelemetry has it: what code says, then OTEL_SERVICE_NAME, then the attributes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter = InMemorySpanExporter()
    with otel.send(exporter) as sending:
        with lightspan.record(f"sqlite:{tmp_path / 'a.db'}", service=given) as recording:
            with lightspan.agent("writer"):
                pass
            assert recording.flush()
        assert sending.flush()
    for span in exporter.get_finished_spans():
        more = {"team": "a"} if "team" in str(environment) else {}
        assert dict(span.resource.attributes) == {"service.name": service, **more}


# --- whose spans are sent ---------------------------------------------------------------------
def run_app(url: str) -> None:
    asked: Any = [{"role": "user", "content": "Where?"}]
    with (
        ScriptedServer("Here.") as server,
        openai.OpenAI(base_url=server.url, api_key="key") as client,
        lightspan.record(url, service="desk") as recording,
    ):
        with lightspan.agent("writer"):
            client.chat.completions.create(model="m", messages=asked)
            lightspan.emit_reward(0.5)
        assert recording.flush()


def test_production_is_sent_as_it_is_kept(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_app(f"sqlite:{tmp_path / 'off.db'}")
    assert module.current() is None  # off by default
    monkeypatch.setenv("LIGHTSPAN_OTLP", f"{backend.url}/own/path")
    run_app(f"sqlite:{tmp_path / 'on.db'}")
    outlet = module.current()
    assert outlet is not None
    assert outlet.flush()
    assert {headers["path"] for headers, _ in backend.requests} == {"/own/path"}
    by_kind = {span.kind: span for span in backend.spans()}
    call = by_kind[SpanKind.LLM]
    assert (call.attributes[c.AGENT_PATH], call.resource["service.name"]) == ("writer", "desk")
    assert "Where?" in str(call.attributes[c.INPUT_MESSAGES])
    assert by_kind[SpanKind.REWARD].attributes[c.REWARD_VALUE] == 0.5
    assert by_kind[SpanKind.AGENT].span_id == call.parent_id


def test_a_redacted_span_is_sent_redacted(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    asked: Any = [{"role": "user", "content": "secret"}]
    with (
        otel.send(exporter) as sending,
        ScriptedServer("Here.") as server,
        openai.OpenAI(base_url=server.url, api_key="key") as client,
        lightspan.record(
            f"sqlite:{tmp_path / 'a.db'}",
            redact=lambda span: lightspan.map_text(
                span, lambda text: text.replace("secret", "***")
            ),
        ) as recording,
    ):
        client.chat.completions.create(model="m", messages=asked)
        assert recording.flush()
        assert sending.flush()
    [span] = exporter.get_finished_spans()
    said = str(dict(span.attributes or {}))
    assert "***" in said
    assert "secret" not in said
