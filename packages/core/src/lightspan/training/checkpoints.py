"""Checkpoints: one folder per checkpoint, renamed into place when complete.

The checkpoint alone records what was trained. A folder `step-000012` exists only whole: it is
written under another name, flushed to disk, and renamed. Without the flush a power cut could leave
a complete name with empty files under it.
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


class RunSegment(msgspec.Struct, frozen=True, array_like=True):
    """What a run trained between two interruptions."""

    name: str
    """Part of the ids of its rollouts; never used again."""
    first_step: int
    last_step: int


class TrainerState(msgspec.Struct, kw_only=True):
    """Everything beside the learner that resuming needs."""

    run_id: str
    step: int = 0
    """Iterations done."""
    cursor: int = 0
    """Training tasks used so far."""
    in_flight: dict[str, Any] = msgspec.field(default_factory=dict)
    """Group → task, of those that were submitted and not taken for training yet."""
    returned: list[Any] = msgspec.field(default_factory=list)
    """Tasks of groups that an interruption cut off: they come again before any others."""
    untrained: list[str] = msgspec.field(default_factory=list)
    """Those groups."""
    segments: list[RunSegment] = msgspec.field(default_factory=list)
    """Which rollouts were trained: those that each life made in its steps."""
    versions: dict[str, int] = msgspec.field(default_factory=dict)
    """Policy → the version that its weights were last served as."""
    rng: Any = None
    """State of the trainer's random generator."""
    algorithm: dict[str, Any] = msgspec.field(default_factory=dict)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    """Part → CPU-seconds so far."""

    def trained(self, rollout_id: str, step: int) -> bool:
        """Whether a training rollout of this run was part of an update."""
        name = life_of(rollout_id, self.run_id)
        group = rollout_id.rpartition("-")[0]
        if group in self.in_flight or group in self.untrained:
            return False
        return any(
            life.name == name and life.first_step <= step <= life.last_step
            for life in self.segments
        )

    def cut_off(self) -> None:
        """Nothing is in flight any more: an interruption has ended it."""
        self.returned = [*self.returned, *self.in_flight.values()]
        self.untrained = [*self.untrained, *self.in_flight]
        self.in_flight = {}


def rollout_stem(run_id: str, life: str, step: int, batch: int) -> str:
    """What the ids of a batch's rollouts begin with."""
    return f"{run_id}-{life}-{step}-{batch}"


def life_of(rollout_id: str, run_id: str) -> str:
    """The life that made a rollout."""
    return rollout_id.removeprefix(f"{run_id}-").partition("-")[0]


def save(
    folder: Path,
    state: TrainerState,
    save_learner: Callable[[Path], None] | None,
    *,
    keep: int = 2,
    best: int | None = None,
) -> Path:
    """Write the checkpoint of a step and drop all but the newest `keep` and that of step `best`.

    Args:
        save_learner: None where there is no learner.

    Raises:
        CheckpointError: it cannot be written; earlier ones are untouched.
    """
    final = at_step(folder, state.step)
    temporary = folder / f".{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, mode=0o700)
        if save_learner is not None:
            save_learner(temporary / LEARNER)
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        _flush(temporary)
        if final.exists():  # a run that was set back does this step again
            shutil.rmtree(final)
        temporary.rename(final)
        _flush_folder(folder)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in list_checkpoints(folder)[:-keep]:
        if best is None or old != at_step(folder, best):
            shutil.rmtree(old, ignore_errors=True)
    return final


def at_step(folder: Path, step: int) -> Path:
    """The checkpoint of a step, if there is one."""
    return folder / f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    complete = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    # by number: step-1000000 follows step-999999, though not as text
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(reversed(list_checkpoints(folder)), None)


def load_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint. Raises `CheckpointError` if it cannot be read."""
    try:
        return msgspec.json.decode((checkpoint / STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint} cannot be read: {error}; delete it, and training goes on "
            "from the one before it"
        ) from error


def _flush(folder: Path) -> None:
    """Put everything in a folder on disk: the files, and the folders that name them."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _flush_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
