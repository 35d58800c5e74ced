"""The journal of a search: every evaluation and every reflection, one JSON line each, in order.

A search decides by a seed and by what it is answered. So one that goes on asks the same questions
again, and is answered from here as long as there are answers: its candidates are equal, and no
rollout and no reflection is done twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, TypeVar

import msgspec

from lightspan.errors import CheckpointError, StoreError
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.prompt_discovery import Surveyed


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What the journal is of."""

    library: str
    """What decides, and its version: another one may ask other questions."""
    format: int = 1


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation"):
    """A candidate on some tasks."""

    key: str
    split: str
    """`feedback` or `selection`."""
    candidate: dict[str, str]
    """Prompt → template."""
    seen: list[Evidence]
    """One per task, in their order."""


class Reflection(msgspec.Struct, frozen=True, kw_only=True, tag="reflection"):
    """What a reflection model was asked, and its answer."""

    key: str
    prompt: str
    """Whose other text was asked for."""
    asked: str
    answer: str
    finish_reason: str
    input_tokens: int
    output_tokens: int
    model: str = ""
    """The model that was asked."""


class Survey(msgspec.Struct, frozen=True, kw_only=True, tag="survey"):
    """The app as it is on the selection split, and the texts that were found in it."""

    key: str
    found: Surveyed
    seen: list[Evidence]


Entry = Evaluation | Reflection | Survey
_E = TypeVar("_E", Evaluation, Reflection, Survey)
_LINE: Final = msgspec.json.Decoder(Header | Evaluation | Reflection | Survey)


class SearchLog:
    """A journal in a file, whose folder is made where there is none.

    Args:
        path: of the file.
        library: see `Header`.

    Raises:
        CheckpointError: it is damaged, or was begun by another version of the library.
        StoreError: it cannot be written.
    """

    def __init__(self, path: Path, library: str) -> None:
        self.path = path
        header = Header(library=library)
        entries = self._read()
        self._known = [entry for entry in entries if not isinstance(entry, Header)]
        self._place = 0
        if entries and entries[0] != header:
            raise CheckpointError(
                f"{self.path} was begun with {entries[0]}, and this is {header}: the one would go "
                "on otherwise than the other; install that version of gepa, or start anew"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file: IO[bytes] = self.path.open("ab")
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error
        if not entries:
            self._write(header)

    @property
    def is_replaying(self) -> bool:
        """Whether what is asked next was answered already."""
        return self._place < len(self._known)

    def replayed(self, keys: Sequence[str], kind: type[_E]) -> list[_E | None]:
        """The answers to what is asked now, all at once and perhaps answered in another order; None
        for what was not answered yet.

        Raises:
            CheckpointError: something else was asked at this place.
        """
        found: list[_E | None] = [None] * len(keys)
        while self.is_replaying and None in found:
            entry = self._known[self._place]
            open_places = (n for n, key in enumerate(keys) if found[n] is None and key == entry.key)
            place = next(open_places, None)
            if not isinstance(entry, kind) or place is None:
                raise CheckpointError(
                    f"{self.path}: entry {self._place + 1} is not what is asked now, so the run "
                    "cannot go on as it began: start anew in another folder"
                )
            found[place] = entry
            self._place += 1
        return found

    def goes_on_with(self, keys: Sequence[str]) -> bool:
        """Whether one of these may be asked now: it is what was asked next, or nothing was."""
        return not self.is_replaying or self._known[self._place].key in keys

    def add(self, entry: Entry) -> None:
        """Keep an answer; it survives whatever happens next.

        Raises:
            StoreError: it cannot be written.
        """
        self._write(entry)
        self._known.append(entry)
        self._place += 1

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: Header | Entry) -> None:
        try:
            self._file.write(msgspec.json.encode(entry) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written: {error.strerror}; see to its disk, then go on "
                "with resume=True"
            ) from error

    def _read(self) -> list[Header | Entry]:
        """Every whole line. A process that was killed while writing leaves the rest of one, which
        is cut off: the next line would go on with it."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self.path, len(whole))
        entries = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entries.append(_LINE.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{self.path}, line {number} is damaged: {error}") from error
        return entries
