"""Base class of groups of verl's ranks: sends an order to each rank and collects the answers.

After the loss of a rank the whole group is ended.
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
from lightspan_verl.rpc import Answer, Order, answer_decoder, packed

RESUME_HINT: Final = "The last checkpoint is intact: continue with resume=True (--resume)"
MAX_LINES: Final = 12
"""Maximum number of output lines of a process in an error message."""
EXIT_DELAY_S: Final = 2.0
"""Maximum seconds between the closing of a process's connection and its exit status."""
GRACE_S: Final = 5.0
"""Seconds between closing a process's standard input and SIGKILL."""
_MAX_PATH_LENGTH: Final = 40
"""Maximum length of the folder's path: Ray's sockets in it have paths of at most 107 bytes."""
_PLATFORM: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lightspan_verl.cpu_platform",
    # Every pass frees layers and activations, of which glibc would keep as much again. Setting its
    # initial threshold explicitly stops glibc from raising the threshold.
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""Environment variables of ranks on the CPU, which verl does not support itself."""


class LostError(Exception):
    """A rank has ended, or exceeded its time limit."""


class RankGroup(ABC):
    """A group of verl's ranks.

    Args:
        python: the interpreter that has verl.
        devices: the device of each rank.
        with_ray: whether Ray is required.
        start_s: maximum seconds of the first order.
        timeout_s: maximum seconds of any other order.

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
        """Process ids of all ranks."""

    @property
    def where(self) -> str:
        """Location of the ranks, for the run's manifest; empty for child processes."""
        return ""

    def together(self, orders: Sequence[Order]) -> list[Answer]:
        """Send an order to each rank and return the answers.

        Raises:
            LightspanError: an order failed; the ranks remain usable.
            RankError: a rank was lost; the group has ended.
        """
        with self._lock:
            if self._lost:
                raise RankError(self._lost)
            try:
                received = self._exchange([packed(order) for order in orders])
            except LostError as error:
                self._lost = f"{error}. {RESUME_HINT}"
                self.end()
                raise RankError(self._lost) from None
            except BaseException as error:  # messages may be half sent
                self._lost = f"the learner has failed before: {error!r}"
                self.end()
                raise
            answers = [answer_decoder.decode(data) for data in received]
            self._started = True
        for rank, answer in enumerate(answers):
            if answer.failure is not None:
                raise answer.failure.error(self.name(rank))
        return answers

    def name(self, rank: int) -> str:
        """Return the name of a rank, for messages."""
        return f"verl's rank {rank} ({self.devices[rank]})"

    @abstractmethod
    def end(self) -> None:
        """End all ranks. Idempotent."""

    @abstractmethod
    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send an encoded order to each rank and return the encoded answers.

        Raises:
            LostError: a rank has ended, or exceeded the limit.
        """

    @property
    def _limit(self) -> tuple[str, float]:
        """The time limit of an order: the setting's name, and its seconds."""
        if self._started:
            return "timeout_s", self._timeout_s
        return "start_s", self._start_s

    def _late(self, who: str) -> LostError:
        setting, limit = self._limit
        return LostError(f"{who} took longer than {setting}={limit:g} seconds")

    def _environment(self, *, without: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the environment of verl's processes.

        Args:
            without: prefixes of variables that are not inherited from this process.
        """
        dropped = ("VERL_", *without)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        return {**inherited, **self._overrides}

    @property
    def _overrides(self) -> dict[str, str]:
        """Environment variables that are set for verl's processes."""
        return {
            **(_PLATFORM if self.devices[0] == "cpu" else {}),
            "PYTHONPATH": str(self._folder / "path"),
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            # warnings would fill the output lines of error messages
            "PYTHONWARNINGS": "ignore",
            "TQDM_DISABLE": "1",
            "VERL_LOGGING_LEVEL": "ERROR",
        }

    @property
    def _rendezvous(self) -> str:
        """Path of the file by which ranks find each other."""
        return str(self._folder / "rendezvous")


def last_words(log: Path) -> str:
    """Return the last lines of a process's output, for an error message."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "; its last output:\n" + "\n".join(lines[-MAX_LINES:]) + "\n" if lines else ""


def how_it_ended(status: int) -> str:
    """Describe the end of a process by its exit status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ", as by the kernel when the host's memory runs out" if status == -9 else ""
    return f"was ended by {name}{hint}"


def end_children(children: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """End processes by closing their standard input, and remove their folder."""
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
    """Make a private folder whose `path` has links to the lightspan packages only.

    The trainer's site-packages also have packages that are incompatible with verl.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-"))
    if len(str(folder)) > _MAX_PATH_LENGTH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-", dir="/tmp"))
    paths = folder / "path"
    paths.mkdir()
    for package in (lightspan, lightspan_torch, lightspan_verl):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return folder
