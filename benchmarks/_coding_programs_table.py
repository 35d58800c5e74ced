"""The table of `coding_programs.py`, from its result; it needs no lightspan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results/coding_programs.jsonl"
HEADS: Final = (
    *("program", "version", "calls recorded", "trained", "frozen", "rejected"),
    *("rows / calls", "prompt", "evaluation"),
)


Row = Mapping[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a results file; none if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """Return the table, a row for each program."""
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    options = f" `{' '.join(row['arguments'])}`" if row["arguments"] else ""
    works = row["evaluation_calls"] > 0 and max(row["evaluation_rewards"]) > 0
    return (
        f"`{row['program']}`{options}",
        row["version"],
        f"{row['recorded']} of {row['calls'] + row['refused']}",
        str(row["trained"]),
        _counts(row["frozen"]),
        _counts(row["rejected"]),
        f"{row['session_rows']} / {row['session_calls']}",
        f"{row['prompt']:,}",
        "works" if works else "fails",
    )


def _counts(counts: Mapping[str, int]) -> str:
    """Return the counts by name as text; 0 if there are none."""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "0"
