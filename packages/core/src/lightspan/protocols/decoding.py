"""Decode token ids that arrive one by one: text deltas, and where a stop string ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightspan.protocols.engine import ChatTokenizer

_REPLACEMENT: Final = "\ufffd"


class IncrementalDecoder:
    """Text deltas of ids that arrive bit by bit; their concatenation is the text of all ids.

    Text that more ids may still change, such as half a UTF-8 character, is held back until they
    arrive or `flush` is called. Only a window of recent ids is decoded again at each push (the
    window starts one delta back, because the text of an id may depend on its left neighbour).
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        """Where the window starts."""
        self._read = 0
        """Ids before this one have their text out, but for `_early` more characters."""
        self._base = ""
        """Text of the ids from `_start` to `_read`."""
        self._early = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids settle."""
        self._ids.extend(ids)
        window = self._decode(self._start)
        stable = window.rstrip(_REPLACEMENT)
        out = len(self._base) + self._early
        if len(stable) <= out or not window.startswith(self._base):
            return ""
        delta = stable[out:]
        if len(stable) < len(window):
            self._early += len(delta)
            return delta
        self._move_on()
        return delta

    def flush(self) -> str:
        """The rest, incomplete characters shown as U+FFFD. The decoder is then at its end."""
        rest = self._decode(self._start)[len(self._base) + self._early :]
        self._move_on()
        return rest

    def _move_on(self) -> None:
        """All ids have their text out: the window starts where the last delta began."""
        self._start, self._read, self._early = self._read, len(self._ids), 0
        self._base = self._decode(self._start)

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip)


class StopWatcher:
    """Says at which token a stop string is complete: engines end there, and so does the gateway
    where an engine sees the rest of an answer only."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def complete(self, ids: Sequence[int]) -> int | None:
        """How many of these further ids complete a stop string; None if all of them do not."""
        for count, token in enumerate(ids, 1):
            text = self._tail + self._decoder.push([token])
            if any(stop in text for stop in self._stops):
                return count
            self._tail = text[len(text) - self._keep :] if self._keep else ""
        return None
