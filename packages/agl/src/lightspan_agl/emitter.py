"""Functions `emit_*` with the arguments of Agent Lightning.

Outside a rollout they record nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, overload

from lightspan.capture import context, emit
from lightspan.capture.context_types import AgentContext, AttemptContext, Place
from lightspan.capture.recorder import NullRecorder
from lightspan.errors import RewardError
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.semconv import REWARD_VALUE
from lightspan.schema.spans import Span, SpanKind
from lightspan_agl._operation import F, OperationContext
from lightspan_agl._unsupported import REWARD_DECORATOR, refuse_names as _refuse_names

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "operation",
]
__getattr__ = _refuse_names(__name__, reward=REWARD_DECORATOR)

_REWARD: Final = "agentlightning.reward"
"""Start of the attribute names with which Agent Lightning 0.3 writes a reward."""
_OLD_REWARD: Final = "reward"
"""The attribute of Agent Lightning 0.2 for a reward."""


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span | None:
    """Record the reward of the rollout. A reward that the agent returns takes precedence.

    Args:
        reward: a number, or a mapping of names to numbers. One of the numbers is the reward that is
            trained; the others are only recorded.
        primary_key: name of the number that is trained; required for a mapping.
        attributes: further attributes of the reward's span; None for none.
        propagate: False records nothing, and returns the span that would be recorded.

    Returns:
        The span; None outside a rollout, unless `propagate` is False.

    Raises:
        RewardError: `reward` is not a number or mapping of numbers, or lacks `primary_key`.
    """
    if reward is None:
        raise RewardError(
            "emit_reward(None): give a number; for no reward, call it not at all. An earlier "
            "reward of the rollout would stay the final one"
        )
    if isinstance(reward, Mapping) and primary_key is None:
        raise RewardError(f"emit_reward({dict(reward)!r:.100}): name the reward by primary_key=")
    with _recorded(propagate):
        return emit.emit_reward(
            reward, primary=primary_key, attributes=dict(_flat(attributes or {}))
        )


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> Span | None:
    """Record named values, or only return their span if `propagate` is False.

    The names in nested mappings are joined by dots. A number named `reward`, or the attributes
    `agentlightning.reward.0.value` and so on, are recorded as the reward of the rollout.

    Returns:
        The span; None outside a rollout, unless `propagate` is False, and for no values.

    Raises:
        ValueError: a name is no text, or a value is no text, number or boolean, or a list or
            mapping with another value.
    """
    _check_annotation(annotation, "")
    values = dict(_flat(annotation))
    if not values:
        return None
    rewards = dict(_rewards(annotation))
    if not rewards:
        with _recorded(propagate):
            return emit.emit_annotation(values)
    others = {
        name: value
        for name, value in values.items()
        if name != _OLD_REWARD and not name.startswith(f"{_REWARD}.") and name != _REWARD
    }
    with _recorded(propagate):
        return emit.emit_reward(rewards, primary=next(iter(rewards)), attributes=others)


def _rewards(annotation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and number of each reward in an annotation, the one that is trained first."""
    dimensions = annotation.get(_REWARD)
    if isinstance(dimensions, Sequence) and not isinstance(dimensions, str):
        yield from ((str(one["name"]), one["value"]) for one in dimensions)
        return
    number = 0
    while (value := annotation.get(f"{_REWARD}.{number}.value")) is not None:
        yield str(annotation.get(f"{_REWARD}.{number}.name", number)), value
        number += 1
    if number == 0 and isinstance(annotation.get(_OLD_REWARD), int | float):
        yield _OLD_REWARD, annotation[_OLD_REWARD]


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record a line of text.

    Args:
        message: the text.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing.

    Raises:
        TypeError: `message` is no text.
    """
    if not isinstance(message, str):
        raise TypeError(f"emit_message({message!r:.100}): the message must be a text")
    if propagate:
        emit.emit_message(message, dict(_flat(attributes or {})))


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> Span | None:
    """Record an object as JSON.

    Args:
        object: the object.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing, and returns the span that would be recorded.

    Returns:
        The span; None outside a rollout, unless `propagate` is False.

    Raises:
        RuntimeError: JSON cannot express `object`.
    """
    if not isinstance(object, bytes):
        try:
            json.dumps(object)
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"emit_object({object!r:.100}) takes values of JSON: {error}") from (
                error
            )
    with _recorded(propagate):
        return emit.emit_object(object, dict(_flat(attributes or {})))


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Record an exception that the agent handled.

    Args:
        exception: the exception.
        attributes: further attributes of the span; None for none.
        propagate: False records nothing.

    Raises:
        TypeError: `exception` is no exception.
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"emit_exception({exception!r:.100}) takes an exception")
    if propagate:
        emit.emit_exception(exception, dict(_flat(attributes or {})))


@contextmanager
def _recorded(propagate: bool) -> Iterator[None]:
    """Record what is emitted in the `with` block, or nothing if `propagate` is False.

    In the second case a span is made outside a rollout too, without ids of a rollout.
    """
    if propagate:
        yield
        return
    current = context.current_agent() or AgentContext(AttemptContext())
    scope = replace(current.scope, recorder=NullRecorder())
    leave = context.set_agent(Place.of(current).within(scope))
    try:
        yield
    finally:
        leave()


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the reward of the last span with a reward; None if no span has a reward.

    A reward of NaN, which is not trained, is returned as NaN.
    """
    rewards = [span for span in spans if span.kind is SpanKind.REWARD]
    value = rewards[-1].attributes.get(REWARD_VALUE, math.nan) if rewards else None
    return value if value is None else float(value)  # type: ignore[arg-type]


def _check_annotation(value: Any, name: str) -> None:
    """Raise `ValueError` if Agent Lightning's `emit_annotation` refuses the value called `name`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"emit_annotation: the name {key!r} must be a text")
            _check_annotation(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_annotation(item, f"{name}.{number}")
    elif not isinstance(value, str | int | float):
        raise ValueError(
            f"emit_annotation: {name}={value!r:.100} must be a text, a number, a boolean, or a "
            "list or mapping of them"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a mapping, with those of nested mappings.

    Values that no attribute of a span can hold become JSON.
    """
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


@overload
def operation(
    fn: F, *, propagate: bool = True, name: str | None = None, **additional_attributes: Any
) -> F: ...
@overload
def operation(
    fn: None = None,
    *,
    propagate: bool = True,
    name: str | None = None,
    **additional_attributes: Any,
) -> OperationContext: ...
def operation(
    fn: Callable[..., Any] | None = None,
    *,
    propagate: bool = True,
    name: str | None = None,
    **additional_attributes: Any,
) -> Any:
    """Record a function or a `with` block as one span.

    It decorates functions as `@operation` or `@operation(category="compute")`. Arguments and result
    are recorded as JSON. In `with operation(user_id=1) as op:` call `op.set_input(…)` and
    `op.set_output(…)`; after the block, `op.span()` returns the span.

    Args:
        fn: the function in the form `@operation`; None in the other forms.
        propagate: False records nothing.
        name: name of the span; None for the function's name, or `operation` for a block.
        additional_attributes: attributes of the span; the names in nested mappings are joined by
            dots.

    Raises:
        ValueError: `fn` is no function.
    """
    context = OperationContext(name, dict(_flat(additional_attributes)), propagate)
    if fn is None:
        return context
    if not callable(fn):
        raise ValueError(f"operation({fn!r:.100}): give the name as operation(name=…)")
    return context(fn)
