"""The table of `distill.py`, from the rows of its results file; it needs no lightspan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
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
CURVE: Final = 6
"""Number of steps of which the table of curves has a mean."""

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
            _reward(row),
            f"{teacher - row['mean']:.3f}" if is_student and row["mean"] is not None else "",
            f"{kls[0]:.2f} → {kls[-1]:.2f}" if kls else "",
            f"{row['engine_s']} + {row['learner_s']}" if row["rollouts"] else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(rows: Sequence[Row]) -> str:
    """Return a table with the students' rewards in training, in the mean over some steps each."""
    own = [row for row in rows if row["arm"] in ("distill", "sampled")]
    count = max((len(row["reward"]) for row in own), default=0)
    starts = range(0, count, CURVE)
    heads = ("student", "seed", *(f"steps {n + 1} to {min(n + CURVE, count)}" for n in starts))
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in sorted(own, key=lambda row: (row["seed"], ARMS.index(row["arm"]))):
        parts = [row["reward"][start : start + CURVE] for start in starts]
        cells = [f"{fmean(part):.3f}" if part else "" for part in parts]
        lines.append(f"| {' | '.join((NAMES[row['arm']], str(row['seed']), *cells))} |")
    return "\n".join(lines)


def _reward(row: Row) -> str:
    """Return a row's reward with its interval, or that there is none."""
    if row["mean"] is None:
        return f"not evaluated, stopped after step {len(row['reward'])}"
    return f"{row['mean']:.3f} ({row['low']:.3f}..{row['high']:.3f})"
