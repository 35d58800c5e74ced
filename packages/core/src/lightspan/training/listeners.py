"""Listeners: plugins that are called after steps and evaluations of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from lightspan.plugins import installed_plugins


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a run: a step, an evaluation or the whole run has ended.

    The metrics of what has ended are already written.
    """

    kind: Literal["step", "evaluation", "end"]
    step: int
    folder: Path
    """Folder of the run, with `metrics.jsonl`."""
    algorithm: str
    """Name of the algorithm."""
    metric: str
    """Name of the reward."""
    trains_weights: bool


Listener = Callable[[RunEvent], Iterable[str] | None]
"""Function that is called with an event and returns lines to print, or None."""


class Listeners:
    """The installed listeners (entry points of `lightspan.listeners`).

    Args:
        note: function that prints the lines of listeners, and a note about a listener that fails.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._listeners: dict[str, Listener] = {}
        for name, point in installed_plugins("listeners").items():
            try:
                self._listeners[name] = point.load()
            except Exception as error:  # a broken plugin must not end a training
                note(f"the listener {name!r} of {point.value} is left out: {error}")

    def notify(self, event: RunEvent) -> None:
        """Call each listener with `event`; disable a listener that raises an exception."""
        for name, listener in list(self._listeners.items()):
            try:
                for line in listener(event) or ():
                    self._note(line)
            except Exception as error:
                del self._listeners[name]
                self._note(f"the listener {name!r} failed and is left out from now on: {error}")
