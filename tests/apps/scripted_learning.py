"""Parts of tests of interrupted trainings: a learner that stores its rows, and a scripted model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightspan import Optimizer
from lightspan.lightning.rows import Row
from lightspan_torch.learner.torch import TorchLearner


class Recording(TorchLearner):
    """A learner that stores the rows of each update."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        super().__init__({"policy": str(model)}, optimizer=Optimizer(learning_rate=1e-3), seed=0)
        self.steps: list[list[Row]] = []

    def update(self, rows: Sequence[Row], *args: Any, **more: Any) -> dict[str, float]:
        self.steps.append(list(rows))
        return super().update(rows, *args, **more)

    def learned(self) -> list[list[tuple[Any, ...]]]:
        """Return the sorted rows of each step, without ids.

        Versions are counted from that of the first step, because a store never gives a version
        again.
        """
        first = max(self.steps[0][0].versions)
        return [sorted(_content(row, first) for row in rows) for rows in self.steps]


def _content(row: Row, first: int) -> tuple[Any, ...]:
    versions = [version and version - first + 1 for version in row.versions]
    return (row.ids, row.mask, row.advantages, row.weights, row.logprobs, versions)


def scripted(prompt: str) -> str:
    """Return the answer to a prompt: one to seven words, whose number the prompt determines."""
    return "so " * (1 + sum(map(ord, prompt)) % 7)
