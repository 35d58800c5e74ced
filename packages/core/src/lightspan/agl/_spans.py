"""Spans under the original's names, and what they are called."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, Union, cast

from lightspan.agl._models import Model
from lightspan.schema.spans import Attributes, new_span_id, new_trace_id

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource as SDKResource
    from opentelemetry.sdk.trace import Event as SDKEvent, ReadableSpan
    from opentelemetry.trace import Link as SDKLink, SpanContext as SDKContext, Status as SDKStatus

TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]


class SpanNames(StrEnum):
    """Names of spans, and of what they say about where they belong."""

    REWARD = "agentlightning.reward"
    MESSAGE = "agentlightning.message"
    OBJECT = "agentlightning.object"
    EXCEPTION = "agentlightning.exception"
    VIRTUAL = "agentlightning.virtual"
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(StrEnum):
    """Names of attributes."""

    MESSAGE = "message"
    OBJECT = "object"


ANNOTATION: Final = "agentlightning.annotation"
"""A span that says a reward, too."""
OPERATION: Final = "agentlightning.operation"
REWARD: Final = SpanNames.REWARD.value
MESSAGE_BODY: Final = "agentlightning.message.body"
OBJECT_TYPE: Final = "agentlightning.object.type"
OBJECT_LITERAL: Final = "agentlightning.object.literal"
OBJECT_JSON: Final = "agentlightning.object.json"
OPERATION_NAME: Final = "agentlightning.operation.name"
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"


class SpanContext(Model):
    """Which span it is."""

    trace_id: str
    span_id: str
    is_remote: bool
    trace_state: TraceState

    @classmethod
    def from_opentelemetry(cls, src: SDKContext) -> Self:
        """The same of OpenTelemetry's."""
        return cls(
            trace_id=f"{src.trace_id:032x}",
            span_id=f"{src.span_id:016x}",
            is_remote=src.is_remote,
            trace_state=dict(src.trace_state or {}),
        )


class TraceStatus(Model):
    """How what a span records has ended."""

    status_code: StatusCode
    description: str | None = None

    @classmethod
    def from_opentelemetry(cls, src: SDKStatus) -> Self:
        """The same of OpenTelemetry's."""
        code = cast("StatusCode", src.status_code.name)
        return cls(status_code=code, description=src.description)


class Event(Model):
    """Something that happened inside a span."""

    name: str
    attributes: Attributes
    timestamp: float | None = None
    """Seconds since the epoch."""

    @classmethod
    def from_opentelemetry(cls, src: SDKEvent) -> Self:
        """The same of OpenTelemetry's."""
        attributes = _plain(src.attributes)
        return cls(name=src.name, attributes=attributes, timestamp=_seconds(src.timestamp))


class Link(Model):
    """A link to another span."""

    context: SpanContext
    attributes: Attributes | None = None

    @classmethod
    def from_opentelemetry(cls, src: SDKLink) -> Self:
        """The same of OpenTelemetry's."""
        context = SpanContext.from_opentelemetry(src.context)
        return cls(context=context, attributes=_plain(src.attributes) or None)


class OtelResource(Model):
    """The process that a span comes from."""

    attributes: Attributes
    schema_url: str

    @classmethod
    def from_opentelemetry(cls, src: SDKResource) -> Self:
        """The same of OpenTelemetry's."""
        return cls(attributes=_plain(src.attributes), schema_url=src.schema_url or "")


class SpanCoreFields(Model):
    """A span as who makes it knows it."""

    name: str
    status: TraceStatus
    attributes: Attributes
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None


class SpanRecordingContext(Protocol):
    """A span that is not over."""

    def record_exception(self, exception: BaseException) -> None: ...
    def record_attributes(self, attributes: Attributes) -> None: ...
    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...
    def get_recorded_span(self) -> SpanCoreFields: ...


class Span(Model):
    """One span of an attempt."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """Orders the spans of an attempt."""
    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_id: str | None
    name: str
    status: TraceStatus
    attributes: Attributes
    events: list[Event]
    links: list[Link]
    start_time: float | None
    """Seconds since the epoch."""
    end_time: float | None
    context: SpanContext | None
    parent: SpanContext | None
    resource: OtelResource

    @classmethod
    def from_opentelemetry(
        cls, src: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int
    ) -> Self:
        """A span of OpenTelemetry's SDK, as one of this attempt."""
        context = src.get_span_context()
        parent = SpanContext.from_opentelemetry(src.parent) if src.parent else None
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{context.trace_id if context else 0:032x}",
            span_id=f"{context.span_id if context else 0:016x}",
            parent_id=parent.span_id if parent else None,
            name=src.name,
            status=TraceStatus.from_opentelemetry(src.status),
            attributes=_plain(src.attributes),
            events=[Event.from_opentelemetry(event) for event in src.events],
            links=[Link.from_opentelemetry(link) for link in src.links],
            start_time=_seconds(src.start_time),
            end_time=_seconds(src.end_time),
            context=SpanContext.from_opentelemetry(context) if context else None,
            parent=parent,
            resource=OtelResource.from_opentelemetry(src.resource),
        )

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: OtelResource | None = None,
        status: TraceStatus | None = None,
    ) -> Self:
        """A span that says these attributes; ids that are not given are new ones."""
        trace_id, span_id = trace_id or new_trace_id(), span_id or new_span_id()
        return cls(
            rollout_id=rollout_id or "",
            attempt_id=attempt_id or "",
            sequence_id=sequence_id or 0,
            trace_id=trace_id,
            span_id=span_id,
            parent_id=parent_id,
            name=name or SpanNames.VIRTUAL.value,
            status=status or TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=start_time,
            end_time=end_time,
            context=_here(trace_id, span_id),
            parent=_here(trace_id, parent_id) if parent_id else None,
            resource=resource or OtelResource(attributes={}, schema_url=""),
        )

    @classmethod
    def from_core_fields(
        cls,
        core: SpanCoreFields,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
    ) -> Self:
        """The span that was made so, of this attempt."""
        return cls.from_attributes(
            attributes=core.attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            name=core.name,
            start_time=core.start_time or time.time(),
            end_time=core.end_time,
            status=core.status,
        )


SpanLike = Union["ReadableSpan", Span]
"""Of OpenTelemetry's SDK, or of here."""


def _here(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    """OpenTelemetry's attributes, whose lists are tuples."""
    values = dict(attributes or {})
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _seconds(time_ns: int | None) -> float | None:
    return time_ns / 1e9 if time_ns else None
