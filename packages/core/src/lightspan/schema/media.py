"""Replace images, sounds and files in recorded messages by short references.

A part of a message that is not text becomes one of OpenTelemetry's parts: a `blob` (size and digest
of bytes in the message), a `uri`, or a `file` (id of an uploaded file). `images_into` keeps the
bytes of images.
"""

from __future__ import annotations

import binascii
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit, urlunsplit

from lightspan.schema.images import MEDIA_TYPE, Image
from lightspan.schema.redaction import bounded_text

_warn_once = cache(logging.getLogger(__name__).warning)

Part = dict[str, Any]

MAX_TEXT_LENGTH: Final = 1_024
"""Maximum characters of a recorded URL or file name."""

MAX_IMAGE_BYTES: Final = 20 * 2**20
"""Maximum size of a recorded image. Of a larger one, only the reference is recorded."""

_MAX_OPAQUE_LENGTH: Final = 4_096
"""Maximum number of characters of base64 that count as text in a part of an unknown type. Longer
base64 counts as bytes."""
_MIN_DISTINCT: Final = 48
"""Minimum number of distinct characters of long base64 that counts as bytes. Words without spaces,
a hash in hexadecimal or a long number have fewer."""
_MODALITIES: Final = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_generation_call"), "image"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Type of a part, in any of the APIs → modality."""
_INSIDE: Final = ("image_url", "input_audio", "audio", "audio_url", "video_url", "file", "source")
"""Keys under which an API nests the fields of a part, as `image_url` in `{"type": "image_url",
"image_url": {"url": …}}`."""
_BYTES: Final = ("data", "file_data", "base64", "result")
_ADDRESSES: Final = ("url", "image_url", "file_url", "audio_url", "video_url", "uri")
_MEDIA_TYPES: Final = ("media_type", "mime_type", "format")
_DATA_URL: Final = re.compile(r"data:([^;,]*)(?:;[^;,]*)*,", re.IGNORECASE)
_STRICT_DATA_URL: Final = re.compile(
    r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+(?:=[^;,\s]*)?)*;base64,", re.IGNORECASE
)
"""Start of a `data:` URL, in a field whose text may also begin with "Data:" by chance."""
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\-\r\n]+=*\s*")
_SIGNATURES: Final = re.compile(
    rb"(?P<png>\x89PNG)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<webp>RIFF....WEBP)", re.DOTALL
)
"""Start of an image file; the group is named like the type."""
_DIGESTS: Final = re.compile('"sha256":"([0-9a-f]{64})"')
_found: ContextVar[dict[str, Image] | None] = ContextVar("lightspan_images", default=None)


@contextmanager
def images_into(found: dict[str, Image] | None) -> Iterator[None]:
    """Add the images that become references in the `with` block to `found`, by digest."""
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


def digests_in(attributes: Mapping[str, Any]) -> set[str]:
    """Return the digests in the references in a span's messages to images, sounds and files."""
    return {digest for value in attributes.values() for digest in _DIGESTS.findall(str(value))}


def is_media(part: Any) -> bool:
    """Return whether a part of a message is an image, a sound, a video or a file."""
    return isinstance(part, Mapping) and str(part.get("type")) in _MODALITIES


def is_reference(part: Any) -> bool:
    """Return whether a part of a recorded message is a reference to an image, sound or file."""
    return isinstance(part, Mapping) and "modality" in part


def with_image(part: Any, images: Mapping[str, Image]) -> Any:
    """Return a part of a recorded message, or the image of `images` to which it refers.

    The image is a part `image_url` of OpenAI's chats, with a `data:` URL.
    """
    image = images.get(str(part.get("sha256"))) if is_reference(part) else None
    if image is None:
        return part
    data = binascii.b2a_base64(image.data, newline=False).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}


def reference(part: Mapping[str, Any]) -> Part:
    """Return a part of a message with its bytes replaced by references."""
    modality = _MODALITIES.get(str(part.get("type")))
    if modality is None:
        return {key: _without_bytes(value) for key, value in part.items()}
    fields = dict(part)
    for key in _INSIDE:
        if isinstance(part.get(key), Mapping):
            fields = {**fields, **part[key]}
    if fields["type"] == "text" and isinstance(fields.get("data"), str):  # a document's `source`
        return {"type": "text", "content": fields["data"]}
    common: Part = {"modality": modality}
    for name, keys in (("mime_type", _MEDIA_TYPES), ("filename", ("filename",))):
        if text := _first(fields, keys):
            common[name] = bounded_text(text, MAX_TEXT_LENGTH)
    data, address = _first(fields, _BYTES), _first(fields, _ADDRESSES)
    if data or address.lower().startswith("data:"):
        return _blob(data or address, **common)
    if address:
        return {"type": "uri", **common, **_address(address)}
    file_id = fields.get("file_id") or (fields.get("id") if modality == "audio" else None)
    if isinstance(file_id, str):
        return {"type": "file", **common, "file_id": bounded_text(file_id, MAX_TEXT_LENGTH)}
    return {key: _without_bytes(value) for key, value in part.items()}


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the first non-empty text among the fields `names`; `""` if there is none."""
    texts = (fields[name] for name in names if isinstance(fields.get(name), str))
    return next(filter(None, texts), "")


def _without_bytes(value: Any) -> Any:
    """Return the value of a field with each long base64 text replaced by a reference.

    The field belongs to a part of an unknown type, so any long base64 text may be bytes.
    """
    if isinstance(value, Mapping):
        return reference(value)
    if isinstance(value, list | tuple):
        return [_without_bytes(item) for item in value]
    return _blob(value) if isinstance(value, str) and _is_bytes(value) else value


def _is_bytes(text: str) -> bool:
    if text[:5].lower() == "data:":
        return _STRICT_DATA_URL.match(text) is not None
    is_long_base64 = len(text) > _MAX_OPAQUE_LENGTH and _BASE64.fullmatch(text) is not None
    return is_long_base64 and len(set(text[:_MAX_OPAQUE_LENGTH])) >= _MIN_DISTINCT


def _blob(text: str, **fields: Any) -> Part:
    """Return a `blob` part with size and SHA-256 digest of the bytes in a `data:` URL or base64.

    Args:
        text: the URL or the base64 text.
        fields: further fields of the part.
    """
    part: Part = {"type": "blob", **fields}
    start = _DATA_URL.match(text)
    if start is not None:
        if start[1]:
            part["mime_type"] = bounded_text(start[1], MAX_TEXT_LENGTH)
        text = text[start.end() :]
    is_file = start is None or "base64" in start[0].lower()
    try:
        data = decode_base64(text) if is_file else unquote_to_bytes(text)
    except ValueError:  # not base64, or truncated: the digest of the text distinguishes it
        data, is_file = text.encode(errors="replace"), False
    digest = hashlib.sha256(data).hexdigest()
    part |= {"size": len(data), "sha256": digest}
    if not is_file or not (media_type := _image_type(part, data)):
        return part
    part["mime_type"], found = media_type, _found.get()
    if found is not None and digest not in found:
        if len(data) <= MAX_IMAGE_BYTES:
            found[digest] = Image(digest=digest, media_type=media_type, data=data)
        else:
            _warn_once("lightspan: image %s has %d bytes: it is not recorded", digest, len(data))
    return part


def decode_base64(text: str) -> bytes:
    """Decode base64, which may be URL-safe, percent-encoded or broken into lines.

    Raises:
        ValueError: the text is not base64.
    """
    base64 = "".join(unquote(text).split()).replace("-", "+").replace("_", "/")
    return binascii.a2b_base64(base64, strict_mode=True)


def _image_type(part: Part, data: bytes) -> str:
    """Return the type of the image in a `blob` part, by its bytes; empty if it is no image.

    Bytes of another format have the type that the message declares.
    """
    if part.get("modality") not in ("image", None):
        return ""
    if signature := _SIGNATURES.match(data):
        return f"image/{signature.lastgroup}"
    declared = str(part.get("mime_type", "")).lower()
    return declared if MEDIA_TYPE.fullmatch(declared) else ""


def _address(url: str) -> Part:
    """Return a `uri` part for a URL without its user, password, query and fragment.

    These may hold secrets. If the URL has one of them, the part also has the SHA-256 digest of the
    whole URL.
    """
    try:
        parts = urlsplit(url)
        public = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    except ValueError:  # brackets that enclose no IPv6 address
        public = url.partition("?")[0]
    part: Part = {"uri": bounded_text(public, MAX_TEXT_LENGTH)}
    if public != url:
        part["sha256"] = hashlib.sha256(url.encode(errors="replace")).hexdigest()
    return part
