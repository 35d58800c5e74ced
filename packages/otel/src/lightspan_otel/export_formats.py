"""Read the JSON exports of Phoenix and Langfuse as OpenTelemetry spans. Pure.

Phoenix stores OpenTelemetry spans with OpenInference's attributes, in its own JSON. Langfuse stores
observations, whose input and output may be any JSON. The input and output of a model call (type
GENERATION) are read as chat messages.

The exports contain no token ids, so the spans have none. Langfuse's scores are left out.
"""

from __future__ import annotations

import hashlib
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
from lightspan_otel.convert import plain_value, span_of
from lightspan_otel.normalize import loaded
from lightspan_otel.otlp import ReceivedSpan, check_schema
from lightspan_otel.stored_messages import chat_of, tools_of

Record = Mapping[str, Any]

_TRACE_DIGITS: Final = 32
_SPAN_DIGITS: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_STATUS: Final = {"OK": SpanStatus.OK, "ERROR": SpanStatus.ERROR}
_COUNTS: Final = ("llm.token_count.", "gen_ai.usage.", "llm.usage.")
"""Prefixes of attributes that are numbers of tokens. Data frames with gaps write them as 7.0."""
_MAX_DEPTH: Final = 32
"""Maximum depth of nested mappings that are flattened into dotted names."""


# --- Phoenix --------------------------------------------------------------------------------
def is_phoenix_span(record: Record) -> bool:
    """Return whether `record` is a span in a form that Phoenix exports (see `phoenix_span`)."""
    context = record.get("context")
    return "context.span_id" in record or (isinstance(context, dict) and "span_id" in context)


def phoenix_span(record: Record, service: str) -> ReceivedSpan:
    """Convert a span that Phoenix exported.

    It comes from the REST API (`GET /v1/projects/…/spans`), the command `px`, or a data frame
    (`to_json`).

    Args:
        record: the span as decoded JSON.
        service: service name of the span, because Phoenix stores none.

    Raises:
        DataError: an id or a time is missing or malformed.
    """
    nested = record.get("context")
    context: Record = nested if isinstance(nested, dict) else {}
    attributes: dict[str, Any] = {}
    nested_attributes = record.get("attributes")
    for key, value in nested_attributes.items() if isinstance(nested_attributes, dict) else ():
        attributes |= _flat(str(key), value)
    for key, value in record.items():
        if key.startswith("attributes.") and _is_present(value):
            attributes |= _flat(key.removeprefix("attributes."), value)
    if _is_present(record.get("span_kind")):
        attributes.setdefault(c.OPENINFERENCE_KIND, str(record["span_kind"]).upper())
    parent = record.get("parent_id")
    return _arrival(
        attributes,
        trace_id=context.get("trace_id", record.get("context.trace_id")),
        span_id=context.get("span_id", record.get("context.span_id")),
        parent_id=parent if _is_present(parent) and parent else None,
        name=record.get("name"),
        start=record.get("start_time"),
        end=record.get("end_time"),
        status=_STATUS.get(str(record.get("status_code")).upper(), SpanStatus.UNSET),
        status_message=record.get("status_message"),
        events=_phoenix_events(record.get("events")),
        service=service,
    )


def _phoenix_events(events: Any) -> list[SpanEvent]:
    """Convert the events of a span that Phoenix exported.

    The attributes `exception.*` may be in the event itself or in its field `attributes`.
    """
    converted = []
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict):
            continue
        inner = event.get("attributes")
        attributes = dict(inner) if isinstance(inner, dict) else {}
        attributes |= {key: event[key] for key in event if key.startswith("exception.")}
        attributes = {key: value for key, value in attributes.items() if _is_present(value)}
        at = event.get("timestamp")
        converted.append(
            SpanEvent(
                clean_text(str(event.get("name", ""))),
                _nanoseconds(at, "timestamp") if _is_present(at) else 0,
                clean_attributes(attributes),
            )
        )
    return converted


def _is_present(value: Any) -> bool:
    """Return whether a value is neither None nor NaN (missing values of data frames are NaN)."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _flat(name: str, value: Any, depth: int = 0) -> dict[str, Any]:
    """Flatten a nested attribute into attributes with dotted names that begin with `name`.

    Values nested deeper than `_MAX_DEPTH` become JSON. `depth` is the nesting so far.
    """
    items: Sequence[tuple[Any, Any]]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    else:
        return {name: value} if _is_present(value) else {}
    if depth >= _MAX_DEPTH:
        return {name: genai_messages.dump_json(value)}
    flattened: dict[str, Any] = {}
    for key, inner in items:
        flattened |= _flat(f"{name}.{key}", inner, depth + 1)
    return flattened


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
    """Return whether `record` is a Langfuse trace (`/api/public/traces/ID`) with observations."""
    observations = record.get("observations")
    return isinstance(observations, list) and all(isinstance(each, dict) for each in observations)


def is_langfuse_observation(record: Record) -> bool:
    """Return whether `record` is a Langfuse observation, from the API or a blob storage export."""
    kind = str(record.get("type")).upper()
    return kind in _LANGFUSE_KINDS and _either(record, "traceId", "trace_id") is not None


def langfuse_observations(trace: Record) -> Iterator[dict[str, Any]]:
    """Yield the observations of a trace; an observation without `traceId` gets the trace's id."""
    for observation in trace["observations"]:
        yield {"traceId": trace.get("id"), **observation}


def langfuse_span(record: Record, service: str) -> ReceivedSpan:
    """Convert an observation of Langfuse into a span.

    Args:
        record: the observation as decoded JSON.
        service: service name if the observation's metadata have none.

    Raises:
        DataError: an id or a time is missing or malformed.
    """
    kind = _LANGFUSE_KINDS[str(record["type"]).upper()]
    metadata = _loaded(record.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    attributes = _langfuse_attributes(record, kind, metadata)
    is_error = str(record.get("level")).upper() == "ERROR"
    resource = _loaded(metadata.get("resourceAttributes"))
    named = resource.get(SERVICE_NAME) if isinstance(resource, dict) else None
    start = _either(record, "startTime", "start_time")
    return _arrival(
        attributes,
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
    """Convert the fields of an observation into span attributes.

    If the observation was made from an OpenTelemetry span, its attributes are in `metadata`; they
    are returned too.

    Args:
        record: the observation.
        kind: span kind of the observation, in OpenInference's convention.
        metadata: metadata of the observation.
    """
    sent = _loaded(metadata.get("attributes"))
    attributes: dict[str, Any] = dict(sent) if isinstance(sent, dict) else {}
    attributes[c.OPENINFERENCE_KIND] = kind
    input_value, output_value = record.get("input"), record.get("output")
    if kind == "LLM":
        model = _either(record, "model", "providedModelName", "provided_model_name")
        attributes.setdefault(c.REQUEST_MODEL, model)
        for key, value, role in (
            (c.INPUT_MESSAGES, input_value, "user"),
            (c.OUTPUT_MESSAGES, output_value, "assistant"),
        ):
            chat = chat_of(_loaded(value), role)
            if chat:
                attributes[key] = genai_messages.dump(chat)
        if tools := tools_of(_loaded(input_value)):
            attributes.setdefault(c.TOOL_DEFINITIONS, genai_messages.dump_json(tools))
        usage = _loaded(_either(record, "usageDetails", "usage_details", "usage"))
        for key, count in _langfuse_usage(usage if isinstance(usage, dict) else {}).items():
            attributes.setdefault(key, count)
        return attributes
    if kind == "AGENT":
        attributes.setdefault(c.OPENINFERENCE_AGENT, record.get("name"))
    if kind == "TOOL":
        attributes.setdefault("tool.name", record.get("name"))
    for key, value in (("input.value", input_value), ("output.value", output_value)):
        if value is not None:
            attributes[key] = value if isinstance(value, str) else genai_messages.dump_json(value)
    return attributes


def _langfuse_usage(usage: Record) -> dict[str, int]:
    """Return the numbers of tokens of a generation.

    Langfuse's integrations subtract details, such as `input_cached_tokens`, from `input`, and
    Langfuse adds up all names that contain "input" or "output". A sender may not have subtracted
    them: the details are part of `input` then, as `total` shows.
    """
    counts = {name: count for name, value in usage.items() if (count := _count(value)) is not None}
    tokens = {}
    for key, (kind, *names) in _USAGE.items():
        if (plain := counts.get(kind)) is not None:
            details = [n for name, n in counts.items() if kind in name and name != kind]
            is_whole = counts.get("total") == counts.get("input", 0) + counts.get("output", 0)
            tokens[key] = plain if is_whole else plain + sum(details)
        elif (other := _either(counts, *names)) is not None:
            cache = ("cache_creation_input_tokens", "cache_read_input_tokens")  # Anthropic's
            tokens[key] = other + sum(counts.get(name, 0) for name in cache if kind == "input")
    return tokens


def _count(value: Any) -> int | None:
    """Return a number of tokens, which data frames write as 7.0; None if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number >= 0 and number.is_integer() else None


def _either(record: Record, *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _loaded(value: Any) -> Any:
    """Decode `value` if it is the text of a JSON object or array; else return it unchanged."""
    return loaded(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


# --- Phoenix and Langfuse -------------------------------------------------------------------
def _arrival(raw: Mapping[str, Any], *, service: str, **fields: Any) -> ReceivedSpan:
    attributes: Attributes = clean_attributes(
        {key: _plain(key, value) for key, value in raw.items() if value is not None}
    )
    start = _nanoseconds(fields["start"], "start time")
    end = start if fields["end"] is None else _nanoseconds(fields["end"], "end time")
    parent = fields["parent_id"]
    span = span_of(
        attributes,
        trace_id=_id(fields["trace_id"], _TRACE_DIGITS, "trace"),
        span_id=_id(fields["span_id"], _SPAN_DIGITS, "span"),
        parent_id=None if parent is None else _id(parent, _SPAN_DIGITS, "parent"),
        name=clean_text(str(fields["name"] or "span")),
        start_ns=start,
        end_ns=end,
        status=fields["status"],
        status_message=clean_text(str(fields["status_message"] or "")),
        events=fields["events"],
        resource={SERVICE_NAME: clean_text(service)},
    )
    check_schema(span)
    return ReceivedSpan(span, span.parent_id is None)


def _plain(key: str, value: Any) -> Any:
    """Return the value of an attribute; a number of tokens is an integer."""
    count = _count(value) if isinstance(value, float) and key.startswith(_COUNTS) else None
    return plain_value(value) if count is None else count


def _id(value: Any, digits: int, what: str) -> str:
    """Return `value` if it is an id of `digits` hexadecimal digits; else return its hash as an id.

    Args:
        value: the id in the export.
        digits: length of OpenTelemetry's ids of this kind.
        what: kind of the id, for error messages.

    Raises:
        DataError: `value` is not a text.
    """
    if not isinstance(value, str) or not value:
        raise DataError(f"its {what} id is {value!r:.60}, not a text")
    text = value.lower().replace("-", "")
    if re.fullmatch(r"[0-9a-f]+", text) and len(text) == digits and text.strip("0"):
        return text
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:digits]


def _nanoseconds(value: Any, what: str) -> int:
    """Convert a time to nanoseconds since 1970.

    Args:
        value: a text in ISO 8601, in UTC if it has no time zone; or a number of milliseconds, as
            pandas writes times.
        what: name of the field, for error messages.

    Raises:
        DataError: `value` is not a time since 1970.
    """
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
