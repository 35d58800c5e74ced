"""Run continuations of a recorded rollout, as training runs rollouts: engine, gateway, runners.

The continuations are rollouts of a run of their own, in the store of the recorded run, because
the gateway reads the recorded answers there. So nothing about the recorded run changes. Their own
run has the folder `forks/<date and time>` in the folder of the recorded run, which
`lightspan inspect` reads like any run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import AppError, NotFoundError
from lightspan.lightning.episode import Episode, score_failure
from lightspan.lightning.forks import ForkPoint
from lightspan.plugins import load_plugin
from lightspan.progress import Reporter
from lightspan.protocols.engine import TokenEngine
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, new_id
from lightspan.schema.resources import ROUTING, NamedResources, routing_of
from lightspan.stores.protocol import Store
from lightspan.training.collector import Collector, read_episodes
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import Rewards, Scorer, ScoringPosition
from lightspan_tools.rollout_view import FORK

FORKS: Final = "forks"
"""Folder in the folder of a run with the folders of continuations."""


@dataclass(eq=False)
class ForkSession:
    """Open runners and a gateway that run continuations of one rollout.

    Args:
        folder: folder of the continuations' own run.
        store: store of the recorded run.
        parent: the rollout that is continued.
        collector: runs rollouts.
        resources_id: resources of the parent, with the address of this gateway.
        failure_reward: reward of continuations whose app fails; None leaves them unscored.
        app: reference of the app.
        run_id: id of the continuations' own run.
        rewards: scores the continuations in place of the app; None for the app's own rewards.
    """

    folder: RunFolder
    store: Store
    parent: Rollout
    collector: Collector
    resources_id: str
    failure_reward: float | None
    app: str
    run_id: str
    rewards: Rewards | None = None
    is_stopped: bool = False
    """Whether Ctrl-C was pressed. Then `run` must not be called again."""
    _batches: int = field(default=0, init=False)

    async def run(self, point: ForkPoint, count: int, title: str) -> list[Episode]:
        """Run `count` continuations from a point to their end, and return their episodes.

        After Ctrl-C the others are cancelled, and only those that have ended are returned.

        Raises:
            RewardError: the app or the reward function returned an invalid reward.
            LightspanError: the runners cannot continue.
        """
        self._batches += 1
        group = f"{self.run_id}-{self._batches}"
        rollouts = [
            msgspec.structs.replace(
                self.parent,
                rollout_id=f"{group}-{member}",
                run_id=self.run_id,
                group_id=group,
                mode=Mode.DEV,
                resources_id=self.resources_id,
                app=self.app,
                fork=point.fork,
            )
            for member in range(count)
        ]
        try:
            episodes = await self.collector.run(rollouts, title)
        except asyncio.CancelledError:
            self.is_stopped = True
            self.collector.reporter.line("stopping: what has ended is kept")
            episodes = await self._ended([rollout.rollout_id for rollout in rollouts])
        finally:
            self.collector.reporter.finish()
        if self.rewards is not None:
            episodes = await self.rewards.apply([self.parent.task] * len(episodes), episodes)
        return [score_failure(episode, self.failure_reward) for episode in episodes]

    async def _ended(self, ids: Sequence[str]) -> list[Episode]:
        """Cancel the rollouts that have not ended, and return the episodes of the others."""
        try:
            states = await self.store.rollouts(ids)
        except NotFoundError:  # Ctrl-C came before they were queued
            return []
        await self.store.cancel([s.rollout.rollout_id for s in states if not s.status.final])
        episodes = await read_episodes(self.store, [s for s in states if s.status.final])
        return [episode for episode in episodes if episode.finished or episode.departed]


@dataclass(frozen=True, kw_only=True)
class ForkSettings:
    """How continuations are run."""

    app: str
    """Reference of the app, `module:name`."""
    runners: int
    """Maximum number of continuations at once."""
    python: str | None
    """Interpreter of the app's environment; None for this one."""
    scorer: Scorer | None
    """Scores the continuations in place of the app; None for the app's own rewards."""
    failure_reward: float | None
    """Reward of a continuation whose app fails; None leaves it unscored."""


@asynccontextmanager
async def fork_session(
    run: RunFolder,
    config: Mapping[str, Any],
    store: Store,
    parent: Rollout,
    engine: TokenEngine | None,
    settings: ForkSettings,
    reporter: Reporter,
) -> AsyncIterator[ForkSession]:
    """Open a gateway and runners for continuations of a rollout; yield what runs them.

    Args:
        run: folder of the recorded run.
        config: settings of the recorded run.
        store: its open store.
        parent: the rollout that is continued.
        engine: engine that serves the weights; None if endpoints answer every agent.
        settings: how the continuations are run.
        reporter: reporter of progress.

    Raises:
        AppError: the runners cannot import the app.
        StoreError: the store or the folder of the continuations cannot be written.
    """
    run_id, folder = new_id("fork"), RunFolder(fresh_folder(run.path))
    async with AsyncExitStack() as stack:
        gateway = load_plugin("gateway", "default")(store, engine)
        await stack.enter_async_context(gateway)
        named: NamedResources = {}
        if parent.resources_id:
            named = await store.get_resources(parent.resources_id)
        routing = msgspec.structs.replace(routing_of(named), gateway_url=gateway.url)
        runners = LocalRunners(settings.runners, python=settings.python)
        stack.push_async_callback(runners.stop)
        plan = RunnerPlan(
            store_url=store.url, app=settings.app, run_id=run_id, sys_path=list(sys.path)
        )
        try:
            await runners.start(plan)
        except AppError as error:
            raise AppError(
                f"{error}; run the command where the app can be imported, or name it (--app "
                "module:name, with --python PATH if it has an environment of its own)"
            ) from error
        folder.create()
        stack.callback(folder.release)
        folder.write_config({**_config(config), "app": settings.app, "run_id": run_id,
                             "store": store.url})  # fmt: skip
        session = ForkSession(
            folder=folder,
            store=store,
            parent=parent,
            collector=Collector(store, runners, engine, reporter),
            resources_id=await store.put_resources({**named, ROUTING: routing}),
            failure_reward=settings.failure_reward,
            app=settings.app,
            run_id=run_id,
        )
        if settings.scorer is not None:
            place = ScoringPosition(
                folder.path, keeps=True, note=reporter.line, images=store.images
            )
            scoring = await stack.enter_async_context(settings.scorer.opened(place))
            session.rewards = Rewards(settings.scorer.name, scoring, folder.add_rewards)
        yield session


def fresh_folder(run: Path) -> Path:
    """Return the folder of new continuations of a run: `forks/<date and time>` in its folder.

    A number is appended if the folder exists.
    """
    stem = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    path, number = run / FORKS / stem, 1
    while path.exists():
        number += 1
        path = run / FORKS / f"{stem}-{number}"
    return path


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the recorded run that reports of its continuations show."""
    names = ("model", "optimize", "failure_reward", "metric", "max_length", "reward")
    return {"algorithm": FORK, **{k: config[k] for k in names if k in config}}
