"""Span: an OpenTelemetry span with the fields that lightspan adds.

These are the ids of the rollout and the attempt, and sequence numbers, which order the model calls
of an attempt independently of clocks. Spans are sent and stored as MessagePack (`encode_span`).
Token ids and log-probabilities are not in spans but in
`lightspan.schema.token_records.TokenRecord`.
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
from lightspan.schema.redaction import bounded_text, clean_text

SCHEMA_VERSION = 1

AttributeValue = str | bool | int | float | list[str | bool | int | float]
"""An attribute value of OpenTelemetry; the items of a list have one type."""
Attributes = dict[str, AttributeValue]


class SpanKind(StrEnum):
    """The kind of a span, a coarser classification than `gen_ai.operation.name`."""

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
    """An event inside a span."""

    name: str
    time_ns: int
    attributes: Attributes = msgspec.field(default_factory=dict)


class SpanLink(msgspec.Struct, frozen=True, array_like=True):
    """A link to another span, such as from a reward to the call that it rewards."""

    trace_id: str
    span_id: str
    attributes: Attributes = msgspec.field(default_factory=dict)


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An OpenTelemetry span, with the fields that lightspan adds. Its ids are lower-case hex."""

    span_id: str
    """16 hex digits, unique within the attempt."""
    trace_id: str
    """32 hex digits."""
    name: str
    rollout_id: str = ""
    """Id of the span's rollout; empty outside rollouts."""
    attempt_id: str = ""
    kind: SpanKind = SpanKind.OTHER
    parent_id: str | None = None
    start_ns: int = 0
    """Nanoseconds since the epoch, for display; sequence numbers order calls."""
    end_ns: int = 0
    status: SpanStatus = SpanStatus.UNSET
    status_message: str = ""
    attributes: Attributes = msgspec.field(default_factory=dict)
    events: list[SpanEvent] = msgspec.field(default_factory=list)
    links: list[SpanLink] = msgspec.field(default_factory=list)
    resource: Attributes = msgspec.field(default_factory=dict)
    sequence_start: int | None = None
    """Number that the gateway gave to the start of the call. It counts the starts and ends of an
    attempt's calls. None for a span that the gateway did not number."""
    sequence_end: int | None = None
    """Number that the gateway gave to the end of the call, as in `sequence_start`."""
    late: bool = False
    """Whether the span was written with an epoch that is no longer current, or after the attempt's
    end. A late span is never trained."""
    schema: int = SCHEMA_VERSION

    def replace(self, **changes: Any) -> Span:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


_encoder = msgspec.msgpack.Encoder()
_span_decoder = msgspec.msgpack.Decoder(Span)


def encode_span(span: Span) -> bytes:
    """Encode a span as MessagePack."""
    return _encoder.encode(span)


def decode_span(data: bytes) -> Span:
    """Decode a span from `encode_span`.

    Raises:
        DataError: the bytes are not a span, or the span has a newer schema.
    """
    try:
        span = _span_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise DataError(f"not a span: {error}") from error
    if span.schema > SCHEMA_VERSION:
        raise DataError(
            f"span {span.span_id} has schema {span.schema}, this lightspan reads up to "
            f"{SCHEMA_VERSION}; upgrade lightspan"
        )
    return span


new_span_id: Final = random_digits
"""Return 16 random hex digits. OpenTelemetry's own ids are 0 if its SDK is disabled."""


def new_trace_id() -> str:
    """Return 32 random hex digits."""
    return secrets.token_hex(16)


now_ns: Final = clock.now_ns
"""Return the time in nanoseconds since the epoch."""


def clean_attributes(values: Mapping[str, Any]) -> Attributes:
    """Convert attributes to values that OpenTelemetry allows and MessagePack can encode.

    Values that are None are left out. Subclasses (an enum, numpy's float64) become plain values,
    lone surrogates become U+FFFD, and any other value (an object, a mixed list, an integer beyond
    64 bits) becomes its `repr`. Never raises, because it runs inside apps.
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
    return _clean_list(value) if isinstance(value, list | tuple) else _clean_scalar(value)


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


def text_of(error: BaseException) -> str:
    """Return `str(error)`, bounded and without keys (`bounded_text`). Never raises."""
    try:
        return bounded_text(str(error))
    except BaseException:  # `__str__` of an app's exception may raise anything, even a SystemExit
        return f"<{type(error).__name__}>"
