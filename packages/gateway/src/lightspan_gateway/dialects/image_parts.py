"""Images in requests of each API, and the one form that they are converted to. No I/O.

The form is that of chat completions with the bytes in the request:
`{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan_gateway.api_errors import bad_request

IMAGE_TYPES: Final[Mapping[str, str]] = {
    "chat/completions": "image_url",
    "responses": "input_image",
    "messages": "image",
}
"""Path of an API after `/v1/` → type of the parts that are images. An API without an entry has no
images."""
_DETAILS: Final = ("auto", "low", "high", "original")
_BLOCK_FIELDS: Final = frozenset({"type", "source", "cache_control"})
"""Fields of an image of the Messages API; `cache_control` does not affect the answer."""


class ImagePart(dict[str, Any]):
    """A part of a message with an image that was checked, in the one form.

    Dialects accept an image in this class only: in a plain dict it was not checked, because the
    policy's model does not see.
    """

    __slots__ = ("__weakref__", "image")
    image: Image

    @classmethod
    def of(cls, image: Image, url: str, detail: str | None) -> ImagePart:
        """Return the part of an image.

        Args:
            image: the image.
            url: its bytes as a `data:` URL.
            detail: value of the field `detail`; None to leave it out.
        """
        inner = {"url": url, **({} if detail is None else {"detail": detail})}
        part = cls(type="image_url", image_url=inner)
        part.image = image
        return part


class ImageSource(NamedTuple):
    """Where the bytes of an image in a request are."""

    field: str
    """Path of the field with the bytes or the address."""
    url: str
    """A `data:` URL, or an address on the web."""
    detail: str | None = None


class ImagePlace(NamedTuple):
    """The place of an image in a request."""

    parts: list[Any]
    number: int
    """Index of the image in `parts`."""
    where: str
    """Path of the part, such as `messages[0].content[1]`."""


def image_places(body: Mapping[str, Any], kind: str) -> list[ImagePlace]:
    """Return the places of the images in a request's messages, in order.

    Args:
        body: the request.
        kind: type of the parts that are images (`IMAGE_TYPES`).
    """
    field = "input" if kind == "input_image" else "messages"
    return list(_places(body.get(field), field, kind))


def _places(items: Any, where: str, kind: str) -> Iterator[ImagePlace]:
    """Yield the images among `items`, and those in the contents and tool results of `items`."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        place = f"{where}[{index}]"
        if item.get("type") == kind:
            yield ImagePlace(items, index, place)
            continue
        for key in ("content", "output"):
            yield from _places(item.get(key), f"{place}.{key}", kind)


def image_source(part: Mapping[str, Any], where: str) -> ImageSource:
    """Return where the bytes of an image are.

    Args:
        part: the part, of a type in `IMAGE_TYPES`.
        where: path of the part in the request.

    Raises:
        ApiError: 400 naming the field that is missing, malformed or unsupported.
    """
    if part["type"] == "image":
        return _block_source(part, where)
    field = f"{where}.image_url"
    _refuse_file(part, where)
    url: Any = part.get("image_url")
    detail: Any = part.get("detail")
    if part["type"] == "image_url" and isinstance(url, Mapping):
        url, detail = url.get("url"), url.get("detail")
    if not isinstance(url, str) or not url:
        raise bad_request(f"'{field}' must hold a data: URL with base64, or an address", field)
    if detail is not None and detail not in _DETAILS:
        raise bad_request(
            f"the detail of '{field}' must be {', '.join(_DETAILS)}, not {detail!r}", field
        )
    return ImageSource(field, url, detail)


def _block_source(block: Mapping[str, Any], where: str) -> ImageSource:
    """Return where the bytes of an image of the Messages API are."""
    for key in sorted(block.keys() - _BLOCK_FIELDS):
        if block[key] is not None:
            raise bad_request(f"'{where}.{key}' cannot be honoured", f"{where}.{key}")
    field, given = f"{where}.source", block.get("source")
    source: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = source.get("type")
    if kind not in ("base64", "url", "file"):
        raise bad_request(f"'{field}' must be of type 'base64' or 'url', not {kind!r}", field)
    _refuse_file(source, field)
    key = "data" if kind == "base64" else "url"
    field, value = f"{field}.{key}", source.get(key)
    if not isinstance(value, str) or not value:
        raise bad_request(f"'{field}' must be a text", field)
    if kind == "url":
        return ImageSource(field, value)
    return ImageSource(field, f"data:{source.get('media_type')};base64,{value}")


def _refuse_file(fields: Mapping[str, Any], where: str) -> None:
    if fields.get("file_id") is not None:
        field = f"{where}.file_id"
        raise bad_request(
            f"'{field}' names a file at the provider, which this endpoint cannot read: send the "
            "image itself, as base64",
            field,
            c.UNSUPPORTED_CONTENT,
        )
