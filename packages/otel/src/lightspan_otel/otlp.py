"""Decode OTLP requests, protobuf or JSON, into spans.

A body that is not OTLP is rejected whole. An invalid span in a valid request is rejected alone,
with a reason.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import DataError
from lightspan.schema.images import Image
from lightspan.schema.spans import SCHEMA_VERSION, Span
from lightspan_otel.convert import decode_attributes, decode_span

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
CONTENT_TYPES: Final = (PROTOBUF, JSON)

_REMOTE: Final = 0x300
"""Flags of a span whose parent is known to be in another process."""
_IDS: Final = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_MAX_TIME_NS: Final = 2**63
"""Upper bound of times, in nanoseconds since 1970."""
MAX_SPANS: Final = 50_000
"""Maximum spans per request."""
MAX_STORED_BYTES: Final = 64 * 2**20
"""Maximum bytes of a request's spans as they are stored.

A resource is sent once for many spans, but stored with each of them.
"""
_TRACE_DIGITS: Final = 32
_SPAN_DIGITS: Final = 16


class ReceivedSpan(NamedTuple):
    """A received span."""

    span: Span
    is_entry: bool
    """Whether the span enters its process: it has no parent, or its parent is in another process.
    """
    images: tuple[Image, ...] = ()
    """The images in the span's messages, which are references after `normalized_arrival`."""


class Decoded(NamedTuple):
    """The spans of a decoded request."""

    arrivals: list[ReceivedSpan]
    refused: list[str]
    """Reason for each invalid span."""


def decode_request(body: bytes, content_type: str) -> Decoded:
    """Decode an `ExportTraceServiceRequest`. Needs `opentelemetry-proto`.

    Args:
        body: the uncompressed request body.
        content_type: one of `CONTENT_TYPES`.

    Raises:
        DataError: `body` is not OTLP, or has too many spans or bytes.
    """
    is_json = content_type == JSON
    message = _from_object(_json_of(body)) if is_json else _from_protobuf(body)
    _check_size(message, len(body))
    return _decoded(message)


def decode_protobuf(body: bytes) -> Decoded:
    """Decode the protobuf message `TracesData`; its size is not limited. Needs
    `opentelemetry-proto`.

    Raises:
        DataError: `body` is not OTLP.
    """
    return _decoded(_from_protobuf(body))


def decode_object(value: dict[str, Any]) -> Decoded:
    """Decode a parsed OTLP JSON object; its size is not limited. Needs `opentelemetry-proto`.

    Args:
        value: the object; its ids are modified.

    Raises:
        DataError: `value` is not OTLP; the message names the wrong part.
    """
    return _decoded(_from_object(value))


def _decoded(message: Any) -> Decoded:
    decoded = Decoded([], [])
    for resource_spans in message.resource_spans:
        resource = decode_attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                try:
                    decoded.arrivals.append(_arrival(span, resource))
                except (DataError, ValueError) as error:
                    decoded.refused.append(f"span {span.name[:80]!r}: {error}")
    return decoded


def _check_size(message: Any, size: int) -> None:
    spans = 0
    for resource_spans in message.resource_spans:
        own = sum(len(scope_spans.spans) for scope_spans in resource_spans.scope_spans)
        spans += own
        size += own * int(resource_spans.resource.ByteSize())
    if spans > MAX_SPANS:
        raise DataError(f"the request has {spans:,} spans: send at most {MAX_SPANS:,} at once")
    if size > MAX_STORED_BYTES:
        raise DataError(
            f"the request's spans, each with its resource's attributes, have {size:,} bytes: send "
            f"at most {MAX_STORED_BYTES:,} at once"
        )


def _arrival(sent: Any, resource: dict[str, Any]) -> ReceivedSpan:
    _check_ids(sent)
    if sent.parent_span_id and len(sent.parent_span_id) * 2 != _SPAN_DIGITS:
        raise DataError(f"its parentSpanId is {sent.parent_span_id.hex()[:40]!r}")
    span = decode_span(sent, resource)
    check_schema(span)
    times = [span.start_ns, span.end_ns, *(event.time_ns for event in span.events)]
    if max(times) >= _MAX_TIME_NS:
        raise DataError(f"its time {max(times)} is beyond what 63 bits hold")
    return ReceivedSpan(span, span.parent_id is None or sent.flags & _REMOTE == _REMOTE)


def _check_ids(sent: Any) -> None:
    """Raise `DataError` if an id has a wrong length or is all zeros."""
    for value, digits, what in (
        (sent.trace_id, _TRACE_DIGITS, "traceId"),
        (sent.span_id, _SPAN_DIGITS, "spanId"),
    ):
        if len(value) * 2 != digits or not any(value):
            raise DataError(f"its {what} is {value.hex()[:40]!r}, not {digits} hex digits")


def check_schema(span: Span) -> None:
    """Raise `DataError` for a span of a newer lightspan: readers could not decode it."""
    if span.schema > SCHEMA_VERSION:
        raise DataError(f"it has schema {span.schema}; this lightspan reads up to {SCHEMA_VERSION}")


def _from_protobuf(body: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    try:
        return TracesData.FromString(body)
    except DecodeError as error:
        raise DataError(f"the body is no OTLP protobuf: {error}") from error


def _json_of(body: bytes) -> dict[str, Any]:
    """Decode the JSON of a request. Raises `DataError` if it is no JSON object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"the body is no OTLP JSON: an object, not {type(value).__name__}")
    return value


def _from_object(value: dict[str, Any]) -> Any:
    from google.protobuf.json_format import ParseDict, ParseError
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

    for span in _spans_in(value):
        for link in _list_in(span, "links", "links"):
            convert_ids(link)
        convert_ids(span)
    try:
        return ParseDict(value, TracesData(), ignore_unknown_fields=True)
    except (ParseError, RecursionError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"the body is no OTLP JSON: {error}") from error


def _spans_in(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource_spans in _list_in(value, "resourceSpans", "resource_spans"):
        for scope_spans in _list_in(resource_spans, "scopeSpans", "scope_spans"):
            yield from _list_in(scope_spans, "spans", "spans")


def _list_in(value: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    """Return the list of objects under the first of `names` in `value`; empty if there is none.

    Raises:
        DataError: the value is not a list of objects.
    """
    items = next((value[name] for name in names if name in value), None)
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DataError(f"the body is no OTLP JSON: {names[0]} is no list of objects")
    return items


def convert_ids(value: dict[str, Any]) -> None:
    """Convert the ids in `value` in place, from hexadecimal to base64.

    OTLP has hexadecimal ids, and protobuf's own JSON format has base64.

    Raises:
        DataError: an id is not hexadecimal.
    """
    for name in _IDS:
        text = value.get(name)
        if text is None:
            continue
        try:
            value[name] = base64.b64encode(binascii.unhexlify(text)).decode()
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the body is no OTLP JSON: {name} is {text!r:.60}, not hexadecimal"
            ) from error


def encode_answer(content_type: str, refused: list[str]) -> bytes:
    """Encode an `ExportTraceServiceResponse`; `refused` contains one reason per rejected span."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    answer = trace_service_pb2.ExportTraceServiceResponse()
    if refused:
        answer.partial_success.rejected_spans = len(refused)
        more = f" (and {len(refused) - 3} more)" if len(refused) > 3 else ""
        answer.partial_success.error_message = "; ".join(refused[:3]) + more
    return _encoded(answer, content_type)


def encode_failure(content_type: str, text: str) -> bytes:
    """Encode a `google.rpc.Status`, the body of every response but 200."""
    from google.rpc.status_pb2 import Status

    return _encoded(Status(message=text), content_type)


def _encoded(message: Any, content_type: str) -> bytes:
    from google.protobuf.json_format import MessageToJson

    if content_type == JSON:
        return str(MessageToJson(message, indent=None)).encode()
    data: bytes = message.SerializeToString()
    return data
