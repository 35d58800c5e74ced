"""Trainer: lets an algorithm learn from an app."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lightspan.algorithms import Algorithm
from lightspan.app import App, as_app
from lightspan.data import load_distinct, load_tasks
from lightspan.engines import TokenEngine
from lightspan.errors import ConfigError
from lightspan.execution import Runners
from lightspan.folders import RunFolder
from lightspan.learners import Learner
from lightspan.lightning.selection import check_agents
from lightspan.loops import run_sync
from lightspan.progress import Reporter, default_reporter
from lightspan.records import Json
from lightspan.results import Evaluation, FitResult
from lightspan.session import Session, Settings

__all__ = ["Data", "Evaluation", "FitResult", "Trainer"]

Data = Iterable[Json] | str | Path


class Trainer:
    """Trains the models behind an app's agents.

    Args:
        algorithm: what to learn and how.
        runners: attempts at once, or a set of runners.
        steps: iterations; None for `epochs`.
        epochs: passes over the training tasks where `steps` is not given.
        folder: of the run; None for `runs/<date and time>`.
        validate_every: steps between evaluations; there is one before and one after in any case.
        checkpoint_every: steps between checkpoints; there is one after the last step in any case.
        engine: None for transformers in this process.
        learner: None for torch in this process.
        store: URL; None for a SQLite file in the folder.
        device: of engine and learner, such as `"cuda"`.
        engine_options: further arguments of the embedded engine.
        learner_options: further arguments of the embedded learner.
        metric: what the reward is called where people read it.
        reporter: where progress goes.
        lease_s: seconds of silence after which a runner's attempts are lost.

    Raises:
        ConfigError: an option that cannot be honoured.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        runners: int | Runners = 8,
        steps: int | None = None,
        epochs: float = 1.0,
        folder: str | Path | None = None,
        validate_every: int | None = None,
        checkpoint_every: int = 1,
        engine: TokenEngine | None = None,
        learner: Learner | None = None,
        store: str | None = None,
        device: str = "cpu",
        engine_options: Mapping[str, Any] | None = None,
        learner_options: Mapping[str, Any] | None = None,
        metric: str = "reward",
        reporter: Reporter | None = None,
        lease_s: float = 30.0,
    ) -> None:
        if steps is not None and steps < 0:
            raise ConfigError(f"steps={steps} must not be negative")
        if epochs <= 0:
            raise ConfigError(f"epochs={epochs} must be above 0")
        if checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every={checkpoint_every} must be at least 1")
        if validate_every is not None and validate_every < 1:
            raise ConfigError(f"validate_every={validate_every} must be at least 1, or None")
        if engine is not None and engine_options:
            raise ConfigError("engine_options are of the embedded engine: leave engine= out")
        if learner is not None and learner_options:
            raise ConfigError("learner_options are of the embedded learner: leave learner= out")
        run = RunFolder(Path(folder) if folder is not None else _fresh_folder())
        self._named = folder is not None
        self.settings = Settings(
            algorithm=algorithm,
            folder=run,
            reporter=reporter or default_reporter(),
            runners=runners,
            steps=steps,
            epochs=epochs,
            validate_every=validate_every,
            checkpoint_every=checkpoint_every,
            engine=engine,
            learner=learner,
            store_url=store or run.store_url,
            device=device,
            engine_options=dict(engine_options or {}),
            learner_options=dict(learner_options or {}),
            metric=metric,
            lease_s=lease_s,
        )

    @property
    def algorithm(self) -> Algorithm:
        return self.settings.algorithm

    @property
    def folder(self) -> RunFolder:
        return self.settings.folder

    @property
    def reporter(self) -> Reporter:
        return self.settings.reporter

    def fit(
        self,
        app: App | Callable[..., Any],
        train: Data,
        val: Data | None = None,
        *,
        agents: Sequence[str] | None = None,
        resume: bool = False,
    ) -> FitResult:
        """Train, and return what came of it. Works inside a running event loop too.

        Args:
            app: the user's program, importable as `module:name`.
            train: tasks to learn from.
            val: held-out tasks.
            agents: every agent path, where it is known beforehand (an adapter's `agents()`): a
                name that matches none is then an error at once.
            resume: go on from the folder's latest checkpoint. Without one the run starts anew; a
                run that is complete is not trained again.

        Raises:
            AppError, CheckpointError, ConfigError, DataError, ModelError, RewardError,
            StoreError, UnknownAgentError: as their messages say.
        """
        tasks = load_tasks(train, "train")
        held_out = None if val is None else load_distinct(val, "val")
        if agents is not None:
            check_agents(self.algorithm.routing(), agents)
        return run_sync(self._fit(as_app(app), tasks, held_out, agents, self._checked(resume)))

    def evaluate(
        self, app: App | Callable[..., Any], tasks: Data, *, resume: bool = False
    ) -> Evaluation:
        """Run the app once per task, in val mode, with the weights as they are (`resume`: as the
        latest checkpoint has them). What the folder says of training stays as it is.

        Raises:
            The errors of `fit`.
        """
        held_out = load_distinct(tasks, "tasks")
        return run_sync(self._evaluate(as_app(app), held_out, self._checked(resume)))

    async def _fit(
        self,
        app: App,
        train: list[Json],
        val: list[Json] | None,
        agents: Sequence[str] | None,
        resume: bool,
    ) -> FitResult:
        async with Session(self.settings, app, train, val, agents) as session:
            finished = session.prepare(resume=resume)
            if finished is not None:
                return finished
            await session.open()
            return await session.train()

    async def _evaluate(self, app: App, tasks: list[Json], resume: bool) -> Evaluation:
        async with Session(self.settings, app, tasks) as session:
            session.prepare(resume=resume, training=False)
            await session.open()
            evaluation = await session.evaluate(tasks)
            self.reporter.finish(evaluation.text(self.settings.metric))
            return evaluation

    def _checked(self, resume: bool) -> bool:
        if resume and not self._named:
            raise ConfigError("resume=True needs the folder of the run to go on with (folder=)")
        return resume


def _fresh_folder() -> Path:
    """`runs/<date and time>`, with a number if it is taken."""
    stem = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path
