"""Show progress as a bar, and the learning curve, in a notebook."""

from __future__ import annotations

import html
import sys
import time
from pathlib import Path
from typing import Any, Final

from lightspan.progress import PlainReporter, describe

INTERVAL_S: Final = 0.5
"""Minimum seconds between two updates of the bar."""


class NotebookReporter(PlainReporter):
    """A reporter that shows a progress bar in the output of the cell.

    Lines and summaries are printed, as elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: Any = None

    def start(self, title: str, total: int) -> None:
        super().start(title, total)
        self._show("")

    def advance(self, count: int = 1, **values: float | str) -> None:
        self._done += count
        now = time.monotonic()
        if self._title and (now - self._shown >= INTERVAL_S or self._done >= self._total):
            self._shown = now
            self._show("  ".join(filter(None, [describe(values), self._remaining()])))

    def finish(self, summary: str = "") -> None:
        super().finish(summary)
        self._show("")

    def _show(self, text: str) -> None:
        """Show the bar of the current task, or an empty output if there is no task."""
        from IPython.display import HTML, display

        bar = (
            f"<progress value='{self._done}' max='{self._total}'></progress> "
            f"{html.escape(self._title)} {self._done}/{self._total} {html.escape(text)}"
        )
        content = HTML(bar if self._title else "")
        if self._bar is None:
            self._bar = display(content, display_id=True)
        else:
            self._bar.update(content)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


_curves: dict[tuple[Path, int], Any] = {}
"""Path of a picture, and number of a cell's execution → the output of the cell that shows it."""


def show_picture(path: Path) -> None:
    """Show a picture in the output of the cell, in place of an earlier one of the same path."""
    from IPython import get_ipython
    from IPython.display import Image, display

    picture, key = Image(filename=str(path), width=640), (path, get_ipython().execution_count)
    if key in _curves:
        _curves[key].update(picture)
    else:
        _curves[key] = display(picture, display_id=True)
