"""The table of `distill.py`, from the rows of its results file; it needs no lightspan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results/distill.jsonl"
ARMS: Final = ("start", "teacher", "half", "distill", "sampled")
STUDENTS: Final = ("half", "distill", "sampled")
NAMES: Final = {
    "start": "the published model",
    "teacher": "`LightningRL`, the teacher",
    "half": "`Distill`, over the whole vocabulary, after 12 of 24 steps",
    "distill": "`Distill`, over the whole vocabulary",
    "sampled": "`Distill`, from the sampled tokens",
}
HEADS: Final = (
    *("model", "seed", "rollouts", "reward (95% CI)", "below the teacher"),
    *("reverse KL per token, first and last step", "engine + learner CPU-s"),
)

Row = Mapping[str, Any]


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a results file; none if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """Return the table, a row for each model and seed."""
    if not rows:
        return "Nothing has been run yet."
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    teachers = {row["seed"]: row["mean"] for row in rows if row["arm"] == "teacher"}
    for row in sorted(rows, key=lambda row: (row["seed"], ARMS.index(row["arm"]))):
        kls, teacher = row["reverse_kl"], teachers.get(row["seed"])
        is_student = row["arm"] in STUDENTS and teacher is not None
        cells = (
            NAMES[row["arm"]],
            str(row["seed"]),
            f"{row['rollouts']:,}" if row["rollouts"] else "",
            f"{row['mean']:.3f} ({row['low']:.3f}..{row['high']:.3f})",
            f"{teacher - row['mean']:.3f}" if is_student else "",
            f"{kls[0]:.2f} → {kls[-1]:.2f}" if kls else "",
            f"{row['engine_s']} + {row['learner_s']}" if row["rollouts"] else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
