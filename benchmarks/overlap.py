"""Wall time of training with `LightningRL(overlap=1)`, against waiting for all rollouts of a step.

    python benchmarks/overlap.py [--steps 12] [--sql] [--json PATH]

Two trainings in turn, alike but for `overlap`, of a tiny model whose engine answers as slowly as an
8B model on a busy GPU would (`--first-token`, `--per-token`; assumed, not measured): an agent's
conversations of one to eight turns, most of them short, so that a step which waits for all of its
rollouts waits for a few long ones. Compared are the seconds of the steps (evaluations apart), and
the held-out reward after the last one, whose difference has to lie within its 95 % interval.

`--sql` trains the SQL example beside it, with its own small model, app and recipe, and without any
latency: what overlap gains where engine, learner and apps share two cores. Its warm start takes two
minutes, once.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import torch
from _overlap_apps import talk, tasks
from _report import Figure, finish, options_of
from learning import ROOT

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.engines.protocol import GenerationRequest, TokenChunk
from lightspan.engines.transformers import TransformersEngine
from lightspan.progress import SilentReporter
from lightspan.testing.tiny import tiny_model
from lightspan.training.results import Evaluation, FitResult

OVERLAP: Final = 1
REACH: Final = 0.7
"""Of the synchronous wall time, at most."""
HELD_OUT: Final = 96


class Paced(TransformersEngine):
    """An engine that takes its time.

    Args:
        first_token: seconds until a call's first token.
        per_token: seconds for each token.
    """

    def __init__(self, *args: Any, first_token: float, per_token: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_token, self._per_token = first_token, per_token

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        due = time.monotonic() + self._first_token
        async for chunk in super().generate(request, stream=stream):
            due += len(chunk.ids) * self._per_token
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield chunk


def conversations(folder: Path, overlap: int, options: argparse.Namespace) -> FitResult:
    """A training on conversations."""
    model = tiny_model(folder / "model", seed=0)
    algorithm = LightningRL(
        model,
        optimize="talker",
        group_size=8,
        tasks_per_step=16,
        learning_rate=2e-3,
        overlap=overlap,
    )
    pace = {"first_token": options.first_token, "per_token": options.per_token}
    trainer = Trainer(
        algorithm,
        engine=Paced({"policy": str(model)}, seed=0, **pace),
        runners=LocalRunners(128, processes=2),
        steps=options.steps,
        validate_every=options.steps,
        folder=folder / f"overlap-{overlap}",
        reporter=SilentReporter(),
    )
    return trainer.fit(talk, tasks(16 * options.steps, "talk"), tasks(HELD_OUT, "held out"))


def sql(folder: Path, overlap: int, options: argparse.Namespace) -> FitResult:
    """A training of the SQL example."""
    sys.path.insert(0, str(ROOT / "examples" / "sql"))
    from sql_example import training

    cache = ROOT / "examples" / "sql" / ".cache"
    trainer = Trainer(
        LightningRL(
            training.warm_start(cache, 0, SilentReporter())[0],
            overlap=overlap,
            **training.rl_options(0),
        ),
        runners=16,
        steps=options.steps,
        validate_every=options.steps,
        folder=folder / f"sql-{overlap}",
        reporter=SilentReporter(),
    )
    train, test = (training.load_tasks(cache, split) for split in ("train", "test"))
    return trainer.fit(training.answer, train, test[:: len(test) // 240])


def compared(what: str, before: FitResult, after: FitResult, reach: float | None) -> list[Figure]:
    """The rows of two trainings: each waits for all rollouts, or overlaps."""
    waiting, overlapping = (_seconds(each) for each in (before, after))
    gain, error = _difference(before.evaluations[-1], after.evaluations[-1])
    ages = [line["overlap/behind"] for line in _steps(after)]
    return [
        Figure(
            what=f"{what}, a step",
            unit="s",
            ours=overlapping,
            peer="overlap=0",
            theirs=waiting,
            at_least=None if reach is None else 1 / reach,
            note=f"{overlapping / waiting:.2f} of it; groups {sum(ages) / len(ages):.1f} behind",
        ),
        Figure(
            what=f"{what}, held-out reward below that of overlap=0",
            unit="errors",
            ours=-gain / error,
            at_most=1.96,
            note=f"{before.evaluations[0].mean:.3f} -> {before.evaluations[-1].mean:.3f} and "
            f"{after.evaluations[-1].mean:.3f}, difference {gain:+.3f} (error {error:.3f})",
        ),
    ]


def _steps(result: FitResult) -> list[dict[str, Any]]:
    from lightspan.training.folder import RunFolder

    return [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]


def _seconds(result: FitResult) -> float:
    """Mean wall time of a step."""
    lines = _steps(result)
    return math.fsum(line["seconds"] for line in lines) / len(lines)


def _difference(before: Evaluation, after: Evaluation) -> tuple[float, float]:
    """Mean difference over the tasks that both scored, and its standard error."""
    both = before.rewards.keys() & after.rewards.keys()
    gains = [after.rewards[task] - before.rewards[task] for task in both]
    mean = math.fsum(gains) / len(gains)
    spread = math.fsum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean, math.sqrt(spread / len(gains))


def main() -> int:
    """See the module; the exit status says whether the targets are reached."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--first-token", type=float, default=0.3, help="seconds (0.3)")
    parser.add_argument("--per-token", type=float, default=0.03, help="seconds (0.03)")
    parser.add_argument("--sql", action="store_true", help="the SQL example too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [conversations(folder, overlap, options) for overlap in (0, OVERLAP)]
        figures += compared("conversations", *runs, reach=REACH)
        if options.sql:
            runs = [sql(folder, overlap, options) for overlap in (0, OVERLAP)]
            figures += compared("SQL", *runs, reach=None)
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
