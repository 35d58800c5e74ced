"""Log records that say what was said in a call: from files and over HTTP, before and after it."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from tests.core.otel.test_files import imported, stored, url, write
from tests.core.otel.trace_files import (
    AGENT,
    ASKED,
    CALL,
    INVOKES,
    ROOT,
    START,
    TRACE,
    otlp_line,
    otlp_span,
)

from lightspan.errors import DataError
from lightspan.otel.arrivals import gathered
from lightspan.otel.files import Imported
from lightspan.otel.logs import decode_logs, decode_logs_object
from lightspan.otel.otlp import JSON, PROTOBUF, take_hex
from lightspan.schema import conventions as c, messages
from lightspan.schema.spans import Span, SpanKind

__all__ = ["url"]

SPANS = [
    otlp_span(ROOT, "", "desk", 0, **{"openinference.span.kind": "CHAIN"}),
    otlp_span(AGENT, ROOT, "invoke_agent writer", 1, **INVOKES),
    otlp_span(CALL, AGENT, "chat m", 2, **{"gen_ai.operation.name": "chat"}),
]


def text(value: str) -> dict[str, Any]:
    return {"stringValue": value}


def record(name: str, at: int, body: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """As the SDK's exporter writes a record whose body is a mapping."""
    said = {} if body is None else {"body": {"kvlistValue": {"values": _pairs(body)}}}
    return {
        "timeUnixNano": str(START + at),
        "observedTimeUnixNano": str(START + at + 5),
        "eventName": name,
        "traceId": TRACE,
        "spanId": CALL,
        "attributes": [{"key": "gen_ai.system", "value": text("openai")}],
        **said,
        **more,
    }


def _pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": text(value)
            if isinstance(value, str)
            else {"kvlistValue": {"values": _pairs(value)}},
        }
        for key, value in values.items()
    ]


def logs(*records: dict[str, Any], service: str = "desk") -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": text(service)}]}
    said = [copy.deepcopy(each) for each in records]  # whoever decodes them may change them
    return {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": said}]}]}


SAID = [
    record("gen_ai.system.message", 10, {"content": "Be brief."}),
    record("gen_ai.user.message", 11, {"content": "Where?"}),
    record("gen_ai.choice", 12, {"finish_reason": "stop", "message": {"content": "Here."}}),
]
OLDER = [
    {
        **each,
        "eventName": "",
        "attributes": [{"key": "event.name", "value": text(each["eventName"])}],
    }
    for each in SAID
]
"""As SDKs before 1.35 write the name."""
WHOLE = [
    record(
        "gen_ai.client.inference.operation.details",
        12,
        None,
        attributes=[
            {
                "key": c.INPUT_MESSAGES,
                "value": {
                    "arrayValue": {
                        "values": [
                            {
                                "kvlistValue": {
                                    "values": [
                                        {"key": "role", "value": text(each["role"])},
                                        {
                                            "key": "parts",
                                            "value": {
                                                "arrayValue": {
                                                    "values": [
                                                        {
                                                            "kvlistValue": {
                                                                "values": _pairs(
                                                                    {
                                                                        "type": "text",
                                                                        "content": each["content"],
                                                                    }
                                                                )
                                                            }
                                                        }
                                                    ]
                                                }
                                            },
                                        },
                                    ]
                                }
                            }
                            for each in ASKED
                        ]
                    }
                },
            },
            {
                "key": c.OUTPUT_MESSAGES,
                "value": text(
                    '[{"role":"assistant","parts":[{"type":"text","content":"Here."}],'
                    '"finish_reason":"stop"}]'
                ),
            },
        ],
    )
]
NOISE = [
    record("", 10, {"content": "a line of the app's own"}),
    record("exception", 10, {"content": "another"}),
]
FORMS = {"bodies": SAID, "older": OLDER, "details": WHOLE}


def calls_of(url: str) -> tuple[Any, list[Span]]:
    [(state, attempt, spans)] = asyncio.run(stored(url))
    rollout, settled = gathered(state.rollout, attempt, spans)
    return rollout.task, settled


@pytest.mark.parametrize("order", ["before", "after", "between", "alone"])
@pytest.mark.parametrize("form", FORMS)
def test_a_call_has_what_its_records_say(tmp_path: Path, url: str, form: str, order: str) -> None:
    said = json.dumps(logs(*FORMS[form], *NOISE))
    lines = {
        "before": [said, otlp_line(*SPANS)],
        "after": [otlp_line(*SPANS), said],
        "between": [otlp_line(*SPANS[1:]), said, otlp_line(SPANS[0])],
        "alone": [otlp_line(*SPANS)],
    }[order]
    count = len(SPANS) + (0 if order == "alone" else len(FORMS[form]))
    done, errors = imported(url, write(tmp_path / "t.jsonl", "\n".join(lines)))
    assert (done, errors) == (Imported(count, 1, 0, 0, 0), [])
    if order == "alone":  # from a file of logs that is imported later
        path = write(tmp_path / "logs.json", json.dumps(logs(*FORMS[form]), indent=1))
        assert imported(url, path) == (Imported(len(FORMS[form]), 1, 0, 0, 0), [])
    for _ in range(2):  # again: nothing twice
        task, spans = calls_of(url)
        assert {span.span_id: span.kind for span in spans} == {
            ROOT: SpanKind.CHAIN,
            AGENT: SpanKind.AGENT,
            CALL: SpanKind.LLM,
        }
        [call] = [span for span in spans if span.kind is SpanKind.LLM]
        assert messages.asked_of(call.attributes) == ASKED
        assert messages.answers_of(call.attributes) == [{"role": "assistant", "content": "Here."}]
        assert call.attributes[c.FINISH_REASONS] == ["stop"]
        assert call.attributes[c.AGENT_PATH] == "writer"
        assert task == {"messages": [{"role": "user", "content": "Where?"}]}
        imported(url, write(tmp_path / "t.jsonl", "\n".join(lines)))


def test_records_of_a_span_that_is_not_there_stay(tmp_path: Path, url: str) -> None:
    imported(url, write(tmp_path / "t.jsonl", json.dumps(logs(*SAID))))
    _, spans = calls_of(url)
    assert [(span.name, span.parent_id) for span in spans] == [
        (each["eventName"], CALL) for each in SAID
    ]


def test_two_that_say_the_same_are_two() -> None:
    found = decode_logs_object(logs(SAID[1], SAID[1])).arrivals
    assert len({each.span.span_id for each in found}) == 2
    again = decode_logs_object(logs(SAID[1], SAID[1])).arrivals
    assert found == again


def test_protobuf_says_the_same() -> None:
    value = logs(*SAID, *NOISE)
    for each in value["resourceLogs"][0]["scopeLogs"][0]["logRecords"]:
        take_hex(each)
    body = ParseDict(value, LogsData()).SerializeToString()
    found = decode_logs(body, PROTOBUF)
    assert found == decode_logs(json.dumps(logs(*SAID, *NOISE)).encode(), JSON)
    assert len(found.arrivals) == 3


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"spanId": ""}, "record gen_ai.choice: its spanId is '', not 16 hex digits"),
        ({"traceId": "00" * 16}, "record gen_ai.choice: its traceId is '0"),
        ({"timeUnixNano": str(2**63)}, f"record gen_ai.choice: its time {2**63} is beyond"),
    ],
)
def test_a_record_that_is_none_costs_the_others_nothing(more: dict[str, Any], why: str) -> None:
    found = decode_logs_object(logs(SAID[0], {**SAID[2], **more}))
    assert [each.span.name for each in found.arrivals] == ["gen_ai.system.message"]
    assert [error[: len(why)] for error in found.refused] == [why]


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"\xff", PROTOBUF), (b"[]", JSON), (b'{"resourceLogs": 3}', JSON), (b"x", JSON)],
)
def test_what_is_no_otlp(body: bytes, kind: str) -> None:
    with pytest.raises(DataError, match="the body is no"):
        decode_logs(body, kind)
