"""Trainer: lets an algorithm learn from an app."""

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
from lightspan.runners.command.command import check_served
from lightspan.runners.local import end_if_imported_by_a_runner
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan.stores.aio import run_sync
from lightspan.training.data import clusters_of, load_distinct, load_tasks
from lightspan.training.folder import RunFolder
from lightspan.training.loop import TrainingLoop
from lightspan.training.model_selection import (
    Splits,
    describe_selection,
    overlap_warning,
    split_tasks,
)
from lightspan.training.results import Evaluation, FitResult
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings, signature_from

if TYPE_CHECKING:
    from lightspan_tools.dry_run import DevReport

__all__ = ["Data", "Evaluation", "FitResult", "Trainer"]

Data = Iterable[Json] | str | Path


class Trainer:
    """Trains the models behind an app's agents.

    Args:
        algorithm: what to learn and how.
        runners: attempts at once, or a set of runners: `LocalRunners(8, python=…)` for an app that
            has an environment of its own, `ExternalRunners()` for those that are started by hand,
            `RayRunners(64, actors=8)` for actors of a Ray cluster.
        steps: iterations; None for `epochs`.
        epochs: passes over the training tasks where `steps` is not given.
        folder: of the run; None for `runs/<date and time>`.
        validate_every: steps between evaluations; there is one before and one after in any case.
            With a selection split (`fit(selection=)`) these are on it, and the held-out tasks are
            run before and after only.
        keep: whose weights are the result: the `"last"` step's, or the `"best"` one's by the
            selection split of `fit`; the first of equals.
        patience: evaluations on the selection split in a row that may be no better than the best
            before them; then training stops. None trains all steps.
        validate_temperature: what the agents that learn are sampled at in evaluations; None for
            what the app asks. 0 is greedy: the likeliest token each time.
        checkpoint_every: steps between checkpoints; there is one after the last step in any case.
        engine: None for transformers in this process, `Transformers(…)` for its settings;
            `VLLM(python=…)` for vLLM servers, which are started and ended with the run; the name of
            a plugin (entry point of `lightspan.engines`), or an engine of your own.
        learner: None for torch in this process, `Torch(…)` for its settings; `Verl(python=…)` for
            verl's FSDP2, in an environment of its own, on several devices (`docs/verl.md`); the
            name of a plugin (entry point of `lightspan.learners`), or a learner of your
            own.
        store: URL; None for a SQLite file in the folder.
        device: of engine and learner, such as `"cuda"`; `Torch(device=…)` has its own.
        metric: what the reward is called where people read it.
        cluster: a key of the held-out tasks that names what they share (`"db"`, `"document"`), such
            that those with one value are alike. Intervals then say that so many clusters were seen,
            not so many independent tasks. None: each task stands for itself.
        max_frozen_calls: calls that frozen agents may make to endpoints (where the app points, or
            an `LLM`), over all lives of the run; above that `fit` stops after the batch.
        sinks: where metrics go beside the folder: `"tensorboard"`, `"wandb"`, `"mlflow"`,
            `"trackio"`, or a sink of `lightspan.training.sinks`.
        reporter: where progress goes.
        lease_s: seconds of silence after which a runner's attempts are lost.
        reward: who says what rollouts are worth, in place of the app: a `Judge`, a function of
            `task`, `answer`, `episode` or `episodes` (`docs/rewards.md`), or the name of one
            (`module:name`), which this process imports. What the app says is kept beside it.
        gateway: where model calls come in, `"HOST"` or `"HOST:PORT"`: an address of this machine
            that the server of the store reaches, where that is another machine's. None: a loopback
            address.

    Raises:
        ConfigError: an option that cannot be honoured.
    """

    @signature_from(TrainerSettings)
    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings

    @property
    def algorithm(self) -> Algorithm:
        """What is learned, and how."""
        return self.settings.algorithm

    @property
    def folder(self) -> RunFolder:
        """That of the run."""
        return self.settings.run_folder

    @property
    def reporter(self) -> Reporter:
        """Where progress goes."""
        return self.settings.progress

    def fit(
        self,
        app: App | Callable[..., Any] | str,
        train: Data,
        val: Data | None = None,
        *,
        selection: Data | float | None = None,
        agents: Sequence[str] | None = None,
        resume: bool = False,
    ) -> FitResult:
        """Train, and return what came of it. Works inside a running event loop too.

        Args:
            app: the user's program, importable as `module:name`, or a `Command`. The
                text `"module:name"` is an app that is imported where runners are, and not here.
            train: tasks to learn from.
            val: held-out tasks, which the result is reported on.
            selection: tasks for the evaluations on the way (`validate_every`), others than `val`,
                which is then looked at before and after only. Steps are compared by them
                (`keep="best"`, `patience`): the highest of several scores is too high, and is never
                the result. Or the share of `train` to take for it, such as 0.1, by the algorithm's
                seed.
            agents: every agent path, where it is known beforehand (an adapter's `agents()`): a
                name that matches none is then an error at once.
            resume: go on from the folder's latest checkpoint. Without one the run starts anew; a
                run that is complete is not trained again.

        Raises:
            AppError, BudgetError, CheckpointError, ConfigError, DataError, ModelError, RankError,
            RewardError, StoreError, UnknownAgentError: as their messages say.
        """
        splits = split_tasks(
            self.settings,
            load_tasks(train, "train"),
            None if val is None else load_distinct(val, "val"),
            selection,
        )
        chosen = self._served(as_app(app))
        agents = chosen.agents if agents is None else agents
        if agents is not None:
            check_agents(self.algorithm.routing(), agents)
        resume = self._checked(resume)
        return run_sync(self._fit(chosen, splits, agents, resume))

    def evaluate(
        self, app: App | Callable[..., Any] | str, tasks: Data, *, resume: bool = False
    ) -> Evaluation:
        """Run the app once per task, in val mode, with the weights as they are (`resume`: as the
        latest checkpoint has them, or with `keep="best"` that of the best step). What the folder
        says of training stays as it is.

        Raises:
            The errors of `fit`.
        """
        held_out = load_distinct(tasks, "tasks")
        clusters_of(held_out, self.settings.cluster)
        chosen = self._served(as_app(app))
        resume = self._checked(resume)
        return run_sync(self._evaluate(chosen, held_out, resume))

    def dev(
        self,
        app: App | Callable[..., Any] | str,
        tasks: Data,
        val: Data | None = None,
        *,
        selection: Data | float | None = None,
        agents: Sequence[str] | None = None,
        count: int = 4,
        group_size: int | None = None,
        endpoint: LLM | None = None,
        folder: str | Path | None = None,
    ) -> DevReport:
        """A dry run: a few tasks, nothing trained, and a report of what `fit` would do.

        Args:
            app: as for `fit`.
            tasks: what `fit` would learn from; a few of them are run.
            val: what `fit` would evaluate on; none of them is run.
            selection: what `fit` would compare steps by; likewise.
            agents: every agent path, where it is known: those never called are in the report.
            count: tasks, the first that `fit` would take.
            group_size: rollouts per task; None for the algorithm's, at most 4.
            endpoint: who answers for the agents that would be trained, whose token ids stay
                unknown then. None: the algorithm's own model, in this process.
            folder: where to keep the rollouts for `lightspan inspect`; None keeps nothing. The
                trainer's own folder is never touched.

        Raises:
            AppError, ConfigError, DataError, EngineError, ModelError, RewardError: as their
                messages say.
        """
        chosen = self._served(as_app(app))
        splits = split_tasks(
            self.settings,
            load_tasks(tasks, "tasks"),
            None if val is None else load_distinct(val, "val"),
            selection,
        )
        plan = load_plugin("api", "DryRun")(
            self.settings,
            chosen,
            splits.train,
            splits.held_out,
            selection=splits.selection,
            agents=chosen.agents if agents is None else agents,
            count=count,
            group_size=group_size,
            endpoint=endpoint,
            folder=None if folder is None else Path(folder),
        )
        report: DevReport = run_sync(plan.report())
        return report

    async def _fit(
        self,
        app: App,
        splits: Splits,
        agents: Sequence[str] | None,
        resume: bool,
    ) -> FitResult:
        train, selection, val = splits
        async with Session(self.settings, app, train, val, agents, selection) as session:
            finished = session.prepare(resume=resume)
            if finished is not None:
                return finished
            if (
                self.settings.learner_spec is not None
            ):  # one of the user's own has an optimiser of its own
                for choice in self.algorithm.describe_choices():
                    self.reporter.line(choice)
            await session.open()
            if shared := overlap_warning(splits):
                self.reporter.line(shared)
            if shared := describe_selection(self.algorithm, splits):
                self.reporter.line(shared)
            return await TrainingLoop(session).run()

    async def _evaluate(self, app: App, tasks: list[Json], resume: bool) -> Evaluation:
        async with Session(self.settings, app, tasks) as session:
            session.prepare(resume=resume, training=False)
            await session.open()
            evaluation = await session.evaluate(tasks)
            self.reporter.finish(evaluation.text(self.settings.metric))
            return evaluation

    def _served(self, app: App) -> App:
        """The app, whose agents are answered as far as it names them itself, and that gets what it
        asks for. Where a runner process only imports the script, there is none: the process
        ends."""
        end_if_imported_by_a_runner()
        algorithm = self.algorithm
        check_served(algorithm.routing(), app.agents or ())
        resources = algorithm.resources()
        app.check_arguments(resources)
        if app.needs("llm") and not algorithm.routing().serves:
            raise ConfigError(
                f"the app {app.__name__!r} asks for `llm`, and {algorithm.name} trains no model: "
                "let the app make its own client, as in production"
            )
        prompts = [name for name, each in resources.items() if isinstance(each, PromptTemplate)]
        for name in prompts:
            if not app.takes(name, alone=len(prompts) == 1):
                raise ConfigError(
                    f"the app {app.__name__!r} has no argument {name!r}, so what {algorithm.name} "
                    "makes of that prompt would change nothing: give the app an argument of that "
                    "name (or `resources`, all of them by name)"
                )
        return app

    def _checked(self, resume: bool) -> bool:
        if resume and self.settings.folder is None:
            raise ConfigError("resume=True needs the folder of the run to go on with (folder=)")
        return resume
