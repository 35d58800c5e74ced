"""Make the updates of a fine-tuning, with progress, Ctrl-C and checkpoints."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lightspan.errors import ModelError
from lightspan.lightning.rows import Row
from lightspan.progress import Reporter
from lightspan.protocols.learner import Learner
from lightspan.schema.images import PromptImage
from lightspan_torch.sft.checkpoint import Progress, Unfinished, delayed_interrupt

POLICY: Final = "policy"
"""Name of the fine-tuned model in its learner."""


def training_row(
    ids: list[int],
    mask: list[bool],
    weights: list[float],
    name: str,
    images: tuple[PromptImage, ...] = (),
) -> Row:
    """Return a row of tokens for `SFTLoss`, for one sequence.

    Args:
        ids: token ids.
        mask: whether each token is in the loss.
        weights: weight of each token in the loss.
        name: id of the row.
        images: the images among the ids, with their bytes.
    """
    size = len(ids)
    return Row(
        rollout_id=name,
        policy=POLICY,
        ids=ids,
        mask=mask,
        advantages=[0.0] * size,
        weights=weights,
        logprobs=[0.0] * size,
        versions=[0] * size,
        temperatures=[1.0] * size,
        images=images,
    )


def shuffled_batches(count: int, epochs: float, batch_size: int, seed: int) -> list[list[int]]:
    """Return the indices of the examples of each update.

    Args:
        count: number of examples.
        epochs: how often each example is used. A part of an epoch uses a part of the examples.
        batch_size: examples per update; the last update may have fewer.
        seed: seed of the order, which differs in each epoch.
    """
    rng = random.Random(seed)
    order: list[int] = []
    while len(order) < epochs * count:
        epoch = list(range(count))
        rng.shuffle(epoch)
        order += epoch
    order = order[: max(1, round(epochs * count))]
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def run_updates(
    learner: Learner,
    batches: Sequence[Sequence[int]],
    update: Callable[[Sequence[int]], Mapping[str, float]],
    progress: Progress,
    unfinished: Unfinished,
    reporter: Reporter,
    title: tuple[str, str],
    checkpoint_every: int | None = None,
) -> None:
    """Make the updates that `progress` does not contain yet, and add them to it.

    Args:
        learner: the learner that `update` trains.
        batches: indices of the examples of each update.
        update: makes an update on a batch, and returns its metrics, among them `loss` and
            `grad_norm`.
        progress: what earlier processes did.
        unfinished: the checkpoint.
        reporter: reports progress.
        title: what is being done, and what was done at the end.
        checkpoint_every: number of updates after which a checkpoint is written; None to write it
            only on Ctrl-C.

    Raises:
        CheckpointError: a checkpoint cannot be written.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint is written.
        ModelError: a loss or a gradient is not finite.
    """
    reporter.start(title[0], len(batches))
    reporter.advance(len(progress.losses))
    before_s, started = progress.seconds, time.monotonic()
    with delayed_interrupt() as interrupted:
        for batch in batches[len(progress.losses) :]:
            metrics = update(batch)
            for name, what in (("loss", "loss"), ("grad_norm", "norm of the gradient")):
                if not math.isfinite(metrics[name]):  # the learner skipped the update
                    raise ModelError(
                        f"the {what} of update {len(progress.losses) + 1} is {metrics[name]}: the "
                        "weights are damaged, or too large for their data type. Give another "
                        'model, a lower learning rate, or learner=Torch(dtype="float32")'
                    )
            progress.losses.append(metrics["loss"])
            usage = learner.usage()
            progress.seconds = before_s + usage["cpu_s"]
            speed = usage["tokens"] / max(1e-3, time.monotonic() - started)
            reporter.advance(1, **metrics, tokens_per_s=speed)
            done, is_interrupted = len(progress.losses), interrupted()
            is_due = checkpoint_every is not None and done % checkpoint_every == 0
            if is_interrupted or is_due:
                unfinished.write(learner, progress)
            if is_interrupted:
                reporter.finish(
                    f"interrupted after {done} of {len(batches)} updates, "
                    f"saved in {unfinished.path}: continue with fit(…, resume=True)"
                )
                raise KeyboardInterrupt
    reporter.finish(f"{title[1]}, loss {progress.losses[-1]:.3f}")
