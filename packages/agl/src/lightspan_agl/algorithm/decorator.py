"""The decorator `algo`, which makes a function the algorithm of a `Trainer`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from lightspan.errors import ConfigError
from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["algo"]
__getattr__ = _refuse_names(__name__)

_ARGUMENTS: Final = (
    *("store", "train_dataset", "val_dataset", "llm_proxy", "adapter", "initial_resources"),
)


class FunctionalAlgorithm:
    """An algorithm that calls the user's function; the decorator `algo` creates it.

    Raises:
        ConfigError: the function has a parameter that is unknown (not in `_ARGUMENTS`) and has no
            default. `*args` and `**kwargs` are allowed and get nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        unknown = [
            p.name
            for p in parameters
            if p.name not in _ARGUMENTS
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if unknown:
            raise ConfigError(
                f"the algorithm {function.__qualname__!r} takes {', '.join(unknown)}, which are "
                f"unknown; it can take {', '.join(_ARGUMENTS)}"
            )
        self.arguments = [p.name for p in parameters if p.name in _ARGUMENTS]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def is_async(self) -> bool:
        """Return whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    def bind(self, values: Mapping[str, Any]) -> Callable[[], Any]:
        """Return the function with its arguments filled in.

        Args:
            values: parameter → argument. Arguments that the function does not take are left out.

        Raises:
            ConfigError: `values` has a data set that the function does not take.
        """
        for name in ("train_dataset", "val_dataset"):
            if values.get(name) is not None and name not in self.arguments:
                raise ConfigError(
                    f"the algorithm {self.function.__qualname__!r} takes no {name}: leave it out "
                    "of fit, or add the parameter"
                )
        return functools.partial(
            self.function, **{name: values.get(name) for name in self.arguments}
        )


def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Turn a function into an algorithm for `Trainer(algorithm=…)`; also a decorator.

    The function queues rollouts in `store` and reads their rewards. It may be async, and may take
    `store`, `train_dataset`, `val_dataset`, `adapter` and `initial_resources`; `llm_proxy` is None.

    Raises:
        ConfigError: see `FunctionalAlgorithm`.
    """
    return FunctionalAlgorithm(function)
