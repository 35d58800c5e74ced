"""Rollouts of an agent in this process with an in-memory store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final

from lightspan.errors import RewardError
from lightspan.lightning.episode import Episode
from lightspan.progress import print_line
from lightspan.runners.attempt import AttemptRun
from lightspan.runners.loop_watchdog import LoopWatchdog
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import PLACEHOLDER_KEY, Runner
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import Json, Mode, Outcome, Rollout, new_id, task_id
from lightspan.schema.resources import Resources
from lightspan.schema.reward import LARGEST
from lightspan.schema.semconv import REWARD_VALUE
from lightspan.schema.spans import Span, SpanKind, new_span_id
from lightspan.stores import open_store
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import Store
from lightspan.training.collector import read_episodes
from lightspan_agl._agent_transport import AgentApp, AgentPool, factory_of
from lightspan_agl._hooks import HookCalls
from lightspan_agl.litagent import FunctionalLitAgent, LitAgent, accept_changes
from lightspan_agl.store import LightningStore
from lightspan_agl.types import NamedResources, Rollout as AglRollout

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 600.0
"""Seconds per rollout if `LocalRuns` has no `timeout_s`."""
_POLL_TIMEOUT_S: Final = 0.5
_QUEUE_INTERVAL_S: Final = 0.05
_TIMINGS: Final = RunnerTimings(blocked_warning_s=1.0)
_KEY: Final = "OPENAI_API_KEY"
_OF_THE_AGENT: Final = ("returned", "emitted")
"""Values of `Episode.reward_source` for rewards that the agent gave."""


class BlockWarning(LoopWatchdog):
    """Warn once if an asynchronous agent blocks the event loop, on which other rollouts wait.

    Unlike its base, it opens no store, leaves the leases to the runner and does not end the
    process.

    Args:
        runner: the runner.
        agent: name of the agent.
    """

    def __init__(self, runner: Runner, agent: str) -> None:
        super().__init__(runner, "memory:", lambda: None, lambda reason: None)
        self._agent = agent

    async def _watch(self) -> None:
        while not await wait_for_event(self._timings.watchdog_interval_s, self._stopping):
            await self._check_loop(None)  # type: ignore[arg-type]  # used only if overdue

    def _is_overdue(self, blocking: AttemptRun | None) -> bool:
        return False

    def _warn(self, name: str, where: str) -> None:
        if not self._warned and len(self._runner.attempts) > 1:  # else none waits
            self._warned.add(name)
            log.warning(
                "the agent %s has blocked the event loop for %g s: %s. Its rollouts run one at a "
                "time, not %d: await there, as with openai.AsyncOpenAI or asyncio.sleep, or make "
                "the agent synchronous (`def`), which gets a thread for each rollout",
                *(self._agent, self._timings.blocked_warning_s, where, self._runner.config.slots),
            )


class Runners:
    """Run attempts in this process, one runner after another.

    A runner ends if an agent goes on after it was cancelled, because its thread cannot be ended. A
    new runner then takes its place, with all slots free.

    Args:
        make: creates a runner.
        agent: name of the agent if it can block the other rollouts; else None.
    """

    def __init__(self, make: Callable[[], Runner], agent: str | None = None) -> None:
        self._make = make
        self._agent = agent
        self._runner = make()
        self._is_stopping = False

    async def run(self) -> None:
        """Run attempts until `stop` is called."""
        while True:
            agent = self._agent
            async with nullcontext() if agent is None else BlockWarning(self._runner, agent):
                await self._runner.run()
            if self._is_stopping:
                return
            self._runner = self._make()

    def stop(self) -> None:
        """Stop claiming attempts; `run` returns when the attempts under way have ended."""
        self._is_stopping = True
        self._runner.stop()

    def cancel(self, rollout_ids: Collection[str]) -> None:
        """Stop the attempts of some rollouts at once, without waiting for the next heartbeat."""
        for attempt in self._runner.attempts:
            if attempt.claim.rollout.rollout_id in rollout_ids:
                attempt.stop()


class LocalRuns:
    """Run tasks through a runner in this process; `local_runs` creates it.

    Args:
        store: an open store.
        app: the agent's app, which the runner runs.
        runners: the runners.
        work: the asyncio task that runs `runners`.
        timeout_s: seconds for all rollouts of one `rollouts` call; if None, each rollout gets
            `TIMEOUT_S`.
    """

    def __init__(
        self,
        store: Store,
        app: AgentApp,
        runners: Runners,
        work: asyncio.Task[None],
        timeout_s: float | None,
    ) -> None:
        self.store = store
        self._app = app
        self._runners = runners
        self._work = work
        self._timeout_s = timeout_s
        self._has_warned = False
        self._has_warned_of_reward = False

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int = 1,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """Run each task `group_size` times and return the episodes.

        Rollouts that have not ended in time are cancelled.

        Args:
            tasks: tasks for the agent.
            group_size: number of rollouts per task.
            mode: mode of the rollouts.
            resources: for each task, prompts that replace the agent's prompts of the same names;
                None if no prompt is replaced.
        """
        rollouts = [
            Rollout(
                rollout_id=new_id("rollout"),
                task=task,
                # Equal tasks get different groups.
                task_id=f"{number}-{task_id(task)}",
                mode=mode,
                resources_id=await self.store.put_resources(dict(named)) if named else "",
                timeout_s=TIMEOUT_S if self._timeout_s is None else None,
            )
            for number, (task, named) in enumerate(
                zip(tasks, resources or [{}] * len(tasks), strict=True)
            )
            for _ in range(group_size)
        ]
        ids = [rollout.rollout_id for rollout in rollouts]
        await self.store.enqueue(rollouts)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._wait(ids)
        except TimeoutError:
            late = [s for s in await self.store.rollouts(ids) if not s.status.final]
            log.warning(
                "%d of %d rollouts have not ended within %g s: they are cancelled and unscored",
                *(len(late), len(ids), self._timeout_s),
            )
            await self.store.cancel(ids)
            self._runners.cancel(ids)
        states = {state.rollout.rollout_id: state for state in await self.store.rollouts(ids)}
        episodes = await read_episodes(self.store, [states[rollout_id] for rollout_id in ids])
        self._warn_of_unusable(episodes)
        return episodes

    async def serve(
        self, store: LightningStore, limit: int | None = None, event: Any = None
    ) -> None:
        """Run the rollouts that are queued in `store`, one by one, until cancelled.

        Args:
            store: the user's store.
            limit: number of rollouts after which to return; None for no limit.
            event: an event, such as a `threading.Event`; return once it is set. None for no event.
        """
        count = 0
        while (limit is None or count < limit) and not (event is not None and event.is_set()):
            rollout = store.start_next()
            if rollout is None:
                await asyncio.sleep(_QUEUE_INTERVAL_S)
            else:
                await self.run(rollout, store)
                count += 1

    async def run(self, rollout: AglRollout, store: LightningStore) -> None:
        """Run a rollout of `store` to its end, and write its spans and status to `store`.

        If the agent returned a reward, the reward is added as the last span.

        Raises:
            RewardError: the agent returned an invalid reward.
        """
        resources = store.resources_of(rollout.rollout_id)
        self._app.own[rollout.rollout_id] = rollout, resources, store.start_attempt_of
        queued = Rollout(
            rollout_id=rollout.rollout_id,
            task=rollout.input,
            task_id=rollout.rollout_id,
            mode=Mode.TRAIN if rollout.mode == "train" else Mode.VAL,
            timeout_s=TIMEOUT_S if self._timeout_s is None else self._timeout_s,
        )
        spans: list[Span] = []
        status = "failed"
        try:
            await self.store.enqueue([queued])
            await self._wait([queued.rollout_id])
            [episode] = await read_episodes(
                self.store, await self.store.rollouts([queued.rollout_id])
            )
            spans = list((await self.store.spans([episode.attempt_id]))[episode.attempt_id])
            check_rewards([episode], of="rollout")  # its id is the task's here
            self._warn_of_unusable([episode], of="rollout")
            if episode.reward_source == "returned":
                end_ns = max(span.end_ns for span in spans)
                reward = spans[-1].replace(
                    span_id=new_span_id(),
                    name="lightspan.reward",
                    kind=SpanKind.REWARD,
                    start_ns=end_ns,
                    end_ns=end_ns,
                    attributes={} if episode.reward is None else {REWARD_VALUE: episode.reward},
                )
                spans.append(reward)
            if episode.message or not episode.finished:
                log.warning("rollout %s failed: %s", rollout.rollout_id, episode.message)
            else:
                status = "succeeded"
                if not spans[1:] and episode.reward is None:
                    self._warn_of_nothing(rollout.rollout_id)
        finally:
            del self._app.own[rollout.rollout_id]
            store.finish(rollout.rollout_id, status, spans)

    def _warn_of_nothing(self, rollout_id: str) -> None:
        """Warn once that nothing was recorded in a rollout whose agent returned."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "rollout %s has no reward and no call: the agent returned None, and what threads "
                "do that it did not start, such as workers of a global queue, belongs to no "
                "rollout: return the reward, and call the model in the rollout's own threads",
                rollout_id,
            )

    def _warn_of_unusable(self, episodes: Sequence[Episode], of: str = "task") -> None:
        """Warn once of a reward that is NaN or infinite, and so counts as no reward.

        Args:
            episodes: episodes of the agent.
            of: what `Episode.task_id` identifies, for the message.
        """
        for episode in episodes:
            is_unusable = episode.reward is None and episode.reward_source in _OF_THE_AGENT
            if is_unusable and not self._has_warned_of_reward:
                self._has_warned_of_reward = True
                log.warning(
                    "%s %s has no reward: NaN, infinity or more than %g was %s; further ones are "
                    "not named",
                    *(of, episode.task_id, LARGEST, episode.reward_source),
                )

    async def _wait(self, ids: Sequence[str]) -> None:
        cursor = 0
        while True:
            if self._work.done():
                await self._work  # raises the runner's error
            cursor = (await self.store.watch(cursor, timeout_s=_POLL_TIMEOUT_S)).cursor
            states = await self.store.rollouts(ids)
            if all(state.status.final for state in states):
                return


@asynccontextmanager
async def local_runs(
    agent: LitAgent[Any],
    resources: NamedResources,
    *,
    slots: int,
    hooks: HookCalls,
    timeout_s: float | None = None,
) -> AsyncIterator[LocalRuns]:
    """Start a runner for an agent in this process, and stop it at the end of the block.

    Args:
        agent: the agent, which runs the rollouts. Further agents are made from the arguments of its
            constructor for rollouts at the same time.
        resources: the agent's resources.
        slots: maximum concurrent rollouts; 1 is used if the agent cannot be recreated.
        hooks: hooks and tracer of the agent.
        timeout_s: see `LocalRuns`.
    """
    factory = factory_of(agent)
    if factory is None and slots > 1:
        print_line(
            f"one rollout at a time, not {slots}: {type(agent).__qualname__} was changed after "
            "construction and cannot be recreated; set its attributes in __init__"
        )
    app = AgentApp(AgentPool(factory or (lambda: agent), agent), resources, hooks=hooks)
    async with open_store("memory:") as store:
        with _same_environment():
            config = RunnerConfig(slots=slots if factory else 1, timings=_TIMINGS)
            is_shared = agent.is_async() and config.slots > 1
            name = _name_of(agent) if is_shared else None
            runners = Runners(lambda: Runner(store, app, config), name)
            work = asyncio.create_task(runners.run())
            try:
                yield LocalRuns(store, app, runners, work, timeout_s)
            finally:
                runners.stop()
                await work
                if factory:
                    accept_changes(agent)


def _name_of(agent: LitAgent[Any]) -> str:
    named = agent.function if isinstance(agent, FunctionalLitAgent) else type(agent)
    return named.__qualname__


@contextmanager
def _same_environment() -> Iterator[None]:
    """Remove lightspan's placeholder for `OPENAI_API_KEY` at the end of the block.

    A runner sets this environment variable to the placeholder. A key that the user set is kept.
    """
    try:
        yield
    finally:
        if os.environ.get(_KEY) == PLACEHOLDER_KEY:
            del os.environ[_KEY]


def check_rewards(episodes: Sequence[Episode], of: str = "task") -> None:
    """Raise `RewardError` if an agent returned a value that is not a reward.

    Args:
        episodes: episodes of the agent.
        of: what `Episode.task_id` identifies, for the message.
    """
    for episode in episodes:
        if episode.outcome is Outcome.BAD_REWARD:
            raise RewardError(f"{of} {episode.task_id}: {episode.message}")
