"""Prompts with images in the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan.protocols.engine import TokenEngine
from lightspan_testing.engine_suite import EngineSuite
from lightspan_testing.image_suite import ImageEngineSuite
from lightspan_testing.tiny_vision import tiny_vision_model
from lightspan_torch.engine.transformers import TransformersEngine


class TestQwen25(ImageEngineSuite):
    family = "qwen2_5_vl"

    def make_engine(self, models: Mapping[str, Any]) -> TokenEngine:
        return TransformersEngine(models, seed=0)


class TestQwen3(TestQwen25):
    family = "qwen3_vl"


class TestSmolVLM(TestQwen25):
    family = "smolvlm"


class TestGemma3(TestQwen25):
    family = "gemma3"


class TestInSmallSteps(ImageEngineSuite):
    """Prompts are computed in pieces that cut their images."""

    def make_engine(self, models: Mapping[str, Any]) -> TokenEngine:
        return TransformersEngine(models, seed=0, batch_tokens=7, batch_requests=5, num_blocks=4)


class TestTextOfAVisionModel(EngineSuite):
    """A vision model answers prompts without images as any other model does."""

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        return TransformersEngine(models, seed=0)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("vision") / "model"
        return tiny_vision_model(folder, seed=5, context=256)
