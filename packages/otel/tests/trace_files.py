"""Export files of backends: one trace in each format."""

from __future__ import annotations

import json
from typing import Any

TRACE = "5b8efff798038103d269b633813fc60c"
ROOT, AGENT, CALL, TOOL = (
    "eee19b7ec3c1b174",
    "eee19b7ec3c1b175",
    "eee19b7ec3c1b176",
    "00000000000000aa",
)
START = 1_700_000_000_000_000_000
AT = "2023-11-14T22:13:20.000000+00:00"
LATER = "2023-11-14T22:13:21.000000Z"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]


def otlp_span(span_id: str, parent: str, name: str, at: int, **said: Any) -> dict[str, Any]:
    """Return a span in OTLP's JSON with text attributes."""
    return {
        "traceId": TRACE,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(START + at),
        "endTimeUnixNano": str(START + 900 + at),
        "attributes": _attributes(said),
        "status": {},
    }


def otlp_line(*spans: dict[str, Any], service: str = "desk") -> str:
    """Return a line of a collector's file."""
    resource = {"attributes": _attributes({"service.name": service})}
    scope = {"scope": {"name": "a.framework"}, "spans": list(spans)}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]


SAID: dict[str, Any] = {
    "openinference.span.kind": "LLM",
    "llm.model_name": "m",
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.content": "Where?",
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.content": "Here.",
}
INVOKES: dict[str, Any] = {
    "gen_ai.operation.name": "invoke_agent",
    "gen_ai.agent.name": "writer",
}
GIVEN = '{"question": "Where?"}'
GIVES: dict[str, Any] = {"openinference.span.kind": "CHAIN", "input.value": GIVEN}
LOOKS: dict[str, Any] = {"openinference.span.kind": "TOOL", "tool.name": "look"}
OTLP = [
    otlp_span(ROOT, "", "desk", 0, **GIVES),
    otlp_span(AGENT, ROOT, "invoke_agent writer", 1, **INVOKES),
    otlp_span(CALL, AGENT, "chat m", 2, **SAID),
    otlp_span(TOOL, AGENT, "look", 3, **LOOKS),
]


def _phoenix(span_id: str, parent: str | None, name: str, kind: str, **said: Any) -> dict[str, Any]:
    return {
        "id": "U3Bhbjox",
        "name": name,
        "context": {"trace_id": TRACE, "span_id": span_id},
        "span_kind": kind,
        "parent_id": parent,
        "start_time": AT,
        "end_time": LATER,
        "status_code": "OK",
        "status_message": "",
        "attributes": said,
        "events": [],
    }


PHOENIX = [
    _phoenix(ROOT, None, "desk", "CHAIN", **{"input.value": GIVEN}),
    _phoenix(AGENT, ROOT, "writer", "AGENT", **{"agent.name": "writer"}),
    _phoenix(CALL, AGENT, "chat m", "LLM", **SAID),
    _phoenix(TOOL, AGENT, "look", "TOOL", **{"tool.name": "look"}),
]
"""Spans as `GET /v1/projects/PROJECT/spans` returns them."""

FRAME = [
    {
        "name": span["name"],
        "span_kind": span["span_kind"],
        "parent_id": span["parent_id"],
        "start_time": 1_700_000_000_000,
        "end_time": 1_700_000_001_000,
        "status_code": "OK",
        "status_message": "",
        "events": [],
        "context.span_id": span["context"]["span_id"],
        "context.trace_id": TRACE,
        "attributes.input.value": span["attributes"].get("input.value"),
        "attributes.agent.name": span["attributes"].get("agent.name"),
        "attributes.tool.name": span["attributes"].get("tool.name"),
        "attributes.llm.model_name": span["attributes"].get("llm.model_name"),
        "attributes.llm.input_messages": [
            {"message.role": said["role"], "message.content": said["content"]} for said in ASKED
        ]
        if span["span_kind"] == "LLM"
        else None,
        "attributes.llm.output_messages": [
            {"message.role": "assistant", "message.content": "Here."}
        ]
        if span["span_kind"] == "LLM"
        else None,
    }
    for span in PHOENIX
]
"""The same spans as `get_spans_dataframe()` and `to_json` write them."""


def _langfuse(span_id: str, parent: str | None, name: str, kind: str, **more: Any) -> Any:
    return {
        "id": span_id,
        "traceId": TRACE,
        "parentObservationId": parent,
        "name": name,
        "type": kind,
        "startTime": "2023-11-14T22:13:20.000Z",
        "endTime": "2023-11-14T22:13:21.000Z",
        "level": "DEFAULT",
        "statusMessage": None,
        "metadata": {"resourceAttributes": {"service.name": "desk"}},
        **more,
    }


LANGFUSE = {
    "id": TRACE,
    "name": "desk",
    "observations": [
        _langfuse(ROOT, None, "desk", "SPAN", input={"question": "Where?"}),
        _langfuse(AGENT, ROOT, "writer", "AGENT"),
        _langfuse(
            *(CALL, AGENT, "chat m", "GENERATION"),
            model="m",
            input=ASKED,
            output={"role": "assistant", "content": "Here."},
            usageDetails={"input": 7, "output": 2, "total": 9},
        ),
        _langfuse(TOOL, AGENT, "look", "TOOL", input="arguments", output="found"),
    ],
    "scores": [{"id": "s-1", "name": "good", "value": 1}],
}
"""A trace as `GET /api/public/traces/ID` returns it."""

_SNAKES = {
    "traceId": "trace_id",
    "parentObservationId": "parent_observation_id",
    "startTime": "start_time",
    "endTime": "end_time",
    "statusMessage": "status_message",
    "model": "provided_model_name",
    "usageDetails": "usage_details",
}
BLOBS = [
    {
        _SNAKES.get(key, key): json.dumps(value)
        if key in ("input", "output", "metadata") and not isinstance(value, str)
        else value.replace("T", " ").replace("Z", "000")
        if key.endswith("Time")
        else value
        for key, value in observation.items()
    }
    for observation in LANGFUSE["observations"]
]
"""The observations of the trace as an export to blob storage writes them."""
