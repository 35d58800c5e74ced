"""Common parts of a learner's tests: its factory, a small model, and the losses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import UnsupportedError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Learner, Optimizer, PolicyLoss
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model

SGD_LIKE = Optimizer(learning_rate=1e-3, max_grad_norm=None)

BOTH_CLIPS = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.4, importance_cap=None)


class LearnerTests:
    """Hooks and helpers that every group of learner tests inherits."""

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> Learner:
        """Return a learner that trains `models`.

        Args:
            models: policy name → folder of the model.
            options: any of `optimizer`, `lora`, `token_budget`, `seed`. Also `critic` if the
                learner's capabilities have `values`.

        Raises:
            UnsupportedError: an option is not in the learner's capabilities.
        """
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        return tiny_model(
            tmp_path_factory.mktemp("learner") / "model", seed=3, hidden=32, context=128
        )

    @pytest.fixture
    def model(self, folder: Path) -> Any:
        return load_model(folder)

    def lacks(self, folder: Path, **options: Any) -> bool:
        """Return whether the learner does not support `options`, in which case the test ends.

        Also check that such a learner raises an error that names what is not supported.
        """
        declared = self.make_learner({"writer": folder}).capabilities
        lora = options.get("lora")
        lacking = declared.unsupported(options.get("optimizer") or Optimizer(), [lora])
        if not lacking:
            return False
        with pytest.raises(UnsupportedError, match=re.escape(lacking[0])):
            self.make_learner({"writer": folder}, **options)
        return True

    def refuses(self, learner: Learner, rows: Sequence[Row], loss: PolicyLoss) -> bool:
        """Return whether the learner does not support `loss`, in which case the test ends.

        Also check that such a learner raises an error that names what is not supported.
        """
        if not learner.capabilities.refusals(loss):
            return False
        match = "importance" if loss.form in learner.capabilities.loss_forms else loss.form
        old = learner.score(rows)
        with pytest.raises(UnsupportedError, match=match):
            learner.update(rows, loss, old_logprobs=old if loss.needs_old_logprobs else None)
        return True
