"""The two halves of a critic in one step: rows → values → advantages → update."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightspan.lightning import Selection, build_rows, classify_calls, trained_transitions
from lightspan.lightning.credit import discounted
from lightspan.lightning.gae import explained_variance, gae, values_by_call, warmup_lambda
from lightspan.protocols.learner import Critic, Optimizer, PolicyLoss
from lightspan_testing.tiny import tiny_model
from lightspan_torch.learner.torch import TorchLearner
from packages.core.tests.lightning.enumerated import Process, Trajectory

CRITIC = Critic(warmup=2)
EVERYONE = Selection.of("*").routing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("critic") / "model", seed=6, hidden=64)


def step(
    learner: TorchLearner, drawn: Sequence[Trajectory], number: int
) -> tuple[float, float | None]:
    """One iteration on these; (lambda, explained variance)."""
    episodes = [trajectory.as_episode(str(place)) for place, trajectory in enumerate(drawn)]
    coverages = [classify_calls(episode, EVERYONE, step_rewards=True) for episode in episodes]
    transitions = [
        transition
        for episode, coverage in zip(episodes, coverages, strict=True)
        for transition in trained_transitions(episode, coverage)
    ]
    rows = build_rows(transitions).rows
    values = values_by_call(rows, learner.values(rows))
    to_go = {e.rollout_id: discounted(1)(e, c) for e, c in zip(episodes, coverages, strict=True)}
    keys = [(transition.rollout_id, transition.call_key) for transition in transitions]
    targets = [to_go[rollout][call] for rollout, call in keys]
    explained = explained_variance([values[rollout][call] for rollout, call in keys], targets)
    lam = warmup_lambda(CRITIC.lam, fits=number, warmup=CRITIC.warmup, explained=explained)
    advantages = {}
    for episode, coverage in zip(episodes, coverages, strict=True):
        rollout = episode.rollout_id
        advantages[rollout] = gae(coverage.turns, to_go[rollout], values[rollout], lam=lam)
    built = build_rows(
        transitions,
        advantages=[advantages[rollout][call] for rollout, call in keys],
        token_weights=[1 / len(transitions)] * len(transitions),
        value_targets=targets,
    )
    assert [row.call_ids for row in built.rows] == [row.call_ids for row in rows]
    metrics = learner.update(built.rows, PolicyLoss())
    assert metrics["value_calls"] == len(transitions)
    return lam, explained


def test_values_that_are_learned_from_rollouts_approach_the_truth(folder: Path) -> None:
    """Of the enumerated process, from 64 rollouts an iteration; lambda is 1 where a batch does not
    show that they help."""
    process, rng = Process("early"), random.Random(0)
    probabilities = [trajectory.probability for trajectory in process.trajectories]
    learner = TorchLearner(
        {"policy": folder}, optimizer=Optimizer(learning_rate=1e-9), critic=CRITIC
    )
    lambdas, explained = [], []
    for number in range(12):
        lam, part = step(learner, rng.choices(process.trajectories, probabilities, k=64), number)
        lambdas.append(lam)
        explained.append(part or 0.0)
    assert lambdas[:2] == [1.0, 1.0]
    for lam, part in zip(lambdas[2:], explained[2:], strict=True):
        assert lam == (CRITIC.lam if part >= 0.2 else 1.0)
    assert max(explained) >= 0.2

    squares = 0.0
    for trajectory in process.trajectories:
        episode = trajectory.as_episode("1")
        rows = build_rows(trained_transitions(episode, classify_calls(episode, EVERYONE))).rows
        values = values_by_call(rows, learner.values(rows))["ro-1"]
        for choice in trajectory.calls:
            error = values[choice.call_id, 0] - process.values[choice.state]
            squares += trajectory.probability * error**2 / len(trajectory.calls)
    assert squares < 0.1**2
