"""Features of images, and prompts with images as the text part of a model takes them.

The ids of a prompt do not identify it, because all placeholders have one id. So each placeholder is
replaced by a negative number of its own: equal numbers mean equal images and equal places in them.
Whatever compares ids (cache pages, prefix trees) is then exact. Where the model computes, rows of
negative ids get the features of their image instead of an embedding.

The features of an image are computed once for each weights of the vision part, and kept in a cache
that all models of this process share.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightspan.errors import DataError
from lightspan.schema.images import PromptImage
from lightspan_torch.engine.weights import hash_weights
from lightspan_torch.vision.processor import ImageProcessor, check_file

CACHE_BYTES: Final = 2**29
"""Maximum bytes of features (and image files) that are kept for later prompts."""

_Key: TypeAlias = tuple[str, str, tuple[int, int]]
"""Weights of the vision part, digest of the image, grid."""


class CachedImage:
    """An image in the cache: the numbers of its placeholders, and its features.

    Args:
        first: number that stands for the first placeholder, negative; the second has `first` - 1.
        length: number of placeholders.
        digest: digest of the image file.
        data: the image file.
    """

    def __init__(self, first: int, length: int, digest: str, data: bytes) -> None:
        self.first = first
        self.length = length
        self.digest = digest
        self.data = data
        self.lock = threading.Lock()
        self.features: Tensor | None = None
        """[1 + D, length, hidden]: what replaces the embeddings, and what is added to the hidden
        states after each of the first D layers."""

    @property
    def size(self) -> int:
        """Bytes of the file and the features."""
        features = self.features
        return len(self.data) + (0 if features is None else features.nbytes)


class _Cache:
    """The images that were seen last, up to a number of bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._images: OrderedDict[_Key, CachedImage] = OrderedDict()
        self._lock = threading.Lock()
        self._last = 0

    def find(self, key: _Key) -> CachedImage | None:
        """Return an image of the cache; None if it is not there."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def add(self, key: _Key, length: int, data: bytes) -> CachedImage:
        """Return an image of the cache; add it if it is not there.

        An image that was dropped and comes again gets other numbers, so that it shares nothing with
        prompts that still have the former ones.
        """
        with self._lock:
            found = self._images.get(key)
            if found is None:
                found = CachedImage(-1 - self._last, length, key[1], data)
                self._last += length
                self._images[key] = found
            return found

    def size(self, digests: Collection[str]) -> int:
        """Return the bytes of the images with the given digests that are in the cache.

        If features of several models are there, the last used ones count.
        """
        with self._lock:
            sizes = {i.digest: i.size for i in self._images.values() if i.digest in digests}
            return sum(sizes.values())

    def shrink(self) -> None:
        """Drop the images that were not used for the longest time, until the limit is kept."""
        with self._lock:
            total = sum(image.size for image in self._images.values())
            while total > self._limit and len(self._images) > 1:
                _, oldest = self._images.popitem(last=False)
                total -= oldest.size


_CACHE: Final = _Cache(CACHE_BYTES)


def kept_bytes(digests: Collection[str]) -> int:
    """Return the bytes of features (and files) that are kept of images, by their digests."""
    return _CACHE.size(digests)


class Run(NamedTuple):
    """A run of placeholders in a prompt."""

    start: int
    stop: int
    first: int
    """Index of the first placeholder's features among those of the image."""
    image: CachedImage


class VisionPrompt:
    """A prompt with images, as the text part of a model takes it.

    Args:
        ids: the ids, in which placeholders are negative numbers.
        runs: the runs of placeholders, in order.
        positions: [3, ids] positions, if the model has three-dimensional ones; else None.
        both_ways: whether placeholders of a run attend to one another in both directions.
    """

    def __init__(
        self,
        ids: list[int],
        runs: Sequence[Run],
        positions: NDArray[np.int64] | None,
        both_ways: bool = False,
    ) -> None:
        self.ids = ids
        self.runs = runs
        self.positions = positions
        self.both_ways = both_ways

    def positions_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return [3, stop - start] positions of tokens of the prompt, and of tokens after it.

        A token after the prompt has the largest position plus one, in all dimensions.
        """
        assert self.positions is not None
        length = self.positions.shape[1]
        inside = self.positions[:, start:stop]
        if stop <= length:
            return inside
        following = int(self.positions.max()) + 1 - length
        after = np.arange(max(start, length), stop) + following
        return np.concatenate([inside, np.broadcast_to(after, (3, len(after)))], axis=1)

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Run, slice]]:
        """Yield the placeholders from `start` to `stop` - 1.

        Each item has the index of the first of them after `start`, their run, and which features of
        the image they have.
        """
        for run in self.runs:
            first, last = max(start, run.start), min(stop, run.stop)
            if first < last:
                offset = run.first - run.start
                yield first - start, run, slice(first + offset, last + offset)

    def whole(self, start: int, count: int) -> int:
        """Return how many tokens from `start` to compute at once, instead of `count`.

        A run whose placeholders attend to one another must not be cut. It may be longer than
        `count` allows.
        """
        stop = start + count
        for run in self.runs if self.both_ways else ():
            if run.start < stop < run.stop:
                stop = run.start if run.start > start else run.stop
        return stop - start

    def last_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the last token to which each token attends: itself, or the last of its image."""
        last = np.arange(start, stop)
        for run in self.runs if self.both_ways else ():
            first, end = max(start, run.start) - start, min(stop, run.stop) - start
            if first < end:
                last[first:end] = run.stop - 1
        return last


_CHANGES: Final = itertools.count()
"""Numbers of the changes of vision parts in this process."""


class Vision:
    """The vision part of a model, and the image processor that makes its inputs.

    Args:
        model: a transformers model.
        processor: its image processor.
    """

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self.model = model
        self.processor = processor

    @property
    def _inner(self) -> Any:
        """The model without its output layer, which has the functions for images."""
        return self.model.base_model

    @cached_property
    def weights(self) -> str:
        """What the features of an image depend on: weights and settings of the vision part."""
        model = self.model
        state = {name: parameter.detach() for name, parameter in vision_parameters(model)}
        settings = model.config.to_dict()
        for name in ("_name_or_path", "text_config", "transformers_version"):
            settings.pop(name, None)
        config = json.dumps(settings, sort_keys=True, default=str) + self.processor.settings
        digest = hashlib.sha256(config.encode()).hexdigest()
        return f"{hash_weights(state)} {digest} {model.dtype} {model.device}"

    def forget(self) -> None:
        """Use no features from before: the weights of the vision part have changed."""
        # no `id`: that of a model which is gone is given to another one, and the cache has both
        self.weights = f"change {next(_CHANGES)}"

    @torch.no_grad()
    def differs(self, weights: Mapping[str, Any]) -> bool:
        """Return whether some weights of the vision part are others than the model's.

        Args:
            weights: name in the whole model → tensor.
        """
        return any(
            name in weights and not torch.equal(weights[name].to(own.device, own.dtype), own)
            for name, own in vision_parameters(self.model)
        )

    def find(self, image: PromptImage) -> CachedImage:
        """Return the image of a run of placeholders. It is prepared, so that encoding cannot fail.

        Raises:
            DataError: the file is damaged, or it does not fit its digest, grid or placeholders.
        """
        check_file(image)
        key = self.weights, image.digest, image.grid
        found = _CACHE.find(key)
        if found is None:
            found = _CACHE.add(key, self.processor.prepare_as(image).length, image.data)
        if not 0 <= image.first <= image.first + image.length <= found.length:
            raise DataError(
                f"image {image.digest[:12]} has {found.length} placeholders, and a prompt has "
                f"numbers {image.first} to {image.first + image.length - 1} of it"
            )
        return found

    def prompt(self, ids: Sequence[int], images: Sequence[PromptImage]) -> VisionPrompt:
        """Return a prompt as the text part of the model takes it.

        Args:
            ids: the ids of the prompt.
            images: its images, with their bytes.

        Raises:
            DataError: as `find`; or the placeholders are not where the images are.
        """
        seen = list(ids)
        runs: list[Run] = []
        for image in images:
            self.processor.check_placeholders(seen, image)
            found = self.find(image)
            top = found.first - image.first
            stop = image.start + image.length
            seen[image.start : stop] = range(top, top - image.length, -1)
            runs.append(Run(image.start, stop, image.first, found))
        return VisionPrompt(seen, runs, self._positions(ids, images), attends_both_ways(self.model))

    def _positions(
        self, ids: Sequence[int], images: Sequence[PromptImage]
    ) -> NDArray[np.int64] | None:
        """Return [3, ids] positions, if the model has three-dimensional ones; else None."""
        index = getattr(self._inner, "get_rope_index", None)
        if index is None:
            return None
        if not images:
            return np.broadcast_to(np.arange(len(ids)), (3, len(ids)))
        # a placeholder that was sampled, or is in a text, is no image
        plain = [0 if token == self.processor.image_id else token for token in ids]
        kinds = [0] * len(plain)
        for image in images:
            stop = image.start + image.length
            plain[image.start : stop] = [self.processor.image_id] * image.length
            kinds[image.start : stop] = [1] * image.length
        arguments = {
            "input_ids": torch.tensor([plain]),
            "mm_token_type_ids": torch.tensor([kinds]),
            "image_grid_thw": torch.tensor([[1, *image.grid] for image in images]),
        }
        known = inspect.signature(index).parameters
        positions, _ = index(**{key: value for key, value in arguments.items() if key in known})
        result: NDArray[np.int64] = positions[:, 0].numpy()
        return result

    def features(self, image: CachedImage) -> Tensor:
        """Return the features of an image, [1 + D, length, hidden]; compute them if they are new.

        They have no gradient.
        """
        with image.lock:
            if image.features is None:
                # an inference tensor could not be used in a training step
                with torch.inference_mode(False), torch.no_grad():
                    image.features = self.encode([image])
                _CACHE.shrink()
            return image.features

    def encode(self, images: Sequence[CachedImage]) -> Tensor:
        """Run the vision part on images; return all their features, [1 + D, N, hidden]."""
        device = self.model.device
        inputs = [
            {
                name: torch.as_tensor(value, device=device)
                for name, value in self.processor.prepare(image.digest, image.data).inputs.items()
            }
            for image in images
        ]
        if "image_grid_thw" in inputs[0]:  # patches of all images in one row, as Qwen's models take
            inputs = [{name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}]
        return torch.cat([self._encoded(tensors) for tensors in inputs], dim=1)

    def _encoded(self, tensors: Mapping[str, Tensor]) -> Tensor:
        output = self._inner.get_image_features(**tensors)
        first = getattr(output, "pooler_output", output)
        layers = [first, *(getattr(output, "deepstack_features", None) or ())]
        hidden = [_flat(layer) for layer in layers]
        return torch.stack(hidden).to(self.model.dtype)


def _flat(features: Any) -> Tensor:
    """Return features as [placeholders, hidden]."""
    if isinstance(features, list | tuple):
        features = torch.cat([_flat(part) for part in features])
    flat: Tensor = features.reshape(-1, features.shape[-1])
    return flat


def vision_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the names and parameters of a model that are not of its text part.

    The text part is the decoder with its embeddings, and the output layer.
    """
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    parts = (decoder, output, model.get_input_embeddings())
    text = {id(each) for part in parts if part is not None for each in part.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in text:
            yield name, parameter


def attends_both_ways(model: Any) -> bool:
    """Return whether the placeholders of an image attend to one another in both directions.

    Such a model makes its mask from an argument that says which tokens are of images.
    """
    return "token_type_ids" in inspect.signature(type(model.base_model).forward).parameters


def embedded(model: Any, ids: Tensor, rows: Tensor, features: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's decoder in place of ids that have placeholders.

    Args:
        model: the model.
        ids: [B, L] ids; negative ones are placeholders.
        rows: [n] index of each placeholder in the flattened `ids`.
        features: [1 + D, n, hidden] features of the placeholders.
    """
    embeddings = model.get_input_embeddings()(ids.clamp(min=0))
    features = features.to(embeddings.dtype)
    flat = embeddings.flatten(0, 1).index_copy(0, rows, features[0])
    arguments: dict[str, Any] = {"inputs_embeds": flat.view_as(embeddings)}
    if len(features) > 1:
        arguments["visual_pos_masks"] = ids < 0
        arguments["deepstack_visual_embeds"] = list(features[1:])
    return arguments
