"""Tests of rows with images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightspan.errors import DataError
from lightspan.protocols.engine import ImageTokenizer
from lightspan.protocols.learner import Loss, PolicyLoss, SFTLoss
from lightspan_testing.learner_suite.base import BOTH_CLIPS, SGD_LIKE, LearnerTests
from lightspan_testing.learner_suite.reference import (
    distance,
    published,
    reference_loss,
    reference_optimizer,
    weights_of,
)
from lightspan_testing.learner_suite.rows import make_image_rows, token_logprobs
from lightspan_testing.tiny_vision import VisionFamily, tiny_vision_model
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.weights import load_model
from lightspan_torch.vision.features import vision_parameters


class ImageLearnerSuite(LearnerTests):
    """Tests of a learner of vision models; subclass it in addition to `LearnerSuite`.

    The vision part is frozen, which is the default.
    """

    family: VisionFamily = "qwen2_5_vl"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        folder = tmp_path_factory.mktemp("learner") / "model"
        return tiny_vision_model(folder, seed=3, family=cls.family, hidden=32)

    @pytest.fixture(scope="class")
    @classmethod
    def tokenizer(cls, folder: Path) -> ImageTokenizer:
        tokenizer = load_tokenizer(folder)
        assert isinstance(tokenizer, ImageTokenizer)
        return tokenizer

    @pytest.fixture
    def model(self, folder: Path) -> Any:
        """Return a model whose vision part is frozen."""
        model = load_model(folder)
        for _, parameter in vision_parameters(model):
            parameter.requires_grad_(False)
        return model

    def test_images_are_declared(self, folder: Path) -> None:
        assert self.make_learner({"writer": folder}).capabilities.images

    def test_scores_are_those_of_a_forward_pass(
        self, folder: Path, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        """Rows of equal ids and other images have other scores."""
        rows = make_image_rows(model, tokenizer)
        assert rows[0].ids == rows[2].ids
        for budget in (100_000, 1):
            learner = self.make_learner({"writer": folder}, token_budget=budget)
            scores = learner.score(rows)
            with torch.no_grad():
                for row, score in zip(rows, scores, strict=True):
                    assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)
        assert abs(scores[0][-1] - scores[2][-1]) > 1e-3

    @pytest.mark.parametrize(
        "loss", [SFTLoss(), BOTH_CLIPS, msgspec.structs.replace(BOTH_CLIPS, kl=0.1)], ids=str
    )
    async def test_an_update_is_that_of_a_plain_loop(
        self, folder: Path, model: Any, tokenizer: ImageTokenizer, loss: Loss
    ) -> None:
        """Two steps move the text part as autograd of plain forward passes does."""
        base = load_model(folder) if isinstance(loss, PolicyLoss) and loss.kl else None
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE, token_budget=64)
        start, optimizer = await published(learner), reference_optimizer(model, SGD_LIKE)
        for seed in (0, 1):
            rows = make_image_rows(model, tokenizer, seed=seed)
            optimizer.zero_grad()
            total = reference_loss(model, rows, loss, base=base)
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            metrics = learner.update(rows, loss)
            assert metrics["loss"] == pytest.approx(float(total.detach()), abs=1e-4)
        expected, moved = weights_of(model), await published(learner)
        assert distance(moved, expected) < 1e-2 * distance(expected, start)
        for name, _ in vision_parameters(model):
            assert torch.equal(moved[name], start[name])

    def test_an_exported_model_sees(
        self, folder: Path, model: Any, tokenizer: ImageTokenizer, tmp_path: Path
    ) -> None:
        """Its folder has the image processor, and its scores are those of the learner."""
        rows = make_image_rows(model, tokenizer)
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        learner.update(rows, SFTLoss())
        learner.export("writer", tmp_path)
        again = self.make_learner({"writer": tmp_path})
        assert again.score(rows) == learner.score(rows)

    def test_a_saved_state_is_loaded(
        self, folder: Path, model: Any, tokenizer: ImageTokenizer, tmp_path: Path
    ) -> None:
        rows = make_image_rows(model, tokenizer)
        learner = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        learner.update(rows, SFTLoss())
        learner.save(tmp_path)
        again = self.make_learner({"writer": folder}, optimizer=SGD_LIKE)
        again.load(tmp_path)
        assert again.score(rows) == learner.score(rows)

    def test_images_that_do_not_fit_are_refused(
        self, folder: Path, model: Any, tokenizer: ImageTokenizer
    ) -> None:
        row = make_image_rows(model, tokenizer)[0]
        image = row.images[0]
        learner = self.make_learner({"writer": folder})
        before = learner.score([row])
        for changes, message in (
            ({"data": b""}, "missing"),
            ({"start": image.start + 1}, "placeholder"),
            ({"grid": (image.grid[0] + 2, image.grid[1])}, "grid"),
        ):
            wrong = msgspec.structs.replace(image, **changes)
            with pytest.raises(DataError, match=message):
                learner.update([replace(row, images=(wrong, *row.images[1:]))], SFTLoss())
        assert learner.score([row]) == before
