"""Trainer: `fit` and `dev` under the original's names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightspan.agl._adapters import TraceAdapter
from lightspan.agl._agents import LitAgent, defines_rollout
from lightspan.agl._algorithms import Algorithm, FastAlgorithm
from lightspan.agl._resources import NamedResources, check_resources
from lightspan.agl._rollouts import Dataset, Hook
from lightspan.agl._store import InMemoryLightningStore, LightningStore
from lightspan.agl._tracers import Tracer
from lightspan.agl._triplets import TracerTraceToTriplet
from lightspan.agl._verl import VERL, Plan
from lightspan.errors import (
    ConfigError,
    DataError,
    UnsupportedError,
)
from lightspan.progress import say
from lightspan.schema.records import Json
from lightspan.stores.event_loop import run_sync

if TYPE_CHECKING:
    from lightspan.agl._dev import DevSummary
    from lightspan.algorithms.lightning_rl import LightningRL
    from lightspan.reports.dry_run import DevReport
    from lightspan.runners.app import App
    from lightspan.trainer import Trainer as CoreTrainer
    from lightspan.training.results import FitResult


class Trainer:
    """Trains an agent, or tries it out.

    Args:
        n_runners: how many rollouts run at once.
        n_workers: the same, under its older name.
        algorithm: `VERL(config)`, or an `Algorithm` of your own; None for `dev` alone.
        adapter: `{"agent_match": "regular expression"}`; for an algorithm of your own any
            `TraceAdapter`.
        triplet_exporter: the same, under its older name.
        initial_resources: what agents get in `dev`, such as `{"main_llm": LLM(…)}`.
        dev: without effect, which `fit` says; call `dev`.
        port: accepted; ports are chosen when they are free.
        strategy: accepted; runners are threads of a process of their own.
        daemon: accepted; runners end with this process.
        tracer: None or a `Tracer`; with an algorithm of your own, what records its rollouts.
        store: of an algorithm of your own; None: one of this process.
        runner: must be None.
        llm_proxy: must be None.
        hooks: with an algorithm of your own, what is told of its attempts.
        max_rollouts: with an algorithm of your own, how many each runner works on.
        max_tasks: the same, under its older name.

    Raises:
        ConfigError: an option is malformed.
        UnsupportedError: an option cannot be honoured; the message names what to use.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Tracer | None = None,
        adapter: TraceAdapter[Any] | Mapping[str, Any] | None = None,
        store: LightningStore | None = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: VERL | Algorithm | None = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: TraceAdapter[Any] | Mapping[str, Any] | None = None,
        hooks: Sequence[Hook] | Hook | None = None,
    ) -> None:
        most = max_rollouts if max_rollouts is not None else max_tasks
        _refuse(runner=runner, llm_proxy=llm_proxy)
        if not isinstance(algorithm, Algorithm):
            _refuse(max_rollouts=max_rollouts, max_tasks=max_tasks, store=store, hooks=hooks)
        if tracer is not None and not isinstance(tracer, Tracer):
            raise UnsupportedError(
                f"Trainer(tracer={tracer!r}): leave it out; lightspan records calls itself, and "
                "self.tracer.get_langchain_handler() gives its LangChain callback"
            )
        if algorithm is not None and not isinstance(algorithm, VERL | Algorithm):
            raise UnsupportedError(
                f"Trainer(algorithm={type(algorithm).__name__}): use VERL(config), or an Algorithm "
                "of your own; lightspan.Trainer takes algorithms of lightspan"
            )
        self.n_runners = _count(n_runners if n_runners is not None else n_workers)
        self.n_workers = self.n_runners
        self.algorithm = algorithm
        asked = adapter if adapter is not None else triplet_exporter
        self.adapter = _any_adapter(asked) if self._own else _adapter(asked)
        self.triplet_exporter = self.adapter
        self.store = store
        self.hooks = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
        self.max_rollouts = most
        self.initial_resources = check_resources(initial_resources)
        self.tracer = tracer or Tracer()
        accepted = {
            "dev": dev or None,
            "strategy": strategy,
            "port": port,
            "daemon": None if daemon else daemon,
        }
        self._accepted = [f"{k}={v!r}" for k, v in accepted.items() if v is not None]

    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> FitResult | None:
        """Train.

        Args:
            agent: one whose class is at the top level of a module, or of the script.
            train_dataset: tasks to learn from.
            val_dataset: held-out tasks.

        Returns:
            What came of it; None of an algorithm of your own.

        Raises:
            AppError: the agent cannot be made again where the runners are.
            ConfigError: no algorithm; a batch larger than the data.
            UnknownAgentError: after the first batch, `agent_match` matches no agent.
            And the errors of `lightspan.Trainer.fit`.
        """
        if self.algorithm is None:
            raise ConfigError("fit needs an algorithm: Trainer(algorithm=agl.VERL(config))")
        _check_agent(agent)
        if isinstance(self.algorithm, Algorithm):
            self._run_own(self.algorithm, agent, train_dataset, val_dataset)
            return None
        plan = self.algorithm.plan
        train = as_tasks(train_dataset, "train_dataset")
        val = None if val_dataset is None else as_tasks(val_dataset, "val_dataset")
        per_step = plan.algorithm["tasks_per_step"]
        if per_step > len(train):
            raise ConfigError(
                f"data.train_batch_size={per_step} is more than the {len(train)} tasks of "
                "train_dataset"
            )
        trainer = self._core(plan)
        for line in self._notes(plan):
            trainer.reporter.line(line)
        if val is not None:
            val, repeated = _distinct(val)
            if repeated:
                trainer.reporter.line(f"val_dataset: {repeated} repeated tasks are evaluated once")
        return trainer.fit(_travelling(agent, plan), train, val, resume=plan.resume)

    def dev(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
        dev_dataset: Dataset[Any] | None = None,
    ) -> DevSummary | DevReport | None:
        """Try the agent out, without training, and print what came of it.

        A `FastAlgorithm` is run, as `fit` runs it; the result is None then. With
        `initial_resources` every task is run once, in this process, and the agent's calls go
        where `main_llm` points. Without, it is the dry run of `lightspan.Trainer.dev`, with the
        model of the algorithm.

        Raises:
            ConfigError: neither resources nor an algorithm; no task.
            And the errors of `lightspan.Trainer.dev`.
        """
        _check_agent(agent)
        if isinstance(self.algorithm, Algorithm):
            if not isinstance(self.algorithm, FastAlgorithm):
                raise ConfigError(
                    f"dev runs a FastAlgorithm, and {type(self.algorithm).__name__} is none: call "
                    "fit, or leave the algorithm out to try the agent"
                )
            data = train_dataset if dev_dataset is None else dev_dataset
            self._run_own(self.algorithm, agent, data, val_dataset)
            return None
        named = {"train_dataset": train_dataset, "dev_dataset": dev_dataset}
        datasets = {name: data for name, data in named.items() if data is not None}
        train = [task for name, data in datasets.items() for task in as_tasks(data, name)]
        val = [] if val_dataset is None else as_tasks(val_dataset, "val_dataset")
        if not train and not val:
            raise ConfigError("dev needs tasks: dev(agent, train_dataset=…)")
        outcome = self._try_out(agent, train, val)
        say(outcome.text())
        return outcome

    @property
    def _own(self) -> bool:
        """Whether the algorithm is somebody's own."""
        return isinstance(self.algorithm, Algorithm)

    def _run_own(
        self,
        algorithm: Algorithm,
        agent: LitAgent[Any],
        train: Dataset[Any] | None,
        val: Dataset[Any] | None,
    ) -> None:
        from lightspan.agl._own import run_algorithm

        if self.store is None:
            self.store = InMemoryLightningStore()
        algorithm.set_trainer(self)
        algorithm.set_store(self.store)
        algorithm.set_adapter(self.adapter)
        if self.initial_resources:
            algorithm.set_initial_resources(self.initial_resources)
        run_sync(
            run_algorithm(
                algorithm,
                agent,
                self.store,
                train,
                val,
                runners=self.n_runners,
                tracer=self.tracer,
                hooks=self.hooks,
                max_rollouts=self.max_rollouts,
            )
        )

    def _try_out(
        self, agent: LitAgent[Any], train: list[Json], val: list[Json]
    ) -> DevSummary | DevReport:
        from lightspan.agl._dev import try_out

        if self.initial_resources:
            work = try_out(
                agent,
                self.initial_resources,
                train,
                val,
                runners=self.n_runners,
                agent_match=self._agent_match,
            )
            return run_sync(work)
        if not isinstance(self.algorithm, VERL):
            raise ConfigError(
                "dev needs the model that agents are to use: Trainer(initial_resources="
                "{'main_llm': agl.LLM(endpoint=…, model=…, sampling_parameters={…})})"
            )
        plan = self.algorithm.plan
        tasks = train or val
        app = _travelling(agent, plan)
        return self._core(plan).dev(app, tasks, val if train and val else None, count=len(tasks))

    def _core(self, plan: Plan) -> CoreTrainer:
        """Our own trainer, as the plan has it."""
        from lightspan.trainer import Trainer as CoreTrainer

        parts = {"engine": plan.engine, "learner": plan.learner}
        options = {"device": _device(), **plan.trainer, **parts, "sinks": plan.sinks()[0]}
        algorithm = make_algorithm(plan, self._agent_match)
        return CoreTrainer(algorithm, runners=self.n_runners, **options)

    @property
    def _agent_match(self) -> str | None:
        assert isinstance(self.adapter, TracerTraceToTriplet)
        return self.adapter.agent_match

    def _notes(self, plan: Plan) -> Iterable[str]:
        yield plan.report()
        if self._accepted:
            yield (
                f"Trainer: without effect here: {', '.join(self._accepted)} (runners are threads "
                "of a process of their own, and end with this one; a dry run is Trainer.dev())"
            )
        if self.initial_resources:
            yield "Trainer: initial_resources are for dev; in fit the algorithm makes main_llm"


def _travelling(agent: LitAgent[Any], plan: Plan) -> App:
    from lightspan.agl._travel import MainLLM, travelling

    return travelling(agent, MainLLM(model=plan.model, sampling=dict(plan.sampling)))


def make_algorithm(plan: Plan, agent_match: str | None) -> LightningRL:
    """LightningRL as the plan has it, for the agents whose name the expression is found in."""
    from lightspan.agl._matched import MatchedRL

    return MatchedRL(plan.model, agent_match=agent_match, **plan.algorithm)


_INSTEAD: Final = {
    "max_rollouts": "leave it out; trainer.total_training_steps of VERL(config) ends a run",
    "max_tasks": "leave it out; trainer.total_training_steps of VERL(config) ends a run",
    "store": "leave it out; the store is a SQLite file in the run's folder",
    "runner": "leave it out",
    "llm_proxy": "leave it out; lightspan's gateway serves main_llm",
    "hooks": "do it in the agent's rollout, before and after the work",
}


def _refuse(**options: Any) -> None:
    refused = [
        f"Trainer({k}={v!r}): {_INSTEAD[k]}" for k, v in options.items() if v not in (None, ())
    ]
    if refused:
        raise UnsupportedError("; ".join(refused))


def _count(runners: int | None) -> int:
    count = 1 if runners is None else runners
    if count < 1:
        raise ConfigError(f"Trainer(n_runners={count}) must be at least 1")
    return count


_HONOURED: Final = ("agent_match", "repair_hierarchy")
"""Options of the adapter that mean something where lightspan makes the rows."""


def _adapter(given: TraceAdapter[Any] | Mapping[str, Any] | None) -> TracerTraceToTriplet:
    """The adapter of `VERL`, and of `dev`."""
    adapter = _any_adapter(given, known=_HONOURED)
    if not isinstance(adapter, TracerTraceToTriplet):
        raise UnsupportedError(
            f"Trainer(adapter={given!r}): use {{'agent_match': 'regular expression'}}"
        )
    usual = vars(TracerTraceToTriplet())
    other = {k: v for k, v in vars(adapter).items() if k not in _HONOURED and v != usual[k]}
    if other:
        raise _unhonoured(other, _HONOURED)
    return adapter


def _any_adapter(
    given: TraceAdapter[Any] | Mapping[str, Any] | None, known: Sequence[str] | None = None
) -> TraceAdapter[Any]:
    """The adapter; of a mapping, `TracerTraceToTriplet` with these options."""
    if isinstance(given, TraceAdapter):
        adapter = given
    elif given is None or isinstance(given, Mapping):
        options = dict(given or {})
        known = known or tuple(vars(TracerTraceToTriplet()))
        unknown = {name: value for name, value in options.items() if name not in known}
        if unknown:
            raise _unhonoured(unknown, known)
        adapter = TracerTraceToTriplet(**options)
    else:
        raise UnsupportedError(
            f"Trainer(adapter={given!r}): use {{'agent_match': 'regular expression'}}"
        )
    if isinstance(adapter, TracerTraceToTriplet):
        _check_regex(adapter.agent_match)
    return adapter


def _unhonoured(options: Mapping[str, Any], known: Sequence[str]) -> UnsupportedError:
    told = ", ".join(f"{name!r}: {value!r}" for name, value in options.items())
    return UnsupportedError(
        f"Trainer(adapter={{{told}}}): lightspan knows {', '.join(known)}; rewards are of the "
        "whole rollout, or of a call (emit_reward of lightspan)"
    )


def _check_regex(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise ConfigError(f"agent_match={pattern!r} is no regular expression: {error}") from error


_HOOKS: Final = ("on_rollout_start", "on_rollout_end", "init_worker", "teardown_worker")


def _check_agent(agent: Any) -> None:
    if not isinstance(agent, LitAgent):
        raise ConfigError(
            f"the agent must be a LitAgent, or a function under @agl.rollout, not {agent!r}"
        )
    if not defines_rollout(agent):
        raise ConfigError(
            f"{type(agent).__qualname__} defines no rollout(self, task, resources, rollout)"
        )
    hooks = [name for name in _HOOKS if hasattr(agent, name)]
    if hooks:
        raise UnsupportedError(
            f"{type(agent).__qualname__} defines {', '.join(hooks)}, which nothing calls here: do "
            "it in rollout, before and after the work"
        )


# --- data -----------------------------------------------------------------------------------
def as_tasks(dataset: Any, what: str) -> list[Json]:
    """The items of a data set, with arrays of numpy as lists.

    Raises:
        DataError: nothing with a length and items by number.
    """
    if dataset is None:
        raise ConfigError(f"fit needs {what}: a list of tasks")
    if isinstance(dataset, str | Mapping) or hasattr(dataset, "iloc"):
        hint = ".to_dict('records')" if hasattr(dataset, "iloc") else ""
        raise DataError(
            f"{what} must be a list of tasks, not {type(dataset).__name__}"
            + (f": pass data{hint}" if hint else "")
        )
    try:
        return [_plain(dataset[index]) for index in range(len(dataset))]
    except (TypeError, KeyError) as error:
        raise DataError(f"{what} must have a length and items by number: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    to_list = getattr(value, "tolist", None)  # numpy's arrays and numbers
    return to_list() if callable(to_list) else value


def _distinct(tasks: Sequence[Json]) -> tuple[list[Json], int]:
    """The tasks without repetitions, and how many those were."""
    seen: dict[bytes, Json] = {}
    for task in tasks:
        seen.setdefault(msgspec.json.encode(task, order="deterministic"), task)
    return list(seen.values()), len(tasks) - len(seen)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
