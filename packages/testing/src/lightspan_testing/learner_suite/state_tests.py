"""Tests of checkpoints, LoRA adapters, and published and exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import CheckpointError, NotFoundError
from lightspan.protocols.learner import LoRA, Optimizer
from lightspan_testing.learner_suite.base import BOTH_CLIPS, LearnerTests
from lightspan_testing.learner_suite.reference import WeightSink, distance, published
from lightspan_testing.learner_suite.rows import make_rows, token_logprobs
from lightspan_torch.engine.weights import load_model


class StateTests(LearnerTests):
    """Test checkpoints and weights."""

    @pytest.mark.parametrize("name", ["adamw", "muon"])
    @pytest.mark.parametrize(
        "lora",
        [None, LoRA(rank=4), LoRA(rank=4, dropout=0.2)],
        ids=["full", "lora", "dropout"],
    )
    def test_resume_is_exact(
        self, folder: Path, model: Any, tmp_path: Path, name: Any, lora: LoRA | None
    ) -> None:
        """Training that is saved and loaded again continues exactly, even with dropout."""
        options = {
            "optimizer": Optimizer(name=name, learning_rate=1e-3, warmup_steps=4),
            "lora": lora,
        }
        if self.lacks(folder, **options):
            return
        batches = [make_rows(model, seed=seed) for seed in range(3)]
        whole = self.make_learner({"writer": folder}, **options)
        for batch in batches:
            expected = whole.update(batch, BOTH_CLIPS)
        first = self.make_learner({"writer": folder}, **options)
        for batch in batches[:2]:
            first.update(batch, BOTH_CLIPS)
        first.save(tmp_path / "checkpoint")
        suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json"}  # no pickle
        torch.rand(7)  # learners must not depend on the global generator
        second = self.make_learner({"writer": folder}, **{**options, "seed": 99 if not lora else 0})
        second.load(tmp_path / "checkpoint")
        assert second.weight_hash("writer") == first.weight_hash("writer")
        assert second.update(batches[2], BOTH_CLIPS) == expected
        assert second.weight_hash("writer") == whole.weight_hash("writer")

    def test_a_foreign_checkpoint_is_refused(self, folder: Path, tmp_path: Path) -> None:
        learner = self.make_learner({"writer": folder})
        with pytest.raises(CheckpointError, match="nowhere"):
            learner.load(tmp_path / "nowhere")
        other = self.make_learner({"critic": folder})
        other.save(tmp_path / "other")
        with pytest.raises(CheckpointError, match="critic"):
            learner.load(tmp_path / "other")
        adapters = self.make_learner({"writer": folder}, lora=LoRA(rank=2))
        adapters.save(tmp_path / "lora")
        with pytest.raises(CheckpointError, match="lora"):
            learner.load(tmp_path / "lora")

    async def test_lora_equals_its_merged_weights(
        self, folder: Path, model: Any, tmp_path: Path
    ) -> None:
        learner = self.make_learner(
            {"writer": folder},
            lora=LoRA(rank=4),
            optimizer=Optimizer(learning_rate=1e-2, max_grad_norm=None),
        )
        rows = make_rows(model)
        base = learner.score(rows, "base")
        assert learner.score(rows) == [pytest.approx(row, abs=1e-6) for row in base]
        for _ in range(3):
            learner.update(rows, BOTH_CLIPS)
        scores = learner.score(rows)
        assert scores != [pytest.approx(row, abs=1e-2) for row in base]
        assert learner.score(rows, "base") == [pytest.approx(row, abs=1e-6) for row in base]
        model.load_state_dict(await published(learner))
        learner.export("writer", tmp_path / "exported", merge=True)
        for merged in (model, load_model(tmp_path / "exported")):
            for row, score in zip(rows, scores, strict=True):
                with torch.no_grad():
                    assert score == pytest.approx(token_logprobs(merged, row).tolist(), abs=1e-4)

    async def test_publish_hands_over_copies(self, folder: Path, model: Any) -> None:
        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        weights = await published(learner)
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        assert set(weights) == set(model.state_dict())
        learner.update(rows, BOTH_CLIPS)
        assert distance(weights, copies) == 0
        assert distance(await published(learner), copies) > 0
        with pytest.raises(NotFoundError, match="critic"):
            await learner.publish(WeightSink(), {"critic": 1})

    def test_an_exported_model_loads(self, folder: Path, model: Any, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        learner = self.make_learner({"writer": folder})
        rows = make_rows(model)
        learner.update(rows, BOTH_CLIPS)
        learner.export("writer", tmp_path / "exported")
        again = self.make_learner({"writer": tmp_path / "exported"})
        assert again.weight_hash("writer") == learner.weight_hash("writer")
        assert again.score(rows) == [pytest.approx(row, abs=1e-6) for row in learner.score(rows)]
        assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template
