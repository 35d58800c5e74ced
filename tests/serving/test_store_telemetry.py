"""Tests of OTLP over HTTP to a served store: stored attempts, permissions and errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import error as refused, request

import pytest
from google.rpc.status_pb2 import Status

import lightspan
from lightspan.algorithms.recorded_attempts import Query
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, RolloutStatus
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_otel.attribute_names import SPAN_KIND
from lightspan_testing.attempts import read_recorded
from lightspan_testing.store_suite import make_rollout
from lightspan_tools.inspect import inspect_store
from packages.gateway.tests.remote_store.served import KEYS, RUNNER, TRAINER, Served, serving

TRACER = "a-tracer-key-0123456789"
PROTOBUF, JSON = "application/x-protobuf", "application/json"
TRACE = "5b8efff798038103d269b633813fc60c"
ROOT, AGENT, CALL, TOOL = (
    "eee19b7ec3c1b174",
    "eee19b7ec3c1b175",
    "eee19b7ec3c1b176",
    "00000000000000aa",
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    keys = Keys({**KEYS, Role.TRACER: TRACER})
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), keys) as served:
        yield served


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.db'}"


def send(
    served: Served,
    body: bytes,
    kind: str = JSON,
    *,
    key: str = TRACER,
    packing: str = "",
    path: str = "/v1/traces",
) -> tuple[int, str, bytes]:
    """Send a request; return status, content type and body of the response."""
    headers = {"Content-Type": kind, "Authorization": f"Bearer {key}"}
    if packing:
        headers["Content-Encoding"] = packing
    http_request = request.Request(f"{served.url}{path}", data=body, headers=headers)
    try:
        with request.urlopen(http_request, timeout=30) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except refused.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]


def otlp_span(span_id: str, parent: str, name: str, at: int, **said: Any) -> dict[str, Any]:
    """Return a span as OTLP's JSON, with texts as attributes."""
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(1_700_000_000_000_000_000 + at),
        "endTimeUnixNano": str(1_700_000_000_000_000_900 + at),
        "attributes": attributes(said),
        "status": {},
    }


def body(*spans: dict[str, Any], service: str = "desk") -> bytes:
    scope = {"scope": {"name": "a.framework"}, "spans": list(spans)}
    resource = {"attributes": attributes({"service.name": service})}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}).encode()


INVOKES = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}
SAID = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.input_messages.0.message.role": "user",
    "llm.input_messages.0.message.content": "Where?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Here.",
}
GIVEN = {"openinference.span.kind": "CHAIN", "input.value": '{"question": "Where?"}'}
LOOKS = {"openinference.span.kind": "TOOL", "tool.name": "look"}
SPANS = [
    otlp_span(ROOT, "", "desk", 0, **GIVEN),
    otlp_span(AGENT, ROOT, "invoke_agent writer", 1, **INVOKES),
    otlp_span(CALL, AGENT, "chat m", 2, **SAID),
    otlp_span(TOOL, AGENT, "look", 3, **LOOKS),
]


async def stored(url: str) -> tuple[Any, Any, list[Span]]:
    """Return the only rollout, its attempt and its spans."""
    async with open_store(url) as store:
        [state] = await store.rollouts(mode=Mode.PRODUCTION)
        [attempt] = await store.attempts([state.rollout.rollout_id])
        return state, attempt, (await store.spans([attempt.attempt_id]))[attempt.attempt_id]


def test_a_trace_is_an_attempt_of_its_service(served: Served, url: str) -> None:
    assert send(served, body(*SPANS)) == (200, JSON, b"{}")
    state, attempt, spans = asyncio.run(stored(url))
    assert (state.rollout.run_id, state.status) == ("desk", RolloutStatus.SUCCEEDED)
    assert (attempt.status, attempt.started_at) == (AttemptStatus.SUCCEEDED, 1_700_000_000.0)
    assert [span.span_id for span in spans] == [ROOT, AGENT, CALL, TOOL]
    assert {span.trace_id for span in spans} == {TRACE}
    assert [span.late for span in spans] == [False] * 4


@pytest.mark.parametrize(
    "batches",
    [[[span] for span in reversed(SPANS)], [SPANS[2:], SPANS[:2], SPANS, SPANS[1:3]]],
    ids=["children first", "repeated"],
)
def test_batches_in_any_order(served: Served, url: str, batches: list[Any]) -> None:
    for batch in batches:
        assert send(served, body(*batch)) == (200, JSON, b"{}")
    state, _, spans = asyncio.run(stored(url))
    assert sorted(span.span_id for span in spans) == sorted([ROOT, AGENT, CALL, TOOL])
    assert state.status is RolloutStatus.SUCCEEDED
    assert lightspan.tasks_from_store(url) == [{"question": "Where?"}]
    assert "calls by agent: writer 1" in inspect_store(url, query=Query())


def test_a_span_that_names_an_attempt_is_late_beside_it(served: Served, url: str) -> None:
    async def running() -> Any:
        async with open_store(url) as store:
            await store.enqueue([make_rollout("r1")])
            [claim] = await store.claim("runner", 1, 600.0)
            return claim.attempt

    async def found(attempt_id: str) -> list[Span]:
        async with open_store(url) as store:
            return (await store.spans([attempt_id]))[attempt_id]

    attempt = asyncio.run(running())
    named = otlp_span(CALL, "", "chat m", 2, **{c.ATTEMPT_ID: attempt.attempt_id})
    assert send(served, body(named)) == (200, JSON, b"{}")
    [spans] = asyncio.run(found(attempt.attempt_id))
    assert (spans.span_id, spans.late, spans.rollout_id) == (CALL, True, attempt.rollout_id)


def test_a_tracer_pays_nobody(served: Served, url: str) -> None:
    reward = {SPAN_KIND: "reward", c.REWARD_VALUE: "1.0"}
    paid = otlp_span(TOOL, ROOT, "lightspan.reward", 3, **reward)
    status, _, answer = send(served, body(SPANS[0], paid))
    assert status == 200
    assert json.loads(answer) == {
        "partialSuccess": {
            "rejectedSpans": "1",
            "errorMessage": "span 'lightspan.reward': a reward needs a trainer's key",
        }
    }
    assert send(served, body(paid), key=TRAINER) == (200, JSON, b"{}")
    _, _, spans = asyncio.run(stored(url))
    assert [span.kind for span in spans] == [SpanKind.CHAIN, SpanKind.REWARD]


def test_a_span_that_is_none_is_left_out_by_itself(served: Served, url: str) -> None:
    short = {**SPANS[1], "spanId": "eee1"}
    unknown = otlp_span(TOOL, "", "lost", 1, **{c.ATTEMPT_ID: "at-nobody"})
    status, kind, answer = send(served, body(SPANS[0], short, unknown))
    assert (status, kind) == (200, JSON)
    partial = json.loads(answer)["partialSuccess"]
    assert partial["rejectedSpans"] == "2"
    assert "its spanId is 'eee1', not 16 hex digits" in partial["errorMessage"]
    assert "at-nobody" in partial["errorMessage"]
    _, _, spans = asyncio.run(stored(url))
    assert [span.span_id for span in spans] == [ROOT]


@pytest.mark.parametrize(
    ("sent", "kind", "packing", "status", "said"),
    [
        (b"{", JSON, "", 400, "the body is no JSON"),
        (b"[]", JSON, "", 400, "an object, not list"),
        (body({**SPANS[0], "traceId": "xyz"}), JSON, "", 400, "traceId is 'xyz', not hexadecimal"),
        (b"\xff\xff\xff", PROTOBUF, "", 400, "no OTLP protobuf"),
        (b"{}", "text/plain", "", 415, "not 'text/plain'"),
        (b"no gzip", JSON, "gzip", 400, "gzip"),
        (b" " * (2**24 + 1), JSON, "", 413, "16,777,216 bytes"),
    ],
)
def test_what_is_refused(
    served: Served, sent: bytes, kind: str, packing: str, status: int, said: str
) -> None:
    answered = send(served, sent, kind, packing=packing)
    assert answered[0] == status
    if answered[1] == JSON:
        text = json.loads(answered[2])["message"]
    else:
        text = Status.FromString(answered[2]).message
    assert said in text


def test_a_bomb_is_never_held_whole(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a body of 256 MiB that is compressed to 256 KiB: only the limit is decompressed."""
    longest = []
    unpack = zlib.decompressobj

    class Spy:
        def __init__(self, *bits: int) -> None:
            self._inner = unpack(*bits)

        def decompress(self, data: bytes, most: int = 0) -> bytes:
            found = self._inner.decompress(data, most)
            longest.append(len(found))
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(zlib, "decompressobj", Spy)
    bomb = gzip.compress(b"\0" * 2**28)
    assert len(bomb) < 2**19
    assert send(served, bomb, packing="gzip")[0] == 413
    assert sum(longest) <= 2**24 + 1


def test_who_may_not(served: Served, url: str) -> None:
    status, _, answer = send(served, body(*SPANS), key=RUNNER)
    assert (status, json.loads(answer)["message"]) == (
        403,
        "the key's role is runner; only admin, tracer, trainer may send traces",
    )
    assert send(served, body(*SPANS), key="wrong")[0] == 401
    assert read_recorded(url) == []


def test_a_tracer_may_do_nothing_else(served: Served) -> None:
    for path in ("/store/v1/count", "/store/v1"):
        http_request = request.Request(
            served.url + path, headers={"Authorization": f"Bearer {TRACER}"}
        )
        with pytest.raises(refused.HTTPError) as caught, request.urlopen(http_request, timeout=30):
            pass
        with caught.value:
            assert caught.value.code in (403, 404)


def test_the_exporter_of_opentelemetry(served: Served, url: str) -> None:
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource({"service.name": "desk"}))
    exporter = OTLPSpanExporter(
        f"{served.url}/v1/traces",
        headers={"Authorization": f"Bearer {TRACER}"},
        compression=Compression.Gzip,
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("app")
    asks, calls = {"input.value": "Where?"}, {"gen_ai.operation.name": "chat"}
    with tracer.start_as_current_span("ask", attributes=asks):
        tracer.start_span("chat", attributes=calls).end()
    provider.shutdown()
    state, _, spans = asyncio.run(stored(url))
    assert [span.name for span in spans] == ["chat", "ask"]
    assert state.status is RolloutStatus.SUCCEEDED
    assert lightspan.tasks_from_store(url, service="desk") == ["Where?"]
