"""Checkpoints: one folder per checkpoint, which is renamed into place when it is complete.

A folder such as `step-000012` is written under another name, flushed to disk and renamed, so that
it is always complete. Without the flush, a power cut could leave a renamed folder of empty files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import CheckpointError

_NAME: Final = re.compile(r"step-(\d{6,})")
STATE: Final = "state.json"
LEARNER: Final = "learner"
NEWEST: Final = 2
"""Number of newest checkpoints that are not deleted."""


class TrainerState(msgspec.Struct, kw_only=True):
    """The trainer's own state in a checkpoint; the learner saves its state separately."""

    run_id: str
    step: int = 0
    """Number of completed iterations."""
    cursor: int = 0
    """Number of training tasks used so far."""
    in_flight: dict[str, Any] = msgspec.field(default_factory=dict)
    """Group id → task, of groups that were submitted and not taken yet."""
    returned: list[Any] = msgspec.field(default_factory=list)
    """Tasks of groups that a restart interrupted; `next_tasks` returns them first."""
    lowest_reward: float = 0.0
    """Lowest reward of a scored rollout so far, at most 0."""
    versions: dict[str, int] = msgspec.field(default_factory=dict)
    """Policy → version of its weights that was last published."""
    rng: Any = None
    """State of the trainer's random generator."""
    algorithm: dict[str, Any] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Part → CPU-seconds so far, across restarts."""

    def return_in_flight(self) -> None:
        """Move the tasks of `in_flight` to `returned`, so that they run again.

        The run was interrupted, which ended their rollouts.
        """
        self.returned = [*self.returned, *self.in_flight.values()]
        self.in_flight = {}


def save(
    folder: Path,
    state: TrainerState,
    save_learner: Callable[[Path], None] | None,
    *,
    best: int | None = None,
) -> Path:
    """Write the checkpoint of step `state.step`, delete old checkpoints and return the new path.

    Args:
        folder: folder of the checkpoints.
        state: state of the trainer.
        save_learner: function that writes the learner's state to the folder that it is given; None
            without a learner.
        best: step of the best weights, whose checkpoint is kept too; None for no such step.

    Raises:
        CheckpointError: the checkpoint cannot be written; earlier checkpoints are untouched.
    """
    final = at_step(folder, state.step)
    temporary = folder / f".{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
        if save_learner is not None:
            save_learner(temporary / LEARNER)
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        if final.exists():  # of an earlier attempt at this step
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in list_checkpoints(folder)[:-NEWEST]:
        if best is None or old != at_step(folder, best):
            shutil.rmtree(old, ignore_errors=True)
    return final


def at_step(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    complete = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    # Sorted by number: as text, step-1000000 would precede step-999999.
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    return next(reversed(list_checkpoints(folder)), None)


def load_state(checkpoint: Path) -> TrainerState:
    """Return the trainer's state in a checkpoint.

    Raises:
        CheckpointError: the state cannot be read.
    """
    try:
        return msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be read: {error}; delete it, and training goes on "
            "from the one before it"
        ) from error


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk; the files in a folder are not flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
