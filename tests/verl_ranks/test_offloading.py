"""Test offloading of weights and of the optimizer's state, options of `agl.VERL(config)`."""

from __future__ import annotations

from pathlib import Path

from lightspan.protocols.learner import Optimizer
from lightspan_testing.learner_suite import BOTH_CLIPS, distance, make_rows, published
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_verl.learner import VerlLearner
from lightspan_verl.workers import Workers


async def test_offloading_changes_no_step(one: Workers, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", seed=4, hidden=32)
    rows = make_rows(load_model(folder))
    found = []
    for offload in (False, True):
        learner = VerlLearner(
            {"writer": folder},
            workers=one,
            optimizer=Optimizer(learning_rate=1e-3),
            param_offload=offload,
            optimizer_offload=offload,
        )
        metrics = [learner.update(rows, BOTH_CLIPS) for _ in range(2)]
        learner.save(tmp_path / f"saved-{offload}")
        learner.load(tmp_path / f"saved-{offload}")
        metrics.append(learner.update(rows, BOTH_CLIPS))
        found.append((metrics, learner.weight_hash("writer"), await published(learner)))
        learner.close()
    assert found[0][:2] == found[1][:2]
    assert distance(found[0][2], found[1][2]) == 0
