"""Image processors: from the bytes of an image to the inputs of a model's vision part.

The processors are transformers' own, in the form that needs Pillow and no torchvision. Importing
this module loads neither torch nor Pillow.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightspan.errors import DataError, ModelError
from lightspan.schema.images import PromptImage
from lightspan_torch.engine.hub import Origin, cannot_load, locate

CACHE_BYTES: Final = 2**27
"""Maximum bytes of prepared images that a processor keeps, so that a group of calls prepares its
image once."""
FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of a model folder that belong to its processor."""


class PreparedImage(NamedTuple):
    """An image as a model takes it."""

    grid: tuple[int, int]
    """Height and width in patches or tiles (`PromptImage.grid`)."""
    runs: tuple[int, ...]
    """Number of placeholders of each run in a prompt."""
    text: str
    """What stands for the image in a prompt, placeholders included."""
    inputs: Mapping[str, Any]
    """Arguments of the model's `get_image_features`, as NumPy arrays."""

    @property
    def length(self) -> int:
        """Number of placeholders, which is the number of features."""
        return sum(self.runs)


class ImageProcessor:
    """The image processor of a model.

    Args:
        processor: an image processor of transformers.
        config: configuration of the model.
        tokenizer: tokenizer of the model, which has the names of its special tokens.
    """

    def __init__(self, processor: Any, config: Any, tokenizer: Any) -> None:
        self._processor = processor
        self._config = config
        self._family = FAMILIES[config.model_type]
        self.image_id = int(config.image_token_id)
        """Id of a placeholder."""
        self.names = _Names(config, tokenizer)
        self.mark = self._family.mark(self.names)
        """What a chat template writes for an image."""
        self._cache: OrderedDict[str, PreparedImage] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def settings(self) -> str:
        """Digest of all settings on which the prepared images depend."""
        return hashlib.sha256(self._processor.to_json_string().encode()).hexdigest()

    def prepare(self, digest: str, data: bytes) -> PreparedImage:
        """Return an image as the model takes it.

        Args:
            digest: SHA-256 of `data`, in hexadecimal.
            data: the image file.

        Raises:
            DataError: the file cannot be decoded, or the processor refuses the image.
        """
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
        prepared = self._prepare(digest, data)
        size = sum(array.nbytes for array in prepared.inputs.values())
        with self._lock:
            if digest not in self._cache and size <= CACHE_BYTES:
                self._cache[digest] = prepared
                self._bytes += size
            while self._bytes > CACHE_BYTES:
                _, oldest = self._cache.popitem(last=False)
                self._bytes -= sum(array.nbytes for array in oldest.inputs.values())
        return prepared

    def prepare_as(self, image: PromptImage) -> PreparedImage:
        """Return the image of a run of placeholders as the model takes it.

        Raises:
            DataError: as `prepare`; or the image has another grid than the prompt says.
        """
        prepared = self.prepare(image.digest, image.data)
        if prepared.grid != image.grid:
            raise DataError(
                f"image {image.digest[:12]} has the grid {prepared.grid}, and the prompt says "
                f"{image.grid}: the model's image processor has other settings than when "
                "the prompt was made"
            )
        return prepared

    def check_placeholders(self, ids: Sequence[int], image: PromptImage) -> None:
        """Raise `DataError` if a prompt has other ids than placeholders where an image is."""
        stop = image.start + image.length
        if list(ids[image.start : stop]) != [self.image_id] * image.length:
            raise DataError(
                f"the ids from {image.start} to {stop - 1} are not all {self.image_id}, the "
                "placeholder of an image"
            )

    def _prepare(self, digest: str, data: bytes) -> PreparedImage:
        image = decoded(digest, data)
        try:
            return self._family.prepare(self._processor, image, self._config, self.names)
        except (ValueError, ArithmeticError) as error:
            raise DataError(
                f"image {digest[:12]} of {image.width} by {image.height} pixels cannot be prepared "
                f"by {type(self._processor).__name__}: {error}: crop it, pad it or split it"
            ) from error


def check_file(image: PromptImage) -> None:
    """Raise `DataError` if the file of an image is missing or another one."""
    if hashlib.sha256(image.data).hexdigest() != image.digest:
        raise DataError(f"the bytes of image {image.digest[:12]} are missing or others")


def decoded(digest: str, data: bytes) -> Any:
    """Return an image file as a Pillow image in RGB, turned as its orientation says.

    What is transparent becomes white, as in transformers.

    Raises:
        DataError: the file cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            turned = _eight_bits(ImageOps.exif_transpose(image))
            if "A" in turned.getbands() or "transparency" in turned.info:
                turned = turned.convert("RGBA")
                white = Image.new("RGBA", turned.size, "white")
                turned = Image.alpha_composite(white, turned)
            return turned.convert("RGB")
    # Pillow's plugins raise many types for damaged files
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"image {digest[:12]} cannot be decoded: {error}") from error


def _eight_bits(image: Any) -> Any:
    """Return an image with 8 bits per channel.

    Of 16-bit greys the upper bytes are taken, as Pillow does for 16-bit colours. Its method
    `convert` would make all greys but the darkest white.

    Raises:
        ValueError: the pixels have 32 bits.
    """
    import numpy as np
    from PIL import Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() >= 2**16:
        raise ValueError(
            f"its pixels are 32-bit numbers (Pillow's mode {image.mode}): save it with 8 bits per "
            "channel"
        )
    if "transparency" in image.info:
        pixels = np.where(pixels == image.info["transparency"], 2**16 - 1, pixels)
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def takes_images(config: Any) -> bool:
    """Return whether images are supported for models of a configuration."""
    return getattr(config, "model_type", None) in FAMILIES


def load_image_processor(origin: Origin, config: Any, tokenizer: Any) -> ImageProcessor:
    """Load the image processor of a model from its folder.

    Args:
        origin: where the model is.
        config: configuration of the model; `takes_images` returned True for it.
        tokenizer: tokenizer of the model.

    Raises:
        ModelError: Pillow is missing, or the processor cannot be loaded.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ModelError("images need Pillow: pip install pillow")
    try:
        kind = _processor_class(FAMILIES[config.model_type].processor)
        return ImageProcessor(kind.from_pretrained(origin.folder), config, tokenizer)
    except Exception as error:  # transformers raises many types
        raise cannot_load("image processor", origin, error) from error


def copy_processor(model: str | Path, folder: Path) -> None:
    """Copy the files of a model's processor into another folder.

    Args:
        model: folder, or name on the hub.
        folder: an existing folder.
    """
    source = locate(model, "tokenizer").folder
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _processor_class(name: str) -> Any:
    """Return an image processor class that needs Pillow alone.

    Since some version of transformers 5 its name ends with `Pil`; before, it is the class that is
    not called `Fast`.
    """
    import transformers

    return getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)


# --- families -------------------------------------------------------------------------------
class _Names:
    """Special tokens of a model's prompts."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config, self._tokenizer = config, tokenizer
        self.image = self.of("image_token_id")

    def of(self, setting: str) -> str:
        """Return the token whose id is a setting of the model's configuration."""
        return str(self._tokenizer.convert_ids_to_tokens(int(getattr(self._config, setting))))


class _Family(NamedTuple):
    processor: str
    """Name of the class of image processors."""
    prepare: Callable[[Any, Any, Any, _Names], PreparedImage]
    """Takes the processor, a Pillow image, the model's configuration and special tokens."""
    mark: Callable[[_Names], str] = lambda names: names.image
    """Returns what a chat template writes for an image."""


def _qwen(processor: Any, image: Any, config: Any, names: _Names) -> PreparedImage:
    inputs = processor(images=[image], return_tensors="np")
    _, height, width = (int(size) for size in inputs["image_grid_thw"][0])
    count = height * width // config.vision_config.spatial_merge_size**2
    kept = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    return PreparedImage((height, width), (count,), names.image * count, kept)


def _tiled(processor: Any, image: Any, config: Any, names: _Names) -> PreparedImage:
    """Prepare an image for Idefics 3 and SmolVLM: tiles in rows, and the whole image after them."""
    inputs = processor(images=[image], return_row_col_info=True, return_tensors="np")
    rows, columns = int(inputs["rows"][0][0]), int(inputs["cols"][0][0])
    vision = config.vision_config
    count = int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
    around, run = "<fake_token_around_image>", names.image * count
    text = ""
    for row in range(rows):
        tiles = (f"{around}<row_{row + 1}_col_{n + 1}>{run}" for n in range(columns))
        text += "".join(tiles) + "\n"
    text += ("\n" if rows else "") + f"{around}<global-img>{run}{around}"
    kept = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask")}
    return PreparedImage((rows, columns), (count,) * (rows * columns + 1), text, kept)


def _gemma(processor: Any, image: Any, config: Any, names: _Names) -> PreparedImage:
    inputs = processor(images=[image], return_tensors="np")
    crops = int(inputs["num_crops"][0])
    count = int(config.mm_tokens_per_image)
    first, last = names.of("boi_token_index"), names.of("eoi_token_index")
    whole = f"\n\n{first}{names.image * count}{last}\n\n"
    text = whole
    if crops:
        text = (
            f"Here is the original image {whole} and here are some crops to help you see better "
            + " ".join([whole] * crops)
        )
    kept = {"pixel_values": inputs["pixel_values"]}
    return PreparedImage((1, 1 + crops), (count,) * (1 + crops), text, kept)


_QWEN: Final = _Family("Qwen2VLImageProcessor", _qwen)
FAMILIES: Final[Mapping[str, _Family]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "idefics3": _Family("Idefics3ImageProcessor", _tiled),
    "smolvlm": _Family("SmolVLMImageProcessor", _tiled),
    "gemma3": _Family("Gemma3ImageProcessor", _gemma, lambda names: names.of("boi_token_index")),
}
"""Type of a model's configuration → how its images are prepared."""
