"""Functions `emit_*` with the arguments of Agent Lightning.

Outside a rollout they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightspan.capture import emit
from lightspan.schema.genai_messages import dump_json
from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_reward"]
__getattr__ = _refuse_names(__name__)


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> None:
    """Record the reward of the rollout. A reward that the agent returns takes precedence.

    Args:
        reward: a number, or a mapping of names to numbers. One of the numbers is the reward that is
            trained; the others are only recorded.
        primary_key: name of the number that is trained. None for the name `reward`, or for the
            first name if there is no `reward`.
        attributes: further attributes of the reward's span; None for none.
        propagate: False records nothing.

    Raises:
        RewardError: `reward` is not a number or mapping of numbers, or lacks `primary_key`.
    """
    if propagate:
        emit.emit_reward(reward, primary=primary_key, attributes=dict(_flat(attributes or {})))


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> None:
    """Record named values; record nothing if `propagate` is False.

    The names in nested mappings are joined by dots.
    """
    if annotation and propagate:
        emit.emit_annotation(dict(_flat(annotation)))


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record a line of text.

    Args:
        message: the text.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing.
    """
    if propagate:
        emit.emit_message(message, dict(_flat(attributes or {})))


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an object as JSON.

    Args:
        object: the object.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing.
    """
    if propagate:
        emit.emit_object(object, dict(_flat(attributes or {})))


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an exception that the agent handled.

    Args:
        exception: the exception.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing.
    """
    if propagate:
        emit.emit_exception(exception, dict(_flat(attributes or {})))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float) or _is_uniform(value):
            yield f"{prefix}{name}", value
        else:
            yield f"{prefix}{name}", dump_json(value)


def _is_uniform(value: Any) -> bool:
    """Return whether `value` is a list of texts, of ints, of floats or of bools, not a mixture.

    A span's attribute can hold such a list.
    """
    kinds = {type(item) for item in value} if isinstance(value, list) else set()
    return len(kinds) == 1 and kinds <= {str, int, float, bool}
