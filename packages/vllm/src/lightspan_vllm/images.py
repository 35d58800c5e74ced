"""Images of prompts, in the form in which vLLM takes them with token ids.

vLLM's route `/inference/v1/generate` takes the ids of a prompt as they are. For each run of
placeholders it takes an identifier, its place, and the inputs of the model's vision part. These
are made here, by the same image processor as in training, so that vLLM computes with exactly the
same pixels.

The identifier has the digest of the image file: vLLM reads keys, values and features from its
caches only if the images are the same, whatever the ids are.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec

from lightspan.errors import DataError
from lightspan.schema.images import PromptImage
from lightspan_torch.vision.processor import ImageProcessor, PreparedImage, check_file

_INLINE: Final = 3
"""Code of vLLM's MessagePack extension for the bytes of a tensor."""
_BATCHED: Final = ("batched", {"keep_on_cpu": True})
"""How vLLM joins values of several images: one row for each."""


def image_features(
    ids: Sequence[int],
    images: Sequence[PromptImage],
    processor: ImageProcessor,
    family: str,
    dtype: str,
) -> dict[str, Any]:
    """Return the argument `features` of vLLM's route for a prompt with images.

    Args:
        ids: the ids of the prompt.
        images: its images, with their bytes.
        processor: the model's image processor.
        family: type of the model's configuration, one of `SERVED`.
        dtype: data type of the server's weights.

    Raises:
        DataError: a file is damaged, or it does not fit its digest, grid or placeholders. vLLM does
            not check this: its engine would die.
    """
    items = []
    for image in images:
        check_file(image)
        processor.check_placeholders(ids, image)
        prepared = processor.prepare_as(image)
        fields = SERVED[family](prepared, _run(prepared, image))
        packed = {
            name: {"data": _packed(value, dtype), "field": field}
            for name, (value, field) in fields.items()
        }
        items.append(base64.b64encode(msgspec.msgpack.encode(packed)).decode())
    return {
        "mm_hashes": {"image": [f"{i.digest} {i.grid} {i.first}" for i in images]},
        "mm_placeholders": {"image": [{"offset": i.start, "length": i.length} for i in images]},
        "kwargs_data": {"image": items},
    }


def _run(prepared: PreparedImage, image: PromptImage) -> int:
    """Return which of the runs of placeholders of an image a run is."""
    first = [0, *accumulate(prepared.runs)]
    run = first.index(image.first) if image.first in first[:-1] else -1
    if run < 0 or prepared.runs[run] != image.length:
        raise DataError(
            f"image {image.digest[:12]} has runs of {prepared.runs} placeholders, and a prompt has "
            f"numbers {image.first} to {image.first + image.length - 1} of them, which is no run"
        )
    return run


def _packed(value: Any, dtype: str) -> tuple[str, list[int], msgspec.msgpack.Ext]:
    """Return a tensor as vLLM's messages have it: data type, shape and bytes.

    Args:
        value: a NumPy array or a number.
        dtype: data type of floating-point numbers.
    """
    import torch

    tensor = torch.as_tensor(value)
    if tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype))
    name = str(tensor.dtype).removeprefix("torch.")
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return name, list(tensor.shape), msgspec.msgpack.Ext(_INLINE, octets)


def _rows(count: int) -> tuple[str, dict[str, Any]]:
    """Return how vLLM joins values of several images that have `count` rows each."""
    return "flat", {"slices": [(0, count, None)], "dim": 0, "keep_on_cpu": False}


_Fields = Mapping[str, tuple[Any, tuple[str, dict[str, Any]]]]
"""Name of an input of a model's vision part in vLLM → its value, and how vLLM joins several."""


def _qwen(prepared: PreparedImage, run: int) -> _Fields:
    pixels, grid = (prepared.inputs[name] for name in ("pixel_values", "image_grid_thw"))
    return {
        "pixel_values": (pixels, _rows(len(pixels))),
        "image_grid_thw": (grid[0], _BATCHED),
    }


def _tiled(prepared: PreparedImage, run: int) -> _Fields:
    """Return one tile of an image of Idefics 3 or SmolVLM, as if it were an image without others.

    vLLM's route takes no images whose placeholders have text in between.
    """
    pixels, mask = (prepared.inputs[name] for name in ("pixel_values", "pixel_attention_mask"))
    return {
        "pixel_values": (pixels[0, run : run + 1], _rows(1)),
        "pixel_attention_mask": (mask[0, run : run + 1], _rows(1)),
        "num_patches": (1, _BATCHED),
    }


SERVED: Final[Mapping[str, Callable[[PreparedImage, int], _Fields]]] = {
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _tiled,
}
"""Type of the configuration of a model with which vLLM takes images → function that returns the
inputs of its vision part for one run of placeholders, by the run's number in its image."""
