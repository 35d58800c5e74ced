"""Pass every span to a hook of the user before the span leaves the app's code.

The hook (`redact=`, `LIGHTSPAN_REDACT=module:function`) takes a span and returns the span to keep,
or None to keep nothing of it. `map_text` is enough for most hooks, and `without_content` is one:

    def redact(span: Span) -> Span | None:
        return map_text(span, lambda text: EMAIL.sub("<email>", text))

If a hook fails or returns another object, the span loses its content and names: only its ids,
times and numbers are kept.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.spans import Attributes, Span, SpanEvent, SpanLink, clean_attributes

Redact = Callable[[Span], Span | None]
"""A function that takes a span and returns the span to keep, or None to keep nothing of it."""

_JSON_ATTRIBUTES: Final = (
    *(c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.OPERATION_INPUT, c.OPERATION_OUTPUT, c.OBJECT_JSON),
    *(c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT, c.TOOL_DEFINITIONS),
)
"""Attributes whose value may be JSON. Each text in the JSON is changed by itself, after
decoding."""

_STRUCTURE_KEYS: Final = frozenset({"type", "role", "id", "finish_reason"})
"""Keys in messages whose values describe the structure of the message. The values stay
unchanged."""
_SCHEMA_KEYS: Final = _STRUCTURE_KEYS | {"name", "required", "format", "pattern", "$ref"}
"""Keys in definitions of tools whose values stay unchanged."""
_UNCHANGED_KEYS: Final = {
    **dict.fromkeys((c.INPUT_MESSAGES, c.OUTPUT_MESSAGES), _STRUCTURE_KEYS),
    c.TOOL_DEFINITIONS: _SCHEMA_KEYS,
}
"""Attribute → keys in its JSON whose values stay unchanged."""
_FREE_KEYS: Final = frozenset({"arguments", "response"})
"""Keys in messages whose values are objects of the app. In such an object every text is changed,
also under the keys in `_STRUCTURE_KEYS`."""

_IDENTITY: Final = frozenset(
    (
        *(c.CALL_ID, c.CALL_OUTCOME, c.ROUTE, c.POLICY, c.RESPONSE_ID, c.REQUEST_HASH),
        *(c.OPERATION_NAME, c.OPENINFERENCE_KIND, c.FINISH_REASONS, c.CLIENT, c.CLIENT_FIX),
        *(c.AGENT_PATH, c.AGENT_NAME, c.AGENT_ID, c.TOOL_NAME, c.TOOL_CALL_ID, c.PROVIDER_NAME),
        *(c.OPENINFERENCE_AGENT, c.OPENINFERENCE_NODE, c.OPENINFERENCE_PARENT, c.SERVICE_NAME),
        *(c.REQUEST_MODEL, c.RESPONSE_MODEL, c.PROMPT_NAME, c.PROMPT_CALL, c.OBJECT_TYPE),
        *(c.REWARD_CALL_ID, c.REWARD_SPAN_ID, c.ERROR_TYPE, c.EXCEPTION_TYPE),
    )
)
"""Attributes that identify a span and its kind: ids, types, and the names of agents, tools, models,
prompts and services. `map_text` leaves them unchanged."""

_NUMBERS: Final = frozenset(
    (
        *(c.CALL_ID, c.CALL_OUTCOME, c.ROUTE, c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.REQUEST_STREAM),
        *(c.REQUEST_MAX_TOKENS, c.REQUEST_TEMPERATURE, c.REQUEST_TOP_P, c.REWARD_VALUE),
        *(c.REWARD_CALL_ID, c.REWARD_SPAN_ID),
    )
)
"""Attributes without text of the app; they are kept when the hook fails."""


def map_text(span: Span, change: Callable[[str], str]) -> Span:
    """Return a copy of a span with `change` applied to every text of the app, its users and models.

    The texts are messages, inputs, arguments, results, comments, errors, and every other text in
    attributes, resource, events and links. In JSON each text is changed by itself, and keys stay.
    What identifies a span stays unchanged: ids, the names of spans, agents, tools, models, prompts
    and services, types and outcomes, the roles of messages, and in definitions of tools the names,
    types, formats and `required`. To record no content at all, use `without_content` as the hook.
    """
    return span.replace(
        status_message=change(span.status_message) if span.status_message else "",
        attributes=_changed(span.attributes, change),
        resource=_changed(span.resource, change),
        events=[SpanEvent(e.name, e.time_ns, _changed(e.attributes, change)) for e in span.events],
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
        keys = _UNCHANGED_KEYS.get(key, frozenset())
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
        is_schema = unchanged is _SCHEMA_KEYS
        is_tool = key == "name" and unchanged and value.get("type") == "tool_call"
        if (key in unchanged or is_tool) and isinstance(item, str | list if is_schema else str):
            changed[key] = item
        else:
            has_app_keys = key in _FREE_KEYS and not is_schema
            changed[key] = _change_texts(item, change, frozenset() if has_app_keys else unchanged)
    return changed


class Redactor:
    """Applies the user's hook to spans. Never raises.

    Args:
        hook: the hook. If it is named `module:function`, it is imported at the first span, because
            its module was being imported before.
    """

    def __init__(self, hook: Redact | str) -> None:
        self._hook = hook

    def __call__(self, span: Span) -> tuple[Span | None, str]:
        """Return the span to keep, and the kind of the error if the hook fails.

        The span is None if the hook returns None. The kind is empty if the hook did not fail.
        """
        try:
            if isinstance(self._hook, str):
                self._hook = _imported(self._hook)
            redacted = self._hook(span)
            return (None if redacted is None else _with_identity_of(span, redacted)), ""
        except Exception as error:
            # a message of the hook may quote what the hook hides, one about its import cannot
            failure = str(error) if isinstance(self._hook, str) else type(error).__name__
            return _kept(span, _NUMBERS).replace(name=str(span.kind)), failure


def _with_identity_of(span: Span, redacted: Span) -> Span:
    """Return `redacted` with the ids, kind and call id of `span`."""
    if not isinstance(redacted, Span):
        raise TypeError("redact must return a Span or None")
    call_id = {key: span.attributes[key] for key in (c.CALL_ID,) if key in span.attributes}
    attributes = clean_attributes({**redacted.attributes, **call_id})
    fields = ("span_id", "trace_id", "rollout_id", "attempt_id", "parent_id", "kind")
    return redacted.replace(attributes=attributes, **{key: getattr(span, key) for key in fields})


def without_content(span: Span) -> Span:
    """Return the span without any text of the app, its users and models.

    Its ids, times, status, token counts and rewards are kept, and the names of agents, tools,
    models, prompts and services. As the hook, `LIGHTSPAN_REDACT=lightspan:without_content`, it
    switches content off, so that the attempts are neither tasks nor demonstrations.
    """
    return _kept(span, _IDENTITY | _NUMBERS)


def _kept(span: Span, names: frozenset[str]) -> Span:
    """Return the span with those of its attributes and resource that `names` has, and no text.

    The named numbers of a reward are kept too.
    """
    attributes = {
        key: value
        for key, value in span.attributes.items()
        if key in names or key.startswith(c.REWARD_DIMENSION)
    }
    resource = {key: value for key, value in span.resource.items() if key in names}
    bare = span.replace(status_message="", events=[], links=[])
    return bare.replace(attributes=attributes, resource=resource)


def find_hook(hook: Redact | str) -> Redact | str:
    """Check and return the user's hook; import it if it is named `module:function`.

    The name is returned if its module is being imported now, as that of the app may be: the
    function is then imported at the first span.

    Raises:
        ConfigError: the hook cannot be imported, is not callable, or is asynchronous.
    """
    module, _, function = hook.partition(":") if isinstance(hook, str) else ("", "", "")
    names = ("site", module, module.partition(".")[0])
    # while `site` is imported, as by opentelemetry-instrument, the app's folder is not in sys.path
    specs = [getattr(sys.modules.get(name), "__spec__", None) for name in names]
    is_importing = any(getattr(spec, "_initializing", False) for spec in specs)
    return hook if function and is_importing else _imported(hook)


def _imported(reference: Any) -> Redact:
    hook, name = reference, repr(reference)
    if isinstance(reference, str):
        try:
            hook = pkgutil.resolve_name(reference)
        except Exception as error:
            raise ConfigError(
                f"redact={name} cannot be imported ({type(error).__name__}: {error}): name the "
                "function as module:function"
            ) from error
    if not callable(hook):
        raise ConfigError(f"redact={name} is not a function, nor the name of one (module:function)")
    if any(map(inspect.iscoroutinefunction, (hook, getattr(hook, "__call__", None)))):  # noqa: B004
        raise ConfigError(f"redact={name} is asynchronous: use a plain `def`")
    return hook  # type: ignore[no-any-return]
