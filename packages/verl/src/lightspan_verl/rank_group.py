"""verl's ranks as the learner has them, however they were started: each gets an order, and answers.

Here is what does not depend on that: what is ordered and answered, and that nothing goes on once a
rank is lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lightspan
import lightspan_torch
import lightspan_verl
from lightspan.errors import RankError
from lightspan_verl.environment import check_environment
from lightspan_verl.rpc import Answer, Order, answers, packed

GO_ON: Final = "What the last checkpoint holds is whole: go on with resume=True (--resume)"
SHOWN: Final = 12
"""Lines of what a process said last, in an error."""
SEEN_S: Final = 2.0
"""How long the end of a process may take to show after its connection has closed."""
GRACE_S: Final = 5.0
"""From the end of its standard input until a process is killed."""
_LONGEST: Final = 40
"""Of the folder's path: Ray has sockets in it, whose paths may have 107 characters."""
_PLATFORM: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lightspan_verl.cpu_platform",
    # Layers and activations come and go in every pass, and glibc would keep as much again: this is
    # what it begins with, but said, it stays.
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""What is said where the device is the CPU, of which verl knows nothing."""


class LostError(Exception):
    """A rank has ended, or takes too long."""


class Team(ABC):
    """verl's ranks.

    Args:
        python: the interpreter that has verl.
        devices: of each rank.
        with_ray: whether Ray is needed too.
        start_s: how long the first order may take.
        timeout_s: how long any other may.

    Raises:
        ConfigError: see `check_environment`.
    """

    def __init__(
        self,
        python: str,
        devices: Sequence[str],
        *,
        with_ray: bool,
        start_s: float,
        timeout_s: float,
    ) -> None:
        self.devices = tuple(devices)
        self.versions = check_environment(python, with_ray=with_ray)
        self._python = python
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._started = False
        self._lost = ""
        self._lock = threading.Lock()
        self._folder = _own_folder()

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Of all ranks."""

    @property
    def where(self) -> str:
        """Where the ranks are, for a person and the run's manifest; empty for the usual place."""
        return ""

    def together(self, orders: Sequence[Order]) -> list[Answer]:
        """Let the ranks do what they are ordered, one each.

        Raises:
            LightspanError: what went wrong there; every rank can go on.
            RankError: one is lost. Then all are ended, and nothing goes on.
        """
        with self._lock:
            if self._lost:
                raise RankError(self._lost)
            try:
                received = self._exchanged([packed(order) for order in orders])
            except LostError as error:
                self._lost = f"{error}. {GO_ON}"
                self.end()
                raise RankError(self._lost) from None
            except BaseException as error:  # nobody knows what is still on its way
                self._lost = f"the learner has failed before: {error!r}"
                self.end()
                raise
            found = [answers.decode(data) for data in received]
            self._started = True
        failures = [(rank, each) for rank, each in enumerate(found) if each.failure is not None]
        for rank, answer in failures:
            assert answer.failure is not None
            raise answer.failure.error(self.name(rank))
        return found

    def name(self, rank: int) -> str:
        """A rank, for a message."""
        return f"verl's rank {rank} ({self.devices[rank]})"

    @abstractmethod
    def end(self) -> None:
        """End all, whatever they are doing. Idempotent."""

    @abstractmethod
    def _exchanged(self, messages: Sequence[bytes]) -> list[bytes]:
        """What the ranks answer.

        Raises:
            LostError: one has ended, or takes too long.
        """

    @property
    def _limit(self) -> tuple[str, float]:
        """How long an order may take: the setting's name, and its seconds."""
        if self._started:
            return "timeout_s", self._timeout_s
        return "start_s", self._start_s

    def _late(self, who: str) -> LostError:
        setting, limit = self._limit
        return LostError(f"{who} took longer than {setting}={limit:g} seconds")

    def _environment(self, *, without: tuple[str, ...] = ()) -> dict[str, str]:
        """Of verl's processes.

        Args:
            without: beginnings of names that they do not get of this process's.
        """
        dropped = ("VERL_", *without)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        return {**inherited, **self._told}

    @property
    def _told(self) -> dict[str, str]:
        """What verl's processes are told by their environment."""
        return {
            **(_PLATFORM if self.devices[0] == "cpu" else {}),
            "PYTHONPATH": str(self._folder / "path"),
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            # of a rank's last words none should be about engines that it does not use
            "PYTHONWARNINGS": "ignore",
            "TQDM_DISABLE": "1",
            "VERL_LOGGING_LEVEL": "ERROR",
        }

    @property
    def _rendezvous(self) -> str:
        """The file by which ranks find each other."""
        return str(self._folder / "rendezvous")


def last_words(log: Path) -> str:
    """What a process said at its end, for a message."""
    said = log.read_text(errors="replace").strip().splitlines()[-SHOWN:] if log.exists() else []
    return "; it said at the end:\n" + "\n".join(said) + "\n" if said else ""


def how_it_ended(status: int) -> str:
    """Return the end of a process in words, by its exit status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ", which the kernel does where the host's memory runs out" if status == -9 else ""
    return f"was ended by {name}{hint}"


def end_children(children: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """End processes whose standard input is their lifeline, and remove their folder."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
    end = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> Path:
    """Make a folder that nobody else reads, with our packages alone in its `path`.

    Beside them, where the trainer has them installed, lie packages that verl excludes.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-"))
    if len(str(folder)) > _LONGEST:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-", dir="/tmp"))
    paths = folder / "path"
    paths.mkdir()
    for package in (lightspan, lightspan_torch, lightspan_verl):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return folder
