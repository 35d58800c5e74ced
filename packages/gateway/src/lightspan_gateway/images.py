"""Reading and checking of the images in requests.

An image is decoded once before the engine gets it, so that the engine does not fail at it. Pillow
is imported with the first image.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from lightspan.errors import DataError, ModelError
from lightspan.protocols.engine import ImageTokenizer
from lightspan.schema import semconv as c
from lightspan.schema.images import Image, PromptImage
from lightspan.schema.media import decode_base64, is_reference
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects.base import Message
from lightspan_gateway.dialects.image_parts import (
    ImagePart,
    ImageSource,
    image_places,
    image_source,
)
from lightspan_gateway.image_fetch import ImageFetcher
from lightspan_gateway.limits import ImageLimits

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile


class ImageReader:
    """Convert the images of requests to the one form (`dialects.image_parts`).

    Args:
        limits: limits, and the hosts from which images are fetched.
    """

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._fetcher = ImageFetcher(limits)
        self._checked: WeakValueDictionary[tuple[str, str | None], ImagePart] = (
            WeakValueDictionary()
        )
        """(digest, detail) → part. The calls of a group and the turns of an attempt have equal
        images, which are checked once and shared."""

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._fetcher.close()

    async def read(
        self, body: dict[str, Any], kind: str, known: Sequence[Image] = ()
    ) -> list[tuple[str, Image]]:
        """Replace the images in a request by parts in the one form.

        Args:
            body: the request, which is changed.
            kind: type of the parts that are images (`IMAGE_TYPES`).
            known: the last images of the prompt of the same request when it was made before. An
                image with an address on the web is taken from these, because the address may have
                other bytes now.

        Returns:
            The images, each with the path of its field in the request.

        Raises:
            ApiError: the field of an image is malformed, the image is broken or beyond a limit, or
                it cannot be fetched.
        """
        places, limit = image_places(body, kind), self._limits.max_images
        if not places:
            return []
        if len(places) > limit:
            where = places[limit].where
            raise _invalid(f"{where} is image {limit + 1}: at most {limit} are read", where)
        sources = [image_source(place.parts[place.number], place.where) for place in places]
        earlier: list[Image | None] = [None] * len(places)
        if len(known) >= len(places):
            earlier[:] = known[-len(places) :]
        fetched: dict[int, bytes] = {}
        async with self._fetcher.request() as fetch:
            for number, (source, image) in enumerate(zip(sources, earlier, strict=True)):
                if not is_data_url(source.url):
                    fetched[number] = image.data if image else await fetch(source)
        parts = await asyncio.to_thread(self._parts, sources, fetched)
        for place, part in zip(places, parts, strict=True):
            place.parts[place.number] = part
        return [(s.field, part.image) for s, part in zip(sources, parts, strict=True)]

    def _parts(
        self, sources: Sequence[ImageSource], fetched: Mapping[int, bytes]
    ) -> list[ImagePart]:
        return [self._part(source, fetched.get(number)) for number, source in enumerate(sources)]

    def _part(self, source: ImageSource, data: bytes | None) -> ImagePart:
        """Return the part of an image.

        Args:
            source: where the bytes are.
            data: the bytes; None for those in the `data:` URL.
        """
        if data is None:
            data = decode_url(source, self._limits.max_bytes)
        key = hashlib.sha256(data).hexdigest(), source.detail
        part = self._checked.get(key)
        if part is None:
            media_type = check_image(data, source.field, self._limits)
            image = Image(digest=key[0], media_type=media_type, data=data)
            part = self._checked[key] = _part_of(image, source.detail)
        return part


def is_data_url(url: str) -> bool:
    """Return whether a URL holds the bytes itself."""
    return url[:5].lower() == "data:"


def decode_url(source: ImageSource, limit: int) -> bytes:
    """Return the bytes in a `data:` URL.

    Args:
        source: the URL and its field.
        limit: maximum number of bytes.

    Raises:
        ApiError: 400 if the URL is not base64, or has more bytes.
    """
    head, _, text = source.url.partition(",")
    if not head.lower().endswith(";base64"):
        raise _invalid(
            f"'{source.field}' must begin with data:image/…;base64, before its base64", source.field
        )
    if len(text) * 3 // 4 > limit + 1_000_000:  # white space may be a part of it
        raise _too_large(source.field, limit)
    try:
        data = decode_base64(text)
    except ValueError as error:
        reason = f"'{source.field}' is not valid base64: {error}"
        raise _invalid(reason, source.field) from error
    if not data:
        raise _invalid(f"'{source.field}' has no bytes", source.field)
    if len(data) > limit:
        raise _too_large(source.field, limit)
    return data


# --- checks ---------------------------------------------------------------------------------
def check_image(data: bytes, field: str, limits: ImageLimits) -> str:
    """Decode an image, and return its media type.

    Of an animation the first frame is decoded, as engines and learners do.

    Args:
        data: the file.
        field: path of its field in the request.
        limits: limits of images.

    Raises:
        ApiError: 400 if the file is broken, of another format, or beyond a limit. The limits are
            checked before it is decoded.
    """
    from PIL import Image as pillow, ImageOps

    named = _format(data)
    if named is None:
        raise _invalid(f"'{field}' is of no supported format: send PNG, JPEG, WEBP or GIF", field)
    try:
        image = _open(named, data)
        _check_size(image.size, field, limits)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
    except ApiError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        limit = f"at most {limits.max_pixels:,} pixels are read"
        raise _invalid(f"'{field}' is too large: {limit}", field) from error
    except Exception as error:  # Pillow raises errors of many kinds for broken files
        reason = f"'{field}' is a broken or truncated {named}: {error}"
        raise _invalid(reason, field) from error
    return f"image/{named.lower()}"


def _format(data: bytes) -> str | None:
    """Return the name of a file's format; None for an unsupported one."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "WEBP" if data.startswith(b"RIFF") and data[8:12] == b"WEBP" else None


def _open(named: str, data: bytes) -> ImageFile:
    """Read the header of an image.

    Not by `PIL.Image.open`, which warns of large images by a limit of its own.
    """
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    classes: dict[str, Callable[[io.BytesIO], ImageFile]] = {
        "PNG": PngImageFile,
        "JPEG": JpegImageFile,
        "GIF": GifImageFile,
        "WEBP": WebPImageFile,
    }
    return classes[named](io.BytesIO(data))


def _check_size(size: tuple[int, int], field: str, limits: ImageLimits) -> None:
    width, height = size
    if max(size) > limits.max_side:
        limit = f"at most {limits.max_side:,} pixels on a side are read"
    elif width * height > limits.max_pixels:
        limit = f"at most {limits.max_pixels:,} pixels are read"
    else:
        return
    raise _invalid(f"'{field}' has {width:,} by {height:,} pixels: {limit}", field)


def _too_large(field: str, limit: int) -> ApiError:
    return _invalid(f"'{field}' is too large: at most {limit:,} bytes are read", field)


def _invalid(message: str, field: str) -> ApiError:
    return bad_request(message, field, c.INVALID_IMAGE)


def refused_image(
    images: Mapping[str, Image], fields: Mapping[str, str], tokenizer: ImageTokenizer
) -> ApiError | None:
    """Return the error of the first image that the model cannot take; None if it takes all.

    Args:
        images: digest → image.
        fields: digest → path of the field in the request.
        tokenizer: tokenizer of the model.
    """
    for digest, field in fields.items():
        try:
            tokenizer.render_images([{"role": "user", "content": [_part_of(images[digest], None)]}])
        except DataError as error:
            return _invalid(f"'{field}' cannot be read: {error}", field)
        except ModelError:  # the chat template takes no such chat
            continue
    return None


# --- images of recorded calls ----------------------------------------------------------------
def with_bytes(messages: Sequence[Message], images: Mapping[str, Image]) -> list[Message] | None:
    """Return recorded messages with their images in the one form, instead of references.

    The result is None if an image is missing.

    Args:
        messages: messages of a call's span.
        images: digest → image.
    """
    changed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_with_bytes(part, images) for part in content]
            if None in parts:
                return None
            message = {**message, "content": parts}
        changed.append(message)
    return changed


def _with_bytes(part: Any, images: Mapping[str, Image]) -> Any:
    """Return a part of a recorded message with its image; None if that is missing."""
    if not is_reference(part) or part["modality"] != "image":
        return part
    image = images.get(str(part.get("sha256")))
    return None if image is None else _part_of(image, None)


def _part_of(image: Image, detail: str | None) -> ImagePart:
    text = binascii.b2a_base64(image.data, newline=False).decode()
    return ImagePart.of(image, f"data:{image.media_type};base64,{text}", detail)


def without_data(images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
    """Return the images of a prompt as a store has them, without their bytes."""
    return tuple(msgspec.structs.replace(image, data=b"") for image in images)
