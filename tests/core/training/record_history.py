"""Makes a history for `histories/` of a run's folder, of any example:

    python tests/core/training/record_history.py runs/quest-seed0 > .../histories/quest-seed0.jsonl

It keeps of `metrics.jsonl` what is looked at (`lightspan.training.symptoms`), and the rewards of
the selection split, or where there is none of the held-out tasks, in the order of their ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lightspan.training.folder import EvaluationKind, RunFolder

KEPT = (
    *("kind", "step", "reward", "reward_se", "batch/scored", "batch/zero_advantage_rollouts"),
    *("batch/groups", "batch/trained_tokens"),
    *("learner/entropy", "learner/learning_rate", "learner/approx_kl"),
)


def history(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's history, in order."""
    run = RunFolder(folder)
    lines = run.metrics()
    kind: EvaluationKind = "selection" if run.evaluations("selection") else "eval"
    rewards = {found.step: found.rewards for found in run.evaluations(kind)}
    for line in lines:
        if line["kind"] == "train":
            idle = {key: line[key] for key in line if key.startswith("batch/groups:")}
            yield {**{key: line[key] for key in KEPT if key in line}, **idle}
        elif line["kind"] == kind and line["step"] in rewards:
            found = rewards[line["step"]]
            yield {
                "kind": "eval",
                "step": line["step"],
                "rewards": [found[t] for t in sorted(found)],
            }


if __name__ == "__main__":
    for each in history(Path(sys.argv[1])):
        print(msgspec.json.encode(each).decode())
