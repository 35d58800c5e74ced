"""Travel of an agent to the runners: as the name of its class and what it was made from.

A runner is told what to run as `module:name`. For an agent that is `agents` of this module and the
description of the agent, as an attribute that is made when it is asked for.
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

from lightspan.agl._agents import FunctionalLitAgent, LitAgent, Made, made, rollout_method
from lightspan.agl._resources import MAIN_LLM, NamedResources, ProxyLLM
from lightspan.agl._rewards import find_final_reward
from lightspan.agl._rollouts import Attempt, AttemptedRollout, RolloutMode
from lightspan.agl._translation import as_span, to_span
from lightspan.capture.scope import pushed
from lightspan.errors import AppError
from lightspan.runners.app import App, find, reference
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Mode, Rollout


class MainLLM(msgspec.Struct, frozen=True, kw_only=True):
    """The resource `main_llm`, as far as it is known before there is an attempt."""

    model: str
    sampling: dict[str, dict[str, Json]]
    """Mode → sampling parameters."""


class Description(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent as it travels."""

    agent: str
    """`module:name` of its class, of its function, or of itself."""
    llm: MainLLM
    args: list[Json] | None = None
    """Arguments to make it with; None if `agent` is not a class."""
    kwargs: dict[str, Json] = {}


# --- in the trainer's process ---------------------------------------------------------------
def travelling(agent: LitAgent[Any], llm: MainLLM) -> App:
    """The agent as an app that runners can import.

    Raises:
        AppError: it cannot be made again where runners are; the message names the alternative.
    """
    description = _described(agent, llm)
    text = msgspec.json.encode(description).decode()
    # a runner splits names at dots
    name = text.replace("%", "%25").replace(".", "%2E")
    return AgentApp(Agents(lambda: agent), llm, f"{__name__}:agents.{name}")


def _described(agent: LitAgent[Any], llm: MainLLM) -> Description:
    if isinstance(agent, FunctionalLitAgent):
        kwargs: dict[str, Json] = {"strip_proxy": agent.strip_proxy}
        return Description(agent=reference(agent.function), llm=llm, kwargs=kwargs)
    kind, how = type(agent).__qualname__, made(agent)
    changed = how.changes(agent) if how is not None else []
    if changed:  # by name too: nobody knows whether the runners' import would set it
        raise AppError(
            f"the agent {kind}: {', '.join(changed)} was set after it was made, and runners make "
            "it again: set it in __init__, from arguments"
        )
    wrong = "its class does not tell what it is made from" if how is None else _not_plain(how)
    if how is not None and wrong is None:
        name = reference(type(agent))
        return Description(agent=name, llm=llm, args=list(how.args), kwargs=how.kwargs)
    name = _global_name(agent) or ""
    if not name:
        raise AppError(
            f"the agent {kind} cannot be made again in the runners' processes: {wrong}. Make that "
            "in __init__ from arguments of text, finite numbers, booleans, None, or lists and "
            "dicts of them; or make the agent at the top level of a module that is not the "
            "script, so that runners import it"
        )
    return Description(agent=name, llm=llm)


def _not_plain(how: Made) -> str | None:
    """The first argument that is not JSON, or not the same after a journey as JSON."""
    named = {f"argument {number}": value for number, value in enumerate(how.args, 1)}
    for name, value in {**named, **how.kwargs}.items():
        try:
            returned = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, ValueError, msgspec.MsgspecError):
            returned = None
        if not _same(value, returned):
            return f"{name}={value!r:.100} is a {type(value).__name__}"
    return None


def _same(value: Any, returned: Any) -> bool:
    """Whether they are equal, types included: to Python 1 equals True and 1.0."""
    if type(value) is not type(returned):
        return False
    if isinstance(value, dict):
        return value.keys() == returned.keys() and all(_same(value[k], returned[k]) for k in value)
    if isinstance(value, list):
        return len(value) == len(returned) and all(map(_same, value, returned))
    return bool(value == returned)


def _global_name(agent: LitAgent[Any]) -> str | None:
    """`module:name` of an agent at the top level of a module other than the script."""
    for module_name, module in list(sys.modules.items()):
        if module_name in ("__main__", "__mp_main__"):  # a runner's own script is another
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is agent:
                return f"{module_name}:{name}"
    return None


# --- where it runs --------------------------------------------------------------------------
class Agents:
    """Lends an agent to one attempt at a time, and makes another when all are lent: an agent may
    keep what it works on in itself."""

    def __init__(self, make: Callable[[], LitAgent[Any]]) -> None:
        self._make = make
        self._free = [make()]
        self._lock = threading.Lock()
        self.is_async = self._free[0].is_async()

    @contextmanager
    def lent(self) -> Iterator[LitAgent[Any]]:
        """An agent that nobody else uses meanwhile."""
        with self._lock:
            agent = self._free.pop() if self._free else None
        agent = agent if agent is not None else self._make()
        try:
            yield agent
        finally:
            with self._lock:
                self._free.append(agent)


class AgentApp(App):
    """An agent as an app.

    Args:
        agents: who works.
        offered: the resources, or what `main_llm` is to be.
        travels_as: the app's `reference`.
    """

    def __init__(
        self, agents: Agents, offered: MainLLM | NamedResources, travels_as: str = ""
    ) -> None:
        self._agents = agents
        self._offered = offered
        self._travels_as = travels_as
        super().__init__(self._run_async if agents.is_async else self._run)

    @property
    def reference(self) -> str:
        """How it travels to runners."""
        return self._travels_as

    def _run(self, task: Json, rollout: Rollout, llm: LLM | None) -> Any:
        view, resources = self._inputs(rollout, llm)
        with self._agents.lent() as agent:
            return _scored(rollout_method(agent, view.mode)(task, resources, view), view)

    async def _run_async(self, task: Json, rollout: Rollout, llm: LLM | None) -> Any:
        view, resources = self._inputs(rollout, llm)
        with self._agents.lent() as agent:
            return _scored(await rollout_method(agent, view.mode)(task, resources, view), view)

    def _inputs(self, rollout: Rollout, llm: LLM | None) -> tuple[AttemptedRollout, NamedResources]:
        view = _view(rollout, _mode(rollout))
        if not isinstance(self._offered, MainLLM):
            return view, self._offered
        assert llm is not None
        main = ProxyLLM(
            endpoint=llm.base_url,
            model=self._offered.model,
            api_key=llm.api_key(),
            sampling_parameters=dict(self._offered.sampling[view.mode or "train"]),
            rollout_id=view.rollout_id,
            attempt_id=view.attempt.attempt_id,
        )
        return view, {MAIN_LLM: main}


def _scored(value: Any, view: AttemptedRollout) -> Any:
    """What an agent has returned, as a reward; spans that it made are recorded."""
    current = pushed()
    if not isinstance(value, list) or current is None:
        return value
    ids = view.rollout_id, view.attempt.attempt_id
    spans = [as_span(item, *ids, number) for number, item in enumerate(value, 1)]
    for span in spans:
        current.scope.recorder.add(to_span(span))
    return find_final_reward(spans)


def _view(rollout: Rollout, mode: RolloutMode) -> AttemptedRollout:
    current = pushed()
    attempt_id = current.scope.attempt_id if current is not None else ""
    now = time.time()
    return AttemptedRollout(
        rollout_id=rollout.rollout_id,
        input=rollout.task,
        mode=mode,
        resources_id=rollout.resources_id or None,
        start_time=now,
        status="running",
        metadata={"group_id": rollout.group_id, "step": rollout.step},
        attempt=Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt_id,
            sequence_id=1,
            start_time=now,
            status="running",
        ),
    )


def _mode(rollout: Rollout) -> RolloutMode:
    return "val" if rollout.mode is Mode.VAL else "train"


class _Described:
    """Every description of an agent as an attribute: the app that it describes."""

    def __getattr__(self, name: str) -> App:
        if not name.startswith("{"):
            raise AttributeError(name)
        text = name.replace("%2E", ".").replace("%25", "%")
        description = msgspec.json.decode(text, type=Description)
        return AgentApp(Agents(lambda: _arrived(description)), description.llm, f"agents.{name}")


agents: Final = _Described()


def _arrived(description: Description) -> LitAgent[Any]:
    target = find(description.agent, "agent")
    if description.args is None:
        if isinstance(target, LitAgent):
            return target
        return FunctionalLitAgent(target, **description.kwargs)
    try:
        return make_again(target, description.args, description.kwargs)
    except Exception as error:
        raise AppError(
            f"the agent {description.agent} cannot be made: {type(error).__name__}: {error}"
        ) from error


def make_again(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LitAgent[Any]:
    """An agent like the one that was made from these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # said when the first was made
        return kind(*args, **kwargs)  # type: ignore[no-any-return]


def maker(agent: LitAgent[object]) -> Callable[[], LitAgent[object]] | None:
    """Makes agents like this one; None where only the agent itself is as it is."""
    if isinstance(agent, FunctionalLitAgent):
        return lambda: agent
    how = made(agent)
    if how is None or how.changes(agent):
        return None
    return partial(make_again, type(agent), how.args, how.kwargs)
