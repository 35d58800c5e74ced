"""Tests of importing files in every format, with errors and repetitions."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

import lightspan_otel as otel
from lightspan.errors import DataError
from lightspan.lightning.episode import build_episode
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import AttemptStatus, Mode
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.stores import open_store
from lightspan_otel.import_traces import Imported, import_file, read_file
from lightspan_otel.ingest import SENDER, gathered
from lightspan_otel.otlp import convert_ids
from lightspan_testing.strategies import make_attempt, make_rollout, make_span
from packages.otel.tests.trace_files import (
    AGENT,
    ASKED,
    AT,
    BLOBS,
    CALL,
    FRAME,
    LANGFUSE,
    OTLP,
    PHOENIX,
    ROOT,
    START,
    TOOL,
    TRACE,
    otlp_line,
    otlp_span,
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'production.db'}"


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def imported(url: str, path: Path, **more: Any) -> tuple[Imported, list[str]]:
    errors: list[str] = []

    async def run() -> Imported:
        async with open_store(url) as store:
            return await import_file(store, path, refuse=errors.append, **more)

    return asyncio.run(run()), errors


async def stored(url: str) -> list[tuple[Any, Any, list[Span]]]:
    """Return rollout, attempt and spans of each attempt."""
    async with open_store(url) as store:
        states = await store.rollouts(mode=Mode.PRODUCTION)
        attempts = await store.attempts([state.rollout.rollout_id for state in states])
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        return [
            (state, attempt, spans[attempt.attempt_id])
            for state, attempt in zip(states, attempts, strict=True)
        ]


def protobuf(*lines: str) -> list[bytes]:
    """Convert lines of OTLP's JSON to protobuf messages."""
    values = [json.loads(line) for line in lines]
    for value in values:
        for span in value["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            convert_ids(span)
    return [ParseDict(value, TracesData()).SerializeToString() for value in values]


def framed(*messages: bytes) -> bytes:
    """Return messages with length prefixes, as a collector writes them."""
    return b"".join(len(each).to_bytes(4, "big") + each for each in messages)


def lines(values: list[Any]) -> str:
    return "\n".join(map(json.dumps, values)) + "\n"


PIECES = [otlp_line(*OTLP[2:]), otlp_line(OTLP[0]), otlp_line(OTLP[1])]
FORMS: dict[str, str | bytes] = {
    "otlp.jsonl": "\n".join(PIECES),
    "otlp.json": json.dumps(json.loads(otlp_line(*OTLP)), indent=2),
    "otlp.jsonl.gz": gzip.compress("\n".join(PIECES).encode()),
    "otlp.bin": protobuf(otlp_line(*OTLP))[0],
    "collector.bin": framed(*protobuf(*PIECES)),
    "phoenix-page.json": json.dumps({"data": PHOENIX, "next_cursor": None}),
    "phoenix-otlp.json": json.dumps({"data": OTLP, "next_cursor": None}),
    "phoenix-traces.json": json.dumps([{"traceId": TRACE, "spans": PHOENIX}], indent=1),
    "phoenix.jsonl": lines(PHOENIX),
    "frame.jsonl": lines(FRAME),
    "langfuse-trace.json": json.dumps(LANGFUSE),
    "langfuse-traces.jsonl": lines([LANGFUSE]),
    "langfuse-observations.json": json.dumps({"data": LANGFUSE["observations"], "meta": {}}),
    "langfuse-blobs.jsonl": lines(BLOBS),
}


def test_siblings_of_two_libraries_are_one_call() -> None:
    """Check spans of one call, one made after the answer, beside a call of equal shape."""
    plain = {c.OPERATION_NAME: "chat", c.REQUEST_MODEL: "m", c.INPUT_TOKENS: 1, c.OUTPUT_TOKENS: 2}
    theirs = {**plain, c.OPENINFERENCE_KIND: "LLM"}
    spans = [
        make_span(
            f"{number:016x}",
            SpanKind.OTHER if number == 170 else SpanKind.LLM,
            parent_id=None if number == 170 else f"{170:016x}",
            name=f"span {number}",
            start_ns=START + begin,
            end_ns=START + end,
            attributes=attributes,
        )
        for number, begin, end, attributes in (
            (170, 0, 100, {}),
            (1, 10, 40, {**plain, c.RESPONSE_ID: "resp_1"}),
            (2, 11, 39, theirs),
            (3, 20, 60, theirs),
            (4, 70, 90, plain),
        )
    ]
    attempt = msgspec.structs.replace(make_attempt("1"), runner_id=SENDER)
    _, settled = gathered(make_rollout("1"), attempt, spans)
    calls = [span.name for span in settled if span.kind is SpanKind.LLM]
    assert sorted(calls) == ["span 1", "span 3", "span 4"]


def test_nested_spans_of_calls() -> None:
    """Check nested calls with a tool and an agent between, and nested spans of one call.

    An inner span without messages is not the call, unless no other has some.
    """
    full = {c.OPERATION_NAME: "chat", c.OUTPUT_MESSAGES: "[]"}
    bare = {c.OPERATION_NAME: "chat"}
    llm, other = SpanKind.LLM, SpanKind.CHAIN
    rows: list[tuple[int, int | None, SpanKind, dict[str, Any]]] = [
        *((1, None, SpanKind.AGENT, {}), (2, 1, llm, full), (3, 2, SpanKind.TOOL, {})),
        *((4, 3, SpanKind.AGENT, {}), (5, 4, llm, full), (6, 5, other, {}), (7, 6, llm, full)),
        *((8, 1, llm, full), (9, 8, llm, bare), (10, 1, llm, bare), (11, 10, llm, bare)),
        *((12, 1, llm, full), (13, 12, llm, bare), (14, 12, llm, full)),
    ]
    spans = [
        make_span(
            f"{number:016x}",
            kind,
            parent_id=None if parent is None else f"{parent:016x}",
            start_ns=START + number,
            end_ns=START + 99,
            attributes={**attributes, **({c.CALL_ID: f"c-{number}"} if kind is llm else {})},
        )
        for number, parent, kind, attributes in rows
    ]
    attempt = msgspec.structs.replace(make_attempt("1"), runner_id=SENDER)
    rollout, settled = gathered(make_rollout("1"), attempt, spans)
    calls = build_episode(attempt, rollout, settled, []).calls
    assert sorted(call.call_id for call in calls) == sorted(
        f"c-{number}" for number in (2, 7, 8, 11, 13, 14)
    )


@pytest.mark.parametrize("name", FORMS)
def test_each_form_says_the_same(tmp_path: Path, url: str, name: str) -> None:
    done, errors = imported(url, write(tmp_path / name, FORMS[name]), service="desk")
    scores = 1 if name.startswith("langfuse-trace") else 0
    assert (done, errors) == (Imported(4, 1, 0, 0, scores), [])
    [(state, attempt, spans)] = asyncio.run(stored(url))
    assert (state.rollout.run_id, attempt.status) == ("desk", AttemptStatus.SUCCEEDED)
    assert attempt.started_at == START / 1e9
    rollout, settled = gathered(state.rollout, attempt, spans)
    assert rollout.task == {"question": "Where?"}
    by_id = {span.span_id: span for span in settled}
    assert {key: (span.parent_id, span.kind) for key, span in by_id.items()} == {
        ROOT: (None, SpanKind.CHAIN),
        AGENT: (ROOT, SpanKind.AGENT),
        CALL: (AGENT, SpanKind.LLM),
        TOOL: (AGENT, SpanKind.TOOL),
    }
    said = by_id[CALL].attributes
    assert genai_messages.input_messages_of(said) == ASKED
    assert [each["content"] for each in genai_messages.output_messages_of(said)] == ["Here."]
    assert (said[c.AGENT_PATH], said[c.REQUEST_MODEL]) == ("writer", "m")
    assert by_id[TOOL].attributes[c.TOOL_NAME] == "look"


@pytest.mark.parametrize(
    "name", ["otlp.jsonl", "collector.bin", "frame.jsonl", "langfuse-blobs.jsonl"]
)
def test_a_second_import_doubles_nothing(tmp_path: Path, url: str, name: str) -> None:
    path = write(tmp_path / name, FORMS[name])
    first = imported(url, path)
    once = asyncio.run(stored(url))
    done, errors = first
    assert done.earlier == 0
    assert imported(url, path) == (done._replace(earlier=done.attempts), errors)
    twice = asyncio.run(stored(url))
    assert [(s.rollout, a.attempt_id, spans) for s, a, spans in twice] == [
        (s.rollout, a.attempt_id, spans) for s, a, spans in once
    ]


def test_a_bad_line_is_told_of_and_the_others_are_kept(tmp_path: Path, url: str) -> None:
    bad = json.loads(otlp_line(OTLP[3]))
    bad["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "12"
    written = [
        PIECES[0].replace(TOOL, "00000000000000ab"),
        "",
        PIECES[1][:40],
        json.dumps({"logs": []}),
        "3",
        json.dumps(bad),
        json.dumps({**PHOENIX[1], "start_time": "soon"}),
        PIECES[1],
        json.dumps({**LANGFUSE, "observations": [{"type": "WISH", "name": "odd"}]}),
    ]
    done, errors = imported(url, write(tmp_path / "bad.jsonl", "\n".join(written)))
    assert [error[:59] for error in errors] == [
        "line 3: no JSON: Unterminated string starting at: column 34",
        "line 4: it has no spans: neither OTLP JSON (resourceSpans),",
        "line 5: it has no spans: neither OTLP JSON (resourceSpans),",
        "line 6: span 'look': its spanId is '12', not 16 hex digits",
        "line 7: span 'writer': its start time is 'soon': give ISO 8",
        "line 9: span 'odd': its type is 'WISH', which is not known",
    ]
    assert errors[1].endswith("; it has logs")
    assert errors[2].endswith("; it is of int")
    assert done == Imported(3, 1, 0, 6, 1)


def test_a_file_that_was_cut_short_goes_on(tmp_path: Path, url: str) -> None:
    """Complete lines are imported, and importing the whole file adds the rest."""
    whole = framed(*protobuf(*PIECES))
    path = write(tmp_path / "traces.bin", whole[:-3])
    done, errors = imported(url, path)
    size = len(protobuf(PIECES[2])[0])
    assert errors == [f"message 3: the file ends in it: {size:,} bytes were to come"]
    assert done == Imported(3, 1, 0, 1, 0)
    assert imported(url, write(path, whole)) == (Imported(4, 1, 0, 0, 0, earlier=1), [])
    [(_, _, spans)] = asyncio.run(stored(url))
    assert sorted(span.span_id for span in spans) == sorted([ROOT, AGENT, CALL, TOOL])


def test_a_trace_without_its_beginning_stays_running(tmp_path: Path, url: str) -> None:
    done, errors = imported(url, write(tmp_path / "t.jsonl", PIECES[0]))
    assert (done, errors) == (Imported(2, 1, 1, 0, 0), [])
    [(_, attempt, _)] = asyncio.run(stored(url))
    assert attempt.status is AttemptStatus.RUNNING


def test_a_span_of_an_attempt_that_the_store_does_not_know(tmp_path: Path, url: str) -> None:
    """A trace of lightspan goes back into its own store only."""
    ours = Span(span_id=ROOT, trace_id=TRACE, name="ours", attempt_id="at-1", start_ns=1)
    path = write(tmp_path / "t.bin", otel.encode_otlp([ours]))
    done, errors = imported(url, path)
    assert (done.spans, done.attempts, done.errors) == (0, 0, 1)
    [error] = errors
    assert error.startswith("the file: span 'ours': ")
    assert "at-1" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"PAR1....", "Parquet: write JSON lines"),
        (b"\x28\xb5\x2f\xfd....", "packed by zstd: unpack it first"),
        (b"PK\x03\x04....", "a zip file"),
        (b"id,name\n1,desk\n", r"neither JSON \(lines\) nor OTLP's protobuf: it begins with b'id,"),
        (gzip.compress(b"{}", mtime=0)[:-4], "cannot be read"),
    ],
)
def test_what_is_no_file_of_traces(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_file(write(tmp_path / "odd", content)))


# --- what backends say of errors, ids and messages --------------------------------------------
def one(tmp_path: Path, record: Any) -> Span:
    [portion] = read_file(write(tmp_path / "one.jsonl", json.dumps(record)))
    assert portion.errors == []
    [arrival] = portion.arrivals
    return arrival.span


def test_an_error_of_phoenix(tmp_path: Path) -> None:
    said = {"exception.type": "ValueError", "exception.message": "boom"}
    for event in (
        {"name": "exception", "timestamp": AT, "attributes": said},
        {"name": "exception", "timestamp": AT, **said},
    ):
        span = one(
            tmp_path,
            {**PHOENIX[3], "status_code": "ERROR", "status_message": "boom", "events": [event]},
        )
        assert (span.status, span.status_message) == (SpanStatus.ERROR, "boom")
        assert [(e.name, e.time_ns, e.attributes) for e in span.events] == [
            ("exception", START, said)
        ]
        assert span.attributes[c.ERROR_TYPE] == "ValueError"


def test_nested_attributes_of_phoenix(tmp_path: Path) -> None:
    nested = {
        "llm": {
            "model_name": "m",
            "input_messages": [{"message": {"role": "user", "content": "Where?"}}],
            "token_count": {"prompt": 7, "completion": 2},
        },
        "metadata": {},
    }
    span = one(tmp_path, {**PHOENIX[2], "attributes": nested})
    assert genai_messages.input_messages_of(span.attributes) == [
        {"role": "user", "content": "Where?"}
    ]
    assert (span.attributes[c.INPUT_TOKENS], span.attributes[c.OUTPUT_TOKENS]) == (7, 2)


def test_ids_in_other_forms_are_always_the_same(tmp_path: Path) -> None:
    ids = {"id": "7d9d0a0e-8f6c-4f0e-9f3a-1f2e3d4c5b6a", "traceId": "run-1"}
    first = one(tmp_path, {**LANGFUSE["observations"][0], **ids})
    again = one(tmp_path, {**LANGFUSE["observations"][0], **ids})
    child = one(tmp_path, {**LANGFUSE["observations"][1], "parentObservationId": ids["id"]})
    assert (first.trace_id, first.span_id) == (again.trace_id, again.span_id)
    assert (len(first.trace_id), len(first.span_id)) == (32, 16)
    assert child.parent_id == first.span_id
    dashed = one(tmp_path, {**LANGFUSE["observations"][0], "traceId": f"{TRACE[:8]}-{TRACE[8:]}"})
    assert dashed.trace_id == TRACE


def test_an_error_of_langfuse(tmp_path: Path) -> None:
    failed = {"level": "ERROR", "statusMessage": "boom", "endTime": None}
    span = one(tmp_path, {**LANGFUSE["observations"][3], **failed})
    assert (span.status, span.status_message) == (SpanStatus.ERROR, "boom")
    assert span.end_ns == span.start_ns == START


@pytest.mark.parametrize(
    ("given", "chat"),
    [
        ("Where?", [{"role": "user", "content": "Where?"}]),
        ({"role": "system", "content": "Be."}, [{"role": "system", "content": "Be."}]),
        ({"messages": ASKED, "tools": []}, ASKED),
        (json.dumps(ASKED), ASKED),
        ({"question": 1}, [{"role": "user", "content": '{"question":1}'}]),
    ],
)
def test_what_a_generation_was_given(tmp_path: Path, given: Any, chat: list[Any]) -> None:
    span = one(tmp_path, {**LANGFUSE["observations"][2], "input": given})
    assert genai_messages.input_messages_of(span.attributes) == chat


TOOL_SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}}
TOOL_FUNCTION = {"name": "look", "description": "Find it.", "parameters": TOOL_SCHEMA}
CHAT_TOOL = {"type": "function", "function": TOOL_FUNCTION}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"id":7}'},
}
CHAIN_CALL = {"name": "look", "args": {"id": 7}, "id": "c1", "type": "tool_call"}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"id": 7}}
FUNCTION_CALL = {
    "type": "function_call",
    "id": "fc",
    "call_id": "c1",
    "name": "look",
    "arguments": '{"id":7}',
}
RESPONSE = {
    "object": "response",
    "status": "completed",
    "output": [{"type": "reasoning", "id": "r", "summary": []}, FUNCTION_CALL],
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
SPOKE = {**CALLED, "content": "hm"}


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, CALLED),
        ({"role": "assistant", "content": "hm", "tool_calls": [CHAIN_CALL]}, SPOKE),
        (
            {
                "type": "ai",
                "content": "hm",
                "additional_kwargs": {"tool_calls": [CHAT_CALL]},
            },
            SPOKE,
        ),
        ({"role": "assistant", "content": [{"type": "text", "text": "hm"}, USE]}, SPOKE),
        (
            {
                "role": "assistant",
                "tool_calls": [CHAIN_CALL],  # LangChain has both
                "content": [{"type": "text", "text": "hm"}, USE],
            },
            SPOKE,
        ),
        (
            {
                "type": "message",
                "role": "assistant",
                "stop_reason": "tool_use",
                "content": [{"type": "text", "text": "hm"}, USE],
            },
            SPOKE,
        ),
        ([{"type": "text", "text": "hm"}, USE], SPOKE),
        ([FUNCTION_CALL], CALLED),
        (
            [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "hm"}],
                },
                FUNCTION_CALL,
            ],
            SPOKE,
        ),
        (RESPONSE, CALLED),
        ([{"type": "text", "text": "hm"}], {"role": "assistant", "content": "hm"}),
        ([{"generated": 1}], {"role": "assistant", "content": '{"generated":1}'}),
    ],
)
def test_answers_as_libraries_store_them(tmp_path: Path, output: Any, answer: Any) -> None:
    """Check calls of tools: none is lost, and each has its arguments."""
    span = one(tmp_path, {**LANGFUSE["observations"][2], "output": output})
    [found] = genai_messages.output_messages_of(span.attributes)
    found = {key: found[key] for key in ("role", "content", "tool_calls") if key in found}
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
        for call in found.get("tool_calls", ())
        for arguments in [call["function"]["arguments"]]
    ]
    assert [call["function"]["arguments"] for call in calls] == [{"id": 7}] * (
        "tool_calls" in answer
    )
    assert {**found, "content": found.get("content")} == answer


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sent"}


@pytest.mark.parametrize(
    ("given", "chat", "tools"),
    [
        ({"messages": ASKED, "tools": [CHAT_TOOL]}, ASKED, [CHAT_TOOL]),
        (
            {"messages": ASKED, "tools": [{"type": "function", **TOOL_FUNCTION}]},
            ASKED,
            [CHAT_TOOL],
        ),
        (
            {
                "system": "Be.",
                "messages": ASKED,
                "tools": [
                    {
                        "name": "look",
                        "description": "Find it.",
                        "input_schema": TOOL_SCHEMA,
                    }
                ],
            },
            [{"role": "system", "content": "Be."}, *ASKED],
            [CHAT_TOOL],
        ),
        ([*ASKED, {"role": "tool", "content": CHAT_TOOL}], ASKED, [CHAT_TOOL]),  # LangChain's
        (
            [
                *ASKED,
                {"role": "assistant", "content": "", "tool_calls": [CHAIN_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sent"},
            ],
            [*ASKED, {**CALLED, "content": ""}, RESULT],
            None,
        ),
        (
            [
                *ASKED,
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sent"}],
                },
            ],
            [*ASKED, CALLED, RESULT],
            None,
        ),
        (
            {
                "instructions": "Be.",
                "input": [
                    *ASKED,
                    FUNCTION_CALL,
                    {"type": "function_call_output", "call_id": "c1", "output": "sent"},
                ],
            },
            [{"role": "system", "content": "Be."}, *ASKED, CALLED, RESULT],
            None,
        ),
        (
            {"instructions": "Be.", "question": "Where?"},  # an input of a chain, no request
            [{"role": "user", "content": '{"instructions":"Be.","question":"Where?"}'}],
            None,
        ),
        (
            [{"type": "human", "content": "Where?"}, {"type": "ai", "content": "Here."}],
            [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}],
            None,
        ),
    ],
)
def test_prompts_and_tools_as_libraries_store_them(
    tmp_path: Path, given: Any, chat: list[Any], tools: Any
) -> None:
    span = one(tmp_path, {**LANGFUSE["observations"][2], "input": given})
    found = genai_messages.input_messages_of(span.attributes)
    assert [{**message, "content": message.get("content")} for message in found] == chat
    assert json.loads(str(span.attributes.get(c.TOOL_DEFINITIONS, "null"))) == tools


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"input": 7, "output": 2, "total": 9}, (7, 2)),
        (
            {
                "input": 86,
                "input_cached_tokens": 17_817,
                "output": 20,
                "output_reasoning_tokens": 300,
                "total": 18_223,
            },
            (17_903, 320),
        ),
        ({"input": 100, "input_cached_tokens": 80, "output": 20, "total": 120}, (100, 20)),
        ({"input": 7, "cache_read_input_tokens": 90, "output": 2}, (97, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"a": 1}}, (7, 2)),
        ({"input_tokens": 7, "output_tokens": 2, "cache_read_input_tokens": 90}, (97, 2)),
        ({"input": 7.0, "output": "2"}, (7, 2)),
        ({"input": None, "output": 2}, (None, 2)),
        ({"input": 10**400, "output": 2}, (None, 2)),
    ],
)
def test_tokens_of_a_generation(tmp_path: Path, usage: Any, counts: Any) -> None:
    """Check cached and reasoning tokens, which integrations subtract from input and output."""
    span = one(tmp_path, {**LANGFUSE["observations"][2], "usageDetails": usage})
    found = tuple(span.attributes.get(key) for key in (c.INPUT_TOKENS, c.OUTPUT_TOKENS))
    assert found == counts


def test_tokens_of_a_data_frame_with_gaps(tmp_path: Path) -> None:
    """A column of integers with a gap has floats."""
    counts = {"llm.token_count.prompt": 7.0, "llm.token_count.completion": 2.0}
    cost = {"gen_ai.usage.cost": 0.25}
    span = one(tmp_path, {**PHOENIX[2], "attributes": {"llm.model_name": "m", **counts, **cost}})
    assert (span.attributes[c.INPUT_TOKENS], span.attributes[c.OUTPUT_TOKENS]) == (7, 2)
    assert span.attributes["gen_ai.usage.cost"] == 0.25


IMAGE = Image.of(b"\x89PNG a picture", "image/png")
ENCODED = base64.b64encode(IMAGE.data).decode()
DATA_URL = f"data:image/png;base64,{ENCODED}"
CHAT_PART = {"type": "image_url", "image_url": {"url": DATA_URL}}


@pytest.mark.parametrize(
    "record",
    [
        {
            **LANGFUSE["observations"][2],
            "input": [{"role": "user", "content": [{"type": "text", "text": "Look"}, CHAT_PART]}],
        },
        {
            **PHOENIX[2],
            "attributes": {
                "llm.model_name": "m",
                "llm.input_messages.0.message.role": "user",
                "llm.input_messages.0.message.contents.0.message_content.text": "Look",
                "llm.input_messages.0.message.contents.1.message_content.image.image.url": DATA_URL,
            },
        },
        {
            **PHOENIX[2],
            "attributes": {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": json.dumps(
                    [
                        {
                            "role": "user",
                            "parts": [
                                {"type": "text", "content": "Look"},
                                {
                                    "type": "blob",
                                    "modality": "image",
                                    "mime_type": "image/png",
                                    "content": ENCODED,
                                },
                            ],
                        }
                    ]
                ),
            },
        },
    ],
    ids=["langfuse", "openinference", "genai"],
)
def test_images_are_stored_beside_the_spans(tmp_path: Path, url: str, record: Any) -> None:
    path = write(tmp_path / "one.jsonl", json.dumps(record))
    for _ in range(2):
        imported(url, path)
    [(_, _, [span])] = asyncio.run(stored(url))
    reference = {
        "type": "blob",
        "modality": "image",
        "mime_type": "image/png",
        "size": 14,
        "sha256": IMAGE.digest,
    }
    [message] = genai_messages.input_messages_of(span.attributes)
    assert message["content"] == [{"type": "text", "text": "Look"}, reference]
    assert ENCODED not in str(span.attributes)

    async def images() -> dict[str, Image]:
        async with open_store(url) as store:
            return await store.images([IMAGE.digest])

    assert asyncio.run(images()) == {IMAGE.digest: IMAGE}


def test_a_response_as_it_came(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    span = one(tmp_path, {**LANGFUSE["observations"][2], "output": answer})
    [said] = genai_messages.output_messages_of(span.attributes)
    assert said["tool_calls"] == [call]
    assert span.attributes[c.FINISH_REASONS] == ["tool_calls"]
    assert (span.attributes[c.INPUT_TOKENS], span.attributes[c.OUTPUT_TOKENS]) == (7, 2)


@pytest.mark.parametrize(
    "odd", [float("inf"), float("nan"), 10**400, 1e305, -1, "soon", None, True]
)
def test_a_moment_that_is_none(tmp_path: Path, odd: Any) -> None:
    path = write(tmp_path / "one.jsonl", json.dumps({**FRAME[0], "start_time": odd}))
    [portion] = read_file(path)
    assert portion.arrivals == []
    assert len(portion.errors) == 1


def test_a_span_of_a_newer_lightspan_is_refused(tmp_path: Path, url: str) -> None:
    """A span of a newer schema would make the store unreadable."""
    newer = {**FRAME[0], "attributes": {"lightspan.span.schema": 99}}
    done, errors = imported(url, write(tmp_path / "one.jsonl", json.dumps(newer)))
    [error] = errors
    assert error.startswith("line 1: span 'desk': it has schema 99; this lightspan reads up to ")
    assert done == Imported(0, 0, 0, 1, 0)
    assert asyncio.run(stored(url)) == []


@pytest.mark.parametrize("cut", [True, False])
def test_a_packed_file_that_is_cut_or_damaged_keeps_what_came_before(
    tmp_path: Path, url: str, cut: bool
) -> None:
    noise = [json.dumps({"logs": secrets.token_hex(4000)}) for _ in range(40)]
    packed = bytearray(gzip.compress("\n".join([*PIECES, *noise]).encode()))
    if cut:
        del packed[-40_000:]
    else:
        packed[-40_000:-39_900] = b"\xff" * 100
    path = write(tmp_path / "traces.jsonl.gz", bytes(packed))
    done, errors = imported(url, path)
    assert f"{path} cannot be read: " in errors[-1]
    assert (done.spans, done.attempts, done.unfinished) == (4, 1, 0)


def test_a_file_whose_first_line_is_cut_is_read_by_lines(tmp_path: Path, url: str) -> None:
    done, errors = imported(
        url, write(tmp_path / "rotated.jsonl", "\n".join(['{"resourceSpans": [{', *PIECES]))
    )
    assert done == Imported(4, 1, 0, 1, 0)
    assert errors[0].startswith("line 1: no JSON: ")


# --- what is counted ----------------------------------------------------------------------------
def test_a_second_file_of_a_trace_that_has_ended(tmp_path: Path, url: str) -> None:
    """The entry span is in the store, though not in the file."""
    imported(url, write(tmp_path / "whole.jsonl", "\n".join(PIECES)))
    more = otlp_span("00000000000000ab", ROOT, "later", 9)
    done, errors = imported(url, write(tmp_path / "more.jsonl", otlp_line(more)))
    assert (done, errors) == (Imported(1, 1, 0, 0, 0, earlier=1), [])


@pytest.mark.parametrize("name", ["otlp.jsonl.gz", "otlp.json", "collector.bin", "otlp.bin"])
def test_progress_is_in_bytes_of_the_file(tmp_path: Path, url: str, name: str) -> None:
    content = FORMS[name]
    if name.endswith(".gz"):
        content = gzip.compress("\n".join(PIECES * 100).encode())
    path = write(tmp_path / name, content)
    read: list[int] = []
    imported(url, path, advance=read.append)
    assert sum(read) == path.stat().st_size


def test_no_error_shows_a_key(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{'sk'}-proj-0123456789abcdefABCDEF0123456789"  # not a real key
    monkeypatch.setenv("SHOP_API_KEY", "s3cret-of-the-shop")
    odd = [
        {**PHOENIX[0], "start_time": key},
        {**PHOENIX[1], "start_time": "s3cret-of-the-shop"},
        {"type": key, "traceId": "1"},
        {"x" * 10_000: 1},
    ]
    _, errors = imported(url, write(tmp_path / "t.jsonl", lines(odd)))
    assert len(errors) == 4
    assert "sk-proj" not in str(errors)
    assert "s3cret" not in str(errors)
    assert str(errors).count("<key>") == 2
    assert max(map(len, errors)) < 600
    with pytest.raises(DataError, match="<key>") as caught:
        imported(url, write(tmp_path / "odd.txt", "s3cret-of-the-shop"))
    assert "s3cret" not in str(caught.value)


# --- pipes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["otlp.jsonl", "otlp.jsonl.gz", "collector.bin"])
def test_the_standard_input(url: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content = FORMS[name]
    data = content.encode() if isinstance(content, str) else content
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert imported(url, Path("-")) == (Imported(4, 1, 0, 0, 0), [])
