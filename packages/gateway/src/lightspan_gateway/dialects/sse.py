"""Server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"

_LINE_ENDS: Final = {
    character.encode(): f"\\u{ord(character):04x}".encode()
    for character in ("\u0085", "\u2028", "\u2029")
}


def event_of(payload: bytes) -> bytes:
    """Return the server-sent event with the JSON `payload`.

    U+0085, U+2028 and U+2029 are escaped, because some clients split lines at these characters.
    """
    for raw, escaped in _LINE_ENDS.items():
        payload = payload.replace(raw, escaped)
    return b"data: " + payload + b"\n\n"


class Events:
    """Format of a stream of events without names."""

    end = DONE

    def of(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        """Encode chunks as server-sent events."""
        return b"".join(map(self.one, chunks))

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        """Encode a chunk as a server-sent event."""
        return event_of(msgspec.json.encode(chunk))


class TypedEvents(Events):
    """Format of a stream in which the field `type` of each chunk names its event.

    No end mark follows the last event.
    """

    end = b""

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        return b"event: " + str(chunk["type"]).encode() + b"\n" + super().one(chunk)
