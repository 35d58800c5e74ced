"""Agents: the class `LitAgent`, and functions as agents."""

from __future__ import annotations

import functools
import inspect
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from lightspan.agl._resources import LLM, NamedResources, PromptTemplate, ProxyLLM
from lightspan.agl._rollouts import AttemptedRollout, Rollout, RolloutRawResult
from lightspan.agl._tracers import Tracer
from lightspan.errors import AppError

T = TypeVar("T")

RolloutResult = RolloutRawResult
"""What a rollout gives: its reward, or None where `emit_reward` said it."""

_MADE: Final = "_lightspan_made"
"""Attribute of an agent: how it was made."""


class Made:
    """How an agent was made, so that a runner can make it again."""

    def __init__(self, agent: LitAgent[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._fields = dict(vars(agent))

    def changes(self, agent: LitAgent[Any]) -> list[str]:
        """The attributes that were set since, and that making it again would lose."""
        ours = (_MADE, "__orig_class__")
        now = {name: value for name, value in vars(agent).items() if name not in ours}
        missing = object()
        return sorted(
            name
            for name in now.keys() | self._fields.keys()
            if now.get(name, missing) is not self._fields.get(name, missing)
        )


class _Remembering(ABCMeta):
    """Notes what each agent was made from. A metaclass: subclasses need not call our `__init__`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        agent = super().__call__(*args, **kwargs)
        if isinstance(agent, LitAgent):
            setattr(agent, _MADE, Made(agent, args, kwargs))
        return agent


class LitAgent(Generic[T], metaclass=_Remembering):
    """Base class of agents: override `rollout`, or `rollout_async`.

    `training_rollout` and `validation_rollout` (and their async forms) may be overridden where
    training and validation differ.
    """

    trained_agents: str | None = None
    tracer: Tracer = Tracer()

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            warnings.warn(
                f"LitAgent(trained_agents={trained_agents!r}) has no effect: say "
                f"Trainer(adapter={{'agent_match': {trained_agents!r}}})",
                DeprecationWarning,
                stacklevel=2,
            )
        self.trained_agents = trained_agents

    def is_async(self) -> bool:
        """Whether an asynchronous rollout method is overridden."""
        kind = type(self)
        return any(getattr(kind, name) is not getattr(LitAgent, name) for name in _ASYNC)

    def rollout(self, task: T, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        """Work on one task.

        Args:
            task: one item of the data set.
            resources: by name; the trained model is `main_llm`.
            rollout: its id, mode and attempt.

        Returns:
            The reward, or None where `emit_reward` says it.
        """
        raise AppError(_not_there(self, "rollout"))

    async def rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """`rollout` for agents that await."""
        raise AppError(_not_there(self, "rollout_async"))

    def training_rollout(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """Work on one training task; by default `rollout`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """Work on one held-out task; by default `rollout`."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """`training_rollout` for agents that await."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: T, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        """`validation_rollout` for agents that await."""
        return await self.rollout_async(task, resources, rollout)


_ASYNC: Final = ("rollout_async", "training_rollout_async", "validation_rollout_async")


_SYNC: Final = ("rollout", "training_rollout", "validation_rollout")


def defines_rollout(agent: LitAgent[Any]) -> bool:
    """Whether the agent's class says what a rollout is."""
    kind = type(agent)
    return any(getattr(kind, name) is not getattr(LitAgent, name) for name in (*_SYNC, *_ASYNC))


def _not_there(agent: LitAgent[Any], method: str) -> str:
    return f"{type(agent).__qualname__} does not define {method}(self, task, resources, rollout)"


def made(agent: LitAgent[Any]) -> Made | None:
    """How the agent was made; None if it came about without a call of its class."""
    return getattr(agent, _MADE, None)


def rollout_method(agent: LitAgent[Any], mode: str | None) -> Callable[..., Any]:
    """What runs a task of this mode."""
    name = "training_rollout" if mode == "train" else "validation_rollout"
    return getattr(agent, f"{name}_async" if agent.is_async() else name)  # type: ignore[no-any-return]


# --- functions as agents --------------------------------------------------------------------
class FunctionalLitAgent(LitAgent[Any]):
    """A function as an agent; it stays callable as it was. Made by `rollout`.

    Args:
        function: asks for `task` first, then by name for `llm`, `prompt_template`, `resources` or
            `rollout`.
        strip_proxy: hand `llm` as a plain `LLM`.

    Raises:
        AppError: the function asks for something else, or for no task.
    """

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        super().__init__()
        functools.update_wrapper(self, function)
        self.function = function
        self.strip_proxy = strip_proxy
        self._asks = _asked(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutResult:
        return self.function(task, **self._values(resources, rollout))  # type: ignore[no-any-return]

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutResult:
        return await self.function(  # type: ignore[no-any-return]
            task, **self._values(resources, rollout)
        )

    def _values(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        offered: Mapping[str, Callable[[], Any]] = {
            "llm": lambda: self._llm(resources, rollout),
            "prompt_template": lambda: _first(resources, PromptTemplate, "prompt template"),
            "resources": lambda: resources,
            "rollout": lambda: rollout,
        }
        return {name: offered[name]() for name in self._asks}

    def _llm(self, resources: NamedResources, rollout: Rollout) -> LLM:
        llm = _first(resources, LLM, "LLM")
        if not (self.strip_proxy and isinstance(llm, ProxyLLM)):
            return llm
        assert isinstance(rollout, AttemptedRollout)
        return llm.with_attempted_rollout(rollout)


R = TypeVar("R", LLM, PromptTemplate)


def _first(resources: NamedResources, kind: type[R], what: str) -> R:
    for resource in resources.values():
        if isinstance(resource, kind):
            return resource
    raise ValueError(f"the agent asks for {what}, and there is none in {sorted(resources)}")


_OFFERED: Final = ("llm", "prompt_template", "resources", "rollout")


def _asked(function: Callable[..., Any]) -> tuple[str, ...]:
    """What the function asks for by name, after the task."""
    name = getattr(function, "__qualname__", repr(function))
    names = list(inspect.signature(function).parameters.values())
    if not names or names[0].name != "task":
        raise AppError(f"the agent {name!r} must take `task` first")
    unknown = [p.name for p in names[1:] if p.name not in _OFFERED and p.default is p.empty]
    if unknown:
        raise AppError(
            f"the agent {name!r} asks for {', '.join(unknown)}, which nothing provides; after "
            f"`task` it can ask for {', '.join(_OFFERED)}"
        )
    return tuple(p.name for p in names[1:] if p.name in _OFFERED)


def rollout(
    function: Callable[..., Any] | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent | Callable[[Callable[..., Any]], FunctionalLitAgent]:
    """Make an agent of a function: `(task, llm)`, `(task, prompt_template)`, with or without
    `rollout`; sync or async.

    Raises:
        AppError: see `FunctionalLitAgent`.
    """
    if function is None:
        return functools.partial(FunctionalLitAgent, strip_proxy=strip_proxy)
    return FunctionalLitAgent(function, strip_proxy=strip_proxy)


llm_rollout = rollout
prompt_rollout = rollout
