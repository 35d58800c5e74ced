"""`OperationContext` of Agent Lightning, over `lightspan.operation`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, TypeVar

from lightspan.capture import emit
from lightspan.capture.context import current_context
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.semconv import OPERATION_INPUT, OPERATION_OUTPUT
from lightspan.schema.spans import AttributeValue, Span

F = TypeVar("F", bound=Callable[..., Any])

_NAME: Final = "operation"
"""Name of the span of a `with` block without a name."""


class OperationContext:
    """A `with` block or decorator that records one span; the function `operation` creates it.

    Outside a rollout it records nothing, and functions run as they are.

    Args:
        name: name of the span; None for the name of the decorated function, or `operation`.
        attributes: attributes of the span.
        propagate: False records nothing.
    """

    def __init__(
        self, name: str | None, attributes: Mapping[str, AttributeValue], propagate: bool
    ) -> None:
        self.name = name
        self.initial_attributes = attributes
        self.propagate = propagate
        self._block: Any = None
        self._span: Span | None = None
        self._has_ended = False

    def __enter__(self) -> Self:
        if self.propagate:
            self._block = emit.operation(self.name or _NAME)
            self._block.attributes.update(self.initial_attributes)
            self._span = self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)
        self._has_ended = True
        current = current_context()
        if self._span is not None and current is not None:
            recorded = reversed(current.scope.recorder.spans)
            own = (span for span in recorded if span.span_id == self._span.span_id)
            self._span = next(own, self._span)

    def span(self) -> Span | None:
        """Return the span of the `with` block after its end; None if nothing was recorded.

        Raises:
            RuntimeError: the block has not ended.
        """
        if not self._has_ended:
            raise RuntimeError("operation: call span() after the `with` block, when the span ended")
        return self._span

    def set_input(self, /, *args: Any, **kwargs: Any) -> None:
        """Record the input of a `with` block, as a JSON object; `args` is a list in it."""
        self._record(OPERATION_INPUT, {**({"args": args} if args else {}), **kwargs})

    def set_output(self, output: Any) -> None:
        """Record the output of a `with` block as JSON."""
        self._record(OPERATION_OUTPUT, output)

    def _record(self, attribute: str, value: Any) -> None:
        if self._span is not None and not self._has_ended:
            self._span.attributes[attribute] = dump_json(value)

    def __call__(self, function: F) -> F:
        """Return a function that records each call, with its arguments and result.

        Calls of a generator are recorded with their arguments alone.
        """
        name = self.name or str(getattr(function, "__name__", _NAME))
        signature = inspect.signature(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            if not self.propagate:
                return function

            @functools.wraps(function)
            def generator(*args: Any, **kwargs: Any) -> Any:
                block = emit.operation(name)
                arguments = dump_json(_by_name(signature, args, kwargs))
                block.attributes.update(self.initial_attributes)
                block.attributes[OPERATION_INPUT] = arguments
                return block(function)(*args, **kwargs)

            return generator  # type: ignore[return-value]

        def recorded() -> OperationContext:
            return OperationContext(name, self.initial_attributes, self.propagate)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
                with recorded() as operation:
                    operation.set_input(**_by_name(signature, args, kwargs))
                    result = await function(*args, **kwargs)
                    operation.set_output(result)
                    return result

            return wrapped_async  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with recorded() as operation:
                operation.set_input(**_by_name(signature, args, kwargs))
                result = function(*args, **kwargs)
                operation.set_output(result)
                return result

        return wrapped  # type: ignore[return-value]


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, including defaults.

    Arguments that do not fit the signature are returned as `args` and by their own names: the
    function itself raises the error.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {"args": args, **kwargs}
    bound.apply_defaults()
    return bound.arguments
