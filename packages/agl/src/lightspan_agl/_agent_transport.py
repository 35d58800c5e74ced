"""Let runners in other processes recreate an agent of this process.

A runner imports what it runs by a name of the form `module:name`. For an agent, `module` is this
module and `name` is `agents.JSON`. `JSON` is a `Description` of the agent: its class and
constructor arguments, or the name of its function or global variable.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec

from lightspan.capture.context import current_context
from lightspan.errors import AppError
from lightspan.progress import print_line
from lightspan.runners.app import App, find, reference
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate as CorePromptTemplate
from lightspan.schema.records import Json, Mode, Rollout
from lightspan.schema.resources import NamedResources as StoredResources
from lightspan_agl._hooks import HookCalls
from lightspan_agl._main_block import changes_of_main
from lightspan_agl.litagent import (
    Construction,
    FunctionalLitAgent,
    LitAgent,
    construction,
    rollout_method,
)
from lightspan_agl.types import (
    MAIN_LLM,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Rollout as AglRollout,
    RolloutMode,
    copy_resources,
    learned_prompt,
)


class MainLLM(msgspec.Struct, frozen=True, kw_only=True):
    """Model name and sampling parameters, from which each attempt builds its `main_llm`.

    `main_llm` is the resource with the endpoint of the model that the agent calls.
    """

    model: str
    sampling: dict[str, dict[str, Json]]
    """Mode → sampling parameters."""


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Serialized form of an agent."""

    agent: str
    """`module:name` of the agent's class, of the agent's function, or of the agent."""
    llm: MainLLM
    args: list[Json] | None = None
    """Positional arguments of the class; None if `agent` is not a class."""
    kwargs: dict[str, Json] = {}


# --- in the trainer's process ---------------------------------------------------------------
def as_app(agent: LitAgent[Any], llm: MainLLM) -> App:
    """Return an app that runs `agent` and that runners can import.

    Args:
        agent: the agent.
        llm: model name and sampling parameters for the agent's resource `main_llm`.

    Raises:
        AppError: the agent cannot be recreated in a runner's process.
    """
    text = msgspec.json.encode(_describe(agent, llm)).decode()
    owner = agent.function if isinstance(agent, FunctionalLitAgent) else type(agent)
    if names := changes_of_main(is_of_script=owner.__module__ == "__main__"):
        print_line(
            f'the script sets or changes {", ".join(names)} under `if __name__ == "__main__":`, '
            "which runners do not run: in rollouts they have their values from the top level, if "
            "any"
        )
    # Runners split names at dots.
    name = text.replace("%", "%25").replace(".", "%2E")
    return AgentApp(AgentPool(lambda: agent), llm, f"{__name__}:agents.{name}")


def _describe(agent: LitAgent[Any], llm: MainLLM) -> Description:
    if isinstance(agent, FunctionalLitAgent):
        return Description(agent=reference(agent.function), llm=llm)
    kind, arguments = type(agent).__qualname__, construction(agent)
    changes = arguments.changes(agent) if arguments is not None else []
    if changes:
        raise AppError(
            f"the agent {kind}: {', '.join(changes)} was set or changed after construction, and "
            "runners construct it again: set it in __init__, from arguments"
        )
    problem = "it is a copy" if arguments is None else _find_non_json(arguments)
    if arguments is not None and problem is None:
        name = reference(type(agent))
        return Description(agent=name, llm=llm, args=list(arguments.args), kwargs=arguments.kwargs)
    name = _global_name(agent) or ""
    if not name:
        raise AppError(
            f"the agent {kind} cannot be recreated in the runners' process: {problem}. Create "
            "that in __init__ from arguments of text, finite numbers, booleans, None, or lists and "
            "dicts of them; or create the agent at the top level of a module that is not the script"
        )
    return Description(agent=name, llm=llm)


def _find_non_json(arguments: Construction) -> str | None:
    """Describe the first argument that JSON would change; None if JSON keeps every argument."""
    by_position = {f"argument {number}": v for number, v in enumerate(arguments.args, 1)}
    for name, value in {**by_position, **arguments.kwargs}.items():
        try:
            copy = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, msgspec.MsgspecError):
            copy = None
        if repr(copy) != repr(value):  # 1, 1.0 and True are equal
            return f"{name}={value!r:.100} is a {type(value).__name__}"
    return None


def _global_name(agent: LitAgent[Any]) -> str | None:
    """Return `module:name` if `agent` is a global variable of an imported module.

    The script's own module is not searched, because a runner cannot import it by name. Return None
    if no module has the agent.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name not in ("__main__", "__mp_main__"):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is agent:
                    return f"{module_name}:{name}"
    return None


# --- in a runner ----------------------------------------------------------------------------
class AgentPool:
    """A pool of equal agents. Each is used by one attempt at a time, because it may have state.

    Args:
        make: creates a further agent if all are in use.
        first: the agent that is used first; None to create it.
    """

    def __init__(
        self, make: Callable[[], LitAgent[Any]], first: LitAgent[Any] | None = None
    ) -> None:
        self._make = make
        self._free = [make() if first is None else first]
        self._lock = threading.Lock()
        self.is_async = self._free[0].is_async()

    @contextmanager
    def agent(self) -> Iterator[LitAgent[Any]]:
        """Reserve an unused agent for the block; create an agent if all are in use."""
        with self._lock:
            agent = self._free.pop() if self._free else None
        agent = agent if agent is not None else self._make()
        try:
            yield agent
        finally:
            with self._lock:
                self._free.append(agent)


class AgentApp(App):
    """An app that runs an agent.

    Args:
        pool: equal agents; each attempt uses one of them.
        resources: resources for the agents, or the `MainLLM` from which each attempt gets its
            `main_llm`.
        name: name by which runners import the app (`reference`); empty if they need not.
        hooks: hooks and tracer of the agents; None for no hooks and a new `Tracer`.
    """

    follows_urls = True

    def __init__(
        self,
        pool: AgentPool,
        resources: MainLLM | NamedResources,
        name: str = "",
        *,
        hooks: HookCalls | None = None,
    ) -> None:
        self._pool = pool
        self._resources = resources
        self._name = name
        self._hooks = hooks or HookCalls()
        self.own: dict[str, tuple[AglRollout, NamedResources, Callable[[Attempt], None]]] = {}
        """Rollout id → the rollout in the user's store, the resources in place of `resources`, and
        a function that is called with the attempt when it begins."""
        super().__init__(self._run_async if pool.is_async else self._run)

    @property
    def reference(self) -> str:
        return self._name

    def _run(
        self, task: Json, rollout: Rollout, llm: LLM | None, resources: StoredResources
    ) -> Any:
        view, hooks = self._attempted(rollout), self._hooks
        with self._pool.agent() as agent:
            method = rollout_method(agent, view.mode)
            own = self._resources_of(view, llm, resources)
            hooks.run(hooks.before(agent, view))
            try:
                value = method(task, resources=own, rollout=view)
                hooks.run(hooks.end_trace(agent, view))
                return value
            finally:
                hooks.run(hooks.after(agent, view))

    async def _run_async(
        self, task: Json, rollout: Rollout, llm: LLM | None, resources: StoredResources
    ) -> Any:
        view, hooks = self._attempted(rollout), self._hooks
        with self._pool.agent() as agent:
            method = rollout_method(agent, view.mode)
            own = self._resources_of(view, llm, resources)
            await hooks.before(agent, view)
            try:
                value = await method(task, resources=own, rollout=view)
                await hooks.end_trace(agent, view)
                return value
            finally:
                await hooks.after(agent, view)

    def _attempted(self, rollout: Rollout) -> AttemptedRollout:
        """Return the argument `rollout` of the agent, with the mode that the user's store has."""
        current, now = current_context(), time.time()
        mode: RolloutMode | None = "val" if rollout.mode is Mode.VAL else "train"
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id="" if current is None else current.scope.attempt_id,
            start_time=now,
        )
        resources_id = None
        metadata: dict[str, Any] = {"group_id": rollout.group_id, "step": rollout.step}
        if isinstance(self._resources, MainLLM):  # names of Agent Lightning's VERL
            metadata |= {"data_id": rollout.group_id, "is_train": rollout.mode is Mode.TRAIN}
        if rollout.rollout_id in self.own:
            own, _, note = self.own[rollout.rollout_id]
            mode, resources_id, metadata = own.mode, own.resources_id, own.metadata
            note(attempt)
        return AttemptedRollout(
            rollout_id=rollout.rollout_id,
            input=rollout.task,
            mode=mode,
            start_time=now,
            resources_id=resources_id,
            metadata=dict(metadata),
            attempt=attempt,
        )

    def _resources_of(
        self, view: AttemptedRollout, llm: LLM | None, resources: StoredResources
    ) -> NamedResources:
        own = self.own[view.rollout_id][1] if view.rollout_id in self.own else self._resources
        if not isinstance(own, MainLLM):
            prompts = {
                name: _learned(own.get(name), value.template)
                for name, value in resources.items()
                if isinstance(value, CorePromptTemplate)
            }
            return {**copy_resources(own), **prompts}
        assert llm is not None
        main = ProxyLLM(
            endpoint=llm.base_url,
            model=own.model,
            api_key=llm.api_key,
            sampling_parameters=dict(own.sampling["train" if view.mode == "train" else "val"]),
            rollout_id=view.rollout_id,
            attempt_id=view.attempt.attempt_id,
        )
        return {MAIN_LLM: main}


def _learned(original: Any, learned: str) -> PromptTemplate:
    is_prompt = isinstance(original, CorePromptTemplate)
    return learned_prompt(original, learned) if is_prompt else PromptTemplate(learned)


class _Agents:
    """Object whose attributes are apps that run agents.

    A runner imports an app by the name of an attribute. The name is a `Description` of the agent in
    JSON, from which the app is created.
    """

    def __getattr__(self, name: str) -> App:
        if not name.startswith("{"):
            raise AttributeError(name)
        text = name.replace("%2E", ".").replace("%25", "%")
        description = msgspec.json.decode(text, type=Description)
        return AgentApp(AgentPool(partial(_make, description)), description.llm, f"agents.{name}")


agents: Final = _Agents()


def _make(description: Description) -> LitAgent[Any]:
    target = find(description.agent, "agent")
    if description.args is None:
        return target if isinstance(target, LitAgent) else FunctionalLitAgent(target)
    try:
        return _construct(target, description.args, description.kwargs)
    except Exception as error:
        raise AppError(
            f"the agent {description.agent} cannot be created: {type(error).__name__}: {error}"
        ) from error


def _construct(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LitAgent[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # shown at the first construction
        return kind(*args, **kwargs)  # type: ignore[no-any-return]


def factory_of(agent: LitAgent[Any]) -> Callable[[], LitAgent[Any]] | None:
    """Return a function that recreates the agent; None if it cannot be recreated.

    It cannot if it is a copy of another agent, or if its attributes were changed after its
    construction.
    """
    if isinstance(agent, FunctionalLitAgent):
        return lambda: agent
    arguments = construction(agent)
    if arguments is None or arguments.changes(agent):
        return None
    return partial(_construct, type(agent), arguments.args, arguments.kwargs)
