"""The `Trainer`, which trains the agents of an app by an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import ConfigError
from lightspan.lightning.selection import check_agents
from lightspan.plugins import load_plugin
from lightspan.progress import Reporter
from lightspan.runners.app import App, as_app
from lightspan.runners.local import end_if_imported_by_a_runner
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan.schema.routing import AgentPaths
from lightspan.stores.aio import run_sync
from lightspan.training.data import clusters_of, load_distinct, load_tasks
from lightspan.training.folder import RunFolder
from lightspan.training.loop import TrainingLoop
from lightspan.training.model_selection import Splits, overlap_warnings, split_tasks
from lightspan.training.results import Evaluation, FitResult
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings, signature_from

if TYPE_CHECKING:
    from lightspan_tools.dry_run import DevReport

__all__ = ["Data", "Evaluation", "FitResult", "Trainer"]

Data = Iterable[Json] | str | Path


class Trainer:
    """Trainer of the models behind an app's agents.

    Args:
        algorithm: algorithm that learns.
        runners: number of concurrent attempts, or an object that starts runners: `LocalRunners(8,
            python=…)` for an app in another environment, `Hosts()` for runners on other machines,
            `ExternalRunners()` for runners started by hand, `RayRunners(64, actors=8)` for actors
            of a Ray cluster. Or the name of a plugin.
        steps: number of iterations; None for `epochs`.
        epochs: passes over the training tasks if `steps` is None.
        folder: folder of the run; None for `runs/<date and time>`.
        validate_every: steps between evaluations during training. They use the selection split
            (`fit(selection=)`) if there is one, else the held-out tasks. The held-out tasks are
            also evaluated before and after training.
        keep: which weights to keep as the result. `"last"`: those of the last step. `"best"`: those
            of the step with the highest reward on the selection split, the first of equally good
            ones.
        patience: number of consecutive evaluations on the selection split without improvement after
            which training stops. None trains all steps.
        validate_temperature: sampling temperature of the trained agents in evaluations; None for
            the app's own. 0 is greedy decoding.
        checkpoint_every: steps between checkpoints; there is always one after the last step.
        engine: None for transformers in this process, `Transformers(…)` for its settings;
            `VLLM(python=…)` for vLLM servers that start and end with the run; the name of a plugin
            (entry point of `lightspan.engines`); or your own engine.
        learner: None for torch in this process, `Torch(…)` for its settings; `Verl(python=…)` for
            verl's FSDP2 in another environment, on several devices (`docs/guides/verl.md`); the
            name of a plugin (entry point of `lightspan.learners`); or your own learner.
        store: URL of the store; None for a SQLite file in the folder.
        device: device of engine and learner, such as `"cuda"`; `Torch(device=…)` overrides it.
        metric: name of the reward in reports and plots.
        cluster: field of the held-out tasks, such as `"db"` or `"document"`, whose equal values
            mark correlated tasks. Confidence intervals are computed over the groups of correlated
            tasks. None: all tasks are independent.
        max_frozen_calls: maximum number of calls of frozen agents to endpoints (the app's own, or
            an `LLM`), across restarts. If there are more, `fit` stops after the batch.
        sinks: destinations of metrics in addition to the folder: `"tensorboard"`, `"wandb"`,
            `"mlflow"`, `"trackio"`, or a sink of `lightspan_tools.sinks`.
        reporter: reporter of progress.
        lease_s: seconds without a heartbeat of the runner after which an attempt is lost.
        patience_s: seconds for which training and runners wait for a store whose server is
            unreachable (a PostgreSQL or served store). Then training ends, and `resume=True`
            continues it.
        reward: what scores rollouts in place of the app: a `Judge`, a function of `task`, `answer`,
            `episode` or `episodes` (`docs/guides/judge.md`), or the name of a function
            (`module:name`), which this process imports. The app's reward is stored too. None: the
            app's reward is used.
        gateway: address of this machine on which the gateway listens, `"HOST"` or `"HOST:PORT"`. If
            the store's server is on another machine, it must be able to reach the address. None: a
            loopback address.
        image_hosts: hosts from which the gateway fetches images whose addresses are in requests,
            such as `["cdn.example.com"]` (`docs/guides/images.md`). None by default: such requests
            are refused.
        ui: whether to serve a web page about the run while it trains (`lightspan ui`), at port
            8765 of this machine; a number is another port. A process of its own serves it, which
            cannot harm the run and ends with it.

    Raises:
        ConfigError: an option is invalid.
    """

    @signature_from(TrainerSettings)
    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that learns."""
        return self.settings.algorithm

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return self.settings.run_folder

    @property
    def reporter(self) -> Reporter:
        """The reporter of progress."""
        return self.settings.progress

    def fit(
        self,
        app: App | Callable[..., Any] | str,
        train: Data,
        val: Data | None = None,
        *,
        selection: Data | float | None = None,
        agents: Sequence[str] | AgentPaths | None = None,
        resume: bool = False,
    ) -> FitResult:
        """Train and return the result; may be called inside a running event loop.

        Args:
            app: the user's program, importable as `module:name`, or a `Command`. The text
                `"module:name"` is an app that only the runners import.
            train: training tasks.
            val: held-out tasks, on which the result is reported; None for no such tasks.
            selection: tasks for the evaluations that compare steps (`keep="best"`, `patience`).
                They must not be in `val`. A number such as 0.1 takes this share of `train`, drawn
                by the algorithm's seed. The scores on these tasks are not the result, because the
                highest of several scores is biased upwards. None for no such tasks.
            agents: paths of all agents, or what an adapter's `agents()` returns. A pattern of
                `optimize=` or `frozen=` that matches none of them is then an error before the
                training. None for the agents that the app names, if any.
            resume: whether to resume from the folder's latest checkpoint. Without a checkpoint the
                run starts anew; a complete run is not trained again.

        Raises:
            AppError: the app cannot be imported or called.
            BudgetError: frozen agents made more than `max_frozen_calls` calls.
            CheckpointError: a checkpoint cannot be read or written.
            ConfigError: an argument or a setting is invalid, or contradicts another.
            DataError: tasks are malformed.
            EngineError: the engine failed, or does not serve the learner's weights.
            ModelError: a model or tokenizer cannot be loaded.
            RankError: a process of the learner has ended, or does not answer.
            RewardError: a reward is not a number, or no rollout has a reward.
            StoreError: the store cannot be used.
            UnknownAgentError: a pattern of `optimize=` or `frozen=` matches no agent.
        """
        splits = self._splits(load_tasks(train, "train"), val, selection)
        program = self._check_app(as_app(app))
        paths: Any = program.agents if agents is None else getattr(agents, "paths", agents)
        if paths is not None:
            check_agents(self.algorithm.routing(), paths)
        self._check_resume(resume)
        return run_sync(self._fit(program, splits, paths, resume))

    def evaluate(
        self, app: App | Callable[..., Any] | str, tasks: Data, *, resume: bool = False
    ) -> Evaluation:
        """Run the app once per task without training, and return the evaluation.

        The folder's files about the training stay unchanged.

        Args:
            app: as for `fit`.
            tasks: tasks to run.
            resume: whether to load the weights of the latest checkpoint, or with `keep="best"`
                those of the best step.

        Raises:
            LightspanError: an error for the reasons listed in `fit`.
        """
        held_out = load_distinct(tasks, "tasks")
        clusters_of(held_out, self.settings.cluster)
        program = self._check_app(as_app(app))
        self._check_resume(resume)
        return run_sync(self._evaluate(program, held_out, resume))

    def dev(
        self,
        app: App | Callable[..., Any] | str,
        tasks: Data,
        val: Data | None = None,
        *,
        selection: Data | float | None = None,
        agents: Sequence[str] | AgentPaths | None = None,
        count: int = 4,
        group_size: int | None = None,
        folder: str | Path | None = None,
        replay: bool = True,
    ) -> DevReport:
        """Run a few tasks without training and report what `fit` would do.

        Args:
            app: as for `fit`.
            tasks: training tasks of `fit`; a few of them are run.
            val: held-out tasks of `fit`; one of them is run, as in evaluations.
            selection: selection split of `fit`; one of its tasks is run if `val` has none.
            agents: paths of all agents. The report lists those that made no call. None for the
                agents that the app names, if any.
            count: number of tasks to run: the first ones that `fit` would take.
            group_size: rollouts per task; None for the algorithm's number, at most 4.
            folder: folder in which to keep the rollouts for `lightspan inspect`; None keeps
                nothing. The trainer's own folder stays unchanged.
            replay: whether to run some rollouts again with the recorded answers, and report
                whether the app repeats its requests. It asks no model, but tools run again.

        Raises:
            AppError, ConfigError, DataError, EngineError, ModelError, RewardError: see `fit`.
        """
        program = self._check_app(as_app(app))
        splits = self._splits(load_tasks(tasks, "tasks"), val, selection)
        plan = load_plugin("api", "DryRun")(
            self.settings,
            program,
            splits.train,
            splits.held_out,
            selection=splits.selection,
            agents=program.agents if agents is None else getattr(agents, "paths", agents),
            count=count,
            group_size=group_size,
            folder=None if folder is None else Path(folder),
            replay=replay,
        )
        report: DevReport = run_sync(plan.report())
        return report

    def _splits(self, train: list[Json], val: Data | None, select: Data | float | None) -> Splits:
        held_out = None if val is None else load_distinct(val, "val")
        return split_tasks(self.settings, train, held_out, select)

    async def _fit(
        self, app: App, splits: Splits, agents: Sequence[str] | None, resume: bool
    ) -> FitResult:
        train, selection, val = splits
        async with Session(self.settings, app, train, val, agents, selection) as session:
            result = session.prepare(resume=resume)
            if result is not None:
                return result
            if self.settings.learner_spec is not None:  # a user's learner has its own optimiser
                for choice in self.algorithm.describe_choices():
                    self.reporter.line(choice)
            await session.open()
            for warning in overlap_warnings(self.algorithm, splits):
                self.reporter.line(warning)
            return await TrainingLoop(session).run()

    async def _evaluate(self, app: App, tasks: list[Json], resume: bool) -> Evaluation:
        async with Session(self.settings, app, tasks) as session:
            session.prepare(resume=resume, training=False)
            await session.open()
            evaluation = await session.evaluate(tasks)
            self.reporter.finish(evaluation.text(self.settings.metric))
            return evaluation

    def _check_app(self, app: App) -> App:
        """Check that the algorithm's routing and resources fit the app; return the app.

        A runner imports the user's script only to find the app. In a runner's process this method
        ends the process.

        Raises:
            AppError: an argument of the app cannot be injected.
            ConfigError: another check failed.
        """
        end_if_imported_by_a_runner()
        algorithm = self.algorithm
        algorithm.reset()  # the object may have been used before
        if app.program is not None:
            app.program.check_routing(algorithm.routing())
        resources = algorithm.resources()
        app.check_arguments(resources)
        if app.needs("llm") and not algorithm.routing().serves:
            raise ConfigError(
                f"the app {app.__name__!r} asks for `llm`, and {algorithm.name} trains no model: "
                "let the app make its own client, as in production"
            )
        prompts = [name for name, value in resources.items() if isinstance(value, PromptTemplate)]
        for name in prompts:
            if not app.takes(name, alone=len(prompts) == 1):
                raise ConfigError(
                    f"the app {app.__name__!r} has no argument {name!r}, so what {algorithm.name} "
                    "makes of that prompt would change nothing: give the app an argument of that "
                    "name (or `resources`, all of them by name)"
                )
        return app

    def _check_resume(self, resume: bool) -> None:
        if resume and self.settings.folder is None:
            raise ConfigError("resume=True needs the folder of the run to go on with (folder=)")
