"""The dry run: run the tasks and create the report."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightspan.algorithms.grammar_check import reject_mismatches
from lightspan.errors import (
    ConfigError,
    DataError,
    OutOfMemoryError,
    UnknownAgentError,
    UnsupportedError,
)
from lightspan.lightning.advantages import BATCH_ESTIMATORS
from lightspan.lightning.credit import unused_step_rewards
from lightspan.lightning.episode import Episode
from lightspan.lightning.families import Forks
from lightspan.lightning.rollout_checks import (
    callers_of,
    check_computed,
    check_evaluable,
    check_patterns,
    check_trainable,
    why_unreached,
)
from lightspan.lightning.selection import Coverage
from lightspan.plugins import load_plugin
from lightspan.progress import plural
from lightspan.runners.app import App
from lightspan.schema.records import Json, Mode
from lightspan.training.folder import RunFolder
from lightspan.training.model_selection import Splits, overlap_warnings
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings
from lightspan_tools.alerts import stray_rewards_text, unused_rewards_text
from lightspan_tools.dry_run import analysis, memory, report_model as model
from lightspan_tools.dry_run.analysis import Findings
from lightspan_tools.dry_run.replays import ReplayReport, repeat_attempts

GROUP_SIZE: Final = 4
"""Maximum rollouts per task, unless `group_size` is set."""
MODES: Final = (Mode.TRAIN, Mode.DEV)
"""Modes whose calls count as trained: rollouts of a dry run are treated like those of training."""


class _Measurements(NamedTuple):
    """What a dry run measured with the algorithm's own models: rows and memory."""

    rows: model.RowReport
    peak_bytes: int
    runner_bytes: int | None
    image_bytes: int


@dataclass(eq=False)
class DryRun:
    """One dry run of a training; see `Trainer.dev`.

    Args:
        settings: settings of the trainer.
        app: the app to run.
        tasks: training tasks.
        val: held-out tasks of `fit`, of which one is run, as in evaluations; None for none.
        agents: paths of agents that the app is known to have; None if unknown.
        count: maximum number of tasks to run.
        group_size: rollouts per task. None for the algorithm's number, but at most `GROUP_SIZE`.
        folder: folder in which the rollouts are kept; None for a temporary folder.
        selection: tasks by which `fit` compares prompts; one is run if `val` has none. None for
            none.
        replay: whether to repeat rollouts with their recorded answers. It is left out if that would
            ask a model, because the app made calls that the gateway did not answer.

    Raises:
        ConfigError: `count` or `group_size` is less than 1, or `folder` holds a run or is the
            trainer's own folder.
    """

    settings: TrainerSettings
    app: App
    tasks: Sequence[Json]
    val: Sequence[Json] | None
    _: KW_ONLY
    agents: Sequence[str] | None
    count: int
    group_size: int | None
    folder: Path | None
    selection: Sequence[Json] | None = None
    replay: bool = True

    def __post_init__(self) -> None:
        folder, algorithm = self.folder, self.settings.algorithm
        if self.count < 1 or (self.group_size is not None and self.group_size < 1):
            raise ConfigError(
                f"count={self.count}, group_size={self.group_size}: both must be at least 1"
            )
        if folder is not None and folder.resolve() == self.settings.run_folder.path.resolve():
            raise ConfigError(f"{folder} is the trainer's own folder: give the dry run another")
        if folder is not None and RunFolder(folder).is_used:
            raise ConfigError(
                f"{folder} holds a run already, whose rollouts would become unreachable: give the "
                "dry run another folder, or delete this one"
            )
        self._algorithm = algorithm
        self._group_size = self.group_size or min(algorithm.group_size, GROUP_SIZE)
        self._replays: ReplayReport | None = None
        self._missing: list[str] = []
        self._problems: list[str] = []
        """Errors that would stop `fit`, in addition to the report's sections."""

    async def report(self) -> model.DevReport:
        """Run the tasks and return the report."""
        if self.folder is not None:
            return await self._report(self.folder)
        with tempfile.TemporaryDirectory(
            prefix="lightspan-dev-", ignore_cleanup_errors=True
        ) as folder:
            return await self._report(Path(folder))

    async def _report(self, folder: Path) -> model.DevReport:
        measured: _Measurements | None = None
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            await session.open()
            episodes, seconds = await self._run_tasks(session)
            # `inspect` and `export` read from it what the failed rollouts of this folder got
            session.record("dev", session.reward_metrics())
            findings = await self._classify(session, episodes)
            if keys := getattr(session.gateway, "wrong_keys", ""):
                self._problems.append(keys)
            if self.replay and not analysis.read_uncaptured(findings):
                replays = await repeat_attempts(session, episodes)
                # a search among prompts needs no forks, so calls of endpoints are no finding
                self._replays = replays if replays.repeated or self.settings.has_policies else None
            if self.settings.has_policies:
                self._check_evaluations(session, findings)
                await self._try_evaluation(session)
                measured = await self._measure(session, findings)
        memory_report = await asyncio.to_thread(self._memory, measured)
        return self._assemble(findings, measured, memory_report, seconds)

    def _session(self, folder: Path) -> Session:
        """Create a session like that of `fit`, with another folder and store.

        It sends no metrics to services, because they would show it as a training. It ignores
        `max_frozen_calls`, which limits calls in `fit` only.
        """
        settings = replace(
            self.settings,
            folder=folder,
            store=None,
            sinks=(),
            max_frozen_calls=None,
            reporter=self.settings.progress,
        )
        return Session(settings, self.app, self.tasks)

    async def _run_tasks(self, session: Session) -> tuple[list[Episode], float]:
        """Run the tasks; return the episodes and the wall time in seconds."""
        started = time.monotonic()
        tasks = session.next_tasks(min(self.count, len(self.tasks)))
        timeout_s = self._algorithm.timeout_s
        limit = "" if timeout_s is None else f", {timeout_s:g} s each at most"
        runners = self.settings.runners
        slots = runners if isinstance(runners, int) else int(getattr(runners, "slots", 1))
        session.reporter.line(
            f"dry run: {len(tasks) * self._group_size} rollouts, {slots} at once{limit}"
        )
        episodes = await session.rollouts(tasks, self._group_size, Mode.DEV)
        session.reporter.finish()
        return episodes, time.monotonic() - started

    async def _classify(self, session: Session, episodes: Sequence[Episode]) -> Findings:
        """Find out for each call of the episodes whether it would be trained, and if not, why."""
        coverages: Sequence[Coverage] = self._algorithm.coverages(episodes, modes=MODES)
        if self.settings.has_policies:
            coverages = await reject_mismatches(session, coverages)
        routing = self._algorithm.routing()
        return Findings(episodes=episodes, coverages=coverages, routing=routing)

    def _check_evaluations(self, session: Session, findings: Findings) -> None:
        """Append warnings about request fields that the evaluations of `fit` would refuse.

        In training, these fields are overridden. In evaluations, the app's own values are used.
        """
        gateway = load_plugin("gateway", "default")
        self._problems += analysis.evaluation_warnings(
            analysis.read_overrides(findings),
            session.engine.capabilities,
            getattr(gateway, "is_refused", lambda field, value: True),
            is_evaluated=self.val is not None or self.selection is not None,
        )

    async def _try_evaluation(self, session: Session) -> None:
        """Run one held-out task as the evaluations of `fit` do, and append what went wrong.

        It is left out if `fit` has no held-out tasks, or if it would stop for another reason.
        """
        tasks = self.val or self.selection
        if not tasks or self._problems:
            return
        session.reporter.line("dry run: 1 rollout of a held-out task, as in evaluations")
        try:
            episodes = await session.rollouts(tasks[:1], 1, Mode.VAL)
            check_evaluable(episodes, is_whole=True)
        except UnsupportedError as error:
            self._problems.append(f"fit would stop: {error}")
        else:
            self._problems += analysis.evaluated_warnings(episodes)
        finally:
            session.reporter.finish()

    async def _measure(self, session: Session, findings: Findings) -> _Measurements:
        """Build the rows and train on some of them, to see whether an update fits into memory."""
        tokenizers = {name: session.engine.tokenizer(name) for name in session.engine.policies()}

        def decode(policy: str, ids: Sequence[int]) -> str:
            return tokenizers[policy].decode(ids, skip_special_tokens=False)

        transitions = findings.transitions()
        rows = analysis.read_rows(findings, transitions, decode)
        practice = memory.practice_rows(transitions, self._algorithm.batch_config.max_length)
        if practice and self.settings.learner_spec is not None:
            session.reporter.start("dry run: trying an update", 1)
            try:
                await memory.try_update(session, practice)
            except OutOfMemoryError as error:
                self._problems.append(f"fit would stop: {error}")
            finally:
                session.reporter.finish()
        share = min(self.count, len(self.tasks)) / len(self.tasks)
        return _Measurements(
            rows,
            memory.peak_bytes(),
            memory.runner_bytes(session.runners),
            memory.image_bytes(analysis.digests_of(findings), share),
        )

    # --- the sections ---------------------------------------------------------------------
    def _memory(self, measured: _Measurements | None) -> model.MemoryReport | None:
        if not self.settings.has_policies:
            return None
        report, missing = memory.estimate_memory(self.settings)
        self._missing += [missing] if missing else []
        if report is None or measured is None:
            return report
        images = {"features of images": measured.image_bytes} if measured.image_bytes else {}
        return msgspec.structs.replace(
            report,
            parts=report.parts | images,
            peak_bytes=measured.peak_bytes,
            runner_bytes=measured.runner_bytes,
        )

    def _plan(self) -> tuple[int, str]:
        """Return the number of rollouts that `fit` would execute, and the calculation as text."""
        settings, algorithm = self.settings, self._algorithm
        steps = settings.planned_steps(len(self.tasks))
        updates = steps - algorithm.searches
        rollouts = updates * algorithm.tasks_per_step * algorithm.group_size
        text = (
            f"{plural(updates, 'step')} x {algorithm.tasks_per_step} tasks x {algorithm.group_size}"
        )
        forks = getattr(algorithm, "forks", None)
        if isinstance(forks, Forks):
            rollouts *= 1 + forks.each
            text += f" x {1 + forks.each}, as each is forked"
        if algorithm.searches:
            rollouts += algorithm.search_rollouts
            phases = plural(algorithm.searches, "search phase")
            search = f"{algorithm.search_rollouts:,} at most in {phases}"
            text = f"{search} + {text}" if updates else search
        is_evaluated = partial(settings.evaluates_at, has_selection=self.selection is not None)
        for split, verb, is_run in (
            (self.val, "evaluated", is_evaluated),
            (self.selection, "compared", settings.selects_at),
        ):
            times = sum(is_run(step, steps) for step in range(steps + 1))
            if split is not None and times:
                rollouts += times * len(split)
                text += f" + {times} x {len(split)} {verb}"
        if self.val is None:
            text += "; evaluations of held-out tasks (val) would come on top: none were given"
        return rollouts, text

    def _assemble(
        self,
        findings: Findings,
        measured: _Measurements | None,
        memory_report: model.MemoryReport | None,
        seconds: float,
    ) -> model.DevReport:
        rollouts, plan = self._plan()
        agents = analysis.read_agents(findings, self.agents)
        uncaptured = analysis.read_uncaptured(findings)
        config = self._algorithm.batch_config
        by_batch = config.estimator in BATCH_ESTIMATORS or config.needs_critic
        rewards = analysis.read_rewards(
            findings, by_batch=by_batch, failure_reward=self._algorithm.failure_reward
        )
        costs = analysis.read_costs(
            findings, agents, rollouts, plan, self.settings.max_frozen_calls
        )
        is_ours = self.settings.learner_spec is not None
        overrides = analysis.read_overrides(findings)
        choices = self._algorithm.describe_choices() if is_ours else []
        if self.settings.has_policies and getattr(self._algorithm, "max_tokens", 0) is None:
            choices += analysis.answer_limits(findings, overrides)
        try:
            choices += self._algorithm.inspect_episodes(findings.episodes)
        except (ConfigError, DataError) as error:
            self._problems.append(f"fit would stop: {error}")
        stops = list(self._fit_errors(findings))
        rows, trains = None if measured is None else measured.rows, self.settings.has_policies
        warnings = [
            *self._problems,
            *stops,
            *analysis.failure_warnings(rewards),  # before what may follow from them
            *self._agent_warnings(findings, agents),
            *self._call_reward_warnings(findings),
            *overlap_warnings(self._algorithm, Splits(self.tasks, self.selection, self.val)),
            *analysis.shared_ids(self.tasks, searches=bool(self._algorithm.searches)),
            *(analysis.equal_tasks(self.tasks) if self._algorithm.searches else ()),
            *(
                analysis.reward_warnings(rewards, trains=trains)
                if self._algorithm.needs_rewards
                else ()
            ),
            *([] if stops or not trains else analysis.call_warnings(agents, uncaptured)),
            *(analysis.silent_warnings(findings) if trains else ()),
            *analysis.other_warnings(agents, rows, costs, memory_report),
        ]
        return model.DevReport(
            lightspan=version("lightspan"),
            app=self.app.reference,
            algorithm=self._algorithm.name,
            models={name: spec.model for name, spec in self._algorithm.policies().items()},
            tasks=min(self.count, len(self.tasks)),
            group_size=self._group_size,
            rollouts=len(findings.episodes),
            seconds=seconds,
            warnings=list(dict.fromkeys(filter(None, warnings))),
            choices=choices,
            agents=agents,
            uncaptured=uncaptured,
            overrides=overrides,
            rewards=rewards,
            rows=rows,
            costs=costs,
            memory=memory_report,
            replays=self._replays,
            missing=self._missing,
            folder=None if self.folder is None else str(self.folder),
        )

    def _fit_errors(self, findings: Findings) -> Iterator[str]:
        """Yield an error message if `fit` would stop because of the recorded calls."""
        try:
            check_trainable(findings.routing, findings.episodes)
            check_computed(findings.coverages)
        except UnsupportedError as error:
            yield f"fit would stop: {error}"

    def _call_reward_warnings(self, findings: Findings) -> Iterator[str]:
        """Yield warnings about rewards on calls without effect."""
        yield stray_rewards_text(sum(episode.stray_rewards for episode in findings.episodes))
        credit = self._algorithm.batch_config.credit
        pairs = zip(findings.episodes, findings.coverages, strict=True)
        if self.settings.has_policies:
            yield unused_rewards_text(sum(unused_step_rewards(*pair, credit) for pair in pairs))

    def _agent_warnings(
        self, findings: Findings, agents: Sequence[model.AgentReport]
    ) -> Iterator[str]:
        """Yield warnings about the agent patterns that select which agents are trained.

        A pattern is reported if it matches no agent, or only agents that never call a model. If no
        pattern is reported, trained agents without calls are.
        """
        paths, episodes = [agent.path for agent in agents], findings.episodes
        try:
            routing, callers = self._algorithm.routing(), callers_of(episodes)
            check_patterns(routing, self.agents, paths, callers, episodes)
        except UnknownAgentError as error:
            yield f"fit would stop: {error}"
            return
        if not self.agents and (reason := why_unreached(routing, paths, episodes)):
            yield reason
            return
        idle = [agent.path for agent in agents if agent.policy is not None and not agent.calls]
        if idle:
            yield f"never called, so not trained: {', '.join(idle)}"
