"""What spans say: rewards, messages, objects."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightspan.agl import _spans as names
from lightspan.agl._attributes import nested
from lightspan.agl._models import Model
from lightspan.agl._spans import SpanLike
from lightspan.errors import DataError

_AGENTOPS: Final = ("agentops.task.output", "agentops.entity.output")
"""Where the decorators of AgentOps put what a reward function returned, as JSON."""


class Reward(Model):
    """One dimension of a reward."""

    name: str
    value: float


def get_rewards_from_span(span: SpanLike) -> list[Reward]:
    """The dimensions of the reward that a span says, the primary one first; none if it says none.

    Raises:
        DataError: it says one that is malformed.
    """
    attributes = span.attributes or {}
    if not any(name.startswith(names.REWARD) for name in attributes):
        return []
    found = nested(attributes, names.REWARD)
    if not isinstance(found, list):
        raise DataError(f"the span {span.name!r} numbers its rewards wrongly: {sorted(attributes)}")
    return [Reward.model_validate(dimension) for dimension in found]


def get_reward_value(span: SpanLike) -> float | None:
    """The reward that a span says; None if it says none."""
    rewards = get_rewards_from_span(span)
    if rewards:
        return rewards[0].value
    attributes = span.attributes or {}
    for name in _AGENTOPS:
        output = _as_mapping(attributes.get(name))
        if output.get("type") == "reward":
            return output.get("value")
    if span.name != names.ANNOTATION:
        return None
    return attributes.get("reward")  # type: ignore[return-value]  # as 0.1 emitted it


def _as_mapping(value: Any) -> dict[str, Any]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def is_reward_span(span: SpanLike) -> bool:
    """Whether the span says a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Sequence[SpanLike]) -> list[SpanLike]:
    """Those that say a reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[SpanLike]) -> float | None:
    """The reward that the last of them says that says any."""
    values = (get_reward_value(span) for span in reversed(spans))
    return next((value for value in values if value is not None), None)


def get_message_value(span: SpanLike) -> str | None:
    """The message that a span says; None if it says none.

    Raises:
        DataError: it is no text.
    """
    message = (span.attributes or {}).get(names.MESSAGE_BODY)
    if message is not None and not isinstance(message, str):
        raise DataError(f"the message of the span {span.name!r} must be text, not {message!r}")
    return message


_READ: Final[dict[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: text.lower() == "true",
    "bytes": base64.b64decode,
}


def get_object_value(span: SpanLike) -> Any:
    """The object that a span keeps; None if it keeps none.

    Raises:
        DataError: it cannot be read.
    """
    attributes = span.attributes or {}
    try:
        if names.OBJECT_JSON in attributes:
            return json.loads(str(attributes[names.OBJECT_JSON]))
        if names.OBJECT_LITERAL in attributes:
            kind = str(attributes.get(names.OBJECT_TYPE, "str"))
            return _READ[kind](str(attributes[names.OBJECT_LITERAL]))
    except (KeyError, ValueError) as error:
        raise DataError(f"the object of the span {span.name!r} cannot be read: {error}") from error
    return None


def object_attributes(value: Any) -> dict[str, Any]:
    """How a span keeps an object.

    Raises:
        DataError: JSON cannot say it.
    """
    kind = type(value)
    if isinstance(value, str | int | float):
        return {names.OBJECT_TYPE: kind.__name__, names.OBJECT_LITERAL: str(value)}
    if isinstance(value, bytes):
        literal = base64.b64encode(value).decode()
        return {names.OBJECT_TYPE: "bytes", names.OBJECT_LITERAL: literal}
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"JSON cannot say the object {value!r:.200}: {error}") from error
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {names.OBJECT_TYPE: f"{module}{kind.__qualname__}", names.OBJECT_JSON: text}
