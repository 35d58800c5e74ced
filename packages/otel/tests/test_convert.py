"""Tests of the span processor and of OTLP, with the real SDK."""

from __future__ import annotations

from collections.abc import Sequence

import openai
import pytest
from hypothesis import given, strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import lightspan
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.errors import DataError, LightspanError
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind, SpanLink, SpanStatus, now_ns
from lightspan_otel.convert import (
    LightspanSpanProcessor,
    decode_otlp,
    encode_otlp,
    export,
    from_otel,
)
from lightspan_testing.attempts import read_recorded

FULL = Span(
    span_id="00f067aa0ba902b7",
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    parent_id="00f067aa0ba902b8",
    name="chat gpt",
    kind=SpanKind.LLM,
    rollout_id="ro-1",
    attempt_id="at-1",
    start_ns=1_000_000_001,
    end_ns=2_000_000_003,
    status=SpanStatus.ERROR,
    status_message="boom",
    attributes={
        "text": "Größe 日本",
        "flag": True,
        "number": 7,
        "real": 0.25,
        "texts": ["a", "b"],
        "flags": [True, False],
        "numbers": [1, 2],
        "reals": [0.5, 1.5],
    },
    events=[SpanEvent("event", 1_500_000_000, {"n": 1})],
    links=[SpanLink("4bf92f3577b34da6a3ce929d0e0e4737", "00f067aa0ba902b9", {"why": "reward"})],
    resource={"service.name": "app"},
    sequence_start=3,
    sequence_end=4,
    late=True,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(TEXT, min_size=1, max_size=3),
    st.lists(st.integers(-9, 9), min_size=1, max_size=3),
)
KEYS = st.text("abcdefgh.", min_size=1, max_size=8)


def test_otlp_keeps_every_field() -> None:
    assert decode_otlp(encode_otlp([FULL])) == [FULL]


@given(
    attributes=st.dictionaries(KEYS, VALUES, max_size=5),
    kind=st.sampled_from(SpanKind),
    status=st.sampled_from(SpanStatus),
    sequence=st.none() | st.integers(0, 10),
    name=TEXT,
)
def test_otlp_round_trip(
    attributes: dict[str, str], kind: SpanKind, status: SpanStatus, sequence: int | None, name: str
) -> None:
    span = Span(
        span_id="00f067aa0ba902b7",
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        name=name,
        kind=kind,
        status=status,
        attributes=attributes,
        sequence_start=sequence,
        sequence_end=sequence,
    )
    assert decode_otlp(encode_otlp([span])) == [span]


def test_bytes_that_are_no_otlp_are_refused() -> None:
    with pytest.raises(DataError, match="no OTLP protobuf"):
        decode_otlp(b"\xff\xff\xff")


def test_export_sends_in_batches() -> None:
    exporter = InMemorySpanExporter()
    spans = [FULL.replace(span_id=f"{n:016x}") for n in range(1, 6)]
    assert export(spans, exporter, batch_size=2) == 5
    assert [from_otel(span) for span in exporter.get_finished_spans()] == spans


class _Failing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_a_failing_exporter_is_an_error() -> None:
    with pytest.raises(LightspanError, match="failed after 0 spans"):
        export([FULL], _Failing())


def test_processor_keeps_the_spans_of_a_scope_under_the_acting_agent() -> None:
    provider = TracerProvider()
    provider.add_span_processor(LightspanSpanProcessor())
    tracer = provider.get_tracer("app")
    scope = AttemptContext(rollout_id="ro", attempt_id="at", root_span_id="00000000000000aa")
    with tracer.start_as_current_span("outside"):
        pass
    tool = {c.OPENINFERENCE_KIND: "TOOL"}
    with (
        open_scope(scope),
        lightspan.agent("writer"),
        tracer.start_as_current_span("outer"),
        tracer.start_as_current_span("inner", attributes=tool),
    ):
        pass
    inner, outer, agent = scope.recorder.drain()
    assert [inner.name, outer.name, agent.name] == ["inner", "outer", "invoke_agent writer"]
    assert (inner.kind, outer.kind) == (SpanKind.TOOL, SpanKind.OTHER)
    assert (inner.parent_id, outer.parent_id, agent.parent_id) == (
        outer.span_id,
        agent.span_id,
        "00000000000000aa",
    )
    assert {span.attempt_id for span in (inner, outer, agent)} == {"at"}
    assert inner.attributes[c.AGENT_PATH] == "writer"
    provider.shutdown()


def test_a_call_that_the_processor_sees_too_counts_once(client: openai.OpenAI, url: str) -> None:
    """Check spans around the recorded call and after it, and the span of another call."""
    provider = TracerProvider()
    provider.add_span_processor(LightspanSpanProcessor())
    tracer = provider.get_tracer("app")
    llm = {c.OPENINFERENCE_KIND: "LLM"}
    with record(url), lightspan.operation("request"):
        start = now_ns()
        with tracer.start_as_current_span("around", attributes=llm):
            client.responses.create(model="m", input="hi")
        tracer.start_span("after", start_time=start, attributes=llm).end()
        tracer.start_span("another", attributes=llm).end()
    provider.shutdown()
    [recorded] = read_recorded(url)
    kinds = {span.name: span.kind for span in recorded.spans}
    assert (kinds["around"], kinds["after"]) == (SpanKind.CHAIN, SpanKind.CHAIN)
    assert [call.name for call in recorded.calls] == ["chat m", "another"]
