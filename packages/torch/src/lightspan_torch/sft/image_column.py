"""Put the images of a row into its messages. TRL and `datasets` keep them in a column of their own.

A message then has parts `{"type": "image"}` without bytes, which stand for the images in order.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from typing import Any

from lightspan.errors import DataError


def with_images(messages: list[Any], row: Mapping[str, Any], label: str) -> list[Any]:
    """Return messages whose parts `{"type": "image"}` have the images of the row's column.

    Args:
        messages: the messages.
        row: the row. Its column `images`, or `image` with one, has images of Pillow, bytes, or
            `{"bytes": …}` of `datasets`. If it has none, the messages are returned as they are.
        label: name of the row for error messages.

    Raises:
        DataError: there are more or fewer images than parts, or an image is of another type.
    """
    images = row.get("images")
    if images is None and row.get("image") is not None:
        images = [row["image"]]
    if images is None:
        return messages
    places = sum(map(_is_place, _parts(messages)))
    if not isinstance(images, list | tuple) or len(images) != places:
        count = len(images) if isinstance(images, list | tuple) else repr(images)[:100]
        raise DataError(
            f'{label}: its messages have {places} parts {{"type": "image"}}, and its column of '
            f"images has {count}"
        )
    files = (_part(image, f"{label}.images[{index}]") for index, image in enumerate(images))
    return [_filled(message, files) for message in messages]


def _parts(messages: list[Any]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list | tuple) else ()


def _is_place(part: Any) -> bool:
    """Return whether a part stands for an image; rows of `datasets` have its other keys as None."""
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return False
    return not any(value for key, value in part.items() if key != "type")


def _filled(message: Any, files: Iterator[dict[str, Any]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [next(files) if _is_place(part) else part for part in content]}


def _part(image: Any, label: str) -> dict[str, Any]:
    """Return an image as a part of OpenAI's chats.

    Raises:
        DataError: the image is of another type.
    """
    data: Any = image.get("bytes") if isinstance(image, Mapping) else image
    if hasattr(data, "save"):  # of Pillow
        file = io.BytesIO()
        data.save(file, "PNG")
        data = file.getvalue()
    if not isinstance(data, bytes):
        raise DataError(f"{label} must be an image of Pillow or bytes, not {type(image).__name__}")
    # the format is read from the bytes, not from the type
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
