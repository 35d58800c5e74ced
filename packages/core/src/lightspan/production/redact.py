"""What leaves an app's process: a hook of the user's sees every span first.

The hook (`redact=`, `LIGHTSPAN_REDACT=module:function`) takes a span and returns the span to keep,
or None to keep nothing of it. `map_text` does what most hooks want:

    def redact(span: Span) -> Span | None:
        return map_text(span, lambda text: EMAIL.sub("<email>", text))

A hook that fails, or returns something else, costs the span its content: what is kept is its place
in the tree, its times and its numbers.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.spans import (
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    SpanLink,
    clean_attributes,
)

Redact = Callable[[Span], Span | None]
"""See the module."""

_JSON: Final = frozenset(
    {
        c.INPUT_MESSAGES,
        c.OUTPUT_MESSAGES,
        c.TOOL_DEFINITIONS,
        c.TOOL_CALL_ARGUMENTS,
        c.TOOL_CALL_RESULT,
        c.OBJECT_JSON,
        c.OPERATION_INPUT,
        c.OPERATION_OUTPUT,
    }
)
"""Attributes whose text is JSON, or may be: text in it is changed as text, escapes undone."""

_MESSAGES: Final = frozenset({c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS})
_STRUCTURE: Final = frozenset({"type", "role", "id", "finish_reason"})
"""Keys of messages whose texts say what a part is."""
_FREE: Final = frozenset({"arguments", "response"})
"""Keys of messages whose objects have keys of the app's own."""

_PLACE: Final = frozenset(
    {c.CALL_ID, c.CALL_OUTCOME, c.ROUTE, c.RESPONSE_ID, c.OPERATION_NAME, c.OPENINFERENCE_KIND}
)
"""Texts that say what a span is, not what was said. `map_text` leaves them."""

_KEPT: Final = frozenset(
    {
        c.CALL_ID,
        c.CALL_OUTCOME,
        c.ROUTE,
        c.INPUT_TOKENS,
        c.OUTPUT_TOKENS,
        c.REQUEST_STREAM,
        c.REQUEST_MAX_TOKENS,
        c.REQUEST_TEMPERATURE,
        c.REQUEST_TOP_P,
        c.REWARD_VALUE,
        c.REWARD_CALL_ID,
        c.REWARD_SPAN_ID,
    }
)
"""What is kept of a span whose hook failed: no text of the app's."""


def map_text(span: Span, change: Callable[[str], str]) -> Span:
    """A copy of the span with every text changed that the app, its users or its model wrote.

    That is the name, the status message, the texts of attributes, events and links; inside JSON
    (messages, tool arguments, inputs) each text by itself, keys left alone. What says which span it
    is (ids, outcome, route, kind of operation), and of messages role and type, stays.
    """
    return span.replace(
        name=change(span.name),
        status_message=change(span.status_message) if span.status_message else "",
        attributes=_changed(span.attributes, change),
        resource=_changed(span.resource, change),
        events=[
            SpanEvent(change(e.name), e.time_ns, _changed(e.attributes, change))
            for e in span.events
        ],
        links=[
            SpanLink(link.trace_id, link.span_id, _changed(link.attributes, change))
            for link in span.links
        ],
    )


def _changed(attributes: Attributes, change: Callable[[str], str]) -> Attributes:
    return {key: _change_value(key, value, change) for key, value in attributes.items()}


def _change_value(key: str, value: AttributeValue, change: Callable[[str], str]) -> Any:
    if key in _PLACE:
        return value
    if isinstance(value, str):
        kept = _STRUCTURE if key in _MESSAGES else frozenset()
        return _change_json(value, change, kept) if key in _JSON else change(value)
    if isinstance(value, list):
        return [change(item) if isinstance(item, str) else item for item in value]
    return value


def _change_json(
    text: str, change: Callable[[str], str], kept: frozenset[str] = frozenset()
) -> str:
    try:
        value = json.loads(text)
    except ValueError:  # such as the result of a tool, which is plain text
        return change(text)
    if not isinstance(value, dict | list | str):
        return change(text)
    return dump_json(_change_texts(value, change, kept))


def _change_texts(value: Any, change: Callable[[str], str], kept: frozenset[str]) -> Any:
    if isinstance(value, str):
        return _change_text(value, change)
    if isinstance(value, list):
        return [_change_texts(item, change, kept) for item in value]
    if isinstance(value, dict):
        return {
            key: item
            if key in kept and isinstance(item, str)
            else _change_texts(item, change, _kept_in(key, item, kept))
            for key, item in value.items()
        }
    return value


def _kept_in(key: str, item: Any, kept: frozenset[str]) -> frozenset[str]:
    return frozenset() if key in _FREE and isinstance(item, dict) else kept


def _change_text(text: str, change: Callable[[str], str]) -> str:
    """A text inside JSON; the arguments of a tool call are JSON once more."""
    return _change_json(text, change) if text.lstrip()[:1] in ("{", "[") else change(text)


class Redactor:
    """Applies a hook to spans; never raises.

    Args:
        hook: None keeps every span as it is; a text `module:function` is imported when the first
            span comes, as the app may not be whole before.
    """

    def __init__(self, hook: Redact | str | None) -> None:
        self._hook = hook

    @property
    def on(self) -> bool:
        """Whether there is a hook."""
        return self._hook is not None

    def __call__(self, span: Span) -> tuple[Span | None, str]:
        """What to keep of the span, and the kind of error if the hook failed (else empty)."""
        if self._hook is None:
            return span, ""
        try:
            if isinstance(self._hook, str):
                self._hook = find_hook(self._hook)
            kept = self._hook(span)
            return (None if kept is None else _in_place(kept, span)), ""
        except Exception as error:  # its text may hold what was to be hidden
            return without_content(span), type(error).__name__


def _in_place(kept: Span, span: Span) -> Span:
    """What the hook made, where the span stood."""
    if not isinstance(kept, Span):
        raise TypeError("redact must return a Span or None")
    attributes = clean_attributes(kept.attributes)
    if c.CALL_ID in span.attributes:
        attributes[c.CALL_ID] = span.attributes[c.CALL_ID]
    return kept.replace(
        span_id=span.span_id,
        trace_id=span.trace_id,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        parent_id=span.parent_id,
        kind=span.kind,
        attributes=attributes,
    )


def without_content(span: Span) -> Span:
    """The span's place, times, status and numbers: no text of the app's."""
    return Span(
        span_id=span.span_id,
        trace_id=span.trace_id,
        name=str(span.kind),
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        kind=span.kind,
        parent_id=span.parent_id,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        status=span.status,
        attributes={key: value for key, value in span.attributes.items() if key in _KEPT},
    )


def find_hook(reference: str) -> Redact:
    """The function that `module:function` names.

    Raises:
        ConfigError: it cannot be found, or is not callable.
    """
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"redact={reference!r} cannot be imported ({type(error).__name__}): name it "
            f"module:function"
        ) from error
    check_hook(found, reference)
    return found  # type: ignore[no-any-return]


def check_hook(hook: object, reference: str = "") -> None:
    """Raise `ConfigError` unless it can be asked as it is: a plain function, or the like."""
    name = repr(reference or hook)
    if not callable(hook):
        raise ConfigError(f"redact={name} is no function, nor the name of one (module:function)")
    if any(map(inspect.iscoroutinefunction, (hook, getattr(hook, "__call__", None)))):  # noqa: B004
        raise ConfigError(f"redact={name} is asynchronous: a span is kept at once, use plain def")


__all__ = ["Redact", "Redactor", "check_hook", "find_hook", "map_text", "without_content"]
