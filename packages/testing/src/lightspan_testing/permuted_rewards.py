"""Algorithms that must not learn anything, for experiments that check the evaluation itself."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import TrainerContext
from lightspan.lightning.episode import Episode


class Permuted(LightningRL):
    """LightningRL with rewards permuted within each group, so that nothing can be learned.

    The weights change nevertheless. In the end, the policy may always give the same answer, so do
    not use a metric for which some constant answer is good.
    """

    async def collect(self, world: TrainerContext) -> list[Episode]:
        """Run the step's rollouts, and shuffle their rewards within each group."""
        episodes = await super().collect(world)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, episode in enumerate(episodes):
            groups[episode.group_id].append(index)
        rng = random.Random(f"permuted/{self.seed}/{world.step}")
        for members in groups.values():
            rewards = [episodes[index].reward for index in members]
            rng.shuffle(rewards)
            for index, reward in zip(members, rewards, strict=True):
                episodes[index] = replace(episodes[index], reward=reward)
        return episodes
