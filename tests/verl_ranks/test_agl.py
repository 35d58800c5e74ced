"""`agl.VERL(config)` on the ranks of verl, and offloading."""

from __future__ import annotations

import importlib
from pathlib import Path

import lightspan_agl as agl
from lightspan import Verl
from lightspan.protocols.learner import Optimizer
from lightspan.training.folder import RunFolder
from lightspan_testing.learner_suite import BOTH_CLIPS, distance, make_rows, published
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_verl.learner import VerlLearner
from lightspan_verl.local_ranks import Workers


def test_a_configuration_trains_on_its_ranks(python: str, tmp_path: Path) -> None:
    """Two optimiser steps of a batch on two ranks."""
    agents = importlib.import_module("agl_apps")
    model = tiny_model(tmp_path / "model", seed=4, hidden=32)
    config = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2, "max_prompt_length": 400, "max_response_length": 8},
        "actor_rollout_ref": {
            "rollout": {"n": 4},
            "actor": {
                "ppo_mini_batch_size": 1,
                "optim": {"lr": 1e-3},
            },
            "model": {"path": str(model)},
        },
        "trainer": {
            "total_training_steps": 1,
            "default_local_dir": str(tmp_path / "run"),
            "device": "cpu",
        },
    }
    algorithm = agl.VERL(config, learner=Verl(python=python, ranks=2))
    result = agl.Trainer(algorithm=algorithm, n_runners=4).fit(
        agents.spell, [{"q": "question 0"}, {"q": "question 1"}]
    )
    assert result is not None
    [line] = RunFolder(result.folder).metrics()
    assert line["calls/trained"] == 8
    assert (
        distance(dict(load_model(result.model).state_dict()), dict(load_model(model).state_dict()))
        > 0.001
    )


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
