"""Checks whether a model computes prompts with images as its plain forward pass does."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lightspan.errors import DataError, ModelError
from lightspan.protocols.engine import ChatTokenizer
from lightspan.schema.images import Image, PromptImage
from lightspan_torch.engine._attention import compare, tolerance
from lightspan_torch.engine.oom import is_out_of_memory
from lightspan_torch.vision.features import Vision
from lightspan_torch.vision.processor import FAMILIES, takes_images
from lightspan_torch.vision.tokenizer import VisionTokenizer

log = logging.getLogger(__name__)

_TAILS: Final = ((8, 9, 10), (11, 12, 13, 14, 15))
"""Token ids after the image in the two prompts of the check."""


class ImageSample(NamedTuple):
    """Two prompts with an image, and their logits in a plain forward pass."""

    vision: Vision
    prompts: Sequence[Sequence[int]]
    images: Sequence[PromptImage]
    """The image, which both prompts have at the same place."""
    logits: Sequence[Tensor]


def image_sample(model: Any, tokenizer: ChatTokenizer) -> ImageSample | str:
    """Compute the logits of prompts with an image, with transformers' own attention.

    Args:
        model: the model.
        tokenizer: its tokenizer.

    Returns:
        The sample; or why the model takes no images.

    Raises:
        RuntimeError: memory ran out.
    """
    if not takes_images(model.config):
        known = ", ".join(sorted(FAMILIES))
        return f"it is of the type {model.config.model_type}, and images are taken by: {known}"
    if not isinstance(tokenizer, VisionTokenizer):
        return "its tokenizer has no image processor (the log of its loading says why)"
    vision = Vision(model, tokenizer.images)
    try:
        head, images = tokenizer.encode_images(f" {tokenizer.images.mark}", [_sample_image()])
        prompts = [[*head, *tail] for tail in _TAILS]
        logits = [plain_logits(model, vision, ids, images) for ids in prompts]
    except (AttributeError, DataError, ModelError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return f"a prompt with an image raises {type(error).__name__}: {error}"
    return ImageSample(vision, prompts, images, logits)


def _sample_image() -> Image:
    """Return a wide image, so that models that make tiles make few."""
    from PIL import Image as Pillow

    image = Pillow.linear_gradient("L").resize((64, 16)).convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return Image.of(file.getvalue(), "image/png")


@torch.no_grad()
def plain_logits(
    model: Any, vision: Vision, ids: Sequence[int], images: Sequence[PromptImage]
) -> Tensor:
    """Return the logits of all tokens of a prompt whose placeholders are one image.

    They are computed by the model's own forward pass, from the pixels.
    """
    inputs = vision.processor.prepare(images[0].digest, images[0].data).inputs
    kinds = [[int(token == vision.processor.image_id) for token in ids]]
    arguments = {name: torch.as_tensor(value) for name, value in inputs.items()}
    arguments["input_ids"] = torch.tensor([list(ids)])
    known = inspect.signature(type(model).forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in known:
            arguments[name] = torch.tensor(kinds)
    on_device = {name: value.to(model.device) for name, value in arguments.items()}
    logits: Tensor = model(**on_device, use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def checked_vision(model: Any, sample: ImageSample | str) -> Vision | str:
    """Return the vision part of a model, if prompts in pieces have the logits of the sample.

    Args:
        model: the model, with the engine's attention installed.
        sample: what `image_sample` returned before.

    Returns:
        The vision part; or why images are refused, which is logged for a vision model.

    Raises:
        RuntimeError: memory ran out.
    """
    if isinstance(sample, str):
        return sample
    try:
        worst = _difference(model, sample)
        reason = f"its logits after an image differ by {worst:.2e} from those of a forward pass"
        if worst <= tolerance(model, sample.logits):
            return sample.vision
    except (AttributeError, DataError, ModelError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"a prompt with an image in pieces raises {type(error).__name__}: {error}"
    log.warning("images are refused for %s: %s", type(model).__name__, reason)
    return reason


def _difference(model: Any, sample: ImageSample) -> float:
    """Return the largest difference between the sample's logits and those in several steps.

    The first prompt is cut inside of its image, if this may be, and the second one uses its pages.
    """
    seen = [sample.vision.prompt(ids, sample.images) for ids in sample.prompts]
    first, second = (each.ids for each in seen)
    image = sample.images[0]
    inside = image.start + (0 if seen[0].both_ways else image.length // 2)
    rest = len(second) - (len(second) - len(_TAILS[1])) // 4 * 4
    order = (
        ((0, inside),),
        ((0, len(first) - inside),),
        ((1, 2),),
        ((1, rest - 2),),
        ((0, 1), (1, 1)),
    )
    return compare(model, (first, second), sample.logits, order, sample.vision, seen)[0]
