"""`dev` with resources: an agent runs on a few tasks in this process, and a summary says what it
did."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from lightspan.agl._agents import LitAgent
from lightspan.agl._resources import NamedResources
from lightspan.agl._travel import AgentApp, Agents, maker
from lightspan.lightning.episode import Episode
from lightspan.lightning.health import app_failed, check_rewards
from lightspan.runners.runner import PLACEHOLDER_KEY, Runner, RunnerConfig
from lightspan.schema.records import Json, Mode, Rollout, fingerprint, new_id
from lightspan.schema.routing import Route, Rule, Target
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.training.collector import read_episodes

_KEY = "OPENAI_API_KEY"


class DevSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial did."""

    rewards: list[float | None]
    """Per task, in their order; None is unscored, which is not zero."""
    failures: dict[int, str]
    """Number of the task → what went wrong."""
    calls: dict[str, int]
    """Agent path → model calls."""
    trained: list[str]
    """Agent paths that `agent_match` selects."""
    agent_match: str | None

    def text(self) -> str:
        """The summary for people."""
        scored = [reward for reward in self.rewards if reward is not None]
        mean = f", mean reward {math.fsum(scored) / len(scored):.3f}" if scored else ""
        lines = [f"{len(self.rewards)} rollouts, {len(scored)} scored{mean}"]
        for number, reward in enumerate(self.rewards):
            why = self.failures.get(number)
            outcome = f"failed: {why}" if why else "no reward" if reward is None else f"{reward:g}"
            lines.append(f"  task {number}: {outcome}")
        for path, count in sorted(self.calls.items()):
            what = "would be trained" if path in self.trained else "would not be trained"
            lines.append(f"  agent {path}: {count} calls, {what}")
        if not self.calls:
            lines.append("  no agent called a model")
        elif not self.trained:
            lines.append(f"  no agent's name has agent_match={self.agent_match!r} in it")
        return "\n".join(lines)


async def try_out(
    agent: LitAgent[object],
    resources: NamedResources,
    train: Sequence[Json],
    val: Sequence[Json],
    *,
    runners: int,
    agent_match: str | None,
) -> DevSummary:
    """Run the agent once per task; its calls go where `resources` say.

    Raises:
        RewardError: it returned something that is no reward.
    """
    run_id = new_id("dev")
    planned = [
        _rollout(task, mode, run_id, number)
        for number, (task, mode) in enumerate(
            [*((task, Mode.TRAIN) for task in train), *((task, Mode.VAL) for task in val)]
        )
    ]
    make = maker(agent)  # the agent itself stays as it is, for `fit` to make it again
    app = AgentApp(Agents(make or (lambda: agent)), resources)
    slots = runners if make is not None else 1  # a single agent works on one task at a time
    async with open_store("memory:") as store:
        await store.enqueue(planned)
        with _environment():
            await _work(store, Runner(store, app, RunnerConfig(slots=slots, run_id=run_id)), run_id)
        states = {s.rollout.rollout_id: s for s in await store.rollouts(run_id=run_id)}
        ordered = [states[rollout.rollout_id] for rollout in planned]
        return _summary(await read_episodes(store, ordered), agent_match)


def _rollout(task: Json, mode: Mode, run_id: str, number: int) -> Rollout:
    return Rollout(
        rollout_id=f"{run_id}-{number}",
        task=task,
        task_id=f"{number}-{fingerprint(task)}",  # equal tasks are tried apart
        run_id=run_id,
        mode=mode,
        timeout_s=600.0,
    )


async def _work(store: Store, runner: Runner, run_id: str) -> None:
    work = asyncio.create_task(runner.run())
    try:
        cursor = 0
        while True:
            changes = await store.watch(cursor, run_id=run_id, timeout_s=0.5)
            cursor = changes.cursor
            if all(state.status.final for state in await store.rollouts(run_id=run_id)):
                return
    finally:
        runner.stop()
        await work


@contextmanager
def _environment() -> Iterator[None]:
    """Leave the environment as it was: a runner puts a key there for clients that need one."""
    try:
        yield
    finally:
        if os.environ.get(_KEY) == PLACEHOLDER_KEY:
            del os.environ[_KEY]


def _summary(episodes: Sequence[Episode], agent_match: str | None) -> DevSummary:
    check_rewards(episodes)
    calls = Counter(call.agent_path for episode in episodes for call in episode.calls)
    rule = Rule(agent_match or "*", Target(route=Route.POLICY), regex=agent_match is not None)
    return DevSummary(
        rewards=[episode.reward for episode in episodes],
        failures={n: e.message for n, e in enumerate(episodes) if app_failed(e) or not e.finished},
        calls=dict(calls),
        trained=sorted(path for path in calls if rule.matches(path)),
        agent_match=agent_match,
    )
