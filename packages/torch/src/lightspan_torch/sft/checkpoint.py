"""What an interrupted fine-tuning leaves behind, and how the next one goes on from it."""

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
_DONE = "done.json"


class Done(msgspec.Struct, kw_only=True):
    """How far it has come."""

    work: str
    """Hash of the settings and of all that is imitated: nothing else may go on from here."""
    losses: list[float]
    """Of each update so far."""
    seconds: float
    """CPU-seconds of the learner."""


class Unfinished:
    """Beside the folder of the model that is to come.

    Args:
        target: that folder.
    """

    def __init__(self, target: Path) -> None:
        target = target.absolute()  # "." has no name
        self.path = target.with_name(f"{target.name}.unfinished")

    def keep(self, learner: Learner, done: Done) -> None:
        """Write it, whole or not at all."""
        part = self.path.with_name(f"{self.path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        learner.save(part / _LEARNER)
        try:
            (part / _DONE).write_bytes(msgspec.json.encode(done))
            self.remove()
            part.rename(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error}") from error

    def read(self, learner: Learner, work: str) -> Done | None:
        """Bring the learner to where it was; None if nothing was kept.

        Raises:
            CheckpointError: it cannot be read.
            ConfigError: it is of other settings, or of other demonstrations.
        """
        try:
            done = msgspec.json.decode((self.path / _DONE).read_bytes(), type=Done)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error
        if done.work != work:
            raise ConfigError(
                f"{self.path} was made with other settings or demonstrations: give those, or leave "
                "resume= out to begin anew"
            )
        learner.load(self.path / _LEARNER)
        return done

    def remove(self) -> None:
        """Nothing is unfinished any more."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Holds back the first Ctrl-C, which would leave an update half done; gives whether there was
    one. A second one interrupts at once. Where signals are not ours (other threads, somebody's own
    handler) nothing is held back."""
    came = threading.Event()
    default = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not default:
        yield came.is_set
        return

    def note(number: int, frame: Any) -> None:
        if came.is_set():
            default(number, frame)
        came.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, default)
