"""A session: one `fit`, `evaluate` or dry run, with the store, engine and runners that it opens."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from lightspan.algorithms.protocol import Metrics
from lightspan.errors import CheckpointError, ConfigError, LightspanError, UnsupportedError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode, lowest_reward, score_failure
from lightspan.lightning.forks import ForkPoint
from lightspan.lightning.rollout_checks import ENOUGH_TASKS, RolloutChecks, check_evaluable
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import TransitionKey
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.production.exporters import TrainingExport, find_exporter
from lightspan.progress import plural
from lightspan.protocols.engine import ProbedEngine, TokenEngine
from lightspan.protocols.learner import Learner
from lightspan.runners.app import App
from lightspan.runners.discovery import Presence, make_peer, place_of, refuse_elsewhere
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan, Runners, WatchedRunners
from lightspan.schema.images import Image
from lightspan.schema.records import Json, Mode, PeerRole, Rollout, new_id, task_id
from lightspan.schema.resources import ROUTING, NamedResources, Resources, routing_of
from lightspan.schema.routing import Routing
from lightspan.schema.validation import check_whole, parse_gateway_address
from lightspan.stores import open_store, take_credentials
from lightspan.stores.protocol import Store
from lightspan.training import checkpoints
from lightspan.training.backends import check_chat_templates, check_parts, make_engine, make_learner
from lightspan.training.call_budget import CallBudget
from lightspan.training.checkpoints import TrainerState
from lightspan.training.collector import Collector, read_episodes
from lightspan.training.cpu_meter import last_seconds
from lightspan.training.data import clusters_of
from lightspan.training.manifest import data_config, finished_result
from lightspan.training.model_selection import BestSoFar
from lightspan.training.results import Evaluation, FitResult
from lightspan.training.resume import check_store, find_start, no_checkpoint
from lightspan.training.rewards import Rewards, ScoringPosition
from lightspan.training.settings import TrainerSettings

T = TypeVar("T")


class Session(AbstractAsyncContextManager["Session"]):
    """One run of `fit`, `evaluate` or a dry run; the `TrainerContext` of its algorithm.

    Args:
        settings: settings of the trainer.
        app: the user's program.
        train: training tasks.
        val: held-out tasks; None for none.
        agents: paths of all agents; None if unknown.
        selection: tasks of the selection split, by which steps are compared; None for none.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        app: App,
        train: Sequence[Json],
        val: Sequence[Json] | None = None,
        agents: Sequence[str] | None = None,
        selection: Sequence[Json] | None = None,
    ) -> None:
        self.settings = settings
        self.algorithm = settings.algorithm
        self.folder = settings.run_folder
        self.path = self.folder.path
        self.reporter = settings.progress
        self.rng = random.Random(self.algorithm.seed)
        self.budget = CallBudget(settings.max_frozen_calls, self.path)
        self.last_step = settings.planned_steps(len(train))
        self.tasks = train
        self.val = val
        self.selection = selection
        self.state = TrainerState(run_id="")
        self.checkpoint: Path | None = None
        """Checkpoint from which the run is resumed; None for a new run."""
        self.runners: Runners
        self.store: Store
        self.collector: Collector
        self._engine: TokenEngine | None = None
        self._learner: Learner | None = None
        self._app = app
        self._sampler = self.algorithm.task_order(train)
        # raises if a key is not set, before anything is loaded
        _ = [each.endpoint.api_key for each in self.algorithm.routing().targets if each.endpoint]
        self._rollout_checks = RolloutChecks(self.algorithm.routing(), self.note, agents)
        self._rollout_checks.needs_rewards = self.algorithm.needs_rewards
        self._stack = AsyncExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightspan-learner")
        self._segment = new_id("")[-12:]
        """Random part of the rollout ids, so that a resumed run does not reuse ids."""
        self._batches = 0
        self._published = 0
        """Number of publications of weights to the engine."""
        self._submitted: dict[str, int] = {}
        """Group in flight → `_published` when it was submitted."""
        self._taken: dict[int, list[str]] = {}
        """The current step → ids of the groups that the step has taken so far."""
        self._presence: Presence
        self._routing = Routing()
        self._span_export: TrainingExport | None = None
        self._is_stopped = False
        self._is_resumable = False
        """Whether a training began, so that `resume=True` may continue it after an error."""
        self._rewards: Rewards | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.reporter.finish()
        if kind is asyncio.CancelledError:
            self.reporter.line("stopping; Ctrl-C again ends at once")
        self._is_stopped = kind in (asyncio.CancelledError, KeyboardInterrupt)
        if error is not None and self._is_resumable:  # SIGKILL may follow before the clean-up ends
            self._print_checkpoint(error)
        try:
            await self._stack.aclose()
        finally:
            self._thread.shutdown()

    def _print_checkpoint(self, error: BaseException) -> None:
        saved = checkpoints.latest(self.folder.checkpoints)
        keeps = f"{self.path} keeps {'no checkpoint yet' if saved is None else saved.name}"
        if self._is_stopped:
            self.reporter.line(f"stopped; {keeps}: go on with resume=True (--resume)")
        elif saved is not None and "resume=True" not in str(error):
            advice = "once that is mended, go on with resume=True (--resume)"
            if isinstance(error, ConfigError):
                advice += "; a changed setting (optimize=) needs another folder"
            self.reporter.line(f"ended by an error; {keeps}: {advice}")

    # --- opening --------------------------------------------------------------------------
    def prepare(self, *, resume: bool, training: bool = True) -> FitResult | None:
        """Lock the run's folder and find the checkpoint to start from.

        Args:
            resume: whether to resume the run in the folder.
            training: whether to train; False for an evaluation or a dry run.

        Returns:
            The result if the run is already complete; None if there is something to do.

        Raises:
            AppError: runners cannot import the app.
            CheckpointError: the checkpoint, or that of the best step, is gone or cannot be read.
            ConfigError: the folder cannot be used, is locked, or has a run that must be resumed or
                has other settings.
        """
        # raises for a wrong address before anything begins
        if (exporter := find_exporter()) is not None:
            self._span_export = exporter.training_export(
                self.path.name, self.reporter.line, self.images
            )
        config = {**self.settings.config(), "app": self._app.reference}
        if training:
            config |= data_config(self.tasks, self.val, self.selection)
        self.folder.create()
        self._stack.callback(self.folder.release)
        before = self.folder.read_config() if resume and self.folder.is_used else {}
        self.state, self.checkpoint = find_start(self.folder, config, self.reporter, resume=resume)
        if training and before and self.algorithm.starts_again(before):
            self.state.step = 0
        is_bare = self.checkpoint is None and self.state.step != 0
        if not is_bare and (training or self.checkpoint is None):
            self.folder.rewind(self.state.step if self.checkpoint else -1)
            self.folder.write_config({**config, "run_id": self.state.run_id})
        standing = BestSoFar.of(self.folder.evaluations("selection"))
        best = standing.best if self.settings.keep == "best" else None
        if not training:
            if is_bare:
                raise no_checkpoint(self.folder)
            if self.checkpoint is not None and best is not None:
                self.checkpoint = self._checkpoint_at(best.step)
                self.state = checkpoints.load_state(self.checkpoint)
            return None
        step = self.state.step
        ends = self.settings.has_ended(step, self.last_step, standing.since_best)
        if step > self.last_step:
            self.reporter.line(f"steps={self.last_step} is below the {step} done: none is trained")
        has_begun = is_bare or self.checkpoint is not None
        result = finished_result(self.folder, step, best) if has_begun and ends else None
        if is_bare and result is None:
            raise no_checkpoint(self.folder)
        self._is_resumable = result is None
        if result is not None:
            early = f" (ended by patience, step {step})" if step < self.last_step else ""
            self.reporter.line(f"{self.path} is complete: nothing is left to train{early}")
            return result
        self.state.seconds |= last_seconds(self.folder)  # of evaluations after the checkpoint too
        self.folder.delete_unscored(step)
        return None

    async def open(self) -> None:
        """Open the store, the learner, the engine, the gateway and the runners, in that order."""
        has_models = self.settings.has_policies
        await self._open_store()
        if self.checkpoint is not None:
            await refuse_elsewhere(self.store, self.state.run_id, place_of(self.path))
            await check_store(self.store, self.state)
        if has_models:
            await self._open_learner()
        if self.checkpoint is not None:
            await self._restore(self.checkpoint)
        if has_models:
            await self._open_engine()
        await self._serve()

    async def _open_store(self) -> None:
        url = self.settings.store_url
        # A runner process inherits the environment and runs the app, which could read the
        # credentials in /proc even after their removal: remove them before any process starts.
        take_credentials(url)
        store = open_store(url, patience_s=self.settings.patience_s)
        self.store = await self._stack.enter_async_context(store)
        if not self.store.capabilities.multi_process:
            raise UnsupportedError(
                f"store {url!r} lives in one process, and runners have their own: leave store= "
                "out for a SQLite file in the run's folder"
            )
        self._stack.push_async_callback(self._close_span_export)

    async def _close_span_export(self) -> None:
        if self._span_export is not None:
            await self._span_export.close(is_patient=not self._is_stopped)

    async def _serve(self) -> None:
        """Open the gateway, the runners and the judge or reward function."""
        host, port = parse_gateway_address(self.settings.gateway or "127.0.0.1")
        options = {"image_hosts": hosts} if (hosts := self.settings.image_hosts) else {}
        make = load_plugin("gateway", "default")
        gateway = make(self.store, self._engine, host=host, port=port, **options)
        self.gateway = await self._stack.enter_async_context(gateway)
        routing = self.algorithm.routing().naming(self._app.agents or ())
        routing = routing.validating_at(self.settings.validate_temperature)
        self._routing = msgspec.structs.replace(routing, gateway_url=gateway.url)
        self.runners = await self._start_runners()
        self.collector = Collector(self.store, self.runners, self._engine, self.reporter)
        scorer = self.settings.scorer
        if scorer is not None:
            place = ScoringPosition(self.path, keeps=True, note=self.note, images=self.store.images)
            scoring = await self._stack.enter_async_context(scorer.opened(place))
            names, lines = [f"{scorer.name}/{k}" for k in scoring.spent()], self.folder.metrics()
            counted = {name: sum(line.get(name, 0.0) for line in lines) for name in names}
            self._rewards = Rewards(scorer.name, scoring, self.folder.add_rewards, counted)

    async def _restore(self, checkpoint: Path) -> None:
        if self._learner is not None:
            await self.learn(partial(self.learner.load, checkpoint / checkpoints.LEARNER))
        version, internal, gauss = self.state.rng
        self.rng.setstate((version, tuple(internal), gauss))
        self.algorithm.load_state(self.state.algorithm)
        self.state.return_in_flight()
        self._rollout_checks.agents_checked = self.state.step > 0
        evaluations = [*self.folder.evaluations(), *self.folder.evaluations("selection")]
        lowest = [each.lowest_reward for each in evaluations]  # after the checkpoint too
        self.state.lowest_reward = min([self.state.lowest_reward, *lowest])
        states = await self.store.rollouts(run_id=self.state.run_id)
        await self.store.cancel([s.rollout.rollout_id for s in states if not s.status.final])
        self.reporter.line(f"resuming {self.path} after step {self.state.step}")

    def _checkpoint_at(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, the step with the best weights.

        Raises:
            CheckpointError: the checkpoint was deleted.
        """
        saved = checkpoints.at_step(self.folder.checkpoints, step)
        if not saved.is_dir():
            raise CheckpointError(
                f"{saved} is gone, the checkpoint of the best step, whose weights are to be kept: "
                'restore it, or take the last weights (keep="last" and patience=)'
            )
        return saved

    async def restore_weights(self, step: int) -> None:
        """Load the weights and prompts of an earlier step, also into the engine.

        Raises:
            CheckpointError: the step has no checkpoint.
        """
        saved = self._checkpoint_at(step)
        if self.algorithm.learned_prompts():
            self.algorithm.load_state(checkpoints.load_state(saved).algorithm)
        await self.learn(partial(self.learner.load, saved / checkpoints.LEARNER))
        await self.publish()

    async def _open_learner(self) -> None:
        spec = self.settings.learner_spec
        if spec is not None and (line := spec.describe(self.settings.device)):
            self.reporter.line(line)
        self._learner = await self.learn(partial(make_learner, self.settings))
        close = getattr(self._learner, "close", None)
        if spec is not None and callable(close):
            self._stack.push_async_callback(asyncio.to_thread, close)

    async def _open_engine(self) -> None:
        # With one seed, a resumed run would sample the same first answers again.
        seed = random.Random(f"{self.algorithm.seed}/{self.state.step}").randrange(2**31)
        self._engine = await asyncio.to_thread(make_engine, self.settings, seed=seed)
        self._stack.push_async_callback(self.engine.close)
        check_parts(self.algorithm, self.engine, self.learner)
        check_chat_templates(self.engine)
        spec = self.settings.engine_spec
        if spec is not None and (line := spec.describe(self.path)):
            self.reporter.line(line)
        await self.engine.start()
        await self.publish()

    async def _start_runners(self) -> Runners:
        """Start the runners and announce the training to runners that are started by hand."""
        runners = self.settings.runners
        if isinstance(runners, str):
            runners = load_plugin("runners", runners)()
        if isinstance(runners, int):
            runners = LocalRunners(runners)
        run_id, app = self.state.run_id, self._app.reference
        plan = RunnerPlan(
            store_url=self.store.url,
            app=app,
            run_id=run_id,
            lease_s=self.settings.lease_s,
            sys_path=list(sys.path),
            folder=str(self.path.resolve()),
        )
        self._stack.push_async_callback(runners.stop)
        await runners.start(plan)
        remote = getattr(runners, "elsewhere", isinstance(runners, WatchedRunners))
        gateway = self._routing.gateway_url if self._routing.serves else ""
        visible = runners if isinstance(runners, WatchedRunners) else None
        if visible is None and "ExternalRunners" in installed_plugins("api"):
            # `lightspan runner` may join any training of its app in the store.
            visible = load_plugin("api", "ExternalRunners").beside(plan)
        fields = {"gateway": gateway, "remote": remote, "sources": getattr(visible, "sources", {})}
        place = place_of(self.path)
        peer = make_peer(run_id, PeerRole.TRAINER, app, run_id=run_id, place=place, **fields)
        self._presence = await self._stack.enter_async_context(Presence(self.store, peer))
        if visible is not None:
            watch = visible.watch(self.store, self.reporter.line)
            self._stack.callback(asyncio.create_task(watch).cancel)
        return runners

    async def cancel_in_flight(self) -> None:
        """Cancel all rollouts in flight, because no step will train them."""
        await self.store.cancel(self.collector.in_flight.clear())

    async def complete(self) -> None:
        """Announce that the run is complete, so that runners started by hand can end."""
        await self._presence.stay(complete=True)

    async def evaluate(self, tasks: Sequence[Json], *, weights: int | None = None) -> Evaluation:
        """Run the app once per task in val mode and return the evaluation.

        Args:
            tasks: tasks to run.
            weights: step of the loaded weights, if earlier than the current step; else None.

        Raises:
            UnsupportedError: the gateway refused every call (`check_evaluable`).
        """
        # Of a new run a few tasks come first, so that a wrong name in `optimize=` ends it early.
        is_first = bool(self._routing.rules) and not self._rollout_checks.agents_checked
        count = ENOUGH_TASKS if is_first and self.state.step == 0 else 0
        parts = [part for part in (tasks[:count], tasks[count:]) if part]
        self._rollout_checks.defers_failures = True  # the last part may be one rollout
        episodes = [e for part in parts for e in await self.rollouts(part, 1, Mode.VAL)]
        self._rollout_checks.defers_failures = False
        self._rollout_checks.note_failures(episodes)
        check_evaluable(episodes, is_whole=True)
        clusters = clusters_of(tasks, self.settings.cluster)
        step, failed = self.state.step, self._failure_reward
        lowest = min(self.state.lowest_reward, failed or 0.0)
        done = Evaluation.of(step, episodes, self._routing, weights, clusters, failed, lowest)
        return done.restated(failed)

    @property
    def _failure_reward(self) -> float | None:
        """Reward of rollouts whose app failed; None leaves them unscored."""
        setting = self.algorithm.failure_reward
        return self.state.lowest_reward if isinstance(setting, str) else setting

    # --- members of `TrainerContext`, documented there -----------------------------------
    @property
    def engine(self) -> TokenEngine:
        return self._part(self._engine, "engine")

    @property
    def learner(self) -> Learner:
        return self._part(self._learner, "learner")

    def _part(self, part: T | None, name: str) -> T:
        if part is None:
            raise ConfigError(
                f"{self.algorithm.name} has no policies, so a run of it has no {name}: give it "
                "policies(), or do without"
            )
        return part

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def versions(self) -> dict[str, int]:
        return self.state.versions

    @property
    def in_flight(self) -> dict[str, int]:
        return {group: self._published - number for group, number in self._submitted.items()}

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        return await self.store.images(digests)

    def next_tasks(self, count: int) -> list[Json]:
        returned, self.state.returned = self.state.returned[:count], self.state.returned[count:]
        missing = count - len(returned)
        tasks = self._sampler.take(self.state.cursor, missing)
        self.state.cursor += missing
        return [*returned, *tasks]

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[Episode]:
        check_whole("rollouts: group_size", group_size, 1)
        if not self.settings.has_policies:  # a prompt search may evaluate many times in a step
            self.budget.check(self.state.step)
        ids = await self._resources_ids(len(tasks), resources, "rollouts")
        rollouts = self._plan_rollouts(tasks, group_size, mode, ids)
        episodes = await self.collector.run(rollouts, self._title(mode))
        return await self._process(rollouts, episodes, mode)

    async def forks(self, points: Sequence[ForkPoint], count: int) -> list[Episode]:
        check_whole("forks: count", count, 1)
        for point in (point for point in points if point.refusal):
            raise ConfigError(f"forks: {point.attempt_id}, call {point.number}: {point.refusal}")
        if getattr(self.algorithm, "overlap", 0):
            raise ConfigError(
                "forks: with overlap= a recorded attempt may be of older weights, and the calls "
                "that a fork repeats are not corrected for that: use overlap=0"
            )
        forks = await self.run_forks(points, count)
        if departed := [episode.departed for _, episode in forks if episode.departed]:
            self.note(
                f"{len(departed)} of {plural(len(forks), 'fork')} left out: they departed from "
                f"the attempt that they repeat (for example: {departed[0]})"
            )
        kept = [pair for pair in forks if not pair[1].departed]
        rollouts, episodes = [rollout for rollout, _ in kept], [episode for _, episode in kept]
        return await self._process(rollouts, episodes, rollouts[0].mode) if kept else []

    async def run_forks(
        self, points: Sequence[ForkPoint], count: int
    ) -> list[tuple[Rollout, Episode]]:
        """Run forks as the method `forks`; return departed ones too, without further checks."""
        states = await self.store.rollouts([point.rollout_id for point in points])
        parents = {state.rollout.rollout_id: state.rollout for state in states}
        rollouts: list[Rollout] = []
        for point in points:
            parent = parents[point.rollout_id]
            named = await self.store.get_resources(parent.resources_id)
            url = self._routing.gateway_url  # another one in a later process
            routing = msgspec.structs.replace(routing_of(named), gateway_url=url)
            ids = [await self.store.put_resources({**named, ROUTING: routing})]
            forks = self._plan_rollouts([parent.task], count, parent.mode, ids)
            rollouts += [msgspec.structs.replace(fork, fork=point.fork) for fork in forks]
        episodes = await self.collector.run(rollouts, f"step {self.state.step}: forks")
        return list(zip(rollouts, episodes, strict=True))

    async def submit(
        self,
        tasks: Sequence[Json],
        group_size: int,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[str]:
        check_whole("submit: group_size", group_size, 1)
        ids = await self._resources_ids(len(tasks), resources, "submit")
        rollouts = self._plan_rollouts(tasks, group_size, Mode.TRAIN, ids)
        await self.collector.submit(rollouts)
        groups = {rollout.group_id: rollout.task for rollout in rollouts if rollout.group_id}
        self.state.in_flight |= groups
        self._submitted |= dict.fromkeys(groups, self._published)
        return list(groups)

    async def take(self, count: int, first: Sequence[str] = ()) -> list[Episode]:
        rollouts, episodes = await self.collector.take(count, first, self._title(Mode.TRAIN))
        groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts if rollout.group_id))
        step = self.state.step
        self._taken = {step: [*self._taken.get(step, ()), *groups]}
        self.folder.write_taken(step, self._taken[step])
        for group in groups:
            del self.state.in_flight[group], self._submitted[group]
        return await self._process(rollouts, episodes, Mode.TRAIN)

    async def stored_episodes(self, rollout_ids: Sequence[str]) -> list[Episode]:
        return await read_episodes(self.store, await self.store.rollouts(rollout_ids))

    async def interrupted(self, known: Container[str]) -> list[Episode]:
        run, last = self.state.run_id, self.state.step
        steps = [0, 1] if last == 1 else [last]  # `check_run` is before the first step
        found = [await self.store.rollouts(run_id=run, mode=Mode.TRAIN, step=n) for n in steps]
        begun = [state for states in found for state in states if state.attempt_id is not None]
        left = [state for state in begun if state.rollout.rollout_id not in known]
        return await read_episodes(self.store, left)

    async def _process(
        self, rollouts: Sequence[Rollout], episodes: list[Episode], mode: Mode
    ) -> list[Episode]:
        """Score, check and export the episodes of ended rollouts; return the scored episodes."""
        damaged = getattr(self.gateway, "damaged", {})  # of some the store has no mark yet
        for index, each in enumerate(episodes):
            if each.attempt_id in damaged and not each.capture_errors:
                episodes[index] = replace(each, capture_errors=damaged[each.attempt_id])
        await self.budget.count(self.store, self.collector.in_flight.news())
        if self._rewards is not None:
            episodes = await self._rewards.apply([rollout.task for rollout in rollouts], episodes)
        self.state.lowest_reward = lowest_reward(episodes, self.state.lowest_reward)
        episodes = [score_failure(episode, self._failure_reward) for episode in episodes]
        if not any(episode.fork for episode in episodes):  # they are in no failure rate
            try:
                self._rollout_checks.check(episodes)
            except LightspanError as error:  # calls with a wrong key belong to no rollout
                stray = getattr(self.gateway, "wrong_keys", "")
                raise (type(error)(f"{error}. {stray}") if stray else error) from None
        if self._span_export is not None:
            await self._span_export.add(episodes, self.state.step, is_learned=mode is Mode.TRAIN)
        return episodes

    async def _resources_ids(
        self, count: int, resources: Resources | Sequence[Resources] | None, method: str
    ) -> list[str]:
        """Store the resources of each group of rollouts and return one id per group.

        Resources are named values, such as prompts, that the attempts of a rollout get.

        Args:
            count: number of groups.
            resources: one mapping for all groups, or a list with one per group. None for the
                algorithm's resources.
            method: name of the calling method, for the error message.

        Raises:
            ConfigError: the number of mappings is not `count`.
        """
        if resources is None or isinstance(resources, Mapping):
            return [await self._put_resources(resources or {})] * count
        if len(resources) != count:
            raise ConfigError(
                f"{method}(resources=) has {len(resources)} mappings for {count} tasks: give one "
                "for all, or one per task"
            )
        return [await self._put_resources(each) for each in resources]

    async def _put_resources(self, resources: Resources) -> str:
        """Store resources together with the algorithm's own and the routing; return their id.

        Equal resources have the same id.

        Raises:
            ConfigError: a resource is called `routing`, the name of the trainer's own resource.
        """
        named: NamedResources = {**self.algorithm.resources(), **resources}
        if ROUTING in named:
            raise ConfigError(f"a resource cannot be called {ROUTING!r}: the trainer's own is")
        return await self.store.put_resources({**named, ROUTING: self._routing})

    def _plan_rollouts(
        self, tasks: Sequence[Json], group_size: int, mode: Mode, resources_ids: Sequence[str]
    ) -> list[Rollout]:
        self._batches += 1
        stem = f"{self.state.run_id}-{self._segment}-{self.state.step}-{self._batches}"
        return [
            Rollout(
                rollout_id=f"{stem}-{index}-{member}",
                task=task,
                task_id=task_id(task),
                run_id=self.state.run_id,
                group_id=f"{stem}-{index}",
                mode=mode,
                resources_id=resources_ids[index],
                step=self.state.step,
                timeout_s=self.algorithm.timeout_s,
                app=self._app.reference,
            )
            for index, task in enumerate(tasks)
            for member in range(group_size)
        ]

    def _title(self, mode: Mode) -> str:
        step = f"step {self.state.step}"
        titles = {Mode.DEV: "dry run", Mode.VAL: f"{step}: evaluating"}
        return titles.get(mode, f"{step}/{self.last_step}")

    async def learn(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def publish(self) -> None:
        engine, store = self.engine, self.store  # raises without an engine
        run, step, policies = self.state.run_id, self.state.step, self.algorithm.policies()
        versions = {name: await store.allot_version(name, run, step) for name in policies}
        await self.learner.publish(engine, versions)
        if isinstance(engine, ProbedEngine):
            for policy, version in versions.items():
                await engine.check_weights(policy, version, self._score)
        self.state.versions = versions
        self._published += 1

    async def _score(self, rows: Sequence[Row]) -> list[list[float]]:
        return await self.learn(partial(self.learner.score, rows))

    def note(self, text: str) -> None:
        self.reporter.line(f"step {self.state.step}: {text}")

    def record(self, kind: str, metrics: Metrics) -> None:
        self.folder.add_metrics({"kind": kind, "step": self.state.step, **metrics})

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        if self._span_export is not None:
            self._span_export.explain(explanations)
        named = ((f"{a}/{call}/{choice}", why) for (a, call, choice), why in explanations.items())
        self.folder.write_explanations(self.state.step, named)

    def record_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        named = {f"{a}/{call}/{choice}": why for (a, call, choice), why in mismatches.items()}
        self.folder.write_mismatches(self.state.step, named)

    # --- after a step -----------------------------------------------------------------------
    def send_spans(self) -> None:
        """Send the step's spans to the span exporter, if any. Its advantages must be computed."""
        if self._span_export is not None:
            self._span_export.send()

    def reward_metrics(self) -> dict[str, float]:
        """Return the scorer's metrics, and the current failure reward if it may change."""
        metrics = {} if self._rewards is None else self._rewards.metrics()
        if self.algorithm.failure_reward == "lowest":
            metrics["failure_reward"] = self.state.lowest_reward
        return metrics
