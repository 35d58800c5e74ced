"""RAFT (reward-ranked fine-tuning, arXiv 2304.06767) as a custom algorithm.

Per task, the rollouts with the highest reward are imitated, unless all rollouts have the same
reward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import msgspec

from lightspan.algorithms import Algorithm, Metrics, PolicySpec, TrainerContext
from lightspan.algorithms.metrics import rollout_metrics
from lightspan.lightning import Episode, Selection, build_rows, classify_calls, trained_transitions
from lightspan.protocols.learner import Optimizer, SFTLoss
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing
from lightspan.schema.token_records import Sampling


@dataclass(kw_only=True)
class RAFT(Algorithm):
    """RAFT as an `Algorithm`; a field replaces the setting of the same name in `Algorithm`."""

    model: str
    optimize: str = "*"
    group_size: int = 8
    tasks_per_step: int = 8
    optimizer: Optimizer = field(default=Optimizer(learning_rate=1e-3))
    seed: int = 0

    def policies(self) -> dict[str, PolicySpec]:
        return {"policy": PolicySpec(model=self.model)}

    def routing(self) -> Routing:
        return Selection.of(self.optimize, sampling=Sampling(temperature=1.0)).routing

    def config(self) -> dict[str, Json]:
        return {"algorithm": self.name, **msgspec.to_builtins(self)}

    async def run_step(self, world: TrainerContext) -> Metrics:
        tasks = world.next_tasks(self.tasks_per_step)
        episodes = await world.rollouts(tasks, self.group_size)
        # calls of selected agents that may be trained: `classify_calls` says why others may not
        imitated = [(e, classify_calls(e, self.routing())) for e in best_of_each_task(episodes)]
        transitions = [t for pair in imitated for t in trained_transitions(*pair)]
        metrics = {**rollout_metrics(episodes), "imitated": float(len(imitated))}
        if not transitions:
            world.note("no task had a rollout better than its others: nothing to imitate")
            return metrics
        weight = 1.0 / sum(t.tokens for t in transitions)  # the learner minimises Σ weight · loss
        rows = build_rows(transitions, token_weights=[weight] * len(transitions)).rows
        learned = await world.learn(partial(world.learner.update, rows, SFTLoss()))
        await world.publish()
        return {**metrics, **{f"learner/{key}": value for key, value in learned.items()}}


def best_of_each_task(episodes: list[Episode]) -> list[Episode]:
    """Return the episodes with the highest reward of their group, if the group's rewards differ.

    Episodes that are unscored, damaged or unfinished are ignored.
    """
    groups: dict[str, list[tuple[float, Episode]]] = {}
    for e in episodes:
        if e.finished and not e.capture_errors and e.reward is not None:
            groups.setdefault(e.group_id, []).append((e.reward, e))
    best = {name: max(reward for reward, _ in group) for name, group in groups.items()}
    mixed = [n for n, group in groups.items() if min(reward for reward, _ in group) < best[n]]
    return [e for name in mixed for reward, e in groups[name] if reward == best[name]]
