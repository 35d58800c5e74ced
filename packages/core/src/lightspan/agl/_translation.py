"""lightspan's spans as the original's, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from lightspan.agl import _spans as names
from lightspan.agl._attributes import flat
from lightspan.agl._rewards import get_reward_value, object_attributes
from lightspan.agl._spans import (
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanCoreFields,
    SpanNames,
    StatusCode,
    TraceStatus,
)
from lightspan.errors import RewardError
from lightspan.schema import conventions as c, messages
from lightspan.schema.spans import (
    Span as OurSpan,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanStatus,
    clean_attributes,
)
from lightspan.schema.tokens import TokenRecord

SEQUENCE: Final = SpanNames.SPAN_SEQUENCE_ID.value
CALL: Final = "openai.chat.completion"
"""Name of a model call."""

_KINDS: Final[Mapping[str, SpanKind]] = {
    names.ANNOTATION: SpanKind.ANNOTATION,
    names.OPERATION: SpanKind.OPERATION,
    SpanNames.MESSAGE: SpanKind.MESSAGE,
    SpanNames.OBJECT: SpanKind.OBJECT,
    SpanNames.EXCEPTION: SpanKind.EXCEPTION,
}
_NAMES: Final[Mapping[SpanKind, str]] = {
    SpanKind.LLM: CALL,
    SpanKind.REWARD: names.ANNOTATION,
    SpanKind.ANNOTATION: names.ANNOTATION,
    SpanKind.OPERATION: names.OPERATION,
    SpanKind.MESSAGE: SpanNames.MESSAGE.value,
    SpanKind.OBJECT: SpanNames.OBJECT.value,
    SpanKind.EXCEPTION: SpanNames.EXCEPTION.value,
}


# --- ours as the original's -----------------------------------------------------------------
def from_span(span: OurSpan, number: int, record: TokenRecord | None = None) -> Span:
    """A span of lightspan as one of the original.

    Args:
        span: of lightspan.
        number: its place among the attempt's.
        record: the tokens of the model call that it is.
    """
    is_ours = not _is_original(span)
    attributes = _attributes_of(span, record) if is_ours else dict(span.attributes)
    hidden = ("lightspan.", SEQUENCE)
    resource = {k: v for k, v in span.resource.items() if not k.startswith(hidden)}
    return Span(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence_id=int(str(span.resource.get(SEQUENCE, number))),
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=_NAMES.get(span.kind, span.name) if is_ours else span.name,
        status=TraceStatus(status_code=_code(span), description=span.status_message or None),
        attributes={k: v for k, v in attributes.items() if not k.startswith(hidden)},
        events=[
            Event(name=event.name, attributes=event.attributes, timestamp=event.time_ns / 1e9)
            for event in span.events
        ],
        links=[
            Link(context=_context(link.trace_id, link.span_id), attributes=link.attributes or None)
            for link in span.links
        ],
        start_time=span.start_ns / 1e9 or None,
        end_time=span.end_ns / 1e9 or None,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=OtelResource(attributes=resource, schema_url=""),
    )


def _code(span: OurSpan) -> StatusCode:
    return cast("StatusCode", span.status.name)


def _is_original(span: OurSpan) -> bool:
    """Whether it was made under the original's names."""
    return span.name.startswith("agentlightning.") or SEQUENCE in span.resource


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _attributes_of(span: OurSpan, record: TokenRecord | None) -> dict[str, Any]:
    attributes = dict(span.attributes)
    match span.kind:
        case SpanKind.REWARD:
            return {**attributes, **_reward(attributes)}
        case SpanKind.ANNOTATION:
            said = {k.removeprefix(c.ANNOTATION): v for k, v in attributes.items()}
            return {**attributes, **said}
        case SpanKind.MESSAGE:
            return {names.MESSAGE_BODY: attributes.get(c.MESSAGE_BODY, "")}
        case SpanKind.OBJECT:
            return object_attributes(json.loads(str(attributes.get(c.OBJECT_JSON, "null"))))
        case SpanKind.OPERATION:
            given = attributes.get(c.OPERATION_INPUT)
            asked = {} if given is None else {names.OPERATION_INPUT: given}
            return {**attributes, names.OPERATION_NAME: span.name, **asked}
        case SpanKind.LLM:
            return {**attributes, **_call(attributes), **_tokens(record)}
    return attributes


def _reward(attributes: Mapping[str, Any]) -> dict[str, Any]:
    dimensions = {
        name.removeprefix(c.REWARD_DIMENSION): value
        for name, value in attributes.items()
        if name.startswith(c.REWARD_DIMENSION)
    }
    value = attributes.get(c.REWARD_VALUE)
    if value is None:
        return {}
    primary = next((name for name, number in dimensions.items() if number == value), "primary")
    ordered = {primary: value, **dimensions}
    return reward_attributes(ordered)


def reward_attributes(dimensions: Mapping[str, float]) -> dict[str, Any]:
    """How a span says a reward: its dimensions, the primary one first."""
    return flat({names.REWARD: [{"name": k, "value": v} for k, v in dimensions.items()]})


def _call(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked and answered, message by message."""
    asked, answered = messages.asked_of(attributes), messages.answers_of(attributes)
    tools = json.loads(str(attributes.get(c.TOOL_DEFINITIONS, "[]")))
    functions = [
        {**tool["function"], "parameters": messages.dump_json(tool["function"].get("parameters"))}
        for tool in tools
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    said = {
        "gen_ai.prompt": [_message(message) for message in asked],
        "gen_ai.completion": [_message(message) for message in answered],
        "gen_ai.request.functions": functions,
    }
    return flat(said)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": call.get("id"), **(call.get("function") or {})}
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content")
    text = content if content is None or isinstance(content, str) else messages.dump_json(content)
    told = {**message, "content": text, "tool_calls": calls or None}
    return {name: value for name, value in told.items() if value is not None}


def _tokens(record: TokenRecord | None) -> dict[str, Any]:
    if record is None:
        return {}
    probabilities = [{"logprob": float(value)} for value in record.logprobs]
    return {
        "prompt_token_ids": [int(i) for i in record.prompt_ids],
        "response_token_ids": [int(i) for i in record.response_ids],
        "logprobs.content": json.dumps(probabilities),
    }


# --- the original's as ours -----------------------------------------------------------------
def to_span(span: Span) -> OurSpan:
    """A span of the original as one of lightspan, that `from_span` makes into an equal one."""
    core = SpanCoreFields(**{n: getattr(span, n) for n in SpanCoreFields.__struct_fields__})
    ours = OurSpan(
        span_id=span.span_id,
        trace_id=span.trace_id,
        name=span.name,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        parent_id=span.parent_id,
        events=[
            SpanEvent(e.name, _ns(e.timestamp), clean_attributes(e.attributes)) for e in span.events
        ],
        links=[
            SpanLink(
                link.context.trace_id, link.context.span_id, clean_attributes(link.attributes or {})
            )
            for link in span.links
        ],
        resource=clean_attributes({**span.resource.attributes, SEQUENCE: span.sequence_id}),
    )
    return from_core(core, ours)


def from_core(core: SpanCoreFields, span: OurSpan) -> OurSpan:
    """A span of lightspan that says what the core says."""
    kind = _KINDS.get(core.name) or c.kind_of(core.attributes)
    attributes = {**core.attributes}
    reward = get_reward_value(core)  # type: ignore[arg-type]
    if reward is not None:
        kind = SpanKind.REWARD
        attributes[c.REWARD_VALUE] = float(reward)
    return span.replace(
        name=core.name,
        kind=kind,
        status=SpanStatus[core.status.status_code],
        status_message=core.status.description or "",
        start_ns=_ns(core.start_time),
        end_ns=_ns(core.end_time),
        attributes=clean_attributes({**span.attributes, **attributes}),
    )


def as_span(item: Any, rollout_id: str, attempt_id: str, number: int) -> Span:
    """A span that an agent has returned, as one of this attempt.

    Raises:
        RewardError: it is none.
    """
    if isinstance(item, SpanCoreFields):
        return Span.from_core_fields(
            item, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=number
        )
    if isinstance(item, Span):
        ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": number}
        return item.model_copy(update=ids)
    if hasattr(item, "get_span_context"):
        return Span.from_opentelemetry(item, rollout_id, attempt_id, number)
    raise RewardError(f"the agent returned a list with {item!r:.200}, which is no span")


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def exception_attributes(exception: BaseException) -> dict[str, Any]:
    """How a span says an exception."""
    said = c.exception_attributes(exception)
    wanted = (c.EXCEPTION_TYPE, c.EXCEPTION_MESSAGE, c.EXCEPTION_STACKTRACE)
    return {**{name: said[name] for name in wanted}, "exception.escaped": True}
