"""Session: one `fit` or `evaluate`, and everything that is open while it runs."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from lightspan.errors import CheckpointError, ConfigError, UnsupportedError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.rollout_checks import Health
from lightspan.lightning.transitions import TransitionKey
from lightspan.plugins import load_plugin
from lightspan.production import span_exporter
from lightspan.protocols.engine import ProbedEngine, TokenEngine
from lightspan.protocols.learner import Learner
from lightspan.runners.app import App
from lightspan.runners.discovery import Presence, make_peer
from lightspan.runners.external import RunnerWatch
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan, Runners
from lightspan.schema.records import Json, Mode, PeerRole, Rollout, new_id
from lightspan.schema.resources import ROUTING, NamedResources, Resources
from lightspan.schema.routing import Routing
from lightspan.schema.validation import check_whole
from lightspan.stores import open_store, take_credentials
from lightspan.stores.protocol import Store
from lightspan.training import checkpoints
from lightspan.training.backends import (
    check_chat_templates,
    check_parts,
    make_engine,
    make_learner,
)
from lightspan.training.call_budget import CallBudget
from lightspan.training.checkpoints import TrainerState, rollout_stem
from lightspan.training.collector import Collector
from lightspan.training.data import Epochs, clusters_of, task_id
from lightspan.training.manifest import data_config, finished_result
from lightspan.training.model_selection import BestSoFar
from lightspan.training.results import Evaluation, FitResult
from lightspan.training.resume import find_start, next_version
from lightspan.training.rewards import Rewards, Scorer, ScoringPosition, own_reward
from lightspan.training.settings import TrainerSettings
from lightspan.training.span_export import SpanExport
from lightspan.training.weight_sync_check import check_probes

T = TypeVar("T")


class Session:
    """All that is open while a run trains, evaluates or is tried out; the `World` of its algorithm.

    Args:
        settings: of the trainer.
        app: the user's program.
        train: tasks to learn from.
        val: held-out tasks.
        agents: every agent path, where it is known.
        selection: tasks that steps are compared by.
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
        self.reporter = settings.progress
        self.rng = random.Random(self.algorithm.seed)
        self.budget = CallBudget(settings.max_frozen_calls, self.folder.path)
        self.planned_steps = settings.planned_steps(len(train))
        self.val = val
        self.selection = selection
        self.state = TrainerState(run_id="")
        self.checkpoint: Path | None = None
        """Where this life of the run begins; None for a new run."""
        self.life = new_id("")[-12:]
        self.runners: Runners
        self.store: Store
        self.collector: Collector
        self._engine: TokenEngine | None = None
        self._learner: Learner | None = None
        self._app = app
        self._tasks = Epochs(train, self.algorithm.seed)
        self._health = Health(self.algorithm.routing(), self.note, agents)
        self._stack = AsyncExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightspan-learner")
        self._batches = 0
        self._published = 0
        self._begun: dict[str, int] = {}
        """Group in flight → `_published` when it was submitted."""
        self._taken: dict[int, list[str]] = {}
        """This step → the groups that it has taken so far, by one call or by several."""
        self._presence: Presence
        self._watch: RunnerWatch
        self._routing = Routing()
        self._span_export = SpanExport(self.folder.path.name, self.reporter.line)
        self._is_stopped = False
        self._has_begun = False
        """A training has its folder, and so can go on whatever ends it; a dry run and an evaluation
        have nothing to go on with."""
        self._rewards: Rewards | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.reporter.finish()
        if kind is asyncio.CancelledError:
            self.reporter.line("stopping; Ctrl-C again ends at once")
        self._is_stopped = kind in (asyncio.CancelledError, KeyboardInterrupt)
        try:
            await self._stack.aclose()
        finally:
            self._thread.shutdown()
            if error is not None:
                self._tell_what_is_kept(error)

    def _tell_what_is_kept(self, error: BaseException) -> None:
        if not self._has_begun:
            return
        saved = checkpoints.latest(self.folder.checkpoints)
        if self._is_stopped:
            kept = saved.name if saved is not None else "no checkpoint yet"
            self.reporter.line(
                f"stopped; {self.folder.path} keeps {kept}: go on with resume=True (--resume)"
            )
        elif saved is not None and "resume=True" not in str(error):
            self.reporter.line(
                f"ended by an error; {self.folder.path} keeps {saved.name}: once that is mended, "
                "go on with resume=True (--resume)"
            )

    # --- opening --------------------------------------------------------------------------
    def prepare(self, *, resume: bool, training: bool = True) -> FitResult | None:
        """Take the folder and find where to start. A run with nothing left to do has its result.

        Raises:
            AppError, CheckpointError, ConfigError
        """
        span_exporter.current()  # a wrong address is an error before anything begins
        config = {**self.settings.config(), "app": self._app.reference}
        if training:
            config |= data_config(self._tasks.tasks, self.val, self.selection)
        self.folder.create()
        self._stack.callback(self.folder.release)
        start = find_start(self.folder, config, self.reporter, resume=resume)
        self.state, self.checkpoint = start
        if training or self.checkpoint is None:
            self.folder.rewind(self.state.step if self.checkpoint else -1)
            self.folder.write_config({**config, "run_id": self.state.run_id})
        standing = BestSoFar.of(self.folder.evaluations("selection"))
        kept = standing.best if self.settings.keep == "best" else None
        if not training:
            if self.checkpoint is not None and kept is not None:
                self.checkpoint = self._saved(kept.step)
                self.state = checkpoints.load_state(self.checkpoint)
            return None
        step = self.state.step
        has_ended = self.settings.has_ended(step, self.planned_steps, standing.waited)
        if self.checkpoint is None or not has_ended:
            self._has_begun = True
            return None
        finished = finished_result(self.folder, step, kept)
        if finished is not None:
            early = f" (patience={self.settings.patience} has ended it after step {step})"
            why = early if step < self.planned_steps else ""
            self.reporter.line(f"{self.folder.path} is complete: nothing is left to train{why}")
        return finished

    async def open(self) -> None:
        """Open the store, the learner, the engine, the gateway and the runners, in that order."""
        await self._open_store()
        if self.settings.has_policies:
            await self._open_learner()
        if self.checkpoint is not None:
            await self._restore(self.checkpoint)
        if self.settings.has_policies:
            await self._open_engine()
        await self._serve(self._engine, self.algorithm.routing())

    async def open_without_models(self, routing: Routing) -> None:
        """Open the store, a gateway that serves no model of ours, and the runners (a dry run)."""
        await self._open_store()
        await self._serve(None, routing)

    async def _open_store(self) -> None:
        url = self.settings.store_url
        # Before any process is started: a runner's own has the app in it, and finds its environment
        # in /proc even where the variable was removed later.
        take_credentials(url)
        self.store = await self._stack.enter_async_context(open_store(url))
        if not self.store.capabilities.multi_process:
            raise UnsupportedError(
                f"store {url!r} lives in one process, and runners have their own: leave store= "
                "out for a SQLite file in the run's folder"
            )
        self._stack.push_async_callback(self._end_span_export)

    async def _end_span_export(self) -> None:
        """Export what is left, after all else."""
        await self._span_export.close(is_patient=not self._is_stopped)

    async def _serve(self, engine: TokenEngine | None, routing: Routing) -> None:
        host, port = self.settings.gateway_place
        gateway = load_plugin("gateway", "default")(self.store, engine, host=host, port=port)
        await self._stack.enter_async_context(gateway)
        routing = routing.naming(self._app.agents or ())
        routing = routing.validating_at(self.settings.validate_temperature)
        self._routing = msgspec.structs.replace(routing, gateway_url=gateway.url)
        self.runners = await self._start_runners()
        self.collector = Collector(
            self.store, self.runners, engine, self.reporter, self.algorithm.failure_reward
        )
        if self.settings.scorer is not None:
            self._rewards = await self._open_rewards(self.settings.scorer)

    async def _open_rewards(self, scorer: Scorer) -> Rewards:
        place = ScoringPosition(self.folder.path, keeps=True, note=self.note)
        scoring = await self._stack.enter_async_context(scorer.opened(place))
        return Rewards(scorer, scoring, self.folder, self.algorithm.failure_reward)

    async def _restore(self, checkpoint: Path) -> None:
        if self._learner is not None:
            await self.learn(partial(self.learner.load, checkpoint / checkpoints.LEARNER))
        version, internal, gauss = self.state.rng
        self.rng.setstate((version, tuple(internal), gauss))
        self.algorithm.load_state(self.state.algorithm)
        self.state.cut_off()
        left = await self.store.rollouts(run_id=self.state.run_id)
        await self.store.cancel([s.rollout.rollout_id for s in left if not s.status.final])
        self.reporter.line(f"resuming {self.folder.path} after step {self.state.step}")

    def _saved(self, step: int) -> Path:
        """The checkpoint of a step that is kept."""
        saved = checkpoints.at_step(self.folder.checkpoints, step)
        if not saved.is_dir():
            raise CheckpointError(
                f"{saved} is gone, the checkpoint of the best step, whose weights are to be kept: "
                'restore it, or take the last weights (keep="last" and patience=)'
            )
        return saved

    async def take_weights(self, step: int) -> None:
        """Go back to the weights of a step, whose checkpoint there is, and serve them; where
        prompts learn too, to those of that step."""
        saved = self._saved(step)
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
        # another stream of random numbers in each life, or the first answers would come again
        seed = random.Random(f"{self.algorithm.seed}/{self.state.step}").randrange(2**31)
        self._engine = await asyncio.to_thread(make_engine, self.settings, seed=seed)
        self._stack.push_async_callback(self.engine.close)
        check_parts(self.algorithm, self.engine, self.learner)
        check_chat_templates(self.engine)
        spec = self.settings.engine_spec
        if spec is not None and (line := spec.describe(self.folder.path)):
            self.reporter.line(line)
        await self.engine.start()
        await self.publish()

    async def _start_runners(self) -> Runners:
        given = self.settings.runners
        if isinstance(given, str):
            given = load_plugin("runners", given)()
        runners = LocalRunners(given) if isinstance(given, int) else given
        plan = RunnerPlan(
            store_url=self.store.url,
            app=self._app.reference,
            run_id=self.state.run_id,
            lease_s=self.settings.lease_s,
            sys_path=list(sys.path),
        )
        self._stack.push_async_callback(runners.stop)
        await runners.start(plan)
        await self._announce(RunnerWatch(plan, runners, self.reporter.line))
        return runners

    async def _announce(self, watch: RunnerWatch) -> None:
        """Let runners that are started by hand find this training, and say who has come."""
        run_id = self.state.run_id
        peer = make_peer(run_id, PeerRole.TRAINER, self._app.reference, run_id=run_id)
        self._presence = await self._stack.enter_async_context(Presence(self.store, peer))
        self._watch = watch
        watching = asyncio.create_task(watch.watch(self.store), name="lightspan-runner-watch")
        self._stack.callback(watching.cancel)

    async def cancel_in_flight(self) -> None:
        """Cancel what is in flight: no step trains it any more."""
        await self.store.cancel(self.collector.clear())

    async def complete(self) -> None:
        """Let runners that were started by hand end: the run is complete."""
        await self._watch.end(self.store)
        await self._presence.stay(complete=True)

    async def evaluate(self, tasks: Sequence[Json], *, weights: int | None = None) -> Evaluation:
        """Run the app once per task in val mode.

        Args:
            weights: the step whose weights these are, if not those of this one.
        """
        episodes = await self.rollouts(tasks, 1, Mode.VAL)
        clusters = clusters_of(tasks, self.settings.cluster)
        return Evaluation.of(
            self.state.step, episodes, routing=self._routing, weights=weights, clusters=clusters
        )

    # --- what algorithms use (World) ------------------------------------------------------
    @property
    def engine(self) -> TokenEngine:
        """See `World`."""
        if self._engine is None:
            raise self._has_no("engine")
        return self._engine

    @property
    def learner(self) -> Learner:
        """See `World`."""
        if self._learner is None:
            raise self._has_no("learner")
        return self._learner

    def _has_no(self, part: str) -> ConfigError:
        return ConfigError(
            f"{self.algorithm.name} has no policies, so a run of it has no {part}: give it "
            "policies(), or do without"
        )

    @property
    def path(self) -> Path:
        """See `World`."""
        return self.folder.path

    @property
    def tasks(self) -> Sequence[Json]:
        """See `World`."""
        return self._tasks.tasks

    @property
    def step(self) -> int:
        """See `World`."""
        return self.state.step

    @property
    def last_step(self) -> int:
        """See `World`."""
        return self.planned_steps

    @property
    def versions(self) -> dict[str, int]:
        """See `World`."""
        return self.state.versions

    @property
    def in_flight(self) -> dict[str, int]:
        """See `World`."""
        return {group: self._published - begun for group, begun in self._begun.items()}

    def next_tasks(self, count: int) -> list[Json]:
        """See `World`."""
        returned = self.state.returned[:count]
        self.state.returned = self.state.returned[count:]
        fresh = count - len(returned)
        chosen = self._tasks.take(self.state.cursor, fresh)
        self.state.cursor += fresh
        return [*returned, *chosen]

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """See `World`."""
        check_whole("rollouts: group_size", group_size, 1)
        if not self.settings.has_policies:  # one that learns by evaluating may do so all day long
            self.budget.check(self.state.step)
        ids = await self._resources_ids(len(tasks), resources, "rollouts")
        planned = self._planned(tasks, group_size, mode, ids)
        episodes = await self.collector.run(planned, self._title(mode))
        await self.budget.count(self.store, self.collector.news())
        return await self._ended(planned, episodes, mode)

    async def submit(
        self,
        tasks: Sequence[Json],
        group_size: int,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[str]:
        """See `World`."""
        check_whole("submit: group_size", group_size, 1)
        ids = await self._resources_ids(len(tasks), resources, "submit")
        planned = self._planned(tasks, group_size, Mode.TRAIN, ids)
        await self.collector.submit(planned)
        groups = {rollout.group_id: rollout.task for rollout in planned if rollout.group_id}
        self.state.in_flight |= groups
        self._begun |= dict.fromkeys(groups, self._published)
        return list(groups)

    async def take(self, count: int, first: Sequence[str] = ()) -> list[Episode]:
        """See `World`."""
        planned, episodes = await self.collector.take(count, first, self._title(Mode.TRAIN))
        groups = list(dict.fromkeys(each.group_id for each in planned if each.group_id))
        step = self.state.step
        self._taken = {step: [*self._taken.get(step, ()), *groups]}
        self.folder.write_taken(step, self._taken[step])
        for group in groups:
            del self.state.in_flight[group], self._begun[group]
        await self.budget.count(self.store, self.collector.news())
        return await self._ended(planned, episodes, Mode.TRAIN)

    async def _ended(
        self, rollouts: Sequence[Rollout], episodes: list[Episode], mode: Mode
    ) -> list[Episode]:
        """The episodes of these rollouts, scored and looked at."""
        if self._rewards is not None:
            episodes = await self._rewards.apply([each.task for each in rollouts], episodes)
            if mode is Mode.VAL and (own := own_reward(episodes)):
                self.note(f"the app's own reward there: {own}")
        self._health.look(episodes)
        self._span_export.add(episodes, self.state.step, is_learned=mode is Mode.TRAIN)
        return episodes

    async def _resources_ids(
        self, count: int, resources: Resources | Sequence[Resources] | None, asked: str
    ) -> list[str]:
        """The version of the resources of each group."""
        if resources is None or isinstance(resources, Mapping):
            return [await self._put(resources or {})] * count
        if len(resources) != count:
            raise ConfigError(
                f"{asked}(resources=) has {len(resources)} mappings for {count} tasks: give one "
                "for all, or one per task"
            )
        return [await self._put(each) for each in resources]

    async def _put(self, resources: Resources) -> str:
        """The id of a version of the resources; equal ones have one."""
        offered: NamedResources = {**self.algorithm.resources(), **resources}
        if ROUTING in offered:
            raise ConfigError(f"a resource cannot be called {ROUTING!r}: the trainer's own is")
        return await self.store.put_resources({**offered, ROUTING: self._routing})

    def _planned(
        self, tasks: Sequence[Json], group_size: int, mode: Mode, resources_ids: Sequence[str]
    ) -> list[Rollout]:
        self._batches += 1
        stem = rollout_stem(self.state.run_id, self.life, self.state.step, self._batches)
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
        if mode is Mode.DEV:
            return "dry run"
        at = self.state.step
        return f"step {at}: evaluating" if mode is Mode.VAL else f"step {at}/{self.planned_steps}"

    async def learn(self, function: Callable[[], T]) -> T:
        """See `World`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def publish(self) -> None:
        """See `World`."""
        if self._engine is None:
            raise self._has_no("engine to publish to")
        fresh = {
            policy: await next_version(self.store, policy, self.state)
            for policy in self.algorithm.policies()
        }
        await self.learner.publish(self.engine, fresh)
        if isinstance(self.engine, ProbedEngine):
            for policy, version in fresh.items():
                probes = await self.engine.probes(policy)
                await self.learn(partial(check_probes, probes, policy, version, self.learner))
        self.state.versions = fresh
        self._published += 1

    def send_spans(self) -> None:
        """Have the spans of what ended sent, where the user asked for it: all is known of them."""
        self._span_export.send()

    def reward_metrics(self) -> dict[str, float]:
        """See `Rewards.metrics`; empty where the app gives rewards."""
        return {} if self._rewards is None else self._rewards.metrics()

    def note(self, text: str) -> None:
        """See `World`."""
        self.reporter.line(f"step {self.state.step}: {text}")

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """See `World`."""
        self._span_export.explain(explanations)
        named = ((f"{a}/{call}/{choice}", why) for (a, call, choice), why in explanations.items())
        self.folder.write_explanations(self.state.step, named)

    def keep_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        """See `World`."""
        named = {f"{a}/{call}/{choice}": why for (a, call, choice), why in mismatches.items()}
        self.folder.write_mismatches(self.state.step, named)
