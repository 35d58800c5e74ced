"""Agents: the class `LitAgent`, and functions as agents."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Final, Generic, TypeVar

from lightspan.capture.static_analysis import is_user_code, package_of
from lightspan.errors import AppError
from lightspan_agl._unsupported import RefusesNames, refuse_names as _refuse_names
from lightspan_agl.tracer import Tracer
from lightspan_agl.types import LLM, NamedResources, PromptTemplate, Rollout

__all__ = ["LitAgent", "rollout"]
__getattr__ = _refuse_names(__name__)

T = TypeVar("T")

log = logging.getLogger(__name__)

_CONSTRUCTION: Final = "_lightspan_construction"
_SET_LATER: Final = {_CONSTRUCTION, "__orig_class__", "runner", "tracer"}
"""Attributes that are not set by an agent's constructor."""
_CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
_SETTINGS: Final = ("argparse", "collections", "easydict", "ml_collections", "omegaconf")
"""Packages with classes for settings and containers."""


class Construction:
    """Constructor arguments of an agent, from which a runner recreates it."""

    def __init__(self, agent: LitAgent[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.accept(agent)

    def accept(self, agent: LitAgent[Any]) -> None:
        """Regard the attributes that `agent` has now as those of its construction.

        Rollouts in this process change the agent too, and a runner's agent begins without that.
        """
        self._attributes = dict(vars(agent))
        arguments = {id(value) for value in (*self.args, *self.kwargs.values())}
        self._contents = {
            name: _contents(value)
            for name, value in vars(agent).items()
            if id(value) not in arguments  # an argument is passed on as it is
        }

    def changes(self, agent: LitAgent[Any]) -> list[str]:
        """Return the names of the attributes that changed since `agent` was constructed.

        They are attributes that were set, and attributes whose container was changed in place (see
        `_contents`). `tracer` and `runner` are not among them, because runs in this process set
        them.
        """
        attributes, missing = vars(agent), object()
        return sorted(
            name
            for name in (attributes.keys() | self._attributes.keys()) - _SET_LATER
            if attributes.get(name, missing) is not self._attributes.get(name, missing)
            or (name in self._contents and _contents(attributes[name]) != self._contents[name])
        )


def _contents(value: Any) -> int:
    """Return a hash that differs after a change in place of `value`.

    Lists, mappings, sets, and the attributes of data classes, structs, namespaces, pydantic models
    and objects of the user's classes are compared, at every depth. Objects of installed packages,
    such as clients, are compared by identity, because they may change by being used.
    """
    try:
        return _contents_of(value, ())
    except RecursionError:
        return id(value)


def _contents_of(value: Any, above: tuple[int, ...]) -> int:
    if isinstance(value, str | bytes):
        return hash(value)
    if isinstance(value, int | float | bytearray | None):
        return hash((type(value), repr(value)))  # 1, 1.0 and True are equal, and NaN is not itself
    if id(value) in above:  # a container in itself
        return id(value)
    above = (*above, id(value))
    if (settings := _settings_of(value)) is not None:
        value = settings
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple | deque):
        return hash(tuple(_contents_of(item, above) for item in value))
    if isinstance(value, set | frozenset):
        return hash(frozenset(_contents_of(item, above) for item in value))
    return id(value)


def _settings_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that are compared (see `_contents`); None for no such."""
    kind = type(value)
    if isinstance(value, (type, FunctionType, MethodType, *_CONTAINERS)):
        return None
    if is_dataclass(value) or hasattr(kind, "__struct_fields__"):  # perhaps with slots
        names = getattr(kind, "__struct_fields__", None) or [each.name for each in fields(value)]
        return {name: getattr(value, name, None) for name in names} | getattr(value, "__dict__", {})
    package = package_of(kind)
    is_of_user = package.partition("_")[0] != "lightspan" and is_user_code(kind)
    is_settings = isinstance(value, SimpleNamespace) or hasattr(kind, "model_fields")
    if is_of_user or is_settings or package in _SETTINGS:
        return getattr(value, "__dict__", None)
    return None


class _RecordsConstruction(ABCMeta):
    """Records constructor arguments, even if a subclass does not call `LitAgent.__init__`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        agent = super().__call__(*args, **kwargs)
        if isinstance(agent, LitAgent):
            setattr(agent, _CONSTRUCTION, Construction(agent, args, kwargs))
        return agent


class LitAgent(RefusesNames, Generic[T], metaclass=_RecordsConstruction):
    """Base class of agents: a subclass overrides `rollout` or `rollout_async`.

    To treat training tasks and held-out tasks differently, override `training_rollout` and
    `validation_rollout`, or their async forms, instead.
    """

    trained_agents: str | None = None
    tracer: Tracer = Tracer()

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            warnings.warn(
                f"LitAgent(trained_agents={trained_agents!r}) has no effect: use "
                f"Trainer(adapter={{'agent_match': {trained_agents!r}}})",
                DeprecationWarning,
                stacklevel=2,
            )
        self.trained_agents = trained_agents

    def get_tracer(self) -> Tracer:
        """Return the attribute `tracer`."""
        return self.tracer

    def get_runner(self) -> Any:
        """Return the attribute `runner`, which agents of a `LitAgentRunner` have."""
        return self.runner  # type: ignore[attr-defined]

    def is_async(self) -> bool:
        """Return whether an asynchronous rollout method is overridden."""
        return any(overrides(self, name) for name in ASYNC_METHODS)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> float | None:
        """Work on one task.

        Args:
            task: one item of the data set.
            resources: name → resource; the trained model is `main_llm`.
            rollout: the id, the mode and the attempt of the rollout.

        Returns:
            The reward, or None if `emit_reward` reports it.
        """
        raise AppError(_undefined(self, "rollout"))

    async def rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        """Work on one task, asynchronously."""
        raise AppError(_undefined(self, "rollout_async"))

    def training_rollout(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        """Work on one training task; call `rollout` unless overridden."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        """Work on one held-out task; call `rollout` unless overridden."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        """Work on one training task; call `rollout_async` unless overridden."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        """Work on one held-out task; call `rollout_async` unless overridden."""
        return await self.rollout_async(task, resources, rollout)


SYNC_METHODS: Final = ("rollout", "training_rollout", "validation_rollout")
ASYNC_METHODS: Final = tuple(f"{name}_async" for name in SYNC_METHODS)


def overrides(agent: LitAgent[Any], method: str) -> bool:
    """Return whether the agent's class overrides `method` of `LitAgent`."""
    return getattr(type(agent), method) is not getattr(LitAgent, method)


def _undefined(agent: LitAgent[Any], method: str) -> str:
    return f"{type(agent).__qualname__} does not define {method}(self, task, resources, rollout)"


def construction(agent: LitAgent[Any]) -> Construction | None:
    """Return the constructor arguments of an agent; None if it is a copy of another agent."""
    return getattr(agent, _CONSTRUCTION, None)


def accept_changes(agent: LitAgent[Any]) -> None:
    """Regard the changes of rollouts in this process as part of the agent's construction."""
    if (arguments := construction(agent)) is not None:
        arguments.accept(agent)


def rollout_method(agent: LitAgent[Any], mode: str | None) -> Callable[..., Any]:
    """Return the method of the agent that runs tasks of `mode`.

    As in Agent Lightning, the task is its positional argument, and `resources` and `rollout` are
    passed by name.

    It is `training_rollout` for the mode `train`, and `validation_rollout` for every other mode and
    for None. If the agent is asynchronous, it is the async form of that method.
    """
    name = "training_rollout" if mode == "train" else "validation_rollout"
    return getattr(agent, f"{name}_async" if agent.is_async() else name)  # type: ignore[no-any-return]


# --- functions as agents --------------------------------------------------------------------
R = TypeVar("R", LLM, PromptTemplate)


class FunctionalLitAgent(LitAgent[Any]):
    """An agent that calls a function; the decorator `rollout` creates it.

    Args:
        function: function whose first parameter is `task`; further parameters may be `llm`,
            `prompt_template`, `resources` and `rollout`, and are passed by name.
        strip_proxy: ignored; `llm` is always the endpoint of the current attempt.

    Raises:
        AppError: the first parameter is not `task`, or another parameter is unknown and has no
            default.
    """

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        super().__init__()
        functools.update_wrapper(self, function)
        self.function = function
        self._arguments = _arguments(function)
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> float | None:
        return self.function(task, **self._values(resources, rollout))  # type: ignore[no-any-return]

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> float | None:
        return await self.function(  # type: ignore[no-any-return]
            task, **self._values(resources, rollout)
        )

    def _values(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        sources: Mapping[str, Callable[[], Any]] = {
            "llm": lambda: self._first(resources, LLM),
            "prompt_template": lambda: self._first(resources, PromptTemplate),
            "resources": lambda: resources,
            "rollout": lambda: rollout,
        }
        return {name: sources[name]() for name in self._arguments}

    def _first(self, resources: NamedResources, kind: type[R]) -> R:
        """Return the first resource of a kind, with one warning per function if there are more."""
        names = [name for name, resource in resources.items() if isinstance(resource, kind)]
        if not names:
            raise AppError(
                f"the agent takes a {kind.__name__}, and there is none in {sorted(resources)}"
            )
        if len(names) > 1 and kind.__name__ not in self._warned:
            self._warned.add(kind.__name__)
            log.warning("%s", several_resources(kind.__name__, names))
        return resources[names[0]]  # type: ignore[return-value]


def several_resources(kind: str, names: Sequence[str]) -> str:
    """Return the warning that the first of several resources of a kind is used."""
    others = ", ".join(map(repr, names[1:]))
    return (
        f"several resources are a {kind}: {names[0]!r} is used, and {others} only by agents that "
        "take `resources`"
    )


_ARGUMENTS: Final = ("llm", "prompt_template", "resources", "rollout")


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names in `_ARGUMENTS` that the function takes."""
    name = getattr(function, "__qualname__", repr(function))
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].name != "task":
        raise AppError(f"the agent {name!r} must take `task` first")
    rest = parameters[1:]
    unknown = [p.name for p in rest if p.name not in _ARGUMENTS and p.default is p.empty]
    if unknown:
        raise AppError(
            f"the agent {name!r} takes {', '.join(unknown)}, which are unknown; after `task` "
            f"it can take {', '.join(_ARGUMENTS)}"
        )
    return tuple(p.name for p in rest if p.name in _ARGUMENTS)


def rollout(
    function: Callable[..., Any] | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    """Turn a function into an agent; also a decorator, with or without arguments.

    The function takes `(task, llm)` or `(task, prompt_template)`, and may take `rollout`. It may be
    async.

    Raises:
        AppError: see `FunctionalLitAgent`.
    """
    if function is None:
        return functools.partial(FunctionalLitAgent, strip_proxy=strip_proxy)
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)
