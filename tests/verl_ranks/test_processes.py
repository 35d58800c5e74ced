"""Test verl's processes: checkpoints of any number of ranks, exports, a dead rank, bad settings."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    RankError,
    UnsupportedError,
)
from lightspan.lightning.rows import Row
from lightspan.protocols.engine import EngineCapabilities, LoRAWeights
from lightspan.protocols.learner import LoRA, Optimizer
from lightspan_testing.learner_suite import (
    BOTH_CLIPS,
    WeightSink,
    distance,
    make_rows,
    published,
)
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.policy_model import TrainedModel
from lightspan_torch.learner.torch import TorchLearner
from lightspan_verl.learner import VerlLearner
from lightspan_verl.workers import Workers
from tests.verl_ranks.conftest import ADAMW


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
async def test_checkpoints_pass_between_numbers_of_ranks(
    one: Workers,
    two: Workers,
    folder: Path,
    batches: list[list[Row]],
    tmp_path: Path,
    lora: LoRA | None,
) -> None:
    """Check that two ranks, then one, then two again train like one uninterrupted learner.

    One batch is a single row, so that one of the ranks has none.
    """
    options: dict[str, Any] = {"optimizer": ADAMW, "lora": lora}
    whole = VerlLearner({"writer": folder}, workers=two, **options)
    losses = [whole.update(rows, BOTH_CLIPS) for rows in batches]
    start = dict(load_model(folder).state_dict())
    for number, (workers, rows) in enumerate(zip((two, one, two, one), batches, strict=True)):
        learner = VerlLearner({"writer": folder}, workers=workers, **options)
        if number:
            learner.load(tmp_path / f"{number - 1}")
        metrics = learner.update(rows, BOTH_CLIPS)
        assert metrics == pytest.approx(losses[number], rel=1e-4, abs=1e-5)
        learner.save(tmp_path / f"{number}")
    expected = await published(whole)
    found = await published(learner)
    assert distance(found, expected) < 1e-3 * distance(expected, start)
    learner.export("writer", tmp_path / "merged", merge=True)
    assert distance(dict(load_model(tmp_path / "merged").state_dict()), found) < 1e-5
    whole.close()


class LoRASink(WeightSink):
    """An engine that accepts LoRA weights."""

    adapters: LoRAWeights | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(exact_tokens=True, lora=("writer",))

    async def update(self, policy: str, weights: Any, version: int) -> None:
        self.adapters = weights


async def test_adapters_are_published_and_exported_as_peft_has_them(
    two: Workers, folder: Path, batches: list[list[Row]], tmp_path: Path
) -> None:
    lora = LoRA(rank=4)
    learner = VerlLearner(
        {"writer": folder}, workers=two, lora=lora, optimizer=Optimizer(learning_rate=1e-2)
    )
    learner.update(batches[0], BOTH_CLIPS)
    sink = LoRASink()
    await learner.publish(sink, {"writer": 1})
    learner.export("writer", tmp_path / "adapter")
    model = TrainedModel(folder, lora=lora, device="cpu", dtype=torch.float32, seed=0)
    model.restore(learner._weights("writer", "trained"))
    expected = model.lora_weights()
    assert sink.adapters is not None
    assert sink.adapters.scale == expected.scale
    assert set(sink.adapters.layers) == set(expected.layers)
    for name, pair in expected.layers.items():
        for own, other in zip(sink.adapters.layers[name], pair, strict=True):
            assert torch.equal(own, other)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    learner.close()


def test_a_killed_rank_is_named_and_the_checkpoint_is_whole(
    python: str, one: Workers, folder: Path, batches: list[list[Row]], tmp_path: Path
) -> None:
    workers = Workers(python, ["cpu", "cpu"])
    learner = VerlLearner({"writer": folder}, workers=workers, own=True, optimizer=ADAMW)
    learner.update(batches[0], BOTH_CLIPS)
    learner.save(tmp_path)
    os.kill(workers.pids[1], signal.SIGKILL)
    named = r"rank 1 \(cpu\), process \d+, was ended by SIGKILL[\s\S]*resume=True"
    with pytest.raises(RankError, match=named):
        learner.update(batches[1], BOTH_CLIPS)
    with pytest.raises(RankError, match="rank 1"):
        learner.score(batches[1])
    for pid in workers.pids:
        assert not Path(f"/proc/{pid}").exists()
    learner.close()
    again = VerlLearner({"writer": folder}, workers=one, optimizer=ADAMW)
    again.load(tmp_path)
    assert again.update(batches[1], BOTH_CLIPS)["skipped"] == 0
    again.close()


def test_incomplete_checkpoints_are_refused(
    one: Workers, two: Workers, folder: Path, tmp_path: Path
) -> None:
    learner = VerlLearner({"writer": folder}, workers=two)
    learner.save(tmp_path)
    learner.close()
    (tmp_path / "policy-0-rank-001.safetensors").unlink()
    other = VerlLearner({"writer": folder}, workers=one)
    with pytest.raises(CheckpointError, match="files of it are missing"):
        other.load(tmp_path)
    TorchLearner({"writer": folder}).save(tmp_path / "torch")
    with pytest.raises(CheckpointError, match="not made by the verl learner"):
        other.load(tmp_path / "torch")
    other.close()


def test_a_model_that_is_not_there_is_named(python: str, tmp_path: Path) -> None:
    workers = Workers(python, ["cpu"])
    with pytest.raises(ModelError, match=r"the model folder .*nowhere does not exist"):
        VerlLearner({"writer": tmp_path / "nowhere"}, workers=workers, own=True)
    workers.end()


def test_a_rank_that_fails_says_what(python: str, folder: Path, tmp_path: Path) -> None:
    """Check the error for a file that is no model, which verl detects."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"nothing")
    workers = Workers(python, ["cpu"])
    with pytest.raises(RankError, match=r"rank 0 [\s\S]*ended with status 1[\s\S]*header"):
        VerlLearner({"writer": damaged}, workers=workers, own=True)


def test_a_rank_that_hangs_is_named(python: str, folder: Path, batches: list[list[Row]]) -> None:
    """Check that a rank that is stopped is named in the error, and that no rank is left."""
    workers = Workers(python, ["cpu", "cpu"], timeout_s=10)
    workers._timeout_s = 120  # the first passes of a process take longer
    learner = VerlLearner({"writer": folder}, workers=workers, own=True)
    learner.update(batches[0], BOTH_CLIPS)
    workers._timeout_s = 10
    os.kill(workers.pids[1], signal.SIGSTOP)
    with pytest.raises(
        RankError, match=r"verl's rank 1 \(cpu\) took longer than timeout_s=10 [\s\S]*resume=True"
    ):
        learner.update(batches[1], BOTH_CLIPS)
    for pid in workers.pids:
        assert not Path(f"/proc/{pid}").exists()
    learner.close()


async def test_policies_may_change_their_order_on_resume(one: Workers, tmp_path: Path) -> None:
    """Check that each of two different models gets its own weights and optimizer state back."""
    models = {
        name: tiny_model(tmp_path / name, seed=seed, hidden=32)
        for seed, name in enumerate(("writer", "critic"))
    }
    rows = [
        dataclasses.replace(row, policy=name)
        for name in models
        for row in make_rows(load_model(models[name]), seed=len(name))
    ]
    first = VerlLearner(models, workers=one, optimizer=ADAMW)
    first.update(rows, BOTH_CLIPS)
    first.save(tmp_path / "saved")
    again = VerlLearner(dict(reversed(models.items())), workers=one, optimizer=ADAMW)
    again.load(tmp_path / "saved")
    for name in models:
        assert again.weight_hash(name) == first.weight_hash(name)
    expected = first.update(rows, BOTH_CLIPS)
    assert again.update(rows, BOTH_CLIPS) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for learner in (first, again):
        learner.close()


def test_what_it_cannot_is_refused_by_name(one: Workers, folder: Path) -> None:
    for options, match in (
        ({"optimizer": Optimizer(name="muon")}, "muon"),
        ({"lora": LoRA(dropout=0.1)}, r"LoRA\(dropout=0.1\)"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            VerlLearner({"writer": folder}, workers=one, **dict[str, Any](options))
    tied = LoRA(target_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"adapts lm_head, which shares its weight with .*tied"):
        VerlLearner({"writer": folder}, workers=one, lora=tied)
    with pytest.raises(ConfigError, match="in memory"):
        VerlLearner({"writer": load_model(folder)}, workers=one)
