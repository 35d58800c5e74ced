"""Progress for a person who watches: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Any, Final, Protocol, TextIO

PLAIN_INTERVAL_S: Final = 10.0

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but newline and tab, and those that turn the direction of writing."""


def escape_control(text: str) -> str:
    """The text as a terminal may get it: what would command the terminal is written out (`\\x1b`).

    Names, answers and errors come from apps and models. Every line that is printed passes here.
    """
    return _CONTROL.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def plural(count: int, what: str) -> str:
    """A count with its noun, such as `1 row` or `2 rows`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a text for a person, as `escape_control` makes it; None: to the standard output."""
    print(escape_control(text), file=stream or sys.stdout, flush=True)


class Reporter(Protocol):
    """Where progress goes."""

    def start(self, title: str, total: int) -> None:
        """A piece of work of `total` units begins; the one before it, if any, is over."""
        ...

    def advance(self, count: int = 1, **values: float | str) -> None:
        """Units done, with values worth seeing."""
        ...

    def finish(self, summary: str = "") -> None:
        """The piece of work is over."""
        ...

    def line(self, text: str) -> None:
        """A line that stays."""
        ...


class PlainReporter:
    """Plain lines: one when something ends, and at most one every `interval_s` while it goes on.

    Args:
        stream: where lines go; None for the standard output, whatever that is when a line is said.
        interval_s: between two lines of progress.
    """

    def __init__(self, stream: TextIO | None = None, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._title, self._total, self._done = "", 0, 0
        self._started = self._shown = time.monotonic()

    def start(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._started = self._shown = time.monotonic()

    def advance(self, count: int = 1, **values: float | str) -> None:
        self._done += count
        now = time.monotonic()
        if self._title and now - self._shown >= self._interval_s:
            self._shown = now
            parts = [f"{self._title} {self._done}/{self._total}", describe(values), self._left()]
            self.line("  ".join(part for part in parts if part))

    def finish(self, summary: str = "") -> None:
        if summary:
            self.line(summary)
        self._title = ""

    def line(self, text: str) -> None:
        print_line(text.rstrip(), self._stream)

    def _left(self) -> str:
        if not self._done:
            return ""
        elapsed = time.monotonic() - self._started
        return f"{duration(elapsed * (self._total - self._done) / self._done)} left"


class TerminalReporter:
    """Progress bars by rich.

    Args:
        console: None for the standard output.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
        )
        self._task: Any = None

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


class SilentReporter:
    """A reporter that says nothing."""

    def start(self, title: str, total: int) -> None: ...

    def advance(self, count: int = 1, **values: float | str) -> None: ...

    def finish(self, summary: str = "") -> None: ...

    def line(self, text: str) -> None: ...


def default_reporter() -> Reporter:
    """Bars on a terminal, plain lines elsewhere."""
    return TerminalReporter() if sys.stdout.isatty() else PlainReporter()


def describe(values: dict[str, float | str]) -> str:
    """`reward 0.61  tokens/s 1810`."""
    return "  ".join(f"{_name(key)} {_value(value)}" for key, value in values.items())


def _name(key: str) -> str:
    return key.replace("_per_", "/").replace("_", " ")


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    whole = math.isfinite(value) and value == int(value)
    return f"{value:.0f}" if whole or abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
