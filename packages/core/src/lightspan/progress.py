"""Show progress in lines; a plugin shows bars on a terminal."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Final, Protocol, TextIO, cast

from lightspan.plugins import installed_plugins, load_plugin

PLAIN_INTERVAL_S: Final = 10.0
"""Minimum number of seconds between two lines of progress."""

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except newline and tab, and characters that change the writing direction."""


def escape_control(text: str) -> str:
    """Return a text with control characters, which could command a terminal, escaped (`\\x1b`).

    It is applied to every printed line: names, answers and errors come from apps and models.
    """
    return _CONTROL.sub(
        lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n")
    )


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 row` or `2 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a text with escaped control characters to `stream`; None for the standard output."""
    print(escape_control(text), file=stream or sys.stdout, flush=True)


class Reporter(Protocol):
    """Interface for showing the progress of one task after another."""

    def start(self, title: str, total: int) -> None:
        """Begin to show a task of `total` units. If another task was shown, it ends."""

    def advance(self, count: int = 1, **values: float | str) -> None:
        """Report that `count` more units are done.

        Args:
            values: name → value to show with the progress.
        """

    def finish(self, summary: str = "") -> None:
        """End the current task, and print `summary` unless it is empty."""

    def line(self, text: str) -> None:
        """Print a line of text that stays when the progress is updated."""


class PlainReporter:
    """A reporter that prints lines of progress during a task, and a summary at its end.

    Args:
        stream: destination of the lines; None for `sys.stdout` at the time of each line.
        interval_s: minimum seconds between two lines of progress.
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
            title = f"{self._title} {self._done}/{self._total}"
            self.line("  ".join(filter(None, [title, describe(values), self._remaining()])))

    def finish(self, summary: str = "") -> None:
        if summary:
            self.line(summary)
        self._title = ""

    def line(self, text: str) -> None:
        print_line(text.rstrip(), self._stream)

    def _remaining(self) -> str:
        if not self._done:
            return ""
        elapsed = time.monotonic() - self._started
        return f"{duration(elapsed * (self._total - self._done) / self._done)} left"


class SilentReporter(Reporter):
    """A reporter that prints nothing."""


def default_reporter() -> Reporter:
    """Return a reporter with bars on a terminal and in a notebook, else one with plain lines.

    The bars come from a plugin (lightspan-tools). Without it, plain lines are shown there too.
    """
    place = "terminal" if sys.stdout.isatty() else "notebook" if "ipykernel" in sys.modules else ""
    if place in installed_plugins("reporters"):
        return cast("Reporter", load_plugin("reporters", place)())
    return PlainReporter()


def describe(values: dict[str, float | str]) -> str:
    """Return `values` as text, such as `reward 0.61  tokens/s 1810`."""
    names = {name: name.replace("_per_", "/").replace("_", " ") for name in values}
    return "  ".join(f"{names[name]} {_value(value)}" for name, value in values.items())


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    whole = math.isfinite(value) and value == int(value)
    return f"{value:.0f}" if whole or abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration as text, such as `45 s`, `12 min` or `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
