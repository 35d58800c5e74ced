"""Read JSON whose texts end inside a character, and join the halves that a stream has.

A token may end inside a character, and some endpoints stream the text of each token. The half is
then an escape (`\\ud83d`, a surrogate) or some of the UTF-8 bytes of the character. Neither is
valid in JSON.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from lightspan.schema.redaction import clean_text

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_BYTES: Final = re.compile("[\udc80-\udcff]+")
"""Bytes of halves, as `surrogateescape` decodes them."""
_decoder = msgspec.json.Decoder(dict[str, Any])


def decode_object(body: bytes) -> tuple[dict[str, Any], bool]:
    """Decode a JSON object.

    Returns:
        The object, and whether it is valid JSON. If it is not, its texts may have surrogates, and
        `NaN` and `Infinity` are None.

    Raises:
        ValueError: `body` is no JSON object.
    """
    try:
        return _decoder.decode(body), True
    except ValueError as error:  # also UnicodeDecodeError
        try:
            text = body.decode(errors="surrogateescape")
            value = json.loads(text, parse_constant=lambda name: None)
        except RecursionError:
            raise error from None
        if not isinstance(value, dict):
            raise
        return value, False


def encode_object(value: Any) -> bytes:
    """Encode an object as valid JSON, with U+FFFD for each half."""
    return clean_text(json.dumps(value, ensure_ascii=False)).encode()


class HalfCharacters:
    """Join the halves of characters in the texts of one stream."""

    def __init__(self) -> None:
        self._halves: dict[str | int, str] = {}

    def join(self, field: str | int, text: str) -> str:
        """Return a text with the half before it, and without a half at its end.

        The half at its end is put before the next text of the field. A half whose other half does
        not follow becomes U+FFFD.

        Args:
            field: identifies the field of the stream to which the text belongs.
            text: the next part of the field.
        """
        text = self._halves.pop(field, "") + text if text else text
        if not _SURROGATE.search(text):
            return text
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if "\ud800" <= text[-1] <= "\udbff":
            self._halves[field], text = text[-1], text[:-1]

        def decoded(match: re.Match[str]) -> str:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            start = decoder.decode(match[0].encode(errors="surrogateescape"))
            rest, _ = decoder.getstate()
            if rest and match.end() == len(text):
                self._halves[field] = rest.decode(errors="surrogateescape")
                return start
            return start + REPLACEMENT if rest else start

        return clean_text(_BYTES.sub(decoded, text))

    def end(self) -> Iterator[str | int]:
        """Yield, and forget, the fields that ended with a half."""
        while self._halves:
            yield self._halves.popitem()[0]
