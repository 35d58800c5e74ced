"""A trainer context for tests of algorithms, without model calls or trained weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lightspan.errors import NotFoundError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.rows import Row
from lightspan.lightning.transitions import TransitionKey
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities, Loss
from lightspan.schema.records import Mode
from lightspan_testing.strategies import make_attempt, make_record, make_rollout


def episode(group: str, member: int, reward: float | None, **attempt: Any) -> Episode:
    """Return the episode of one call of rollout `ro-<group>-<member>`."""
    name = f"{group}-{member}"
    record = make_record("call", [1, 2], [3, 4 + member], attempt=name)
    rollout = make_rollout(name, group, task_id=group)
    return build_episode(make_attempt(name, reward, **attempt), rollout, [], [record])


class Scripted:
    """A trainer context in which the attempts of task n get the rewards `groups[n]`."""

    capabilities = LearnerCapabilities(numerics="the script", importance_mask=True)

    def __init__(self, groups: Sequence[Sequence[float | None]]) -> None:
        self.groups = groups
        self.asked: list[int] = []
        self.notes: list[str] = []
        self.pruned: set[str] = set()
        self.explained: dict[TransitionKey, Explanation] = {}
        self.updated: list[list[str]] = []
        self.losses: list[tuple[Loss, Any]] = []
        """The loss and the log-probabilities before it of each update."""
        capabilities = EngineCapabilities(exact_tokens=True, numerics="the script")
        self.engine = SimpleNamespace(capabilities=capabilities)
        self.scored: list[int] = []
        self.step = 1
        self.versions = {"policy": 1}
        self.rng = random.Random(0)

    def next_tasks(self, count: int) -> list[int]:
        start = sum(self.asked)
        self.asked.append(count)
        return list(range(start, start + count))

    async def rollouts(
        self, tasks: Sequence[int], group_size: int, mode: Mode = Mode.TRAIN
    ) -> list[Episode]:
        groups = [(task, self.groups[task]) for task in tasks]
        assert all(len(rewards) == group_size for _, rewards in groups)
        return [
            episode(f"g{task}", member, reward)
            for task, rewards in groups
            for member, reward in enumerate(rewards)
        ]

    async def stored_episodes(self, rollout_ids: Sequence[str]) -> list[Episode]:
        """Return the episodes as recorded; those of group n are in the store unless it is pruned.

        Raises:
            NotFoundError: the group was pruned.
        """
        found = []
        for name in rollout_ids:
            _, group, member = name.split("-")
            if group in self.pruned:
                raise NotFoundError(name)
            reward = self.groups[int(group.removeprefix("g"))][int(member)]
            found.append(episode(group, int(member), reward))
        return found

    def note(self, text: str) -> None:
        self.notes.append(text)

    def record_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        self.kept = dict(mismatches)

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        self.explained = dict(explanations)

    async def learn(self, function: Callable[[], Any]) -> Any:
        return function()

    async def publish(self) -> None:
        self.versions["policy"] += 1

    @property
    def learner(self) -> Any:
        return self

    def score(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return log-probabilities that grow by 0.1 with each update, also for prompt tokens."""
        self.scored.append(len(rows))
        return [[0.1 * len(self.updated) - 1] * len(row.ids) for row in rows]

    def update(self, rows: Sequence[Row], loss: Loss, *, old_logprobs: Any) -> dict[str, float]:
        self.losses.append((loss, old_logprobs))
        self.updated.append(sorted({row.rollout_id for row in rows}))
        return {}
