"""Estimate the memory of `fit`, and measure memory by trial updates."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from lightspan.errors import ModelError
from lightspan.lightning.rows import Row, build_rows
from lightspan.lightning.transitions import Transition
from lightspan.protocols.learner import PolicyLoss
from lightspan.runners.protocol import Runners
from lightspan.training.backends import engine_request
from lightspan.training.session import Session
from lightspan.training.settings import TrainerSettings
from lightspan_tools.dry_run.report_model import MemoryReport

MAX_UPDATE_TOKENS: Final = 16_384
"""Maximum number of tokens of a trial update, which has at least one row."""
_MAXRSS_BYTES: Final = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB


# --- updates ----------------------------------------------------------------------------------
def practice_rows(transitions: Sequence[Transition], max_length: int | None) -> list[Row]:
    """Return rows (token sequences for training) of the dry run's calls, for a trial update.

    They have alternating advantages of 1 and -1. Real advantages may all be zero, and then the
    update might compute nothing.
    """
    advantages = [1.0 if number % 2 else -1.0 for number in range(len(transitions))]
    weights = [1.0 / max(1, len(transitions) * t.tokens) for t in transitions]
    built = build_rows(
        transitions, advantages=advantages, token_weights=weights, max_length=max_length
    )
    rows: list[Row] = []
    tokens = 0
    for row in built.rows:
        tokens += len(row.ids)
        if rows and tokens > MAX_UPDATE_TOKENS:
            break
        rows.append(row)
    return rows


async def try_update(session: Session, rows: Sequence[Row]) -> None:
    """Run two updates of the learner on the rows, to find out whether they fit into memory.

    There are two because the optimiser's states exist only from the second update on. The updated
    weights must not be used.

    Raises:
        OutOfMemoryError: an update does not fit into memory.
    """
    learner, loss = session.learner, session.algorithm.loss

    def update() -> None:
        scored = isinstance(loss, PolicyLoss) and loss.needs_old_logprobs
        learner.update(rows, loss, old_logprobs=learner.score(rows) if scored else None)

    for _ in range(2):
        await session.learn(update)


# --- memory -----------------------------------------------------------------------------------
def image_bytes(digests: Collection[str], share: float) -> int:
    """Return the bytes of features of images that `fit` will keep at once.

    Args:
        digests: images of the dry run. Those that its engine and learner have seen are measured.
        share: the dry run's tasks as a share of the tasks of `fit`.
    """
    if not digests:
        return 0
    from lightspan_torch.vision.features import CACHE_BYTES, kept_bytes

    return min(CACHE_BYTES, round(kept_bytes(digests) / share))


def peak_bytes() -> int:
    """Return the peak memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, `ru_maxrss` survives exec, so it may be that of a parent
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES


def runner_bytes(runners: Runners) -> int | None:
    """Return the memory of all runner processes, in bytes; None if none runs on this machine."""
    import psutil

    total = 0
    for pid in getattr(runners, "pids", None) or ():
        with contextlib.suppress(psutil.Error):  # a process that has just died
            total += int(psutil.Process(pid).memory_info().rss)
    return total or None


def estimate_memory(settings: TrainerSettings) -> tuple[MemoryReport | None, str]:
    """Estimate the memory of `fit`.

    The estimate is the sum of the engine's weights and key-value cache, and of the learner's
    weights, gradients, optimiser states and reference copy. Base weights that LoRA policies share
    count once.

    Returns:
        The estimate, or None if it cannot be made; and a text that says why it cannot be made, or
            "".
    """
    learner, engine = settings.learner_spec, settings.engine_spec
    if learner is None or engine is None:
        return None, "memory: engine= or learner= is your own"
    from lightspan_torch.engine.parameter_count import model_size

    parts: Counter[str] = Counter()
    specs, loss = settings.algorithm.policies(), settings.algorithm.loss
    reference = isinstance(loss, PolicyLoss) and loss.kl != 0
    try:
        for policies in engine.copies(engine_request(settings)):
            trained_specs = [specs[name] for name in policies if name in specs]
            model = trained_specs[0].model if trained_specs else settings.algorithm.base_model
            size = model_size(model)
            parts += Counter(engine.memory(size, settings.device, len(policies)))
            if trained_specs:
                ranks = sum(spec.lora.rank for spec in trained_specs if spec.lora is not None)
                parts += Counter(
                    learner.memory(
                        size.parameters,
                        ranks * size.lora_values,
                        device=settings.device,
                        reference=reference,
                    )
                )
    except ModelError as error:
        return None, f"memory: {error}"
    is_here = settings.device == "cpu" or (settings.engine is None and settings.learner is None)
    report = MemoryReport(
        parts=dict(parts), free_bytes=free_bytes(settings.device) if is_here else None
    )
    if "key-value cache" in parts:
        return report, ""
    return report, "memory: the key-value cache, whose size the engine's servers choose themselves"


def free_bytes(device: str) -> int | None:
    """Return the free memory of a device, in bytes; None if the device is not visible."""
    if device == "cpu":
        import psutil

        # A `fit` that starts instead of this process can use this process's memory.
        return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)
    import torch

    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        return None
    return int(torch.cuda.mem_get_info(number)[0])
