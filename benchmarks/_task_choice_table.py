"""The table of `task_choice.py`, from the rows of its results file; it needs no lightspan."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

SETS: Final = ("mixed", "family_relationships", "letter_counting")
SHUFFLED: Final = "shuffled"
ARMS: Final = (SHUFFLED, "adaptive", "resample", "replay")
SHARES: Final = ("", "_predicted", "_shuffled")
QUANTILES: Final = (math.inf, 12.706, 4.303, 3.182, 2.776)
"""97.5 % quantiles of Student's t, by the degrees of freedom from 0 to 4."""
HEADS: Final = (
    *("tasks", "setting", "seeds", "constant answer", "before", "after", "against shuffled"),
    "easy tasks, before and after",
    *("steps", "no gradient", "predicted", "predicted for shuffled", "CPU-s"),
)

Row = Mapping[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a results file without an error; none if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "error" not in row]


def table(rows: Sequence[Row]) -> str:
    """Return the table: means over seeds, and differences from `shuffled` with 95 % intervals."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    for name in SETS:
        of_set = [row for row in rows if row["task"] == name]
        starts = [row for row in of_set if row["rule"] == "start"]
        runs = {arm: {r["seed"]: r for r in of_set if r["rule"] == arm} for arm in ARMS}
        for arm, by_seed in runs.items():
            if by_seed:
                cells = _cells(by_seed, runs[SHUFFLED] if arm != SHUFFLED else {}, starts)
                lines.append(f"| {' | '.join([f'`{name}`', f'`{arm}`', *cells])} |")
    return "\n".join(lines)


def _right(row: Row) -> float:
    return float(row["held_out"]["right"])


def _cells(runs: Mapping[int, Row], plain: Mapping[int, Row], starts: Sequence[Row]) -> list[str]:
    parts = [row["training"] for row in runs.values()]
    keys = [f"tasks/zero_gradient{share}" for share in SHARES]
    shares = [[fmean(part[key]) for part in parts if key in part] for key in keys]
    gains = [
        _right(runs[seed]) - _right(plain[seed]) for seed in sorted(runs.keys() & plain.keys())
    ]
    easy = [
        [row["held_out"]["easy"] for row in rows if "easy" in row["held_out"]]
        for rows in (starts, runs.values())
    ]
    return [
        str(len(runs)),
        f"{fmean(row['constant'] for row in runs.values()):.2f}",
        *(f"{_right(row):.3f}" for row in starts[:1]),
        f"{fmean(map(_right, runs.values())):.3f}",
        _gain(gains),
        " to ".join(f"{fmean(values):.2f}" for values in easy if values),
        f"{fmean(part['steps'] for part in parts):.0f}",
        *(f"{fmean(values):.2f}" if values else "" for values in shares),
        f"{fmean(row['cpu_s'] for row in runs.values()):.0f}",
    ]


def _gain(gains: Sequence[float]) -> str:
    """Return the mean of differences with its 95 % interval; without it for fewer than two."""
    if len(gains) < 2:
        return f"{gains[0]:+.3f}" if gains else ""
    mean, half = fmean(gains), QUANTILES[len(gains) - 1] * statistics.stdev(gains)
    half /= math.sqrt(len(gains))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
