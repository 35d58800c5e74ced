"""Run verl's ranks as child processes, which end when the trainer ends or is killed.

The trainer sends each rank an order, and the rank returns an answer. If one rank is lost, all ranks
are ended.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import lightspan
import lightspan_torch
import lightspan_verl
from lightspan.errors import RankError
from lightspan_verl.cuda_devices import VISIBLE, cuda_device
from lightspan_verl.environment import check_environment
from lightspan_verl.framing import receive, send
from lightspan_verl.rpc import Answer, Order, answer_decoder, packed

RESUME_HINT: Final = "The last checkpoint is intact: continue with resume=True (--resume)"
_MODULE: Final = "lightspan_verl.rank_main"
_MAX_LINES: Final = 12
"""Maximum number of output lines of a process in an error message."""
_EXIT_DELAY_S: Final = 2.0
"""Maximum seconds to wait for a process's exit status after its connection was closed."""
_GRACE_S: Final = 5.0
"""Seconds between closing a process's standard input and SIGKILL."""
_PLATFORM: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lightspan_verl.cpu_platform",
    # Every pass frees layers and activations, of which glibc would keep as much again. Setting its
    # initial threshold explicitly stops glibc from raising the threshold.
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""Environment variables of ranks on a CPU, which verl does not support itself."""


class _LostError(Exception):
    """A rank has ended, or exceeded its time limit."""


class Workers:
    """verl's ranks as child processes. They end when this process ends, even if it is killed.

    Args:
        python: the interpreter of verl's environment.
        devices: the device of each rank.
        start_s: maximum seconds of the first order. They include the time in which the ranks start
            and load models.
        timeout_s: maximum seconds of any other order.

    Raises:
        ConfigError: see `check_environment` and `cuda_device`.
    """

    def __init__(
        self,
        python: str,
        devices: Sequence[str],
        *,
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
    ) -> None:
        check_environment(python)
        self.devices = tuple(devices)
        self._python = python
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._is_started = False
        self._error = ""
        """Why all ranks were ended; "" while they run."""
        self._lock = threading.Lock()
        self._folder = _own_folder()
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        # also at the exit of the interpreter, without a call of `end`
        self._end = weakref.finalize(self, _end, self._children, self._links, self._folder)
        for rank in range(len(self.devices)):
            self._start(rank)

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks."""
        return [child.pid for child in self._children]

    def together(self, orders: Sequence[Order]) -> list[Answer]:
        """Send one order to each rank, and return the answer of each rank.

        Raises:
            LightspanError: an order failed in a rank; the ranks remain usable.
            RankError: a rank was lost; all ranks are ended.
        """
        with self._lock:
            if self._error:
                raise RankError(self._error)
            try:
                received = self._exchange([packed(order) for order in orders])
            except _LostError as error:
                self._error = f"{error}. {RESUME_HINT}"
                self.end()
                raise RankError(self._error) from None
            except BaseException as error:  # messages may be half sent
                self._error = f"the learner has failed before: {error!r}"
                self.end()
                raise
            self._is_started = True
        answers = [answer_decoder.decode(data) for data in received]
        for rank, answer in enumerate(answers):
            if answer.failure is not None:
                raise answer.failure.error(self.name(rank))
        return answers

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages, such as "verl's rank 1 (cuda:1)"."""
        return f"verl's rank {rank} ({self.devices[rank]})"

    def end(self) -> None:
        """End all ranks. Idempotent."""
        self._end()

    # --- start ----------------------------------------------------------------------------
    def _start(self, rank: int) -> None:
        own, theirs = socket.socketpair()
        ranks, rendezvous = str(len(self.devices)), str(self._folder / "rendezvous")
        with theirs, self._log(rank).open("wb") as log:
            descriptor = theirs.fileno()
            self._children.append(
                subprocess.Popen(
                    [self._python, "-m", _MODULE, str(rank), ranks, str(descriptor), rendezvous],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment(rank),
                    pass_fds=[descriptor],
                    start_new_session=True,  # Ctrl-C reaches the trainer only, which ends the rank
                )
            )
        self._links.append(own)

    def _environment(self, rank: int) -> dict[str, str]:
        device = self.devices[rank]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
        return {
            **inherited,
            **(_PLATFORM if device == "cpu" else {VISIBLE: cuda_device(device)}),
            "PYTHONPATH": str(self._folder / "path"),
            "PYTHONSAFEPATH": "1",
            # warnings would fill the output lines of error messages
            "PYTHONWARNINGS": "ignore",
            "TQDM_DISABLE": "1",
            "VERL_LOGGING_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.devices)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # unused: the rendezvous is a file
        }

    # --- orders ---------------------------------------------------------------------------
    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send an encoded order to each rank, and return the encoded answers.

        Raises:
            _LostError: a rank has ended, or took longer than its time limit.
        """
        setting = "timeout_s" if self._is_started else "start_s"
        limit = self._timeout_s if self._is_started else self._start_s
        end = time.monotonic() + limit

        def late(ranks: Sequence[int]) -> _LostError:
            names = ", ".join(map(self.name, ranks))
            return _LostError(f"{names} took longer than {setting}={limit:g} seconds")

        for rank, (link, message) in enumerate(zip(self._links, messages, strict=True)):
            try:
                # a stopped rank does not read
                link.settimeout(max(_EXIT_DELAY_S, end - time.monotonic()))
                send(link, message)
            except TimeoutError:
                raise late([rank]) from None
            except OSError:
                raise _LostError(self._failure()) from None
        waiting = {link: rank for rank, link in enumerate(self._links)}
        replies: dict[int, bytes] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise late(sorted(waiting.values()))
            for link in ready:
                try:
                    link.settimeout(max(_EXIT_DELAY_S, end - time.monotonic()))
                    data = receive(link)
                except TimeoutError:
                    raise late([waiting[link]]) from None
                if data is None:
                    raise _LostError(self._failure())
                replies[waiting.pop(link)] = data
        return [replies[rank] for rank in sorted(replies)]

    def _failure(self) -> str:
        """Return a text that names the lost rank and describes how its process ended."""
        end = time.monotonic() + _EXIT_DELAY_S
        while (rank := self._ended()) is None and time.monotonic() < end:
            time.sleep(0.02)
        if rank is None:
            return "the ranks of verl do not answer any more"
        child = self._children[rank]
        how = f"{_how_it_ended(child.returncode)}{_last_words(self._log(rank))}"
        return f"{self.name(rank)}, process {child.pid}, {how}"

    def _ended(self) -> int | None:
        """Return the number of a rank whose process has ended; None if all run.

        If several have ended, return one that was killed by a signal. The others may have ended as
        a result.
        """
        ended = [
            (child.returncode >= 0, rank)
            for rank, child in enumerate(self._children)
            if child.poll() is not None
        ]
        return min(ended)[1] if ended else None

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"


def _last_words(log: Path) -> str:
    """Return the last lines of a process's output, for an error message; "" if there are none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "; its last output:\n" + "\n".join(lines[-_MAX_LINES:]) + "\n" if lines else ""


def _how_it_ended(status: int) -> str:
    """Describe how a process ended, from its exit status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ", as by the kernel when the host's memory runs out" if status == -9 else ""
    return f"was ended by {name}{hint}"


def _end(
    children: Sequence[subprocess.Popen[bytes]], links: Sequence[socket.socket], folder: Path
) -> None:
    """End the processes, and remove their folder.

    A process exits when its standard input is closed. If it does not exit in time, it is killed.
    """
    for link in links:
        link.close()
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    end = time.monotonic() + _GRACE_S
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> Path:
    """Create a private folder for the ranks.

    Its subfolder `path` has links to lightspan's packages, and is the ranks' PYTHONPATH. The
    trainer's site-packages cannot be on that path, because they contain packages that are
    incompatible with verl.
    """
    folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-"))
    paths = folder / "path"
    paths.mkdir()
    for package in (lightspan, lightspan_torch, lightspan_verl):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return folder
