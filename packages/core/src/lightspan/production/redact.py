"""Pass every span to a hook of the user before the span leaves the app's code.

The hook (`redact=`, `LIGHTSPAN_REDACT=module:function`) takes a span and returns the span to keep,
or None to keep nothing of it. `map_text` is enough for most hooks:

    def redact(span: Span) -> Span | None:
        return map_text(span, lambda text: EMAIL.sub("<email>", text))

If a hook fails or returns another object, the span loses its content: only its ids, times and
numbers are kept.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.content import CONTENT
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.spans import Attributes, Span, SpanEvent, SpanLink, clean_attributes

Redact = Callable[[Span], Span | None]
"""A function that takes a span and returns the span to keep, or None to keep nothing of it."""

_JSON_ATTRIBUTES: Final = (CONTENT - {c.PROMPT_ORIGINAL}) | {c.TOOL_DEFINITIONS}
"""Attributes whose value may be JSON. Each text in the JSON is changed by itself, after
decoding."""

_MESSAGE_ATTRIBUTES: Final = frozenset({c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS})
_STRUCTURE_KEYS: Final = frozenset({"type", "role", "id", "finish_reason"})
"""Keys in messages whose values describe the structure of the message. The values stay
unchanged."""
_FREE_KEYS: Final = frozenset({"arguments", "response"})
"""Keys in messages whose values are objects of the app. In such an object every text is changed,
also under the keys in `_STRUCTURE_KEYS`."""

_IDENTITY: Final = frozenset(
    {c.CALL_ID, c.CALL_OUTCOME, c.ROUTE, c.RESPONSE_ID, c.OPERATION_NAME, c.OPENINFERENCE_KIND}
)
"""Attributes that identify a span and its kind; `map_text` leaves them unchanged."""

_NUMBERS: Final = frozenset(
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
"""Attributes without text of the app; they are kept when the hook fails."""


def map_text(span: Span, change: Callable[[str], str]) -> Span:
    """Return a copy of a span with `change` applied to every text of the app, its users and models.

    The texts are the name, the status message, and the texts in attributes, resource, events and
    links. In JSON (messages, tool arguments, inputs) each text is changed by itself, and keys stay.
    Ids, outcome, route and kind of operation stay unchanged, as do the roles and types of messages.
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


def _change_value(key: str, value: Any, change: Callable[[str], str]) -> Any:
    if key in _IDENTITY:
        return value
    if key == c.TOKEN_IDS:  # the text itself, as numbers
        return "[]"
    if isinstance(value, str):
        keys = _STRUCTURE_KEYS if key in _MESSAGE_ATTRIBUTES else frozenset()
        return _change_json(value, change, keys) if key in _JSON_ATTRIBUTES else change(value)
    if isinstance(value, list):
        return [change(item) if isinstance(item, str) else item for item in value]
    return value


def _change_json(
    text: str, change: Callable[[str], str], unchanged: frozenset[str] = frozenset()
) -> str:
    """Return the JSON `text` with `change` applied to its texts.

    The values of keys in `unchanged` stay. A text that is not JSON is changed as a whole.
    """
    try:
        value = json.loads(text)
    except ValueError:  # plain text, such as a tool's result
        return change(text)
    if not isinstance(value, dict | list | str):
        return change(text)
    return dump_json(_change_texts(value, change, unchanged))


def _change_texts(value: Any, change: Callable[[str], str], unchanged: frozenset[str]) -> Any:
    if isinstance(value, str):  # which may be JSON again, such as the arguments of a tool call
        return _change_json(value, change) if value.lstrip()[:1] in ("{", "[") else change(value)
    if isinstance(value, list):
        return [_change_texts(item, change, unchanged) for item in value]
    if not isinstance(value, dict):
        return value
    changed = {}
    for key, item in value.items():
        if isinstance(item, str) and key in unchanged:
            changed[key] = item
        else:
            has_app_keys = key in _FREE_KEYS and isinstance(item, dict)
            changed[key] = _change_texts(item, change, frozenset() if has_app_keys else unchanged)
    return changed


class Redactor:
    """Applies the user's hook to spans. Never raises.

    Args:
        hook: the hook; None keeps every span unchanged. A hook named `module:function` is imported
            at the first span, because the app may not be fully imported before.
    """

    def __init__(self, hook: Redact | str | None) -> None:
        self._hook = hook
        self.on = hook is not None
        """Whether there is a hook."""

    def __call__(self, span: Span) -> tuple[Span | None, str]:
        """Return the span to keep, and the kind of the error if the hook fails.

        The span is None if the hook returns None. The kind is empty if the hook did not fail.
        """
        if self._hook is None:
            return span, ""
        try:
            if isinstance(self._hook, str):
                self._hook = find_hook(self._hook)
            redacted = self._hook(span)
            return (None if redacted is None else _with_identity_of(span, redacted)), ""
        except Exception as error:  # whose message may quote what the hook hides
            return without_content(span), type(error).__name__


def _with_identity_of(span: Span, redacted: Span) -> Span:
    """Return `redacted` with the ids, kind and call id of `span`."""
    if not isinstance(redacted, Span):
        raise TypeError("redact must return a Span or None")
    attributes = clean_attributes(redacted.attributes)
    if c.CALL_ID in span.attributes:
        attributes[c.CALL_ID] = span.attributes[c.CALL_ID]
    return redacted.replace(
        span_id=span.span_id,
        trace_id=span.trace_id,
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        parent_id=span.parent_id,
        kind=span.kind,
        attributes=attributes,
    )


def without_content(span: Span) -> Span:
    """Return the span with its ids, times, status and numbers, and no text of the app."""
    return span.replace(
        name=str(span.kind),
        status_message="",
        attributes={key: value for key, value in span.attributes.items() if key in _NUMBERS},
        resource={},
        events=[],
        links=[],
    )


def find_hook(reference: str) -> Redact:
    """Import and return the function that `module:function` names.

    Raises:
        ConfigError: the function cannot be imported, or is no valid hook (`check_hook`).
    """
    try:
        hook: Any = pkgutil.resolve_name(reference)
    except Exception as error:
        raise ConfigError(
            f"redact={reference!r} cannot be imported ({type(error).__name__}): name it "
            f"module:function"
        ) from error
    check_hook(hook, reference)
    return hook  # type: ignore[no-any-return]


def check_hook(hook: object, reference: str = "") -> None:
    """Raise `ConfigError` unless the hook is callable and not asynchronous.

    Args:
        hook: the object that the user gave as hook.
        reference: name of the hook for the error; empty to show its `repr`.
    """
    name = repr(reference or hook)
    if not callable(hook):
        raise ConfigError(f"redact={name} is not a function, nor the name of one (module:function)")
    if any(map(inspect.iscoroutinefunction, (hook, getattr(hook, "__call__", None)))):  # noqa: B004
        raise ConfigError(f"redact={name} is asynchronous: use a plain `def`")
