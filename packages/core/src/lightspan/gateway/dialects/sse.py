"""Server-sent events: how chunks travel in a stream."""

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
    """One event. Clients split lines where Unicode does, so JSON's raw line ends are escaped."""
    for raw, escaped in _LINE_ENDS.items():
        payload = payload.replace(raw, escaped)
    return b"data: " + payload + b"\n\n"


class Events:
    """A stream of nameless events."""

    end = DONE

    def of(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        """The chunks as they are sent."""
        return b"".join(map(self.one, chunks))

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        """One chunk."""
        return event_of(msgspec.json.encode(chunk))


class TypedEvents(Events):
    """A stream of events named after their type, and nothing after them."""

    end = b""

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        return b"event: " + str(chunk["type"]).encode() + b"\n" + super().one(chunk)
