"""Session: one `fit` or `evaluate`, and everything that is open while it runs."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from lightspan import checkpoints, resuming
from lightspan import served as served_as
from lightspan.algorithms import Algorithm, Metrics
from lightspan.app import App
from lightspan.checkpoints import Life, TrainerState, rollout_stem
from lightspan.data import Epochs, fingerprint, task_id
from lightspan.embedded import check_chat_templates, check_parts, make_engine, make_learner
from lightspan.engines import TokenEngine
from lightspan.errors import BudgetError, ConfigError, UnsupportedError
from lightspan.execution import RunnerPlan, Runners
from lightspan.execution.local import LocalRunners
from lightspan.execution.peers import Presence, RunnerWatch, here
from lightspan.folders import RunFolder
from lightspan.gateway import Gateway
from lightspan.health import Health
from lightspan.learners import Learner
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode
from lightspan.lightning.transitions import TransitionKey
from lightspan.progress import Reporter, duration
from lightspan.records import Json, Mode, PeerRole, Rollout, new_id
from lightspan.resources import ROUTING
from lightspan.results import Evaluation, FitResult
from lightspan.rollouts import Collector, endpoint_calls
from lightspan.routing import Routing
from lightspan.served import Served, ServedPolicy
from lightspan.sinks import MetricSink, SinkRun, Sinks
from lightspan.store import Store
from lightspan.stores import open_store

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a trainer was asked for (see `Trainer`)."""

    algorithm: Algorithm
    folder: RunFolder
    reporter: Reporter
    runners: int | Runners = 8
    steps: int | None = None
    epochs: float = 1.0
    validate_every: int | None = None
    checkpoint_every: int = 1
    engine: TokenEngine | None = None
    learner: Learner | None = None
    store_url: str
    device: str = "cpu"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    learner_options: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "reward"
    max_frozen_calls: int | None = None
    sinks: Sequence[str | MetricSink] = ()
    lease_s: float = 30.0

    def planned_steps(self, tasks: int) -> int:
        """Iterations in all."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * tasks / self.algorithm.tasks_per_step))

    def evaluates(self, step: int, total: int) -> bool:
        """Whether held-out tasks are run after a step: before training, after it, and every so
        often."""
        every = self.validate_every
        return step in (0, total) or (every is not None and step % every == 0)

    def config(self) -> dict[str, Json]:
        """For `config.json`."""
        names = ("steps", "epochs", "validate_every", "checkpoint_every", "device", "metric")
        config = {**self.algorithm.config(), **{name: getattr(self, name) for name in names}}
        elsewhere = self.store_url != self.folder.store_url
        return {**config, "store": self.store_url if elsewhere else None}


class Session:
    """Algorithms see it as `lightspan.algorithms.World`.

    Args:
        settings: of the trainer.
        app: the user's program.
        train: tasks to learn from.
        val: held-out tasks.
        agents: every agent path, where it is known.
    """

    def __init__(
        self,
        settings: Settings,
        app: App,
        train: Sequence[Json],
        val: Sequence[Json] | None = None,
        agents: Sequence[str] | None = None,
    ) -> None:
        self.settings = settings
        self.algorithm = settings.algorithm
        self.folder = settings.folder
        self.reporter = settings.reporter
        self.rng = random.Random(self.algorithm.seed)
        self.engine: TokenEngine
        self.learner: Learner
        self.runners: Runners
        self._app = app
        self._tasks = Epochs(train, self.algorithm.seed)
        self._val = val
        self._total = settings.planned_steps(len(train))
        self._health = Health(self.algorithm.routing(), self.note, agents)
        self._sinks = Sinks(settings.sinks, self.note)
        self._stack = AsyncExitStack()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightspan-learner")
        self._at = TrainerState(run_id="")
        self._checkpoint: Path | None = None
        self._life = new_id("")[-12:]
        self._first_step = 1
        self._batches = 0
        self._meter = {"engine": 0.0, "learner": 0.0}
        self._frozen_calls = 0
        self._started = time.monotonic()
        self._store: Store
        self._collector: Collector
        self._presence: Presence
        self._watch: RunnerWatch
        self._resources_id = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.reporter.finish()
        try:
            await self._stack.aclose()
        finally:
            self._thread.shutdown()
            saved = checkpoints.latest(self.folder.checkpoints)
            if kind in (asyncio.CancelledError, KeyboardInterrupt) and self._can_go_on(saved):
                kept = saved.name if saved is not None else "no checkpoint yet"
                self.reporter.line(
                    f"stopped; {self.folder.path} keeps {kept}: go on with resume=True (--resume)"
                )

    def _can_go_on(self, saved: Path | None) -> bool:
        """Whether what was stopped can go on: a run with a checkpoint, or one that has begun to
        train (a dry run and an evaluation have not)."""
        if saved is not None:
            return True
        try:
            return "train" in self.folder.read_config()
        except ConfigError:
            return False

    # --- opening --------------------------------------------------------------------------
    def prepare(self, *, resume: bool, training: bool = True) -> FitResult | None:
        """Take the folder and find where to start. A run with nothing left to do has its result.

        Raises:
            AppError, CheckpointError, ConfigError
        """
        config = {**self.settings.config(), "app": self._app.reference}
        if training:
            config["train"] = _described(self._tasks.tasks)
            config["val"] = None if self._val is None else _described(self._val)
        self.folder.create()
        self._stack.callback(self.folder.release)
        start = resuming.find_start(self.folder, config, self.reporter, resume=resume)
        self._at, self._checkpoint = start
        if training or self._checkpoint is None:
            self.folder.rewind(self._at.step if self._checkpoint else -1)
            self.folder.write_config({**config, "run_id": self._at.run_id})
        if not training or self._checkpoint is None:
            return None
        finished = resuming.finished_result(self.folder, self._at, self._total)
        if finished is not None:
            self.reporter.line(f"{self.folder.path} is complete: nothing is left to train")
        return finished

    async def open(self) -> None:
        """Open the store, the learner, the engine, the gateway and the runners, in that order."""
        settings = self.settings
        await self._open_store()
        make = partial(make_learner, self.algorithm, settings.device, settings.learner_options)
        self.learner = await self.learn(make) if settings.learner is None else settings.learner
        if self._checkpoint is not None:
            await self._restore(self._checkpoint)
        await self._open_engine()
        await self._serve(self.engine, self.algorithm.routing())

    async def open_without_models(self, routing: Routing) -> None:
        """Open the store, a gateway that serves no model of ours, and the runners (a dry run)."""
        await self._open_store()
        await self._serve(None, routing)

    async def _open_store(self) -> None:
        url = self.settings.store_url
        self._store = await self._stack.enter_async_context(open_store(url))
        if not self._store.capabilities.multi_process:
            raise UnsupportedError(
                f"store {url!r} lives in one process, and runners have their own: leave store= "
                "out for a SQLite file in the run's folder"
            )

    async def _serve(self, engine: TokenEngine | None, routing: Routing) -> None:
        gateway = await self._stack.enter_async_context(Gateway(self._store, engine))
        routing = routing.naming(self._app.agents or ())
        routing = msgspec.structs.replace(routing, gateway_url=gateway.url)
        self._resources_id = await self._store.put_resources({ROUTING: routing})
        self.runners = await self._start_runners()
        self._collector = Collector(
            self._store, self.runners, engine, self.reporter, self.algorithm.failure_reward
        )

    async def _restore(self, checkpoint: Path) -> None:
        await self.learn(partial(self.learner.load, checkpoint / checkpoints.LEARNER))
        self._first_step = self._at.step + 1
        version, internal, gauss = self._at.rng
        self.rng.setstate((version, tuple(internal), gauss))
        self.algorithm.load_state(self._at.algorithm)
        self._at.seconds |= _last_seconds(self.folder)
        left = await self._store.rollouts(run_id=self._at.run_id)
        await self._store.cancel([s.rollout.rollout_id for s in left if not s.status.final])
        self.reporter.line(f"resuming {self.folder.path} after step {self._at.step}")

    async def _open_engine(self) -> None:
        settings = self.settings
        # another stream of random numbers in each life, or the first answers would come again
        seed = random.Random(f"{self.algorithm.seed}/{self._at.step}").randrange(2**31)
        make = partial(make_engine, self.algorithm, settings.device, settings.engine_options)
        given = settings.engine
        self.engine = await asyncio.to_thread(make, seed=seed) if given is None else given
        self._stack.push_async_callback(self.engine.close)
        check_parts(self.algorithm, self.engine, self.learner)
        check_chat_templates(self.engine)
        await self.engine.start()
        await self.publish()

    async def _start_runners(self) -> Runners:
        given = self.settings.runners
        runners = LocalRunners(given) if isinstance(given, int) else given
        plan = RunnerPlan(
            store_url=self._store.url,
            app=self._app.reference,
            run_id=self._at.run_id,
            lease_s=self.settings.lease_s,
            sys_path=list(sys.path),
        )
        self._stack.push_async_callback(runners.stop)
        await runners.start(plan)
        await self._announce(RunnerWatch(plan, runners, self.reporter.line))
        return runners

    async def _announce(self, watch: RunnerWatch) -> None:
        """Let runners that are started by hand find this training, and say who has come."""
        run_id = self._at.run_id
        peer = here(run_id, PeerRole.TRAINER, self._app.reference, run_id=run_id)
        self._presence = await self._stack.enter_async_context(Presence(self._store, peer))
        self._watch = watch
        watching = asyncio.create_task(watch.watch(self._store), name="lightspan-runner-watch")
        self._stack.callback(watching.cancel)

    # --- training -------------------------------------------------------------------------
    async def train(self) -> FitResult:
        """Every step that is left, with its checkpoints and evaluations."""
        self._open_sinks()
        await self._recall_calls()
        done = {evaluation.step for evaluation in self.folder.evaluations()}
        if self._at.step == 0 and self._checkpoint is None:
            await self._save()
        if self._evaluates(self._at.step) and self._at.step not in done:
            await self._validate()
        self._check_budget()
        self._started = time.monotonic()
        while self._at.step < self._total:
            await self._one_step()
            every = self.settings.checkpoint_every
            saving = self._at.step == self._total or self._at.step % every == 0
            if saving:
                await self._save()
            if self._evaluates(self._at.step) and not self._overspent():
                await self._validate()
            if self._overspent() and not saving:
                await self._save()
            self._check_budget()
        return await self._finish()

    async def _recall_calls(self) -> None:
        """Count the calls to endpoints that earlier lives of the run have made."""
        if self.settings.max_frozen_calls is None or self._checkpoint is None:
            return
        states = await self._store.rollouts(run_id=self._at.run_id)
        ids = [state.rollout.rollout_id for state in states if state.rollout.mode is not Mode.DEV]
        self._frozen_calls = await endpoint_calls(self._store, ids)
        self._check_budget()

    def _check_budget(self) -> None:
        """Raise `BudgetError` if the run has made more calls to endpoints than it may."""
        if spent := self._overspent():
            raise BudgetError(spent)

    def _overspent(self) -> str:
        """What to tell where `max_frozen_calls` is exceeded; empty where it is not."""
        limit = self.settings.max_frozen_calls
        if limit is None or self._frozen_calls <= limit:
            return ""
        return (
            f"after step {self._at.step} the run's frozen agents have made {self._frozen_calls} "
            f"calls to endpoints, and max_frozen_calls is {limit}; {self.folder.path} keeps what "
            "was learned: go on with resume=True (--resume) and a larger max_frozen_calls, or "
            'with None for no limit. Calls to our own engine (frozen="base", "shared") are free'
        )

    def _open_sinks(self) -> None:
        run = SinkRun(
            run_id=self._at.run_id,
            folder=self.folder.path,
            config=self.folder.read_config(),
            first_step=0 if self._checkpoint is None else self._first_step,
        )
        self._stack.callback(self._sinks.close)
        self._sinks.open(run)

    def _evaluates(self, step: int) -> bool:
        """Before training, after it, and every so often."""
        return self._val is not None and self.settings.evaluates(step, self._total)

    async def _one_step(self) -> None:
        self._at.step += 1
        started, waited = time.monotonic(), self._collector.seconds
        tokens = self.engine.usage().get("tokens", 0.0)
        metrics = await self.algorithm.run_step(self)
        self._account("")
        made = self.engine.usage().get("tokens", 0.0) - tokens
        waited = self._collector.seconds - waited
        speed = {
            "seconds": time.monotonic() - started,
            "seconds/rollouts": waited,
            "engine/tokens": made,
            "engine/tokens_per_s": made / waited if waited else 0.0,
        }
        self._add_line("train", {**metrics, **speed})
        self.reporter.finish(self._step_line({**metrics, **speed}))

    def _step_line(self, metrics: Metrics) -> str:
        at = self._at.step
        parts = [f"step {at}/{self._total}"]
        shown = {"reward": "reward {:.3f}", "learner/loss": "loss {:.4f}"}
        shown |= {"engine/tokens_per_s": "{:.0f} tokens/s", "seconds": "{:.1f} s"}
        parts += [text.format(metrics[key]) for key, text in shown.items() if key in metrics]
        steps = at - self._first_step + 1
        left = (time.monotonic() - self._started) / steps * (self._total - at)
        return "  ".join([*parts, f"{duration(left)} left"] if at < self._total else parts)

    def _add_line(self, kind: str, values: Mapping[str, Any]) -> None:
        line = self._line(kind, values)
        self.folder.add_metrics(line)
        self._sinks.add(line)

    def _line(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        spent = {f"cpu_s/{part}": round(value, 6) for part, value in self._at.seconds.items()}
        return {"kind": kind, "step": self._at.step, **values, **spent}

    def _account(self, phase: str) -> None:
        """Add the CPU-seconds since the last call to a phase (`_evaluation`, or training)."""
        now = {
            "engine": float(self.engine.usage().get("cpu_s", 0.0)),
            "learner": float(self.learner.usage().get("cpu_s", 0.0)),
        }
        seconds = self._at.seconds
        for part, value in now.items():
            seconds[part + phase] = seconds.get(part + phase, 0.0) + value - self._meter[part]
        self._meter = now

    async def _save(self) -> None:
        at = self._at
        at.rng = self.rng.getstate()
        at.algorithm = self.algorithm.state()
        earlier = [life for life in at.lives if life.name != self._life]
        mine = [Life(self._life, self._first_step, at.step)] if at.step >= self._first_step else []
        at.lives = [*earlier, *mine]
        await self.learn(partial(checkpoints.save, self.folder.checkpoints, at, self.learner.save))

    async def _validate(self) -> None:
        assert self._val is not None
        evaluation = await self.evaluate(self._val)
        line = self._line("eval", evaluation.metrics())
        self.folder.add_evaluation(evaluation, line)
        self._sinks.add(line)
        self.reporter.finish(evaluation.text(self.settings.metric))
        self._draw()

    async def evaluate(self, tasks: Sequence[Json]) -> Evaluation:
        """Run the app once per task in val mode."""
        self._account("")
        episodes = await self.rollouts(tasks, 1, Mode.VAL)
        self._account("_evaluation")
        return Evaluation.of(self._at.step, episodes)

    async def _finish(self) -> FitResult:
        served = self._served()
        for policy, known in served.policies.items():
            await self.learn(partial(self.learner.export, policy, self.folder.path / known.folder))
        self._draw()
        result = FitResult(
            folder=self.folder.path,
            model=self.folder.model,
            evaluations=tuple(self.folder.evaluations()),
            seconds=dict(self._at.seconds),
            steps=self._at.step,
        )
        summary = result.summary(self.settings.metric)
        ended = {"steps": result.steps, "summary": summary, "seconds": result.seconds}
        self.folder.write_result({**ended, served_as.KEY: served.as_json()})
        await self._watch.end(self._store)
        await self._presence.stay(complete=True)
        return result

    def _served(self) -> Served:
        """How the policies are to be served (`lightspan serve`)."""
        specs, model = self.algorithm.policies(), self.folder.model
        folders = {name: model if len(specs) == 1 else model / name for name in specs}
        policies = {
            name: ServedPolicy(
                folder=str(folders[name].relative_to(self.folder.path)),
                model=spec.model,
                version=self._at.versions.get(name, 0),
            )
            for name, spec in specs.items()
        }
        return Served(
            policies=policies,
            base_model=self.algorithm.base_model,
            routing=self.algorithm.routing(),
        )

    def _draw(self) -> None:
        from lightspan.plots import learning_curve

        learning_curve(
            self.folder.metrics(),
            self.folder.curve,
            title=f"{self.folder.path.name}: {self.algorithm.name}",
            metric=self.settings.metric,
        )

    # --- what algorithms use (World) ------------------------------------------------------
    @property
    def step(self) -> int:
        """See `World`."""
        return self._at.step

    @property
    def versions(self) -> dict[str, int]:
        """See `World`."""
        return self._at.versions

    def next_tasks(self, count: int) -> list[Json]:
        """See `World`."""
        chosen = self._tasks.take(self._at.cursor, count)
        self._at.cursor += count
        return chosen

    async def rollouts(
        self, tasks: Sequence[Json], group_size: int, mode: Mode = Mode.TRAIN
    ) -> list[Episode]:
        """See `World`."""
        self._batches += 1
        stem = rollout_stem(self._at.run_id, self._life, self._at.step, self._batches)
        planned = [
            Rollout(
                rollout_id=f"{stem}-{index}-{member}",
                task=task,
                task_id=task_id(task),
                run_id=self._at.run_id,
                group_id=f"{stem}-{index}",
                mode=mode,
                resources_id=self._resources_id,
                step=self._at.step,
                timeout_s=self.algorithm.timeout_s,
                app=self._app.reference,
            )
            for index, task in enumerate(tasks)
            for member in range(group_size)
        ]
        at = self._at.step
        title = f"step {at}: evaluating" if mode is Mode.VAL else f"step {at}/{self._total}"
        title = "dry run" if mode is Mode.DEV else title
        episodes = await self._collector.run(planned, title)
        if self.settings.max_frozen_calls is not None and mode is not Mode.DEV:
            ids = [rollout.rollout_id for rollout in planned]
            self._frozen_calls += await endpoint_calls(self._store, ids)
        self._health.look(episodes)
        return episodes

    async def learn(self, function: Callable[[], T]) -> T:
        """See `World`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def publish(self) -> None:
        """See `World`."""
        fresh = {
            policy: await resuming.next_version(self._store, policy, self._at)
            for policy in self.algorithm.policies()
        }
        await self.learner.publish(self.engine, fresh)
        self._at.versions = fresh

    def note(self, text: str) -> None:
        """See `World`."""
        self.reporter.line(f"step {self._at.step}: {text}")

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """See `World`."""
        named = ((f"{a}/{call}/{choice}", why) for (a, call, choice), why in explanations.items())
        self.folder.write_explanations(self._at.step, named)


def _described(tasks: Sequence[Json]) -> dict[str, Json]:
    """What `config.json` says of data."""
    return {"tasks": len(tasks), "fingerprint": fingerprint(list(tasks))}


def _last_seconds(folder: RunFolder) -> dict[str, float]:
    """CPU-seconds as the last line of the metrics has them: it may be newer than a checkpoint."""
    lines = folder.metrics()
    last = lines[-1] if lines else {}
    named = {key: value for key, value in last.items() if key.startswith("cpu_s/")}
    return {key.removeprefix("cpu_s/"): value for key, value in named.items()}
