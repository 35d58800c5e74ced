"""Print the figures of a benchmark: a table with our figure, the peer's, the ratio and the target.

    figures = [Figure(what="spans to rows, 16 turns", unit="CPU-ms", ours=0.05, theirs=1.8,
                      peer="0.3.0", at_least=10)]
    sys.exit(finish(figures, options.json))

The exit status is 1 if any target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = "benchmarks/results"
"""Folder of the committed results, relative to the repository's root."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure, with the peer's figure and a target if there are any."""

    what: str
    unit: str
    ours: float
    peer: str = ""
    theirs: float | None = None
    more_is_better: bool = False
    """Whether a higher figure is better, as for rates; False for costs."""
    at_least: float | None = None
    """Target for the ratio: how many times better than the peer; None for no target."""
    at_most: float | None = None
    """Target for our figure, in its unit; None for no target."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better our figure is than the peer's; None without a peer."""
        if self.theirs is None:
            return None
        better, worse = (
            (self.ours, self.theirs) if self.more_is_better else (self.theirs, self.ours)
        )
        # what is added may measure as less than nothing beside the noise of the bare app
        return better / worse if worse > 0 else float("inf")

    @property
    def reached(self) -> bool | None:
        """Whether the figure reaches its targets; None if it has no target."""
        if self.at_least is None and self.at_most is None:
            return None
        if self.at_most is not None and self.ours > self.at_most:
            return False
        return self.at_least is None or (self.ratio is not None and self.ratio >= self.at_least)

    @property
    def target(self) -> str:
        """The targets as text; "" if there are none."""
        parts = []
        if self.at_most is not None:
            parts.append(f"<= {self.at_most:g} {self.unit}")
        if self.at_least is not None:
            parts.append(f">= {self.at_least:g}x")
        return ", ".join(parts)


def finish(figures: Sequence[Figure], path: Path | None) -> int:
    """Print the table and write the JSON to `path`, unless it is None.

    Return the exit status: 1 if a target is missed, else 0.
    """
    print(table(figures))
    missed = [figure.what for figure in figures if figure.reached is False]
    if path is not None:
        path.write_text(json.dumps(report(figures), indent=2) + "\n")
    for what in missed:
        print(f"missed: {what}")
    return 1 if missed else 0


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a text table."""
    heads = ("what", "unit", "ours", "peer", "theirs", "ratio", "reach", "")
    lines = [heads, *(cells(figure) for figure in figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def report(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the figures as data, with date, commit and machine."""
    rows = [
        {**asdict(figure), "ratio": figure.ratio, "reached": figure.reached} for figure in figures
    ]
    return {**circumstances(), "figures": rows}


def circumstances() -> dict[str, Any]:
    """Return date, commit, machine, load and Python version of a measurement."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(but=RESULTS),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "load": round(os.getloadavg()[2], 1),  # of the last 15 minutes
        "python": platform.python_version(),
    }


def commit(*, but: str = ".git") -> str:
    """Return the commit that is checked out; "" outside a checkout.

    `-dirty` is appended if the working tree differs.

    Args:
        but: path from the root whose changes are ignored, such as the results.
    """
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no", f":(top,exclude){but}")
        return _git("describe", "--always", "--abbrev=12") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def options_of(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with `--json PATH`, which prints `description` unchanged."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    return parser


def cells(figure: Figure) -> tuple[str, ...]:
    ratio, reached = figure.ratio, figure.reached
    return (
        figure.what,
        figure.unit,
        _number(figure.ours),
        figure.peer,
        "" if figure.theirs is None else _number(figure.theirs),
        "" if ratio is None else f"{ratio:.3g}x",
        figure.target,
        figure.note if reached is None else f"{'reached' if reached else 'MISSED'} {figure.note}",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
