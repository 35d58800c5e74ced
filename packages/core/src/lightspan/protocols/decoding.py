"""Incremental decoding of token ids into text, and detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightspan.protocols.engine import ChatTokenizer

_REPLACEMENT: Final = "\ufffd"


class IncrementalDecoder:
    """Decoder of a stream of ids into pieces of text, whose concatenation is the text of all ids.

    Text that further ids may change, such as half a UTF-8 character, is held back until further ids
    arrive or `flush` is called. Each push decodes a window of recent ids only. The window starts
    with the ids of the last piece, because the text of an id may depend on the id before it.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        """Index at which the window starts."""
        self._read = 0
        """Index of the first id whose text was not returned, except for `_early` characters."""
        self._base = ""
        """Text of the ids from `_start` to `_read`."""
        self._early = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the new text that no further ids can change. It may be empty."""
        self._ids.extend(ids)
        window = self._decode(self._start)
        stable = window.rstrip(_REPLACEMENT)
        returned = len(self._base) + self._early
        if len(stable) <= returned or not window.startswith(self._base):
            return ""
        delta = stable[returned:]
        if len(stable) < len(window):
            self._early += len(delta)
            return delta
        self._advance()
        return delta

    def flush(self) -> str:
        """Return the text that was held back, with incomplete characters as U+FFFD."""
        rest = self._decode(self._start)[len(self._base) + self._early :]
        self._advance()
        return rest

    def _advance(self) -> None:
        """Move the window, so that it begins with the last returned text.

        The text of all ids must have been returned.
        """
        self._start, self._read, self._early = self._read, len(self._ids), 0
        self._base = self._decode(self._start)

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip)


class StopWatcher:
    """Detector of stop strings in a stream of ids.

    Engines use it. The gateway uses it if an engine continues the answer of an earlier try, because
    the engine searches only the new ids for stop strings.
    """

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._overlap = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def complete(self, ids: Sequence[int]) -> int | None:
        """Add ids; return how many there are up to the one that completes a stop string.

        None if the ids complete no stop string.
        """
        for count, token in enumerate(ids, 1):
            text = self._tail + self._decoder.push([token])
            if any(stop in text for stop in self._stops):
                return count
            self._tail = text[len(text) - self._overlap :] if self._overlap else ""
        return None
