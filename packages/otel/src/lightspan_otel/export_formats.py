"""Spans as two tracing backends write them out, in OpenTelemetry's form: pure.

Phoenix keeps OpenTelemetry's spans, with OpenInference's attributes, and says them in JSON of its
own. Langfuse has observations, whose input and output are whatever the app gave; of a generation
they are read as chat messages. What neither says is not made up: tokens, and Langfuse's scores.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from lightspan.errors import DataError
from lightspan.production.options import SERVICE_NAME
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.redaction import clean_text
from lightspan.schema.spans import Attributes, SpanEvent, SpanStatus, clean_attributes
from lightspan_otel.convert import span_of
from lightspan_otel.otlp import ReceivedSpan, check_schema

Record = Mapping[str, Any]

_TRACE_DIGITS: Final = 32
_SPAN_DIGITS: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_STATUS: Final = {"OK": SpanStatus.OK, "ERROR": SpanStatus.ERROR}
_DEEPEST: Final = 32
"""Mappings inside one another that become one name with dots."""


# --- Phoenix --------------------------------------------------------------------------------
def is_phoenix_span(record: Record) -> bool:
    """Whether it is a span as Phoenix's REST API, its command or its data frames have it."""
    context = record.get("context")
    return "context.span_id" in record or (isinstance(context, dict) and "span_id" in context)


def phoenix_span(record: Record, service: str) -> ReceivedSpan:
    """A span of `GET /v1/projects/…/spans`, of `px`, or of a data frame (`to_json`).

    Args:
        record: loaded JSON.
        service: whose it is: Phoenix keeps no name of a service.

    Raises:
        DataError: it has no ids or no time.
    """
    nested = record.get("context")
    context: Record = nested if isinstance(nested, dict) else {}
    said: dict[str, Any] = {}
    attributes = record.get("attributes")
    for key, value in attributes.items() if isinstance(attributes, dict) else ():
        said |= _flat(str(key), value)
    for key, value in record.items():
        if key.startswith("attributes.") and _is_said(value):
            said |= _flat(key.removeprefix("attributes."), value)
    if _is_said(record.get("span_kind")):
        said.setdefault(c.OPENINFERENCE_KIND, str(record["span_kind"]).upper())
    parent = record.get("parent_id")
    return _arrival(
        said,
        trace_id=context.get("trace_id", record.get("context.trace_id")),
        span_id=context.get("span_id", record.get("context.span_id")),
        parent_id=parent if _is_said(parent) and parent else None,
        name=record.get("name"),
        start=record.get("start_time"),
        end=record.get("end_time"),
        status=_STATUS.get(str(record.get("status_code")).upper(), SpanStatus.UNSET),
        status_message=record.get("status_message"),
        events=_phoenix_events(record.get("events")),
        service=service,
    )


def _phoenix_events(events: Any) -> list[SpanEvent]:
    """An event's attributes lie in it, or beside its name where they are the conventions' own."""
    found = []
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict):
            continue
        inner = event.get("attributes")
        said = dict(inner) if isinstance(inner, dict) else {}
        said |= {key: event[key] for key in event if key.startswith("exception.")}
        said = {key: value for key, value in said.items() if _is_said(value)}
        at = event.get("timestamp")
        found.append(
            SpanEvent(
                clean_text(str(event.get("name", ""))),
                _nanoseconds(at, "timestamp") if _is_said(at) else 0,
                clean_attributes(said),
            )
        )
    return found


def _is_said(value: Any) -> bool:
    """A data frame has null or NaN where a span says nothing."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _flat(name: str, value: Any, depth: int = 0) -> dict[str, Any]:
    """Attributes with dots in their names, as they were sent, of nested ones."""
    items: Sequence[tuple[Any, Any]]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    else:
        return {name: value} if _is_said(value) else {}
    if depth >= _DEEPEST:
        return {name: genai_messages.dump_json(value)}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _flat(f"{name}.{key}", inner, depth + 1)
    return found


# --- Langfuse -------------------------------------------------------------------------------
_LANGFUSE_KINDS: Final = {
    **dict.fromkeys(("SPAN", "CHAIN"), "CHAIN"),
    **{kind: kind for kind in ("TOOL", "AGENT", "RETRIEVER", "EVALUATOR", "EMBEDDING")},
    "GENERATION": "LLM",
    "EVENT": "UNKNOWN",
    "GUARDRAIL": "GUARDRAIL",
}
_USAGE: Final = {
    c.INPUT_TOKENS: ("input", "promptTokens", "prompt_tokens", "input_tokens"),
    c.OUTPUT_TOKENS: ("output", "completionTokens", "completion_tokens", "output_tokens"),
}


def is_langfuse_trace(record: Record) -> bool:
    """Whether it is a trace of `GET /api/public/traces/ID`, which holds its observations."""
    observations = record.get("observations")
    return isinstance(observations, list) and all(isinstance(each, dict) for each in observations)


def is_langfuse_observation(record: Record) -> bool:
    """Whether it is an observation, of the API or of an export to blob storage."""
    kind = str(record.get("type")).upper()
    return kind in _LANGFUSE_KINDS and _either(record, "traceId", "trace_id") is not None


def langfuse_observations(trace: Record) -> Iterator[dict[str, Any]]:
    """The observations of a trace; one that does not say of which trace it is, is of this one."""
    for observation in trace["observations"]:
        yield {"traceId": trace.get("id"), **observation}


def langfuse_span(record: Record, service: str) -> ReceivedSpan:
    """An observation as a span.

    Args:
        record: loaded JSON.
        service: whose it is, where its metadata do not say so.

    Raises:
        DataError: it has no ids or no time.
    """
    kind = _LANGFUSE_KINDS[str(record["type"]).upper()]
    metadata = _loaded(record.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    said = _langfuse_attributes(record, kind, metadata)
    is_error = str(record.get("level")).upper() == "ERROR"
    resource = _loaded(metadata.get("resourceAttributes"))
    named = resource.get(SERVICE_NAME) if isinstance(resource, dict) else None
    start = _either(record, "startTime", "start_time")
    return _arrival(
        said,
        trace_id=_either(record, "traceId", "trace_id"),
        span_id=record.get("id"),
        parent_id=_either(record, "parentObservationId", "parent_observation_id") or None,
        name=record.get("name") or kind.lower(),
        start=start,
        end=_either(record, "endTime", "end_time") or start,
        status=SpanStatus.ERROR if is_error else SpanStatus.UNSET,
        status_message=_either(record, "statusMessage", "status_message"),
        events=[],
        service=str(named) if named else service,
    )


def _langfuse_attributes(record: Record, kind: str, metadata: Record) -> dict[str, Any]:
    """What an observation says, beside what its library's span said (Langfuse keeps that of
    OpenTelemetry's)."""
    sent = _loaded(metadata.get("attributes"))
    said: dict[str, Any] = dict(sent) if isinstance(sent, dict) else {}
    said[c.OPENINFERENCE_KIND] = kind
    given, answered = record.get("input"), record.get("output")
    if kind == "LLM":
        model = _either(record, "model", "providedModelName", "provided_model_name")
        said.setdefault(c.REQUEST_MODEL, model)
        for key, value, role in (
            (c.INPUT_MESSAGES, given, "user"),
            (c.OUTPUT_MESSAGES, answered, "assistant"),
        ):
            chat = _chat(_loaded(value), role)
            if chat:
                said[key] = genai_messages.dump(chat)
        usage = _loaded(_either(record, "usageDetails", "usage_details", "usage"))
        for key, names in _USAGE.items():
            count = _either(usage, *names) if isinstance(usage, dict) else None
            if isinstance(count, int | float | str) and str(count).isdecimal():
                said.setdefault(key, int(count))
        return said
    if kind == "AGENT":
        said.setdefault(c.OPENINFERENCE_AGENT, record.get("name"))
    if kind == "TOOL":
        said.setdefault("tool.name", record.get("name"))
    for key, value in (("input.value", given), ("output.value", answered)):
        if value is not None:
            said[key] = value if isinstance(value, str) else genai_messages.dump_json(value)
    return said


def _chat(value: Any, role: str) -> list[dict[str, Any]]:
    """The messages that a generation's input or output is, in one of the forms in which apps give
    them: a text, a message, a list of them, a request, a response."""
    if isinstance(value, dict):
        for key in ("messages", "choices"):
            if isinstance(value.get(key), list):
                return _chat(value[key], role)
        if isinstance(value.get("message"), dict):  # a choice
            reason = value.get("finish_reason")
            told = {} if reason is None else {"finish_reason": reason}
            return _chat({**value["message"], **told}, role)
        if "content" in value or "role" in value or "tool_calls" in value:
            return [{"role": role, **value}]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [message for item in value for message in _chat(item, role)]
    if value is None or value == [] or value == {}:
        return []
    text = value if isinstance(value, str) else genai_messages.dump_json(value)
    return [{"role": role, "content": text}]


def _either(record: Record, *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _loaded(value: Any) -> Any:
    """An export writes as a text what the API has as JSON."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# --- what they share ------------------------------------------------------------------------
def _arrival(said: Mapping[str, Any], *, service: str, **told: Any) -> ReceivedSpan:
    attributes: Attributes = clean_attributes(
        {key: _plain(value) for key, value in said.items() if value is not None}
    )
    start = _nanoseconds(told["start"], "start time")
    end = start if told["end"] is None else _nanoseconds(told["end"], "end time")
    parent = told["parent_id"]
    span = span_of(
        attributes,
        trace_id=_id(told["trace_id"], _TRACE_DIGITS, "trace"),
        span_id=_id(told["span_id"], _SPAN_DIGITS, "span"),
        parent_id=None if parent is None else _id(parent, _SPAN_DIGITS, "parent"),
        name=clean_text(str(told["name"] or "span")),
        start_ns=start,
        end_ns=end,
        status=told["status"],
        status_message=clean_text(str(told["status_message"] or "")),
        events=told["events"],
        resource={SERVICE_NAME: clean_text(service)},
    )
    check_schema(span)
    return ReceivedSpan(span, span.parent_id is None)


def _plain(value: Any) -> Any:
    """What an attribute cannot be, as JSON."""
    items = value if isinstance(value, list) else [value]
    nested = any(isinstance(item, dict | list) for item in items)
    return genai_messages.dump_json(value) if nested else value


def _id(value: Any, digits: int, what: str) -> str:
    """The id in OpenTelemetry's form; of one in another form, always the same."""
    if not isinstance(value, str) or not value:
        raise DataError(f"its {what} id is {value!r:.60}, not a text")
    text = value.lower().replace("-", "")
    if re.fullmatch(r"[0-9a-f]+", text) and len(text) == digits and text.strip("0"):
        return text
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:digits]


def _nanoseconds(value: Any, what: str) -> int:
    """A moment: ISO 8601 (UTC where it names no zone), or milliseconds as pandas writes them."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            nanoseconds = round(value * 1_000_000)
        else:
            moment = datetime.fromisoformat(value)
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
            nanoseconds = (moment - _EPOCH) // _MICROSECOND * 1_000
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"its {what} is {value!r:.60}: give ISO 8601") from error
    if not 0 <= nanoseconds < 2**63:
        raise DataError(f"its {what} is {str(value)[:60]}, which is no time since 1970")
    return nanoseconds
