"""Show progress as bars on a terminal."""

from __future__ import annotations

from rich import progress
from rich.console import Console

from lightspan.progress import describe, escape_control


class TerminalReporter:
    """A reporter that shows progress bars, with the package rich.

    Args:
        console: console of rich; None for a console on the standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[values]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=self._console,
            transient=True,
        )
        self._task: progress.TaskID | None = None

    def start(self, title: str, total: int) -> None:
        self.finish()
        self._progress.start()
        self._task = self._progress.add_task(escape_control(title), total=total, values="")

    def advance(self, count: int = 1, **values: float | str) -> None:
        if self._task is not None:
            self._progress.update(
                self._task, advance=count, values=escape_control(describe(values))
            )

    def finish(self, summary: str = "") -> None:
        if self._task is not None:
            self._progress.refresh()
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None
        if summary:
            self.line(summary)

    def line(self, text: str) -> None:
        self._console.print(escape_control(text), highlight=False, markup=False, soft_wrap=True)
