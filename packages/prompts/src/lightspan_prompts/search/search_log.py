"""Log of a search: every evaluation and reflection in order, one JSON line each.

A search depends only on its seed and on these results. So a resumed search makes the same requests
again, and gets the answers from the log until its end. It arrives at the same candidates without
repeating a rollout or a reflection.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightspan.errors import CheckpointError
from lightspan.training.jsonl_log import append, read
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.prompt_discovery import Surveyed

INTERRUPTED: Final = "interrupted"
"""`Evaluation.split` of rollouts that an earlier process began without getting their results."""
REFUSED: Final = "refused"
"""`Reflection.finish_reason` if the endpoint refused the question, so that there is no answer."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """First line of the log."""

    library: str
    """Name and version of the library that makes the search's decisions."""
    format: int = 1


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation"):
    """Results of a candidate on some tasks."""

    key: str
    split: str
    """`feedback` or `selection`, or `INTERRUPTED`, which answers no request."""
    candidate: dict[str, str]
    """Prompt → template."""
    seen: list[Evidence]
    """Evidence per task, in order."""
    is_final: bool = False
    """Whether only the end of the search follows. With a larger budget the search goes on instead;
    a later end reuses these results if it asks for the same."""


class Reflection(msgspec.Struct, frozen=True, kw_only=True, tag="reflection"):
    """A request to a reflection model and its answer."""

    key: str
    prompt: str
    """Name of the prompt to rewrite."""
    asked: str
    answer: str
    finish_reason: str
    input_tokens: int
    output_tokens: int
    model: str = ""
    """The model's name."""
    is_estimated: bool = False
    """Whether the endpoint counts no tokens, so they are estimated."""


class Survey(msgspec.Struct, frozen=True, kw_only=True, tag="survey"):
    """Rollouts of the unchanged app, and the texts that were discovered in its calls."""

    key: str
    found: Surveyed
    seen: list[Evidence]


Entry = Evaluation | Reflection | Survey
E = TypeVar("E", Evaluation, Reflection, Survey)
LINE: Any = Header | Evaluation | Reflection | Survey
"""A line of the log."""
_REMEDY = "delete it and all lines that follow, which are then done again"


class SearchLog:
    """A log in a file, whose folder is created if missing.

    Args:
        path: path of the file.
        library: name and version of the library that makes the decisions.

    Raises:
        CheckpointError: the log was begun by another version of the library.
        ConfigError: the log is damaged or cannot be read.
        StoreError: the log cannot be written.
    """

    def __init__(self, path: Path, library: str) -> None:
        self.path = path
        header = Header(library=library)
        entries: list[Header | Entry] = read(path, LINE, _REMEDY)
        self._entries = [entry for entry in entries if not isinstance(entry, Header)]
        self._place = 0
        if entries and entries[0] != header:
            raise CheckpointError(
                f"{self.path} was begun with {entries[0]}, and this is {header}, which would "
                "decide differently; install that version of gepa, or start anew"
            )
        if not entries:
            append(path, [header])
        self._interrupted: list[Evaluation] = []
        self._pass_interrupted()

    @property
    def is_replaying(self) -> bool:
        """Return whether the log has more entries, which answer the next requests."""
        return self._place < len(self._entries)

    def replayed(self, keys: Sequence[str], kind: type[E]) -> list[E | None]:
        """Return the logged answers to concurrent requests; None for a request that is not logged.

        Args:
            keys: keys of the requests, which may be logged in another order.
            kind: type of the requests' log entries.

        Raises:
            CheckpointError: the log has another request at this position.
        """
        answers: list[E | None] = [None] * len(keys)
        while self.is_replaying and None in answers:
            entry = self._entries[self._place]
            open_places = (
                n for n, key in enumerate(keys) if answers[n] is None and key == entry.key
            )
            place = next(open_places, None)
            if not isinstance(entry, kind) or place is None:
                raise CheckpointError(
                    f"{self.path}: entry {self._place + 1} differs from the current request, so "
                    "the run cannot be resumed: start anew in another folder"
                )
            answers[place] = entry
            self._place += 1
            self._pass_interrupted()
        return answers

    def take_finals(self) -> list[Evaluation]:
        """Return the final evaluations that come next, and continue behind them."""
        finals = []
        while self.is_replaying:
            entry = self._entries[self._place]
            if not isinstance(entry, Evaluation) or not entry.is_final:
                break
            finals.append(entry)
            self._place += 1
            self._pass_interrupted()
        return finals

    def _pass_interrupted(self) -> None:
        while self.is_replaying:
            entry = self._entries[self._place]
            if not isinstance(entry, Evaluation) or entry.split != INTERRUPTED:
                break
            self._interrupted.append(entry)
            self._place += 1

    def take_interrupted(self) -> list[Evaluation]:
        """Return the interrupted rollouts before this position that were not returned before."""
        taken, self._interrupted = self._interrupted, []
        return taken

    def add_interrupted(self, seen: list[Evidence]) -> None:
        """Append interrupted rollouts, behind all entries, and fsync.

        Raises:
            StoreError: the log cannot be written.
        """
        entry = Evaluation(key="", split=INTERRUPTED, candidate={}, seen=seen)
        append(self.path, [entry])
        self._entries.append(entry)
        self._pass_interrupted()

    @property
    def rollout_ids(self) -> set[str]:
        """Return the ids of all rollouts in the log."""
        runs = [entry.seen for entry in self._entries if not isinstance(entry, Reflection)]
        return {one.rollout_id for seen in runs for one in seen}

    def unused(self) -> list[Entry]:
        """Return the entries that no request has asked for."""
        return self._entries[self._place :]

    def may_continue_with(self, keys: Sequence[str]) -> bool:
        """Return whether a request with one of `keys` may come next.

        True at the end of the log, or if the next entry has one of these keys.
        """
        return not self.is_replaying or self._entries[self._place].key in keys

    def add(self, entry: Entry) -> None:
        """Append an entry and fsync.

        Raises:
            StoreError: the log cannot be written.
        """
        append(self.path, [entry])
        self._entries.append(entry)
        self._place += 1
