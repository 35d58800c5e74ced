"""Read and describe the recorded images of model calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lightspan.errors import DataError
from lightspan.lightning.episode import Call
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.stores.protocol import Store

DIGITS: Final = 12
"""Number of a digest's digits that identify an image for people."""


def references_of(call: Call) -> dict[str, Mapping[str, Any]]:
    """Return the references to images in the messages of a call, by digest, in order."""
    found: dict[str, Mapping[str, Any]] = {}
    for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        text = "[]" if call.span is None else str(call.span.attributes.get(key, "[]"))
        if '"sha256":"' in text:
            for part in _mappings_in(json.loads(text)):
                is_image = part.get("modality") == "image" or "modality" not in part
                if part.get("type") == "blob" and is_image and isinstance(part.get("sha256"), str):
                    found.setdefault(part["sha256"], part)
    return found


def _mappings_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _mappings_in(item)


async def read_images(store: Store, calls: Iterable[Call]) -> dict[str, Image]:
    """Return the stored images of calls, by digest."""
    digests = dict.fromkeys(digest for call in calls for digest in references_of(call))
    return await store.images(list(digests)) if digests else {}


def image_lines(call: Call, images: Mapping[str, Image]) -> Iterator[str]:
    """Describe the images of a call, one line each.

    Args:
        call: the call.
        images: the stored images, by digest.
    """
    for digest, part in references_of(call).items():
        image = images.get(digest)
        kind = part.get("mime_type", "image") if image is None else image.media_type
        facts = [str(kind), f"{part.get('size', 0):,} bytes"]
        facts += ["not stored"] if image is None else _pixels(image.data)
        yield f"{digest[:DIGITS]}  {', '.join(facts)}"


def _pixels(data: bytes) -> list[str]:
    """Return width and height of an image as text; empty without Pillow or if it cannot read it."""
    try:
        import io

        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(data)) as opened:
            return [f"{opened.width} × {opened.height} pixels"]
    except Exception:  # no Pillow, an unknown format, or a damaged file
        return []


def write_images(images: Iterable[Image], folder: Path) -> list[Path]:
    """Write images to files of a folder, named by digest; return their paths.

    Raises:
        DataError: the folder cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for image in images:
            ending = image.media_type.partition("/")[2].partition("+")[0]
            paths.append(folder / f"{image.digest[:DIGITS]}.{ending}")
            paths[-1].write_bytes(image.data)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    return paths
