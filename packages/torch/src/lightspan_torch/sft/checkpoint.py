"""Checkpoint of an interrupted fine-tuning, from which it can be resumed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lightspan.errors import CheckpointError, ConfigError
from lightspan.protocols.learner import Learner

_LEARNER = "learner"
_PROGRESS = "done.json"


class Progress(msgspec.Struct, kw_only=True):
    """How far a fine-tuning has come."""

    work: str
    """Hash of the settings and examples. A run with another hash cannot continue the
    checkpoint."""
    losses: list[float] = []
    """Loss of each update that was made."""
    seconds: float = 0.0
    """CPU seconds that the learner has used."""
    curve: list[dict[str, float]] = []
    """Metrics of held-out examples, each with `update`, the number of updates before. `SFT` has
    none."""


class Unfinished:
    """The checkpoint of an interrupted fine-tuning, in the folder `MODEL.unfinished`.

    Args:
        target: folder in which the model is written at the end.
    """

    def __init__(self, target: Path) -> None:
        target = target.absolute()  # "." has no name
        self.path = target.with_name(f"{target.name}.unfinished")
        self._part = self.path.with_name(f"{self.path.name}.part")
        self._old = self.path.with_name(f"{self.path.name}.old")

    def write(self, learner: Learner, progress: Progress) -> None:
        """Write the checkpoint, replacing an earlier one.

        The new checkpoint is complete before the earlier one is deleted.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        part = self._part
        (part / _PROGRESS).unlink(missing_ok=True)  # first, as the folder is no longer complete
        shutil.rmtree(part, ignore_errors=True)
        learner.save(part / _LEARNER)
        try:
            encoded = part / f"{_PROGRESS}.part"
            encoded.write_bytes(msgspec.json.encode(progress))
            encoded.rename(part / _PROGRESS)  # last, so that a folder with it is complete
            self.remove()
            part.rename(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error}") from error

    def progress(self, learner: Learner, work: str, *, resume: bool) -> Progress:
        """Return the progress to continue from: that of the checkpoint, or of no update.

        Args:
            learner: the learner, which is restored from the checkpoint.
            work: hash of the settings and examples.
            resume: whether to continue from the checkpoint, if there is one.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: the checkpoint has other settings or examples.
        """
        checkpoint = self._read(learner, work) if resume else None
        return checkpoint or Progress(work=work)

    def _read(self, learner: Learner, work: str) -> Progress | None:
        """Restore the learner from the checkpoint, and return its progress; None if there is none.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: the checkpoint has other settings or examples.
        """
        try:
            if (self._part / _PROGRESS).exists():  # `write` was killed before its last line
                self.remove()
                self._part.rename(self.path)
            progress = msgspec.json.decode((self.path / _PROGRESS).read_bytes(), type=Progress)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error
        if progress.work != work:
            raise ConfigError(
                f"{self.path} was made with other settings or examples: give those, or leave "
                "resume= out to start again"
            )
        learner.load(self.path / _LEARNER)
        return progress

    def remove(self) -> None:
        """Delete the checkpoint."""
        shutil.rmtree(self._old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self._old)  # a checkpoint that is deleted halfway could not be read
        shutil.rmtree(self._old, ignore_errors=True)


@contextlib.contextmanager
def delayed_interrupt() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C in the `with` block, so that no update is interrupted halfway.

    Yield a function that returns whether Ctrl-C was pressed. A second Ctrl-C interrupts at once. In
    other threads than the main thread, or if SIGINT already has another handler, nothing is
    changed.
    """
    interrupted = threading.Event()
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield interrupted.is_set
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if interrupted.is_set():
            default(number, frame)
        interrupted.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, default)
