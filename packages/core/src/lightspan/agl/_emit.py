"""`emit_*` and `operation`: what an agent may say while it works, under the original's names and
arguments.

Outside a rollout nothing is recorded: the span is made and returned, where the original raises.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar

from lightspan.agl import _spans as names
from lightspan.agl._attributes import allowed, check, flat
from lightspan.agl._rewards import object_attributes
from lightspan.agl._spans import SpanCoreFields, SpanNames, SpanRecordingContext
from lightspan.agl._tracers import DummyTracer, Tracer, get_active_tracer, instant
from lightspan.agl._translation import exception_attributes, reward_attributes
from lightspan.capture import emit
from lightspan.errors import ConfigError, DataError, RewardError

F = TypeVar("F", bound=Callable[..., Any])


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Say what the rollout is worth. A value that the agent returns wins over it.

    Args:
        reward: a number, or named dimensions of which `primary_key` is what is trained.
        primary_key: needed for dimensions.
        attributes: kept with it.
        propagate: False records nothing.

    Returns:
        The span that says it.

    Raises:
        RewardError: `reward` is none, or has dimensions and no primary one.
    """
    dimensions = _dimensions(reward, primary_key)
    said = _annotation({**reward_attributes(dimensions), **(attributes or {})})
    return _said(said, propagate, lambda: _reward(dimensions, reward), attributes)


def _reward(dimensions: Mapping[str, float], given: float | Mapping[str, float]) -> object:
    """In lightspan's words: a number has no dimensions there; of several, the first is primary."""
    if not isinstance(given, Mapping):
        return emit.emit_reward(given)
    return emit.emit_reward(dimensions, primary=next(iter(dimensions)))


def _dimensions(reward: float | Mapping[str, float], primary: str | None) -> dict[str, float]:
    """The dimensions of a reward, the primary one first."""
    ordered: Mapping[str, float]
    if isinstance(reward, Mapping):
        if primary is None or primary not in reward:
            raise RewardError(
                f"emit_reward of {sorted(reward)} needs primary_key=, one of these names"
            )
        ordered = {primary: reward[primary], **reward}
    else:
        ordered = {"primary": reward}
    for name, value in ordered.items():
        if not isinstance(value, int | float):
            raise RewardError(f"emit_reward: {name}={value!r} must be a number")
    return {str(name): float(value) for name, value in ordered.items()}


def emit_annotation(annotation: Mapping[str, Any], propagate: bool = True) -> SpanCoreFields:
    """Attach named values; nested ones are joined by dots.

    Raises:
        DataError: a value is no text, number or bool, and no list of one of them.
    """
    said = _annotation(annotation)
    return _said(said, propagate, lambda: _annotate(annotation))


def _annotation(annotation: Mapping[str, Any]) -> SpanCoreFields:
    attributes = flat(annotation, expand_lists=False)
    check(attributes)
    return instant(names.ANNOTATION, allowed(attributes))


def _annotate(annotation: Mapping[str, Any]) -> object:
    return emit.emit_annotation(allowed(flat(annotation, expand_lists=False)))


def emit_message(
    message: str, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Say a line of text for people; `attributes` are kept with it.

    Raises:
        DataError: it is no text.
    """
    if not isinstance(message, str):
        raise DataError(f"emit_message: a message must be text, not {message!r:.200}")
    said = _instant(SpanNames.MESSAGE, {names.MESSAGE_BODY: message}, attributes)
    _said(said, propagate, lambda: emit.emit_message(message), attributes)


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> SpanCoreFields:
    """Keep any value that JSON can say; `attributes` are kept with it.

    Raises:
        DataError: JSON cannot say it.
    """
    said = _instant(SpanNames.OBJECT, object_attributes(object), attributes)
    return _said(said, propagate, lambda: emit.emit_object(object), attributes)


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, propagate: bool = True
) -> None:
    """Keep an exception that the agent handled itself; `attributes` are kept with it.

    Raises:
        DataError: it is none.
    """
    if not isinstance(exception, BaseException):
        raise DataError(f"emit_exception: not an exception: {exception!r:.200}")
    said = _instant(SpanNames.EXCEPTION, exception_attributes(exception), attributes)
    _said(said, propagate, lambda: emit.emit_exception(exception), attributes)


def _instant(
    name: str, said: Mapping[str, Any], attributes: Mapping[str, Any] | None
) -> SpanCoreFields:
    more = allowed(flat(attributes or {}, expand_lists=False))
    return instant(str(name), {**said, **more})


def _said(
    span: SpanCoreFields,
    propagate: bool,
    say: Callable[[], object],
    attributes: Mapping[str, Any] | None = None,
) -> SpanCoreFields:
    """Record it: by an active tracer of somebody's own, or else as lightspan says it, after its
    attributes."""
    if not propagate:
        return span
    tracer = get_active_tracer()
    if tracer is not None and type(tracer).create_span is not Tracer.create_span:
        return tracer.create_span(span.name, attributes=span.attributes, status=span.status)
    if attributes:
        _annotate(attributes)
    say()
    return span


def reward(fn: F) -> F:
    """Emit what the function returns as a reward; sync or async."""
    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            value = await fn(*args, **kwargs)
            emit_reward(value)
            return value

        return awaited  # type: ignore[return-value]

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        emit_reward(value)
        return value

    return called  # type: ignore[return-value]


class OperationContext:
    """A block, or every call of a function, as one span. Made by `operation`."""

    def __init__(self, name: str, attributes: Mapping[str, Any], propagate: bool = True) -> None:
        self.name = name
        self.initial_attributes = flat(attributes, expand_lists=False)
        self.propagate = propagate
        self._block: AbstractContextManager[SpanRecordingContext] | None = None
        self._recording: SpanRecordingContext | None = None
        self._span: SpanCoreFields | None = None

    @property
    def tracer(self) -> Tracer:
        """Who records it."""
        if not self.propagate:
            return DummyTracer()
        return get_active_tracer() or Tracer()

    def __enter__(self) -> Self:
        self._block = self._opened(self.initial_attributes)
        self._recording = self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._block is not None
        assert self._recording is not None
        recording, block, self._block, self._recording = (
            self._recording,
            self._block,
            None,
            None,
        )
        try:
            block.__exit__(kind, error, trace)
        finally:
            self._span = recording.get_recorded_span()

    def _opened(
        self, attributes: Mapping[str, Any]
    ) -> AbstractContextManager[SpanRecordingContext]:
        return self.tracer.operation_context(self.name, attributes=allowed(attributes))

    def span(self) -> SpanCoreFields:
        """The span of the block.

        Raises:
            ConfigError: the block is not over.
        """
        if self._span is None:
            raise ConfigError("operation: its span is ready after the block")
        return self._span

    def set_input(self, *args: Any, **kwargs: Any) -> None:
        """Keep what the block works on.

        Raises:
            ConfigError: outside the block.
        """
        given = {"args": _numbered(args), **kwargs} if args else kwargs
        self._record(_below(names.OPERATION_INPUT, given))

    def set_output(self, output: Any) -> None:
        """Keep what came of it.

        Raises:
            ConfigError: outside the block.
        """
        self._record(flat({names.OPERATION_OUTPUT: output}, expand_lists=False))

    def _record(self, attributes: Mapping[str, Any]) -> None:
        if self._recording is None:
            raise ConfigError("operation: input and output belong inside its `with` block")
        self._recording.record_attributes(allowed(attributes))

    def __call__(self, fn: F) -> F:
        """Keep each call of the function, with its arguments and what it returns."""
        signature = inspect.signature(fn)
        attributes = {names.OPERATION_NAME: fn.__name__, **self.initial_attributes}

        def began(recording: SpanRecordingContext, args: Any, kwargs: Any) -> None:
            given = _given(signature, args, kwargs)
            recording.record_attributes(allowed(_below(names.OPERATION_INPUT, given)))

        def ended(recording: SpanRecordingContext, value: Any) -> None:
            said = flat({names.OPERATION_OUTPUT: value}, expand_lists=False)
            recording.record_attributes(allowed(said))

        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self._opened(attributes) as recording:
                    began(recording, args, kwargs)
                    value = await fn(*args, **kwargs)
                    ended(recording, value)
                    return value

            return awaited  # type: ignore[return-value]

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self._opened(attributes) as recording:
                began(recording, args, kwargs)
                value = fn(*args, **kwargs)
                ended(recording, value)
                return value

        return called  # type: ignore[return-value]


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    said = flat(values, expand_lists=False)
    return {f"{prefix}.{name}": value for name, value in said.items()}


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


def _given(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, defaults too; as given where they do not fit, which the
    function itself will say."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {"args": _numbered(args), **kwargs}
    bound.apply_defaults()
    kinds = signature.parameters
    return {
        name: _numbered(value) if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL else value
        for name, value in bound.arguments.items()
    }


def operation(
    fn: F | None = None, *, propagate: bool = True, name: str | None = None, **attributes: Any
) -> Any:
    """Keep a block, or each call of a function, as one span.

    `@operation`, `@operation(category="compute")`, `with operation(user=1) as op:` and then
    `op.set_input(…)`, `op.set_output(…)`.

    Args:
        fn: the function, of a decorator without arguments.
        propagate: False records nothing.
        name: of the operation; of a function it is its own.
        attributes: kept with it.
    """
    said = {names.OPERATION_NAME: name, **attributes} if name is not None else attributes
    context = OperationContext(names.OPERATION, said, propagate)
    return context if fn is None else context(fn)
