"""Images of rows: numbers in place of their placeholders, and their features.

Within one batch, the nth feature of all its images has the id -1 - n. So prefix trees, which
compare ids, share the nodes of equal images and of no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightspan.errors import DataError, UnsupportedError
from lightspan.lightning.rows import Row
from lightspan_torch.engine._attention import tolerance
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_torch.engine.weights import set_text_attention, text_attention
from lightspan_torch.learner.prefix_tree import plain as each_by_itself, share
from lightspan_torch.learner.tree_forward import Pass, decoder, plan, sweep
from lightspan_torch.vision.checks import ImageSample, image_sample
from lightspan_torch.vision.features import CachedImage, Vision


class RowImages:
    """The images of the rows of one batch.

    Args:
        vision: the vision part of the trained model.
        rows: the rows.
        trained: whether the vision part is trained, so that its features have a gradient.

    Attributes:
        sequences: for each row, its ids, in which placeholders are negative
        positions: for each row, [3, length] positions; None if they are indices

    Raises:
        DataError: an image of a row is missing or does not fit it.
    """

    def __init__(self, vision: Vision, rows: Sequence[Row], *, trained: bool = False) -> None:
        self._vision = vision
        self._trained = trained
        self._images: dict[int, CachedImage] = {}
        self.sequences: list[list[int]] = []
        positions: list[NDArray[np.int64] | None] = []
        offsets: dict[int, int] = {}
        count = 0
        for row in rows:
            try:
                seen = vision.prompt(row.ids, row.images)
            except DataError as error:
                raise DataError(f"a row of rollout {row.rollout_id}: {error}") from error
            for run in seen.runs:
                if id(run.image) not in offsets:
                    offsets[id(run.image)] = count
                    self._images[id(run.image)] = run.image
                    count += run.image.length
                top = -1 - offsets[id(run.image)] - run.first
                length = run.stop - run.start
                seen.ids[run.start : run.stop] = range(top, top - length, -1)
            self.sequences.append(seen.ids)
            positions.append(seen.positions)
        self.positions = [each for each in positions if each is not None] or None
        self._features: dict[tuple[int, bool], Tensor] = {}
        self._attached: Tensor | None = None
        """Features of the trained weights, attached to the graph of the vision part."""

    def features(self, model: Any) -> Tensor:
        """Return [1 + D, N, hidden] features of all images.

        They are a leaf of the autograd graphs of the passes, each of which is freed on its own.

        Args:
            model: the trained model, or the model before training.
        """
        key = id(model), torch.is_grad_enabled()
        if key not in self._features:
            self._features[key] = self._computed(model)
        return self._features[key]

    def _computed(self, model: Any) -> Tensor:
        images = self._images.values()
        if not self._trained:
            return torch.cat([self._vision.features(image) for image in images], dim=1)
        is_base = model is not self._vision.model
        vision = Vision(model, self._vision.processor) if is_base else self._vision
        features = vision.encode(list(images))
        if not features.requires_grad:
            return features
        self._attached = features
        return features.detach().requires_grad_()

    def backward(self) -> None:
        """Add the gradient of the features to the vision part, if it is trained."""
        if self._attached is not None:
            gradient = self.features(self._vision.model).grad
            torch.autograd.backward(self._attached, gradient)


def checked_vision(
    model: Any, tokenizer: TransformersTokenizer, policy: str, *, in_trees: bool
) -> Vision:
    """Return the vision part of a model, if its path gives the logits of a plain forward pass.

    Args:
        model: the transformers model.
        tokenizer: its tokenizer.
        policy: name of the policy, for the error message.
        in_trees: whether the model computes trees.

    Raises:
        UnsupportedError: the model takes no images, or its logits differ.
    """
    before = text_attention(model)
    try:
        if in_trees:
            set_text_attention(model, "sdpa")
        sample = image_sample(model, tokenizer)
    finally:
        if in_trees:
            set_text_attention(model, before)
    if isinstance(sample, str):
        raise UnsupportedError(f"rows of policy {policy} have images, and it takes none: {sample}")
    worst = _difference(model, sample, in_trees=in_trees)
    if not worst <= tolerance(model, sample.logits):
        raise UnsupportedError(
            f"rows of policy {policy} have images, and the logits of {type(model).__name__} after "
            f"an image differ by {worst:.2e} from those of its own forward pass"
        )
    return sample.vision


@torch.no_grad()
def _difference(model: Any, sample: ImageSample, *, in_trees: bool) -> float:
    """Return the largest difference between the sample's logits and those of the learner's path."""
    rows = [_SampleRow(ids, sample.images) for ids in sample.prompts]
    images = RowImages(sample.vision, rows)  # type: ignore[arg-type]
    selected = [list(range(1, len(ids))) for ids in images.sequences]
    count = sum(map(len, selected))
    logits = torch.zeros(count, sample.logits[0].shape[-1], device=model.device)
    output = model.get_output_embeddings()
    worst = 0.0

    def head(hidden: Tensor, current_pass: Pass) -> list[tuple[Tensor, Tensor]]:
        logits[current_pass.entries] = output(hidden[current_pass.places]).float()
        return []

    expected = torch.cat([each[:-1] for each in sample.logits])
    for trees in [each_by_itself(images.sequences)] + [
        share(images.sequences, pair_cost=0.0)
    ] * in_trees:
        passes = plan(
            images.sequences, selected, trees, 1, model.device, positions=images.positions
        )
        features = images.features(model)
        sweep(passes, decoder(model, in_trees=in_trees, features=features), head)
        worst = max(worst, float((logits - expected).abs().max()))
    return worst


class _SampleRow:
    """The fields of a row that `RowImages` reads."""

    def __init__(self, ids: Sequence[int], images: Sequence[Any]) -> None:
        self.ids = list(ids)
        self.images = tuple(images)
        self.rollout_id = "the check"
