"""Span: one OpenTelemetry span as lightspan keeps it.

A span is frozen and carries OpenTelemetry's fields plus three of ours: the rollout and attempt that
it belongs to, and the per-attempt sequence numbers that order model calls (design: never by
clocks). Spans travel and rest as MessagePack (`encode_spans`, `decode_spans`); token ids and
log-probabilities never live in a span, they are in `lightspan.schema.token_records.TokenRecord`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, cast

import msgspec

from lightspan.errors import DataError
from lightspan.schema import clock
from lightspan.schema.ids import random_digits
from lightspan.schema.redaction import clean_text, kept_text

SCHEMA_VERSION = 1

AttributeValue = str | bool | int | float | list[str | bool | int | float]
"""OpenTelemetry's attribute values; a list holds values of one type."""
Attributes = dict[str, AttributeValue]


class SpanKind(StrEnum):
    """What a span says about an agent app (a coarse reading of `gen_ai.operation.name`)."""

    LLM = "llm"
    AGENT = "agent"
    TOOL = "tool"
    CHAIN = "chain"
    REWARD = "reward"
    ANNOTATION = "annotation"
    MESSAGE = "message"
    OBJECT = "object"
    EXCEPTION = "exception"
    OPERATION = "operation"
    OTHER = "other"


class SpanStatus(StrEnum):
    """OpenTelemetry's status of a span."""

    UNSET = "unset"
    OK = "ok"
    ERROR = "error"


class SpanEvent(msgspec.Struct, frozen=True, array_like=True):
    """A timestamped event inside a span."""

    name: str
    time_ns: int
    attributes: Attributes = msgspec.field(default_factory=dict)


class SpanLink(msgspec.Struct, frozen=True, array_like=True):
    """A link to another span (a reward links to the call that it rewards)."""

    trace_id: str
    span_id: str
    attributes: Attributes = msgspec.field(default_factory=dict)


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One span. Ids are lower-case hex as in OpenTelemetry: 16 digits a span, 32 a trace."""

    span_id: str
    """16 hex digits, unique within the attempt."""
    trace_id: str
    """32 hex digits."""
    name: str
    rollout_id: str = ""
    """Empty outside any rollout."""
    attempt_id: str = ""
    kind: SpanKind = SpanKind.OTHER
    parent_id: str | None = None
    start_ns: int = 0
    """Nanoseconds since the epoch; for display, never for ordering calls."""
    end_ns: int = 0
    status: SpanStatus = SpanStatus.UNSET
    status_message: str = ""
    attributes: Attributes = msgspec.field(default_factory=dict)
    events: list[SpanEvent] = msgspec.field(default_factory=list)
    links: list[SpanLink] = msgspec.field(default_factory=list)
    resource: Attributes = msgspec.field(default_factory=dict)
    sequence_start: int | None = None
    """Per-attempt sequence number that the gateway gave when the call began."""
    sequence_end: int | None = None
    """Per-attempt sequence number that the gateway gave when the call ended."""
    late: bool = False
    """Written under a lost epoch or after the attempt was sealed: kept, never trained."""
    schema: int = SCHEMA_VERSION

    def replace(self, **changes: Any) -> Span:
        """A copy with the given fields changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def duration_s(self) -> float:
        """Seconds between start and end."""
        return (self.end_ns - self.start_ns) / 1e9


_encoder = msgspec.msgpack.Encoder()
_span_decoder = msgspec.msgpack.Decoder(Span)
_spans_decoder = msgspec.msgpack.Decoder(list[Span])


def encode_span(span: Span) -> bytes:
    """MessagePack of one span."""
    return _encoder.encode(span)


def decode_span(data: bytes) -> Span:
    """The inverse of `encode_span`.

    Raises:
        DataError: the bytes are no span, or one of a newer schema.
    """
    try:
        return _checked(_span_decoder.decode(data))
    except msgspec.DecodeError as error:
        raise DataError(f"not a span: {error}") from error


def encode_spans(spans: Sequence[Span]) -> bytes:
    """MessagePack of many spans."""
    return _encoder.encode(spans)


def decode_spans(data: bytes) -> list[Span]:
    """The inverse of `encode_spans`.

    Raises:
        DataError: the bytes are no spans, or of a newer schema.
    """
    try:
        return [_checked(span) for span in _spans_decoder.decode(data)]
    except msgspec.DecodeError as error:
        raise DataError(f"not spans: {error}") from error


new_span_id: Final = random_digits
"""16 random hex digits (never OpenTelemetry's own: those are 0 where its SDK is disabled)."""


def new_trace_id() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


now_ns: Final = clock.now_ns
"""Nanoseconds since the epoch."""


def clean_attributes(values: Mapping[str, Any]) -> Attributes:
    """The mapping with values that OpenTelemetry allows and MessagePack can carry.

    None is left out. Subclasses (an enum, numpy's float64) become plain values, lone surrogates
    become U+FFFD, and what has no such form (an object, a mixed list, an integer beyond 64 bits)
    becomes its `repr`. Never raises: it runs inside apps.
    """
    return {
        (key if type(key) is str and key.isascii() else clean_text(str(key))): (
            value if type(value) is str and value.isascii() else _clean(value)
        )
        for key, value in values.items()
        if value is not None
    }


_TEXT: Final = frozenset({str})


def _clean(value: Any) -> AttributeValue:
    kind = type(value)
    if kind is float or kind is bool or (kind is int and -(2**63) <= value < 2**63):
        return value  # type: ignore[no-any-return]
    if isinstance(value, list | tuple):
        return _clean_list(value)
    return _clean_scalar(value)


def _clean_scalar(value: Any) -> str | bool | int | float:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(str.__str__(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    return clean_text(_repr(value))


def _clean_list(values: Sequence[Any]) -> AttributeValue:
    if {*map(type, values)} <= _TEXT:
        return [clean_text(value) for value in values]
    cleaned = [_clean_scalar(value) for value in values]
    kinds = {type(value) for value in cleaned}
    uniform = len(kinds) <= 1 and all(isinstance(value, tuple(kinds)) for value in values)
    return cast("AttributeValue", cleaned) if uniform else clean_text(_repr(values))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _checked(span: Span) -> Span:
    if span.schema > SCHEMA_VERSION:
        raise DataError(
            f"span {span.span_id} has schema {span.schema}, this lightspan reads up to "
            f"{SCHEMA_VERSION}; upgrade lightspan"
        )
    return span


def text_of(error: BaseException) -> str:
    """`str(error)`, whatever the exception's author made of it, as it is kept (`kept_text`)."""
    try:
        return kept_text(str(error))
    except BaseException:  # a SystemExit too, or a cancellation that nobody asked for
        return f"<{type(error).__name__}>"
