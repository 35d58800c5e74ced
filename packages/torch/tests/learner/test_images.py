"""Rows with images in the embedded learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightspan_testing.learner_suite import ImageLearnerSuite
from lightspan_torch.learner.torch import TorchLearner


class TestQwen25(ImageLearnerSuite):
    family = "qwen2_5_vl"

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> TorchLearner:
        return TorchLearner(models, **options)


class TestQwen3(TestQwen25):
    family = "qwen3_vl"


class TestSmolVLM(TestQwen25):
    family = "smolvlm"


class TestGemma3(TestQwen25):
    family = "gemma3"
