"""DryRun: runs the tasks, with our own models or at an endpoint, and puts the report together."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, Literal

import msgspec

from lightspan.algorithms.replays import without_mismatches
from lightspan.engines.hub import is_here
from lightspan.engines.protocol import ChatTokenizer
from lightspan.engines.tokenizer import load_tokenizer
from lightspan.engines.vllm.description import VLLM
from lightspan.errors import (
    ConfigError,
    DataError,
    ModelError,
    OutOfMemoryError,
    UnknownAgentError,
    UnsupportedError,
)
from lightspan.lightning.advantages import OF_THE_BATCH
from lightspan.lightning.episode import Episode
from lightspan.lightning.health import check_computed, check_seen, check_trainable
from lightspan.lightning.selection import Coverage
from lightspan.lightning.transitions import Transition
from lightspan.reports.dry_run import measurements
from lightspan.reports.dry_run.endpoints import (
    check_reachable,
    default_endpoint,
    described,
    endpoint_routing,
)
from lightspan.reports.dry_run.estimates import with_estimates
from lightspan.reports.dry_run.findings import (
    Findings,
    as_if_tokens_were_known,
    check_states,
    read_agents,
    read_air,
    read_costs,
    read_overrides,
    read_rewards,
    read_rows,
)
from lightspan.reports.dry_run.provenance import read_detours
from lightspan.reports.dry_run.report import DevReport
from lightspan.reports.dry_run.sections import AgentReport, RewardReport, RowReport
from lightspan.reports.dry_run.warnings import warnings_of
from lightspan.reports.forecast import MemoryForecast, RunSize, TimeForecast, time_forecast
from lightspan.runners.app import App
from lightspan.schema.checks import check_url
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json, Mode
from lightspan.training.folder import RunFolder
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings

GROUP_SIZE: Final = 4
"""Rollouts per task at most, unless more are asked for."""
NO_MODEL: Final = "no-model-given"
"""Stands for the model to train where none is known and an endpoint answers."""
MODES: Final = (Mode.TRAIN, Mode.DEV)
"""Rollouts of a dry run are judged as those of training would be."""


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
    """Who answers; None: the algorithm's own models. Where it is left open, it is decided here."""
    local: bool | None
    folder: Path | None
    selection: Sequence[Json] | None = None

    def __post_init__(self) -> None:
        endpoint, folder, algorithm = self.endpoint, self.folder, self.settings.algorithm
        if self.count < 1 or (self.group_size is not None and self.group_size < 1):
            raise ConfigError(
                f"count={self.count}, group_size={self.group_size}: both must be at least 1"
            )
        if endpoint is not None and self.local:
            raise ConfigError("local=True runs the algorithm's own model: leave endpoint= out")
        if folder is not None and folder.resolve() == self.settings.run_folder.path.resolve():
            raise ConfigError(f"{folder} is the trainer's own folder: give the dry run another")
        if folder is not None and RunFolder(folder).is_used:
            raise ConfigError(
                f"{folder} holds a run already, whose rollouts nothing would lead to any more: "
                "give the dry run another folder, or delete this one"
            )
        if not self.settings.has_policies and (endpoint is not None or self.local is not None):
            raise ConfigError(
                f"endpoint= and local= say who answers in place of a model to train, and "
                f"{algorithm.name} trains none: leave them out, the app's calls go where it points "
                "them"
            )
        self._algorithm = algorithm
        self._count = min(self.count, len(self.tasks))
        self._group_size = self.group_size or min(algorithm.group_size, GROUP_SIZE)
        if endpoint is None and self.local is not True and self.settings.has_policies:
            models = [spec.model for spec in algorithm.policies().values()]
            self.endpoint = default_endpoint(models, self.local)
        if self.endpoint is not None:
            check_url(self.endpoint.base_url, "the endpoint's base URL")
        self._missing: list[str] = []
        self._problems: list[str] = []
        """What would keep `fit` from working, beside what the report's sections show."""

    async def report(self) -> DevReport:
        """Run the tasks and say what they showed."""
        folder = self.folder or Path(tempfile.mkdtemp(prefix="lightspan-dev-"))
        try:
            if not self.settings.has_policies:
                return await self._as_the_app_is(folder)
            return await (self._local(folder) if self.endpoint is None else self._remote(folder))
        finally:
            if self.folder is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _session(self, folder: Path) -> Session:
        """A session like that of `fit`, in a folder and a store of its own.

        Without sinks, where a team would take it for a training; and without the limit on frozen
        calls, which is for `fit` to keep.
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

    async def _rollouts(self, session: Session) -> tuple[list[Episode], float]:
        """The episodes, and the wall time they took."""
        started = time.monotonic()
        tasks = session.next_tasks(self._count)
        limit = self._algorithm.timeout_s
        at_most = "" if limit is None else f", {limit:g} s each at most"
        session.reporter.line(
            f"dry run: {len(tasks) * self._group_size} rollouts, {self._runners} at once{at_most}"
        )
        episodes = await session.rollouts(tasks, self._group_size, Mode.DEV)
        session.reporter.finish()
        return episodes, time.monotonic() - started

    # --- with the algorithm's own model ---------------------------------------------------
    async def _local(self, folder: Path) -> DevReport:
        # measured first: the forecast adds the models, which are not there yet
        process = await asyncio.to_thread(_process_bytes)
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            started = time.monotonic()
            await session.open()
            opened = time.monotonic() - started
            cpu = session.engine.usage().get("cpu_s", 0.0)
            episodes, seconds = await self._rollouts(session)
            cpu = session.engine.usage().get("cpu_s", 0.0) - cpu
            coverages = self._algorithm.coverages(episodes, modes=MODES)
            findings = self._judged(episodes, await without_mismatches(session, coverages))
            transitions = findings.transitions()
            rows = self._rows(findings, transitions, _tokenizers_of(session), exact=True)
            rewards = self._rewards(findings)
            runner_bytes = measurements.runner_bytes(session.runners)
            updates = await self._updates(session, transitions, folder)
        times = measurements.rollout_times(episodes, seconds, cpu)
        forecast = None
        if updates is not None:
            speed = measurements.speed_of(
                start_s=opened,
                rollouts=times,
                updates=updates,
                rows=rows,
                rewards=rewards,
                on_cpu=self.settings.device.startswith("cpu"),
            )
            if speed.save_s is None:
                self._missing.append("the time of checkpoints: they are large, none was written")
            forecast = time_forecast(self._size, speed, self._runners)
        memory = self._memory(process, rows, len(episodes))
        if memory is not None:
            memory = msgspec.structs.replace(
                memory,
                measured_peak_bytes=measurements.peak_bytes(),
                runner_bytes=runner_bytes,
            )
        return self._put_together(findings, rows, rewards, memory, forecast, seconds)

    async def _updates(
        self, session: Session, transitions: Sequence[Transition], folder: Path
    ) -> measurements.UpdateTimes | None:
        rows = measurements.practice_rows(transitions, self._algorithm.batch_config.max_length)
        if not self.settings.is_our_learner:
            self._missing.append("time: learner= is your own, and a dry run does not train it")
            return None
        if not rows:
            self._missing.append("time: no call could be trained, so the learner was not measured")
            return None
        session.reporter.start("dry run: timing updates", 1)
        try:
            return await measurements.update_times(session, rows, folder)
        except OutOfMemoryError as error:
            self._problems.append(f"fit would stop: {error}")
            self._missing.append("time: the learner ran out of memory")
            return None
        finally:
            session.reporter.finish()

    # --- with an endpoint -----------------------------------------------------------------
    async def _remote(self, folder: Path) -> DevReport:
        assert self.endpoint is not None
        await check_reachable(self.endpoint.base_url)
        routing = endpoint_routing(self._algorithm.routing(), self.endpoint)
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            await session.open_without_models(routing)
            episodes, seconds = await self._rollouts(session)
        tokenizers = await asyncio.to_thread(self._local_tokenizers)
        episodes = with_estimates(episodes, self._algorithm.routing(), tokenizers)
        findings = self._judged(episodes, self._algorithm.coverages(episodes, modes=MODES))
        rows = None
        if tokenizers:
            rows = self._rows(findings, findings.transitions(), tokenizers, exact=False)
        else:
            self._missing.append(f"rows: {self._without('the tokenizer')}")
        # without a model nothing is forecast: the seconds that torch takes to import are spared
        process = await asyncio.to_thread(_process_bytes) if self._model_given else 0
        memory = self._memory(process, rows, len(episodes))
        self._missing.append("time: an endpoint's speed says nothing of a model trained here")
        return self._put_together(findings, rows, self._rewards(findings), memory, None, seconds)

    # --- with nothing of ours ---------------------------------------------------------------
    async def _as_the_app_is(self, folder: Path) -> DevReport:
        """No policy is trained: every call goes where the app points it."""
        async with self._session(folder) as session:
            session.prepare(resume=False, training=False)
            await session.open()
            episodes, seconds = await self._rollouts(session)
        findings = self._judged(episodes, self._algorithm.coverages(episodes, modes=MODES))
        return self._put_together(findings, None, self._rewards(findings), None, None, seconds)

    def _local_tokenizers(self) -> dict[str, ChatTokenizer]:
        """Policy → its tokenizer, where that is on this machine."""
        tokenizers: dict[str, ChatTokenizer] = {}
        for name, spec in self._algorithm.policies().items():
            if is_here(spec.model, "tokenizer_config.json"):
                try:
                    tokenizers[name] = load_tokenizer(spec.model)
                except ModelError as error:
                    self._missing.append(f"rows: {error}")
        return tokenizers

    # --- the sections ---------------------------------------------------------------------
    def _judged(self, episodes: Sequence[Episode], coverages: Sequence[Coverage]) -> Findings:
        step_rewards = self._algorithm.batch_config.credit.step_rewards
        if self.endpoint is not None:
            pairs = zip(coverages, episodes, strict=True)
            coverages = [as_if_tokens_were_known(c, e, step_rewards) for c, e in pairs]
        return Findings(
            episodes=episodes,
            coverages=coverages,
            routing=self._algorithm.routing(),
            endpoint=self.endpoint,
        )

    def _rewards(self, findings: Findings) -> RewardReport:
        rules = self._algorithm.batch_config
        by_batch = rules.estimator in OF_THE_BATCH
        rewards = msgspec.structs.replace(read_rewards(findings), by_batch=by_batch)
        try:
            check_states(findings, rules.credit)
            air = rules.air and read_air(findings, rules.air, rules.credit)
        except ConfigError as error:
            self._problems.append(f"fit would stop: {error}")
            return rewards
        return msgspec.structs.replace(rewards, air=air)

    def _rows(
        self,
        findings: Findings,
        transitions: Sequence[Transition],
        tokenizers: Mapping[str, ChatTokenizer],
        *,
        exact: bool,
    ) -> RowReport:
        def decode(policy: str, ids: Sequence[int]) -> str:
            return tokenizers[policy].decode(ids, skip_special_tokens=False)

        return read_rows(findings, transitions, decode, exact=exact)

    @property
    def _size(self) -> RunSize:
        """How much `fit` would do."""
        settings = self.settings
        steps = settings.planned_steps(len(self.tasks))
        apart = self.selection is not None
        ends = range(steps + 1)
        evaluations = sum(settings.evaluates(step, steps, selection=apart) for step in ends)
        comparisons = sum(settings.compares(step, steps, selection=apart) for step in ends)
        return RunSize(
            steps=steps,
            tasks_per_step=self._algorithm.tasks_per_step,
            group_size=self._algorithm.group_size,
            evaluations=0 if self.val is None else evaluations,
            val_tasks=0 if self.val is None else len(self.val),
            comparisons=comparisons,
            selection_tasks=0 if self.selection is None else len(self.selection),
            minibatches=self._algorithm.minibatches,
            checkpoint_every=settings.checkpoint_every,
            searches=self._algorithm.searches,
            search_rollouts=self._algorithm.search_rollouts,
        )

    @property
    def _runners(self) -> int:
        """How many attempts run at once."""
        runners = self.settings.runners
        return runners if isinstance(runners, int) else int(getattr(runners, "slots", 1))

    @property
    def _model_given(self) -> bool:
        return all(spec.model != NO_MODEL for spec in self._algorithm.policies().values())

    @property
    def _choices(self) -> list[str]:
        """What the algorithm chose for the model to train, where that is known and ours."""
        is_ours = self._model_given and self.settings.is_our_learner
        return self._algorithm.choices() if is_ours else []

    @property
    def _answered_by(self) -> Literal["local", "endpoint", "app"]:
        if not self.settings.has_policies:
            return "app"
        return "local" if self.endpoint is None else "endpoint"

    def _without(self, what: str) -> str:
        if self._model_given:
            return f"{what} of the model to train is not on this machine"
        return f"{what} of the model to train is needed (--model)"

    def _memory(self, process: int, rows: RowReport | None, rollouts: int) -> MemoryForecast | None:
        if not self._model_given:
            self._missing.append(f"memory: {self._without('the configuration')}")
            return None
        described_engine = isinstance(self.settings.engine, VLLM | None)
        if not described_engine or not self.settings.is_our_learner:
            self._missing.append("memory: engine= or learner= is your own")
            return None
        try:
            servers = None
            if isinstance(self.settings.engine, VLLM):
                servers = measurements.vllm_memory(self.settings, self.settings.engine)
                self._missing += servers.missing
            return measurements.forecast_memory(
                self.settings,
                process_bytes=process,
                rows=rows,
                rollouts=rollouts,
                step_rollouts=self._size.step_rollouts,
                servers=servers,
            )
        except ModelError as error:
            self._missing.append(f"memory: {error}")
            return None

    def _put_together(
        self,
        findings: Findings,
        rows: RowReport | None,
        rewards: RewardReport,
        memory: MemoryForecast | None,
        forecast: TimeForecast | None,
        seconds: float,
    ) -> DevReport:
        agents = read_agents(findings, self.agents)
        costs = read_costs(findings, self._size, self.settings.max_frozen_calls)
        detours = read_detours(findings, agents)
        endpoint = self.endpoint
        stops = self._stops(findings)
        looked: list[str] = []
        try:
            looked = self._algorithm.look(findings.episodes)
            asked = self._algorithm.reflections(self.tasks, findings.episodes)
            costs = msgspec.structs.replace(costs, reflections=asked)
        except (ConfigError, DataError) as error:
            self._problems.append(f"fit would stop: {error}")
        warnings = [
            *self._problems,
            *stops,
            *self._names(findings, agents),
            *warnings_of(
                rewards,
                agents,
                rows,
                costs,
                memory,
                would_stop=bool(stops),
                trains=self.settings.has_policies,
                detours=detours,
            ),
        ]
        return DevReport(
            lightspan=version("lightspan"),
            app=self.app.reference,
            algorithm=self._algorithm.name,
            models={
                name: spec.model
                for name, spec in self._algorithm.policies().items()
                if spec.model != NO_MODEL
            },
            answered_by=self._answered_by,
            endpoint=None if endpoint is None else described(endpoint),
            exact=endpoint is None,
            tasks=self._count,
            group_size=self._group_size,
            rollouts=len(findings.episodes),
            seconds=seconds,
            warnings=list(dict.fromkeys(warnings)),
            choices=[*self._choices, *looked],
            agents=agents,
            detours=detours,
            overrides=read_overrides(findings),
            rewards=rewards,
            rows=rows,
            costs=costs,
            memory=memory,
            time=forecast,
            missing=self._missing,
            folder=None if self.folder is None else str(self.folder),
        )

    def _stops(self, findings: Findings) -> list[str]:
        """Why `fit` would stop over the calls that it saw; nothing where it would not."""
        try:
            check_trainable(findings.routing, findings.episodes)
            check_computed(findings.coverages)
        except UnsupportedError as error:
            return [f"fit would stop: {error}"]
        return []

    def _names(self, findings: Findings, agents: Sequence[AgentReport]) -> list[str]:
        """Patterns that `fit` would refuse, and agents that did nothing."""
        seen = [agent.path for agent in agents]
        try:
            check_seen(self._algorithm.routing(), self.agents or seen, findings.episodes)
        except UnknownAgentError as error:
            return [f"fit would stop: {error}"]
        idle = [agent.path for agent in agents if agent.policy is not None and not agent.calls]
        return [f"never called, so not trained: {', '.join(idle)}"] if idle else []


# --- warnings ---------------------------------------------------------------------------------


# --- who answers ------------------------------------------------------------------------------


def _tokenizers_of(session: Session) -> dict[str, ChatTokenizer]:
    return {policy: session.engine.tokenizer(policy) for policy in session.engine.policies()}


def _process_bytes() -> int:
    """What this process holds with everything imported that training needs, and no model."""
    import lightspan.engines.transformers
    import lightspan.learners.torch  # noqa: F401

    return measurements.resident_bytes()
