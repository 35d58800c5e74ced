"""Listeners: plugins that are called when a run has moved on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from lightspan.plugins import installed_plugins


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A step, an evaluation or the end of a run, after its metrics were written to the folder."""

    kind: Literal["step", "evaluation", "end"]
    step: int
    folder: Path
    """The run's, with `metrics.jsonl`."""
    algorithm: str
    """The name of the algorithm."""
    metric: str
    """The name of the reward."""
    trains_weights: bool


Listener = Callable[[RunEvent], object]


class Listeners:
    """Every listener that is installed (entry points of `lightspan.listeners`).

    Args:
        note: called with the error of a listener, which is left out from then on.
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
        """Call each listener; one that raises is noted and left out from then on."""
        for name, listener in list(self._listeners.items()):
            try:
                listener(event)
            except Exception as error:
                del self._listeners[name]
                self._note(f"the listener {name!r} failed and is left out from now on: {error}")
