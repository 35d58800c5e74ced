"""The table of `verdicts.py`, from its lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results" / "verdicts.jsonl"
NAMES: Final = {
    "untrained": "untrained",
    "sft": "SFT on what was rated well, four passes",
    "kto": "KTO, four passes",
    "kto1": "KTO, one pass",
    "dpo": "DPO, four passes",
    "rl": "RL with the true metric",
}
"""Arm → its name in the table."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; empty if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each task and arm, and what has failed or is left."""
    rows = [row for row in rows if row["design"] == rows[-1]["design"]]
    scored = [row for row in rows if "mean" in row]
    if not scored:
        return "Nothing has been run yet."
    lines = [
        "| task | arm | held-out messages right, each seed | mean | verdicts up / down / false | "
        "trained examples |",
        "|---|---|---|---|---|---|",
    ]
    for task in ("desk", "router"):
        for arm, name in NAMES.items():
            own = sorted(
                (row for row in scored if (row["task"], row["arm"]) == (task, arm)),
                key=lambda row: row["seed"],
            )
            if not own:
                lines.append(f"| {task} | {name} | not run | | | |")
                continue
            means = [row["mean"] for row in own]
            verdicts = [
                f"{row['up']} / {row['down']} / {row['false']}" for row in own if "up" in row
            ]
            examples = [str(row["examples"]) for row in own if "examples" in row]
            cells = (
                *(task, name, ", ".join(f"{mean:.3f}" for mean in means)),
                *(f"{math.fsum(means) / len(means):.3f}", ", ".join(verdicts), ", ".join(examples)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    failed = [row for row in rows if "error" in row]
    lines += [
        f"\n{row['task']}, {row['arm']}, seed {row['seed']} ended with an error: `{row['error']}`"
        for row in failed
    ]
    return "\n".join(lines)
