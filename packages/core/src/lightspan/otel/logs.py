"""OTLP's log records that say what was said in a call, beside its span.

Some libraries tell of a call's messages in events that are log records (`utterances`). Such a
record is kept as a span of its own inside the one that it names: it may come before that, after it,
or again. Who reads the attempt finds what it says in the call (`arrivals.gathered`). All other
records are an app's log, and left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightspan.errors import DataError
from lightspan.otel.otlp import (
    JSON,
    MOST_KEPT,
    MOST_SPANS,
    NEVER,
    Arrival,
    Decoded,
    check_ids,
    check_parts,
    json_of,
    list_in,
    numbers_in,
    numbers_of_parts,
    parsed,
    take_hex,
)
from lightspan.otel.translation import decode_attributes, decode_value
from lightspan.otel.utterances import EVENTS
from lightspan.otel.vocabulary import completed
from lightspan.schema import messages
from lightspan.schema.spans import Attributes, Span, SpanEvent, SpanKind

NAMES: Final = ("resourceLogs", "resource_logs")
"""What OTLP's JSON of logs has."""
_EVENT_NAME: Final = "event.name"


def decode_logs(body: bytes, content_type: str) -> Decoded:
    """What an `ExportLogsServiceRequest` says of calls. Needs `opentelemetry-proto`.

    Raises:
        DataError: it is no OTLP; the message says where.
    """
    if content_type == JSON:
        return decode_logs_object(json_of(body))
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.logs.v1.logs_pb2 import LogsData

    try:
        return _decoded(LogsData.FromString(body))
    except DecodeError as error:
        raise DataError(f"the body is no OTLP protobuf: {error}") from error


def decode_logs_object(value: dict[str, Any]) -> Decoded:
    """The same of OTLP's JSON that is loaded; it may be changed.

    Raises:
        DataError: it is no OTLP; the message says where.
    """
    from opentelemetry.proto.logs.v1.logs_pb2 import LogsData

    for resource_logs in list_in(value, *NAMES):
        for scope_logs in list_in(resource_logs, "scopeLogs", "scope_logs"):
            for record in list_in(scope_logs, "logRecords", "log_records"):
                take_hex(record)
    return _decoded(parsed(value, LogsData()))


def _decoded(message: Any) -> Decoded:
    check_parts(numbers_of_parts(message.resource_logs, "scope_logs", "log_records"))
    bodies = (record.body for record, *_ in _records(message))
    check_parts(number for body in bodies for number in numbers_in([body]))
    decoded = Decoded([], [])
    seen: Counter[str] = Counter()
    size = 0
    for record, resource_size, resource in _records(message):
        name = str(record.event_name)
        if not name:
            said = decode_attributes(each for each in record.attributes if each.key == _EVENT_NAME)
            name = str(said.get(_EVENT_NAME, ""))
        if name not in EVENTS:
            continue
        size += int(record.ByteSize()) + resource_size
        if len(decoded.arrivals) >= MOST_SPANS or size > MOST_KEPT:
            raise DataError(
                f"the request has more than {MOST_SPANS:,} records of calls, or they come to more "
                f"than {MOST_KEPT:,} bytes: send less at once"
            )
        try:
            decoded.arrivals.append(_arrival(name, record, resource, seen))
        except (DataError, ValueError) as error:
            decoded.refused.append(f"record {name}: {error}")
    return decoded


def _records(message: Any) -> Iterator[tuple[Any, int, Attributes]]:
    """Each record, and of what made it the size and the attributes."""
    for resource_logs in message.resource_logs:
        resource = decode_attributes(resource_logs.resource.attributes)
        size = int(resource_logs.resource.ByteSize())
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                yield record, size, resource


def _arrival(name: str, record: Any, resource: Attributes, seen: Counter[str]) -> Arrival:
    check_ids(record)
    at = record.time_unix_nano or record.observed_time_unix_nano
    if at >= NEVER:
        raise DataError(f"its time {at} is beyond what 63 bits hold")
    said = decode_attributes(record.attributes)
    body = decode_value(record.body)
    if body is not None:
        said["body"] = body if isinstance(body, str) else messages.dump_json(body)
    trace_id, span_id = record.trace_id.hex(), record.span_id.hex()
    key = messages.dump_json([trace_id, span_id, name, at, said])
    seen[key] += 1  # two of one moment that say the same are two
    digest = hashlib.sha256(f"{seen[key]} {key}".encode(errors="replace")).hexdigest()
    span = Span(
        span_id=digest[:16],
        trace_id=trace_id,
        parent_id=span_id,
        name=name,
        start_ns=at,
        end_ns=at,
        events=[SpanEvent(name, at, said)],
        resource=dict(resource),
    )
    return Arrival(span, is_entry=False)


# --- reading them ---------------------------------------------------------------------------
def _is_record(span: Span, by_id: Mapping[str, Span]) -> bool:
    """Whether a span stands for a record of another one that is there."""
    is_event = span.kind is SpanKind.OTHER and [event.name for event in span.events] == [span.name]
    return is_event and span.name in EVENTS and span.parent_id in by_id


def joined(spans: Sequence[Span]) -> list[Span]:
    """The spans, and what records say in the spans that they name."""
    by_id = {span.span_id: span for span in spans}
    records = [span for span in spans if _is_record(span, by_id)]
    said: dict[str, list[SpanEvent]] = {}
    for record in sorted(records, key=lambda record: record.start_ns):
        said.setdefault(record.parent_id or "", []).extend(record.events)
    left_out = {record.span_id for record in records}
    return [
        completed(span, said[span.span_id]) if span.span_id in said else span
        for span in spans
        if span.span_id not in left_out
    ]
