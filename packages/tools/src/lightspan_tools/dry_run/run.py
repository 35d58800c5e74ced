"""The dry run: run the tasks and put the report together."""

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
from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import check_computed, check_patterns, check_trainable
from lightspan.lightning.selection import Coverage
from lightspan.progress import plural
from lightspan.runners.app import App
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Mode
from lightspan.schema.validation import check_url
from lightspan.training.folder import RunFolder
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings
from lightspan_tools.dry_run import analysis, report_model as model, token_estimates
from lightspan_tools.dry_run.analysis import Findings
from lightspan_tools.dry_run.endpoints import check_reachable, described, endpoint_routing

GROUP_SIZE: Final = 4
"""Maximum rollouts per task, unless `group_size` is set."""
NO_MODEL: Final = "no-model-given"
"""Placeholder for an unknown model to train, if an endpoint answers."""
MODES: Final = (Mode.TRAIN, Mode.DEV)
"""Modes whose calls count as trained, to treat rollouts of a dry run like those of training."""


class _Measurements(NamedTuple):
    """Measurements of a dry run with the algorithm's own models."""

    rows: model.RowReport
    token_s: float | None
    peak_bytes: int
    runner_bytes: int | None


@dataclass(eq=False)
class DryRun:
    """One dry run; see `Trainer.dev` for the options.

    Raises:
        ConfigError: options that contradict each other.
    """

    settings: TrainerSettings
    app: App
    tasks: Sequence[Json]
    val: Sequence[Json] | None
    _: KW_ONLY
    agents: Sequence[str] | None
    count: int
    group_size: int | None
    endpoint: LLM | None
    """Endpoint that answers; None: the algorithm's own models."""
    folder: Path | None
    selection: Sequence[Json] | None = None

    def __post_init__(self) -> None:
        endpoint, folder, algorithm = self.endpoint, self.folder, self.settings.algorithm
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
        if endpoint is not None and not self.settings.has_policies:
            raise ConfigError(
                f"endpoint= answers in place of a model to train, and {algorithm.name} trains "
                "none: leave it out, the app's calls go to its own endpoints"
            )
        self._algorithm = algorithm
        self._group_size = self.group_size or min(algorithm.group_size, GROUP_SIZE)
        if endpoint is not None:
            check_url(endpoint.base_url, "the endpoint's base URL")
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
        if self.endpoint is not None:
            await check_reachable(self.endpoint.base_url)
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            routing = None
            if self.endpoint is not None:
                routing = endpoint_routing(self._algorithm.routing(), self.endpoint)
            await session.open(routing)
            episodes, seconds = await self._run_tasks(session)
            findings = await self._classify(session, episodes)
            if self.settings.has_policies and self.endpoint is None:
                measured = await self._measure(session, findings)
        memory = await asyncio.to_thread(self._memory, measured)
        if self.endpoint is not None:
            self._missing += [
                "rows: the token ids of an endpoint's answers",
                "time: an endpoint's speed does not predict that of a model trained here",
            ]
        return self._assemble(findings, measured, memory, seconds)

    def _session(self, folder: Path) -> Session:
        """Return a session like that of `fit`, with another folder and store.

        It has no sinks, where it would look like a training, and no limit on frozen calls, which
        is that of `fit`.
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
        """Return the episodes and their wall time in seconds."""
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
        """Return the episodes with their coverages."""
        coverages: Sequence[Coverage] = self._algorithm.coverages(episodes, modes=MODES)
        if self.endpoint is not None:
            step_rewards = self._algorithm.batch_config.credit.step_rewards
            pairs = zip(coverages, episodes, strict=True)
            coverages = [analysis.assume_tokens(c, e, step_rewards) for c, e in pairs]
        elif self.settings.has_policies:
            coverages = await reject_mismatches(session, coverages)
        routing = self._algorithm.routing()
        return Findings(episodes=episodes, coverages=coverages, routing=routing)

    async def _measure(self, session: Session, findings: Findings) -> _Measurements:
        """Build the rows and train on them to time an update."""
        tokenizers = {name: session.engine.tokenizer(name) for name in session.engine.policies()}

        def decode(policy: str, ids: Sequence[int]) -> str:
            return tokenizers[policy].decode(ids, skip_special_tokens=False)

        transitions = findings.transitions()
        rows = analysis.read_rows(findings, transitions, decode)
        runner_bytes = token_estimates.runner_bytes(session.runners)
        practice = token_estimates.practice_rows(
            transitions, self._algorithm.batch_config.max_length
        )
        token_s = None
        if self.settings.learner_spec is None:
            self._missing.append("time: learner= is your own, and a dry run does not train it")
        elif not practice:
            self._missing.append("time: no call could be trained, so the learner was not measured")
        else:
            session.reporter.start("dry run: timing updates", 1)
            try:
                token_s = await token_estimates.seconds_per_token(session, practice)
            except OutOfMemoryError as error:
                self._problems.append(f"fit would stop: {error}")
                self._missing.append("time: the learner ran out of memory")
            finally:
                session.reporter.finish()
        return _Measurements(rows, token_s, token_estimates.peak_bytes(), runner_bytes)

    # --- the sections ---------------------------------------------------------------------
    @property
    def _models(self) -> dict[str, str]:
        """Policy → model; empty if the model is unknown."""
        specs = self._algorithm.policies()
        return {name: spec.model for name, spec in specs.items() if spec.model != NO_MODEL}

    def _memory(self, measured: _Measurements | None) -> model.MemoryReport | None:
        if not self.settings.has_policies:
            return None
        if not self._models:
            self._missing.append("memory: the model to train is needed (--model)")
            return None
        memory, missing = token_estimates.estimate_memory(self.settings)
        self._missing += [missing] if missing else []
        if memory is None or measured is None:
            return memory
        return msgspec.structs.replace(
            memory, peak_bytes=measured.peak_bytes, runner_bytes=measured.runner_bytes
        )

    def _plan(self) -> tuple[int, int, str]:
        """Return the rollouts of `fit`, its updates, and how the rollouts are calculated."""
        settings, algorithm = self.settings, self._algorithm
        steps = settings.planned_steps(len(self.tasks))
        updates = steps - algorithm.searches
        rollouts = updates * algorithm.tasks_per_step * algorithm.group_size
        text = (
            f"{plural(updates, 'step')} x {algorithm.tasks_per_step} tasks x {algorithm.group_size}"
        )
        if algorithm.searches:
            rollouts += algorithm.search_rollouts
            phases = plural(algorithm.searches, "search phase")
            text = f"{algorithm.search_rollouts:,} at most in {phases} + {text}"
        is_evaluated = partial(settings.evaluates_at, has_selection=self.selection is not None)
        for split, verb, is_run in (
            (self.val, "evaluated", is_evaluated),
            (self.selection, "compared", settings.selects_at),
        ):
            times = sum(is_run(step, steps) for step in range(steps + 1))
            if split is not None and times:
                rollouts += times * len(split)
                text += f" + {times} x {len(split)} {verb}"
        return rollouts, updates, text

    def _time(
        self, measured: _Measurements, rewards: model.RewardReport, seconds: float
    ) -> model.TimeReport | None:
        """Estimate the time of `fit`; None if no update was timed."""
        if measured.token_s is None:
            return None
        rollouts, updates, _ = self._plan()
        rollout_s = seconds / rewards.rollouts
        learned = rewards.teaching / len(rewards.groups) or 1.0
        tokens = measured.rows.row_tokens / rewards.rollouts * learned
        step_rollouts = self._algorithm.tasks_per_step * self._algorithm.group_size
        return model.TimeReport(
            rollout_s=rollout_s,
            token_s=measured.token_s,
            rollouts_s=rollouts * rollout_s,
            updates_s=updates * step_rollouts * tokens * measured.token_s,
        )

    def _assemble(
        self,
        findings: Findings,
        measured: _Measurements | None,
        memory: model.MemoryReport | None,
        seconds: float,
    ) -> model.DevReport:
        rollouts, _, plan = self._plan()
        agents = analysis.read_agents(findings, self.agents)
        uncaptured = analysis.read_uncaptured(findings)
        by_batch = self._algorithm.batch_config.estimator in BATCH_ESTIMATORS
        rewards = analysis.read_rewards(findings, by_batch=by_batch)
        costs = analysis.read_costs(findings, rollouts, plan, self.settings.max_frozen_calls)
        is_ours = self._models and self.settings.learner_spec is not None
        choices = self._algorithm.describe_choices() if is_ours else []
        try:
            choices += self._algorithm.inspect_episodes(findings.episodes)
            reflections = self._algorithm.reflections(self.tasks, findings.episodes)
            costs = msgspec.structs.replace(costs, reflections=reflections)
        except (ConfigError, DataError) as error:
            self._problems.append(f"fit would stop: {error}")
        stops = list(self._fit_errors(findings))
        rows, trains = None if measured is None else measured.rows, self.settings.has_policies
        warnings = [
            *self._problems,
            *stops,
            *self._agent_warnings(findings, agents),
            *analysis.reward_warnings(rewards, trains=trains),
            *([] if stops or not trains else analysis.call_warnings(agents, uncaptured)),
            *analysis.other_warnings(agents, rows, costs, memory),
        ]
        endpoint = self.endpoint
        return model.DevReport(
            lightspan=version("lightspan"),
            app=self.app.reference,
            algorithm=self._algorithm.name,
            models=self._models,
            answered_by=("local" if endpoint is None else "endpoint") if trains else "app",
            endpoint=None if endpoint is None else described(endpoint),
            tasks=min(self.count, len(self.tasks)),
            group_size=self._group_size,
            rollouts=len(findings.episodes),
            seconds=seconds,
            warnings=list(dict.fromkeys(warnings)),
            choices=choices,
            agents=agents,
            uncaptured=uncaptured,
            overrides=analysis.read_overrides(findings),
            rewards=rewards,
            rows=rows,
            costs=costs,
            memory=memory,
            time=None if measured is None else self._time(measured, rewards, seconds),
            missing=self._missing,
            folder=None if self.folder is None else str(self.folder),
        )

    def _fit_errors(self, findings: Findings) -> Iterator[str]:
        """Yield the error with which `fit` would stop over the calls, if any."""
        try:
            check_trainable(findings.routing, findings.episodes)
            check_computed(findings.coverages)
        except UnsupportedError as error:
            yield f"fit would stop: {error}"

    def _agent_warnings(
        self, findings: Findings, agents: Sequence[model.AgentReport]
    ) -> Iterator[str]:
        """Warn of patterns that match no agent, or else of trained agents without calls."""
        paths = [agent.path for agent in agents]
        try:
            check_patterns(self._algorithm.routing(), self.agents or paths, findings.episodes)
        except UnknownAgentError as error:
            yield f"fit would stop: {error}"
            return
        idle = [agent.path for agent in agents if agent.policy is not None and not agent.calls]
        if idle:
            yield f"never called, so not trained: {', '.join(idle)}"
