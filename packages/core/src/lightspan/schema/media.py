"""Images, sounds and files in messages: what is recorded is a reference, never their bytes.

A part of a message that is not text becomes a part as OpenTelemetry has it: a `blob` (bytes that
were sent along: their size and digest), a `uri`, or a `file` (the id of one uploaded before).
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from lightspan.schema.redaction import kept_text

Part = dict[str, Any]

MAX_TEXT_LENGTH: Final = 1_024
"""Characters that are kept of an address or a file's name."""

DEEPEST: Final = 64
"""Levels that are kept of a part: what reads it goes down by calling itself."""
_MAX_OPAQUE_LENGTH: Final = 4_096
"""Characters of base64 that are taken for text, in a part of no known kind."""
_FEWEST_KINDS: Final = 48
"""Different characters of base64's 64 that so many bytes need: words without spaces, a hash in
hexadecimal or a long number have fewer."""
_MODALITIES: Final = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_generation_call"), "image"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
"""Type of a part in any of the dialects → what it holds."""
_INSIDE: Final = ("image_url", "input_audio", "audio", "audio_url", "video_url", "file", "source")
"""Fields that hold the rest of a part."""
_BYTES: Final = ("data", "file_data", "base64", "result")
_ADDRESSES: Final = ("url", "image_url", "file_url", "audio_url", "video_url", "uri")
_MEDIA_TYPES: Final = ("media_type", "mime_type", "format")
_DATA_URL: Final = re.compile(r"data:([^;,]*)(?:;[^;,]*)*,", re.IGNORECASE)
_SURE_DATA_URL: Final = re.compile(
    r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+(?:=[^;,\s]*)?)*;base64,", re.IGNORECASE
)
"""Where any text may stand: some begin with "Data:"."""
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\-\r\n]+=*\s*")


def is_media(part: Any) -> bool:
    """Whether a part of a message is an image, a sound, a video or a file."""
    return isinstance(part, Mapping) and str(part.get("type")) in _MODALITIES


def holds_bytes(part: Any) -> bool:
    """Whether of a part of a message a reference is recorded, however long it is."""
    return is_media(part) and not _is_text(part.get("source"))


def is_reference(part: Any) -> bool:
    """Whether a part of a recorded message is a reference."""
    return isinstance(part, Mapping) and "modality" in part


def reference(part: Mapping[str, Any], levels: int = DEEPEST) -> Part:
    """The part with references in place of bytes; one without any stays what it is, so many levels
    deep."""
    modality = _MODALITIES.get(str(part.get("type")))
    if modality is None:
        return {key: _without_bytes(value, levels) for key, value in part.items()}
    fields = dict(part)
    for key in _INSIDE:
        if isinstance(part.get(key), Mapping):
            fields = {**fields, **part[key]}
    if _is_text(part.get("source")):
        return {"type": "text", "content": part["source"]["data"]}
    known: Part = {"modality": modality}
    media_type = _first(fields, _MEDIA_TYPES)
    if media_type:
        known["mime_type"] = kept_text(media_type, MAX_TEXT_LENGTH)
    if isinstance(fields.get("filename"), str):
        known["filename"] = kept_text(fields["filename"], MAX_TEXT_LENGTH)
    data, address = _first(fields, _BYTES), _first(fields, _ADDRESSES)
    if data or address.lower().startswith("data:"):
        return {"type": "blob", **known, **_digest(data or address)}
    if address:
        return {"type": "uri", **known, **_address(address)}
    file_id = fields.get("file_id") or (fields.get("id") if modality == "audio" else None)
    if isinstance(file_id, str):
        return {"type": "file", **known, "file_id": kept_text(file_id, MAX_TEXT_LENGTH)}
    return {key: _without_bytes(value, levels) for key, value in part.items()}


def _is_text(source: Any) -> bool:
    """Whether a document is plain text, which stands in it as it is."""
    if not isinstance(source, Mapping) or source.get("type") != "text":
        return False
    return isinstance(source.get("data"), str)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of these that is a text; empty if none is."""
    texts = (fields[name] for name in names if isinstance(fields.get(name), str))
    return next(filter(None, texts), "")


def _without_bytes(value: Any, levels: int) -> Any:
    """The value of a part that no dialect here knows, with a reference where bytes stand."""
    if isinstance(value, Mapping | list | tuple) and levels == 0:
        return "…"
    if isinstance(value, Mapping):
        return reference(value, levels - 1)
    if isinstance(value, list | tuple):
        return [_without_bytes(one, levels - 1) for one in value]
    if isinstance(value, str) and _is_bytes(value):
        return {"type": "blob", **_digest(value)}
    return value


def _is_bytes(text: str) -> bool:
    if text[:5].lower() == "data:":
        return _SURE_DATA_URL.match(text) is not None
    if len(text) <= _MAX_OPAQUE_LENGTH or _BASE64.fullmatch(text) is None:
        return False
    return len(set(text[:_MAX_OPAQUE_LENGTH])) >= _FEWEST_KINDS


def _digest(text: str) -> Part:
    """Size and digest of the bytes that a `data:` URL or base64 says."""
    known: Part = {}
    start = _DATA_URL.match(text)
    if start is not None:
        if start[1]:
            known["mime_type"] = kept_text(start[1], MAX_TEXT_LENGTH)
        text = text[start.end() :]
    try:
        data = binascii.a2b_base64(text)
    except ValueError:  # no base64, or not whole: the text itself tells it from others
        data = text.encode(errors="replace")
    return {**known, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _address(url: str) -> Part:
    """The address without a password, and without its query, where signatures and tokens are; the
    digest of the whole tells two of them apart."""
    try:
        parts = urlsplit(url)
        plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    except ValueError:  # brackets that are no address
        plain = url.partition("?")[0]
    known: Part = {"uri": kept_text(plain, MAX_TEXT_LENGTH)}
    if plain != url:
        known["sha256"] = hashlib.sha256(url.encode(errors="replace")).hexdigest()
    return known
