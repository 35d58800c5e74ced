"""Controls of learning: what must not learn, whatever the app."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import TrainerContext
from lightspan.lightning.episode import Episode


class Permuted(LightningRL):
    """LightningRL whose rewards are permuted within each group: nothing can be learned.

    Weights move all the same, and the policy may drift to one answer for everything. A metric that
    some constant answer does well in is therefore no control.
    """

    async def collect(self, world: TrainerContext) -> list[Episode]:
        """The step's episodes, each with the reward of one of its group."""
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
