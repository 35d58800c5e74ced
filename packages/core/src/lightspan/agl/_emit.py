"""`emit_*`: what an agent may say while it works, under the original's names and arguments.

Outside a rollout every function does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightspan.capture import emit
from lightspan.errors import RewardError
from lightspan.schema.messages import dump_json
from lightspan.schema.spans import Span


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span | None:
    """Say what the rollout is worth. A value that the agent returns wins over it.

    Args:
        reward: a number, or named dimensions of which `primary_key` is what is trained.
        primary_key: needed for dimensions.
        attributes: kept as an annotation.
        propagate: False says nothing.

    Raises:
        RewardError: `reward` is none, or has dimensions and no primary one.
    """
    if isinstance(reward, Mapping) and primary_key not in reward:
        raise RewardError(f"emit_reward of {sorted(reward)} needs primary_key=, one of these names")
    return _said(lambda: emit.emit_reward(reward, primary=primary_key), attributes, propagate)


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> Span | None:
    """Attach named values; nested ones are joined by dots."""
    return emit.emit_annotation(dict(_flat(annotation))) if propagate else None


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span | None:
    """Say a line of text for people; `attributes` are kept as an annotation."""
    return _said(lambda: emit.emit_message(message), attributes, propagate)


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span | None:
    """Keep any value as JSON; `attributes` are kept as an annotation."""
    return _said(lambda: emit.emit_object(object), attributes, propagate)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span | None:
    """Keep an exception that the agent handled itself; `attributes` are kept as an annotation."""
    return _said(lambda: emit.emit_exception(exception), attributes, propagate)


def _said(
    say: Callable[[], Span | None], attributes: Mapping[str, Any] | None, propagate: bool
) -> Span | None:
    """Say something, after its attributes; `propagate=False` says nothing, as in the original."""
    if not propagate:
        return None
    if attributes:
        emit_annotation(attributes)
    return say()


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | bool | int | float):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", dump_json(value)
