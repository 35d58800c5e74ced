"""Wall time of training with `LightningRL(overlap=1)`, compared with training without overlap.

    python benchmarks/overlap.py [--steps 32] [--seeds 0 1 2] [--sql] [--json PATH]

Two trainings that differ only in `overlap` run one after the other. The model is tiny, but its
engine answers as slowly as an 8B model on a busy GPU would (`--first-token`, `--per-token`;
assumed, not measured). The app has conversations of one to eight turns, most of them short, so that
a step without overlap waits for a few long rollouts. Compared are the seconds per step (without
evaluations), and the held-out reward after the last step: the 95 % interval of its difference, over
seeds, must include zero or a gain.

`--sql` trains the SQL example too, with its own small model, app and recipe, and without added
latency: this shows the gain if engine, learner and apps share two cores. Its warm start takes two
minutes, once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from _curves import seed_interval
from _overlap_apps import talk, tasks
from _report import Figure, finish, options_of
from learning import ROOT

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan.protocols.engine import GenerationRequest, TokenChunk
from lightspan.training.folder import RunFolder
from lightspan.training.results import FitResult
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import TransformersEngine

OVERLAP: Final = 1
REACH: Final = 0.7
"""Maximum time of a step with overlap, as a fraction of the time without."""
HELD_OUT: Final = 96

Train = Callable[[Path, int, int, argparse.Namespace], FitResult]
"""Function of (folder, seed, overlap, options) that trains and returns the result."""


class Paced(TransformersEngine):
    """An engine that waits before tokens, to simulate a slower one.

    Args:
        first_token: seconds until a call's first token.
        per_token: seconds for each further token.
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


def conversations(folder: Path, seed: int, overlap: int, options: argparse.Namespace) -> FitResult:
    """Train on conversations."""
    model = tiny_model(folder / f"model-{overlap}", seed=seed)
    algorithm = LightningRL(
        model,
        optimize="talker",
        group_size=8,
        tasks_per_step=16,
        learning_rate=2e-3,
        overlap=overlap,
        seed=seed,
    )
    pace = {"first_token": options.first_token, "per_token": options.per_token}
    trainer = Trainer(
        algorithm,
        engine=Paced({"policy": str(model)}, seed=seed, **pace),
        runners=LocalRunners(128, processes=2),
        steps=options.steps,
        validate_every=options.steps,
        folder=folder / f"overlap-{overlap}",
        reporter=SilentReporter(),
    )
    return trainer.fit(talk, tasks(16 * options.steps, "talk"), tasks(HELD_OUT, "held out"))


def sql(folder: Path, seed: int, overlap: int, options: argparse.Namespace) -> FitResult:
    """Train the SQL example."""
    sys.path.insert(0, str(ROOT / "examples" / "sql"))
    from sql_example import training

    cache = ROOT / "examples" / "sql" / ".cache"
    trainer = Trainer(
        LightningRL(
            training.warm_start(cache, seed, SilentReporter())[0],
            overlap=overlap,
            **training.rl_options(seed),
        ),
        runners=16,
        steps=options.steps,
        validate_every=options.steps,
        folder=folder / f"overlap-{overlap}",
        reporter=SilentReporter(),
    )
    train, test = (training.load_tasks(cache, split) for split in ("train", "test"))
    return trainer.fit(training.answer, train, test[:: len(test) // 240])


def in_pairs(
    train: Train, folder: Path, options: argparse.Namespace
) -> list[tuple[FitResult, FitResult]]:
    """Return the results without and with overlap, for each seed."""
    pairs = []
    for seed in options.seeds:
        place = folder / f"{train.__name__}-{seed}"
        place.mkdir()
        pairs.append((train(place, seed, 0, options), train(place, seed, OVERLAP, options)))
    return pairs


def compared(
    what: str, pairs: Sequence[tuple[FitResult, FitResult]], reach: float | None
) -> list[Figure]:
    """Return the rows of the table.

    Args:
        what: name of the training.
        pairs: (without overlap, with overlap) for each seed.
        reach: target for the time of a step, as a fraction; None for no target.
    """
    waiting, overlapping = (
        statistics.fmean(map(_seconds, each)) for each in zip(*pairs, strict=True)
    )
    first, last = (
        [[each.evaluations[at].mean for each in pair] for pair in pairs] for at in (0, -1)
    )
    gain = seed_interval([after - before for before, after in last])
    ages = [line["overlap/behind"] for _, after in pairs for line in _steps(after)]
    means = [statistics.fmean(side) for side in zip(*last, strict=True)]
    return [
        Figure(
            what=f"{what}, a step",
            unit="s",
            ours=overlapping,
            peer="overlap=0",
            theirs=waiting,
            at_least=None if reach is None else 1 / reach,
            note=f"{overlapping / waiting:.2f} of it; groups {statistics.fmean(ages):.1f} behind",
        ),
        Figure(
            what=f"{what}, held-out reward, surely lost",
            unit="",
            ours=-gain.high,
            at_most=0.0,
            note=f"{statistics.fmean(pair[0] for pair in first):.3f} -> {means[0]:.3f} and "
            f"{means[1]:.3f}; difference {gain.mean:+.3f}, 95% {gain.low:+.3f}..{gain.high:+.3f}",
        ),
    ]


def _steps(result: FitResult) -> list[dict[str, Any]]:
    return [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]


def _seconds(result: FitResult) -> float:
    """Return the mean wall time of a training step."""
    return statistics.fmean(line["seconds"] for line in _steps(result))


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more (0 1 2)"
    )
    parser.add_argument("--first-token", type=float, default=0.3, help="seconds (0.3)")
    parser.add_argument("--per-token", type=float, default=0.03, help="seconds (0.03)")
    parser.add_argument("--sql", action="store_true", help="the SQL example too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures += compared("conversations", in_pairs(conversations, folder, options), REACH)
        if options.sql:
            figures += compared("SQL", in_pairs(sql, folder, options), None)
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
