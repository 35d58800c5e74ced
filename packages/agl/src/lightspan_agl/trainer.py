"""`Trainer.fit` and `Trainer.dev` with the arguments of Agent Lightning."""

from __future__ import annotations

import asyncio
from asyncio import create_task
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightspan.errors import ConfigError, UnknownAgentError, UnsupportedError
from lightspan.progress import print_line
from lightspan.schema.records import Json
from lightspan.schema.validation import check_whole
from lightspan.stores.aio import run_sync
from lightspan_agl._agent_match import globs_of, instrument_advice
from lightspan_agl._hooks import HookCalls, check_hooks
from lightspan_agl._specs import build
from lightspan_agl._tasks import as_tasks, check_no_text, distinct_tasks
from lightspan_agl._unsupported import RUNNERS, RefusesNames, refuse_names as _refuse_names
from lightspan_agl.adapter import TracerTraceToTriplet, TraceToMessages
from lightspan_agl.algorithm.apo import APO, first_prompt
from lightspan_agl.algorithm.decorator import FunctionalAlgorithm
from lightspan_agl.algorithm.verl import VERL, Plan, verl_words
from lightspan_agl.env_var import check_role, without_effect
from lightspan_agl.litagent import ASYNC_METHODS, SYNC_METHODS, LitAgent, overrides
from lightspan_agl.store import InMemoryLightningStore, LightningStore
from lightspan_agl.tracer import AgentOpsTracer, OtelTracer, Tracer, check_tracer
from lightspan_agl.types import Dataset, Hook, NamedResources, check_resources

if TYPE_CHECKING:
    from lightspan.algorithms.lightning_rl import LightningRL
    from lightspan.runners.app import App
    from lightspan.trainer import Trainer as CoreTrainer
    from lightspan.training.results import FitResult
    from lightspan_agl._dev import DevSummary
    from lightspan_tools.dry_run import DevReport

__all__ = ["Trainer"]
__getattr__ = _refuse_names(__name__)


class Trainer(RefusesNames):
    """Train an agent, or run it for a trial.

    Args:
        n_runners: maximum concurrent rollouts; None for 1.
        n_workers: older name of `n_runners`.
        algorithm: `VERL(config)`, `APO(client)` or a function under `@algo`; None if only
            `Trainer.dev` is called.
        adapter: `{"agent_match": "regular expression"}` for `VERL`; None trains all agents. It,
            `tracer` and `store` may also be a class, its dotted name, or a mapping with `type`.
        initial_resources: resources by name: with `APO` the initial prompt; for `Trainer.dev` all
            resources of the agents, such as `{"main_llm": LLM(…)}`.
        tracer: tracer for hooks and for the agents' attribute `tracer`; None for a new `Tracer`.
            Agents that `VERL` trains have a `Tracer` of their own.
        hooks: hooks that are called around each rollout; refused by `fit` with `VERL`, whose agents
            run in another process.
        store: `InMemoryLightningStore` for a function under `@algo`; None for a new one. Refused
            with other algorithms.
        options: further options of Agent Lightning. `strategy`, `port`, `daemon` and `dev` are
            accepted without effect, except that `n_runners` of a mapping `strategy` counts more
            than the argument `n_runners`; `fit` and `dev` print a note. Other options are refused.

    Raises:
        ConfigError: `n_runners` or `initial_resources` is invalid.
        UnsupportedError: an option is refused; the message has a hint.
    """

    def __init__(
        self,
        *,
        n_runners: int | None = None,
        n_workers: int | None = None,
        algorithm: VERL | APO[Any] | FunctionalAlgorithm | None = None,
        adapter: TracerTraceToTriplet
        | TraceToMessages
        | type[TracerTraceToTriplet | TraceToMessages]
        | Mapping[str, Any]
        | str
        | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Tracer | type[Tracer] | Mapping[str, Any] | str | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        store: LightningStore | type[LightningStore] | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        other_options = {name: value for name, value in options.items() if value not in (None, ())}
        hints = _HINTS_BY_ALGORITHM.get(type(algorithm), _HINTS)
        refused = [
            f"Trainer({name}={value!r}): {hints.get(name, _HINTS.get(name, 'leave it out'))}"
            for name, value in other_options.items()
            if name not in _NO_EFFECT
        ]
        if refused:
            raise UnsupportedError("; ".join(refused))
        if algorithm is not None and not isinstance(algorithm, VERL | APO | FunctionalAlgorithm):
            raise UnsupportedError(
                f"Trainer(algorithm={algorithm!r:.100}): use VERL(config), APO(client) or "
                "a function under @algo; lightspan.Trainer takes other algorithms"
            )
        if store is not None and not isinstance(algorithm, FunctionalAlgorithm):
            raise UnsupportedError(f"Trainer(store={store!r:.100}): {_HINTS['store']}")
        _check_strategy(other_options.get("strategy"))
        self.n_runners, unused = _runner_count(n_runners, n_workers, other_options)
        self.algorithm = algorithm
        self.adapter = _make_adapter(adapter)
        if isinstance(algorithm, VERL) and not isinstance(self.adapter, TracerTraceToTriplet):
            raise UnsupportedError(
                f"Trainer(adapter={type(self.adapter).__name__}()) with VERL: use "
                "{'agent_match': 'regular expression'}, or leave it out to train every agent"
            )
        self.initial_resources = check_resources(initial_resources)
        self.tracer = check_tracer(build(tracer, "Trainer: tracer"), "Trainer")
        self.hooks = check_hooks(hooks, "Trainer")
        self.store = build(store, "Trainer: store")
        if not isinstance(self.store, LightningStore | None):
            raise UnsupportedError(f"Trainer(store={store!r:.100}): use InMemoryLightningStore()")
        self._no_effect = [f"{name}={value!r}" for name, value in unused.items()]

    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> FitResult | None:
        """Train the agent with `algorithm`.

        Args:
            agent: an agent. For `VERL`, its class is defined at the top level of a module or of the
                script.
            train_dataset: training tasks; required.
            val_dataset: held-out tasks; `APO` requires them and compares prompts on them.

        Returns:
            With `VERL`, the result. With `APO`, None: `APO.get_best_prompt` returns the prompt.
            With a function under `@algo`, None.

        Raises:
            AppError: the agent cannot be recreated in the runners' process.
            UnsupportedError: `AGL_CURRENT_ROLE` is set to one role, or there are `hooks` and the
                algorithm is `VERL`.
            ConfigError: the algorithm or required tasks are missing, or a batch is larger than
                `train_dataset`.
            UnknownAgentError: no agent that acted in the first batch matches `agent_match`.
            And the errors of `lightspan.Trainer.fit`.
        """
        if self.algorithm is None:
            raise ConfigError("fit needs an algorithm: Trainer(algorithm=agl.VERL(config))")
        check_role()
        _check_agent(agent)
        if isinstance(self.algorithm, FunctionalAlgorithm):
            data = {"train_dataset": train_dataset, "val_dataset": val_dataset}
            for name, dataset in data.items():
                check_no_text(dataset, name)
            self._print_notes()
            run_sync(self._run_function(self.algorithm, agent, data))
            return None
        if isinstance(self.algorithm, APO):
            first_prompt(self.initial_resources)
            train = as_tasks(train_dataset, "train_dataset")
            val = as_tasks(val_dataset, "val_dataset")
            self._print_notes()
            run_sync(self._search(self.algorithm, agent, train, val))
            return None
        if self.hooks:
            raise UnsupportedError(
                f"Trainer(hooks=[{type(self.hooks[0]).__qualname__}(), …]) with VERL: agents run "
                f"in another process; {_HINTS['hooks']}"
            )
        plan = self.algorithm.plan
        train = as_tasks(train_dataset, "train_dataset")
        per_step = plan.algorithm["tasks_per_step"]
        if per_step > len(train):
            raise ConfigError(
                f"data.train_batch_size={per_step} is more than the {len(train)} tasks of "
                "train_dataset"
            )
        with verl_words():
            trainer = self._core(self.algorithm, steps=plan.steps(len(train)))
        for line in filter(None, [plan.report(), *self._notes()]):
            trainer.reporter.line(line)
        held_out = None
        if val_dataset is not None:
            tasks = as_tasks(val_dataset, "val_dataset")
            held_out = distinct_tasks(tasks, "val_dataset")
            if len(held_out) < len(tasks):
                repeated = len(tasks) - len(held_out)
                trainer.reporter.line(f"val_dataset: {repeated} repeated tasks are evaluated once")
        app = _as_app(agent, plan)
        try:
            with verl_words():
                return trainer.fit(app, train, held_out, resume=plan.resume)
        except UnknownAgentError as error:
            error.add_note(
                f"For agent_match, {instrument_advice()}. Try it with Trainer.dev, which trains "
                "nothing. Remove the run's folder before another fit: it goes on with no other "
                "agent_match."
            )
            raise

    def dev(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
        dev_dataset: Dataset[Any] | None = None,
    ) -> DevSummary | DevReport:
        """Run the agent without training and print a summary.

        With `initial_resources`, every task of the data sets is run once in this process. Without
        `initial_resources`, `lightspan.Trainer.dev` runs the tasks with the model of `VERL`.

        Args:
            agent: an agent.
            train_dataset: training tasks; None for none.
            val_dataset: held-out tasks; None for none.
            dev_dataset: further training tasks; None for none.

        Raises:
            ConfigError: there are neither `initial_resources` nor `VERL`, or there is no task.
            UnsupportedError: `AGL_CURRENT_ROLE` is set to one role.
            And the errors of `lightspan.Trainer.dev`.
        """
        check_role()
        _check_agent(agent)
        self._print_notes()
        by_name = {"train_dataset": train_dataset, "dev_dataset": dev_dataset}
        datasets = {name: data for name, data in by_name.items() if data is not None}
        train = [task for name, data in datasets.items() for task in as_tasks(data, name)]
        val = [] if val_dataset is None else as_tasks(val_dataset, "val_dataset")
        if not train and not val:
            raise ConfigError("dev needs tasks: dev(agent, train_dataset=…)")
        summary = self._try_out(agent, train, val)
        print_line(summary.text())
        return summary

    async def _run_function(
        self, algorithm: FunctionalAlgorithm, agent: LitAgent[Any], data: Mapping[str, Any]
    ) -> None:
        """Run a function under `@algo`, and the rollouts that it queues, until it returns."""
        from lightspan_agl._local import local_runs

        store = self.store or InMemoryLightningStore()
        if self.initial_resources:
            await store.add_resources(self.initial_resources)
        function = algorithm.bind(
            {
                **data,
                "store": store,
                "adapter": self.adapter,
                "initial_resources": self.initial_resources or None,
            }
        )
        async with local_runs(agent, {}, slots=self.n_runners, hooks=self._hook_calls) as runs:
            work = asyncio.ensure_future(
                function() if algorithm.is_async() else asyncio.to_thread(function)
            )
            tasks = [work, *(create_task(runs.serve(store)) for _ in range(self.n_runners))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await task  # raises its error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(
        self, algorithm: APO[Any], agent: LitAgent[Any], train: list[Json], val: list[Json]
    ) -> None:
        from lightspan_agl._local import local_runs

        async with local_runs(
            agent,
            self.initial_resources,
            slots=self.n_runners,
            timeout_s=algorithm.rollout_batch_timeout,
            hooks=self._hook_calls,
        ) as runs:
            await algorithm.search(runs, self.initial_resources, train, val)

    def _try_out(
        self, agent: LitAgent[Any], train: list[Json], val: list[Json]
    ) -> DevSummary | DevReport:
        from lightspan_agl._dev import try_out

        if self.initial_resources:
            work = try_out(
                agent,
                self.initial_resources,
                train,
                val,
                slots=self.n_runners,
                agent_match=self._agent_match,
                hooks=self._hook_calls,
            )
            return run_sync(work)
        if not isinstance(self.algorithm, VERL):
            raise ConfigError(
                "dev needs a model for the agents: Trainer(initial_resources="
                "{'main_llm': agl.LLM(endpoint=…, model=…, sampling_parameters={…})})"
            )
        tasks = train or val
        app = _as_app(agent, self.algorithm.plan)
        with verl_words():
            steps = max(1, self.algorithm.plan.steps(len(tasks)))  # 0 if they are no whole batch
            trainer = self._core(self.algorithm, steps=steps)
            return trainer.dev(app, tasks, val if train and val else None, count=len(tasks))

    def _core(self, verl: VERL, **more: Any) -> CoreTrainer:
        """Create the `lightspan.Trainer` that runs the configuration of `verl`."""
        from lightspan.trainer import Trainer as CoreTrainer

        plan = verl.plan
        options = {"device": _device(), **plan.trainer, "sinks": plan.sinks(), **more}
        return CoreTrainer(
            make_algorithm(plan, self._agent_match),
            runners=self.n_runners,
            engine=verl.engine,
            learner=verl.learner,
            **options,
        )

    @property
    def _hook_calls(self) -> HookCalls:
        return HookCalls(hooks=self.hooks, tracer=self.tracer)

    @property
    def _agent_match(self) -> str | None:
        return getattr(self.adapter, "agent_match", None)

    def _print_notes(self) -> None:
        for line in self._notes():
            print_line(line)

    def _notes(self) -> Iterable[str]:
        no_effect = list(self._no_effect)
        is_verl = isinstance(self.algorithm, VERL)
        if is_verl and type(self.tracer) not in (Tracer, AgentOpsTracer, OtelTracer):
            no_effect.append(f"tracer={type(self.tracer).__qualname__}(…) in the agents of VERL")
        if not getattr(self.adapter, "repair_hierarchy", True):
            no_effect.append("adapter={'repair_hierarchy': False}")
        if no_effect:
            yield (
                f"Trainer: without effect: {', '.join(no_effect)} (runners end with "
                "this process; a dry run is Trainer.dev())"
            )
        if variables := without_effect():
            yield (
                f"Trainer: without effect: {', '.join(variables)} (algorithm, store and runners "
                "are one program, without a server; unset them)"
            )
        if self.initial_resources and is_verl:
            yield "Trainer: initial_resources are for dev; in fit the algorithm makes main_llm"


def make_algorithm(plan: Plan, agent_match: str | None) -> LightningRL:
    """Create a LightningRL that trains the agents whose names match `agent_match`.

    If `agent_match` is None, all agents are trained. Agents that do not match use the current
    weights but are not trained.
    """
    from lightspan.algorithms.lightning_rl import LightningRL

    optimize = globs_of(agent_match)
    return LightningRL(plan.model, optimize=optimize, frozen="shared", **plan.algorithm)


def _as_app(agent: LitAgent[Any], plan: Plan) -> App:
    from lightspan_agl._agent_transport import MainLLM, as_app

    return as_app(agent, MainLLM(model=plan.model, sampling=dict(plan.sampling)))


_NO_EFFECT: Final = ("strategy", "port", "daemon", "dev")
_ENDS: Final = {
    VERL: "trainer.total_training_steps of VERL(config) ends a run",
    APO: "leave it out; beam_rounds, beam_width, branch_factor and the batch sizes of APO set how "
    "many rollouts there are",
    FunctionalAlgorithm: "leave it out; the function under @algo queues as many rollouts as it "
    "needs, and fit ends when it returns",
    type(None): "leave it out; dev runs each task once, and the algorithm ends fit",
}
_HINTS_BY_ALGORITHM: Final = {
    algorithm: dict.fromkeys(("max_rollouts", "max_tasks"), hint)
    for algorithm, hint in _ENDS.items()
}
"""Class of the algorithm → option → what to use instead."""
_STRATEGIES: Final = ("shm", "cs")
"""Short names of the strategies of Agent Lightning."""
_HINTS: Final = {
    "store": "leave it out; VERL's store is a SQLite file in the run's folder, APO's in memory",
    "llm_proxy": "leave it out; the gateway of lightspan serves main_llm",
    "hooks": "do the work in the agent's rollout, before and after the rest",
    "triplet_exporter": "use adapter={'agent_match': …}",
    "runner": "leave it out; Trainer runs the agents itself, n_runners at a time",
}


def _make_adapter(adapter: Any) -> TracerTraceToTriplet | TraceToMessages:
    built = build(adapter or {}, "Trainer: adapter", TracerTraceToTriplet)
    if not isinstance(built, TracerTraceToTriplet | TraceToMessages):
        raise UnsupportedError(
            f"Trainer(adapter={adapter!r}): use {{'agent_match': 'regular expression'}}"
        )
    return built


def _check_strategy(strategy: Any) -> None:
    """Raise `UnsupportedError` if Agent Lightning has no such strategy."""
    name = strategy.get("type", "cs") if isinstance(strategy, Mapping) else strategy
    if name is None or name in _STRATEGIES or str(name).endswith("ExecutionStrategy"):
        return
    raise UnsupportedError(f"Trainer(strategy={strategy!r:.100}) is unknown: {RUNNERS}")


def _runner_count(
    n_runners: int | None, n_workers: int | None, options: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Return the number of runners, and the options that have no effect.

    The number in `strategy` counts most, as in Agent Lightning, and `n_workers` least.
    """
    unused = dict(options)
    strategy = unused.get("strategy")
    counts = {"strategy": None, "n_runners": n_runners, "n_workers": n_workers}
    if isinstance(strategy, Mapping) and strategy.get("n_runners") is not None:
        counts["strategy"] = strategy["n_runners"]
        others = {name: value for name, value in strategy.items() if name != "n_runners"}
        unused = {**unused, "strategy": others} if others else _without(unused, "strategy")
    given = {name: count for name, count in counts.items() if count is not None}
    count = next(iter(given.values()), 1)
    check_whole("n_runners", count, 1)
    differing = {name: value for name, value in given.items() if value != count}
    return count, {**differing, **unused}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _check_agent(agent: Any) -> None:
    if not isinstance(agent, LitAgent):
        raise ConfigError(
            f"the agent must be a LitAgent, or a function under @agl.rollout, not {agent!r}"
        )
    kind = type(agent).__qualname__
    if not any(overrides(agent, name) for name in (*SYNC_METHODS, *ASYNC_METHODS)):
        raise ConfigError(f"{kind} defines no rollout(self, task, resources, rollout)")
    hooks = [name for name in ("on_rollout_start", "on_rollout_end") if hasattr(agent, name)]
    if hooks:
        raise UnsupportedError(
            f"{kind} defines {' and '.join(hooks)}, which lightspan never calls: {_HINTS['hooks']}"
        )


def _device() -> str:
    import_module("lightspan_torch")  # before torch: it lets torch's threads sleep while they wait
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
