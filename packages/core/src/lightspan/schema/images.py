"""Images of prompts: their bytes by digest, and their places among the token ids.

The ids of a prompt do not identify it: two images of one size have the same placeholder ids. So
whatever compares prompts compares the images too (`prompt_key`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Self, TypeAlias

import msgspec

_ID_BYTES = 4

MEDIA_TYPE: Final = re.compile(r"image/[a-z0-9.+-]{1,64}")
"""Types that an image may have."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image file, as the app sent it.

    What reads the pixels takes the first frame, and turns it upright as the file's EXIF data say
    (`PIL.ImageOps.exif_transpose`).
    """

    digest: str
    """SHA-256 of `data`, in hexadecimal."""
    media_type: str
    """Type of the file, such as `image/png`."""
    data: bytes

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Self:
        """Return the image of a file."""
        return cls(digest=hashlib.sha256(data).hexdigest(), media_type=media_type, data=data)


ImageReader: TypeAlias = Callable[[Sequence[str]], Awaitable[dict[str, Image]]]
"""Function that returns the stored images among digests (`Store.images`)."""


class PromptImage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of placeholder ids in a prompt, which stand for features of one image.

    Most models have one run per image. A model that cuts an image into tiles has one per tile.
    """

    digest: str
    """`Image.digest`."""
    grid: tuple[int, int]
    """Height and width of the whole image as the model's processor cut it, in patches or tiles."""
    start: int
    """Index of the first placeholder in the prompt."""
    length: int
    """Number of placeholders."""
    first: int = 0
    """Index of the first placeholder's features among those of the image."""
    data: bytes = b""
    """The image file, for engines and learners; empty in a store."""

    @property
    def key(self) -> tuple[str, tuple[int, int], int, int, int]:
        """What identifies the run: all fields but the bytes."""
        return self.digest, self.grid, self.start, self.length, self.first


def prompt_key(prompt: bytes, images: Sequence[PromptImage]) -> bytes:
    """Return packed token ids in which each placeholder is replaced by bits of its image's digest.

    Prompts with equal keys have equal ids and images, and a prompt begins with another one exactly
    if its key does. The chance of an error is 2^-32 for an image of one placeholder, and 2^-256
    from eight placeholders on.

    Args:
        prompt: token ids, int32 little-endian.
        images: the images of the prompt.
    """
    if not images:
        return prompt
    key = bytearray(prompt)
    for image in images:
        name = f"{image.digest} {image.grid} {image.first}".encode()
        start, size = _ID_BYTES * image.start, _ID_BYTES * image.length
        key[start : start + size] = hashlib.shake_256(name).digest(size)
    return bytes(key)


def with_data(
    images: Sequence[PromptImage], files: Mapping[str, Image]
) -> tuple[PromptImage, ...] | None:
    """Return the images of a prompt with their bytes; None if the bytes of one are missing.

    Args:
        images: images as a store has them.
        files: digest → file.
    """
    if any(image.digest not in files for image in images):
        return None
    return tuple(msgspec.structs.replace(i, data=files[i.digest].data) for i in images)
