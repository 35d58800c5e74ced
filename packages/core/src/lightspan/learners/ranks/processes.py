"""The other ranks as processes of this machine, which end with the trainer however that ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightspan.errors import RankError
from lightspan.learners.ranks.group import Group, GroupError, check_same, dist, ready
from lightspan.passing import PassingFolder

MODULE: Final = "lightspan.learners.ranks.worker"
GRACE_S: Final = 5.0
"""From the end of its lifeline until a process is killed."""
_LOOK_S: Final = 0.02
_SEEN_S: Final = 2.0
"""How long the end of a process may take to show after its connections have closed."""
_APART_S: Final = 10.0
"""How long ranks that wait for one that hangs may take to end, once they are told."""
LOST: Final = 75
"""The status of a process that ended because another one was lost."""
_SHOWN: Final = 6


class Processes:
    """Ranks 1 and up, each a process whose standard input is its lifeline.

    Args:
        devices: of each rank, rank 0 included.
    """

    def __init__(self, devices: Sequence[str], *, timeout_s: float) -> None:
        self.devices = tuple(devices)
        passing = PassingFolder("lightspan-ranks-", tempfile.gettempdir())
        self._folder = passing.path
        self._path = self._folder / "rendezvous"
        self._timeout_s = timeout_s
        self._children: list[subprocess.Popen[bytes]] = []
        # also where nobody calls `end`: at the end of the interpreter
        self._end = weakref.finalize(self, _end, self._children, passing)
        for rank in range(1, len(self.devices)):
            self._children.append(self._start(rank))

    def connect(self, *, start_s: float) -> Group:
        """Rank 0's group, once all others are there.

        Raises:
            RankError: one ended before, took longer, or runs something else.
        """
        store = dist.FileStore(str(self._path), len(self.devices))
        end = time.monotonic() + start_s
        wanted = [ready(rank) for rank in range(1, len(self.devices))]
        try:
            while not store.check(wanted):
                self.look()
                if time.monotonic() > end:
                    raise GroupError(f"no rank may take longer to start than start_s={start_s:g}")
                time.sleep(_LOOK_S)
            check_same(store, len(self.devices))
            return Group(store, 0, self.devices, timeout_s=self._timeout_s, look=self.look)
        except GroupError as error:
            raise RankError(self.failure(str(error))) from error

    def look(self) -> None:
        """Raise `GroupError` if a process has ended."""
        if self._ended() is not None:
            raise GroupError("a process has ended")

    def failure(self, why: str, *, limit: str = "", late: bool = False) -> str:
        """Which rank is lost, and how.

        Args:
            why: what was noticed, for where every process lives.
            limit: how long a rank may take, as it is set.
            late: whether one took longer. Ranks that do not hang have to have been told (hung up).
        """
        if not self._end.alive:
            return "the ranks of the learner have been ended"
        end = time.monotonic() + (_APART_S if late else _SEEN_S)
        while (rank := self._ended()) is None and time.monotonic() < end:
            if late and len(self._living()) < 2:
                break
            time.sleep(_LOOK_S)
        if rank is not None:
            child = self._children[rank - 1]
            said = self._log(rank).read_text(errors="replace").strip().splitlines()[-_SHOWN:]
            words = "; it said at the end:\n" + "\n".join(said) if said else ""
            return f"{self._name(rank)} {how_it_ended(child.returncode)}{words}"
        hung = [self._name(each) for each in self._living()]
        if limit and (late or not hung):
            who = " and ".join(hung) or "rank 0 of the learner (the trainer's own process)"
            return f"{who} kept the others waiting for longer than {limit} seconds"
        return f"the ranks of the learner do not answer each other any more: {why}"

    def end(self) -> None:
        """End all. Idempotent."""
        self._end()

    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [child.pid for child in self._children]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", MODULE, str(rank), str(self._path)),
                    *(str(self._timeout_s), *self.devices),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl-C is the trainer's, which ends its ranks in order
            )

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _name(self, rank: int) -> str:
        process = self._children[rank - 1].pid
        return f"rank {rank} of the learner ({self.devices[rank]}, process {process})"

    def _living(self) -> list[int]:
        """Ranks whose processes have not ended."""
        return [rank for rank, child in enumerate(self._children, 1) if child.poll() is None]

    def _ended(self) -> int | None:
        """A rank whose process has ended, but because another was lost; one that was killed before
        others."""
        ended = [
            (child.returncode >= 0, rank)
            for rank, child in enumerate(self._children, 1)
            if child.poll() not in (None, LOST)
        ]
        return min(ended)[1] if ended else None


def how_it_ended(status: int) -> str:
    """The end of a process, in words, by its exit status."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    hint = ", which the kernel does where the host's memory runs out" if status == -9 else ""
    return f"was ended by {name}{hint}"


def _end(children: Sequence[subprocess.Popen[bytes]], passing: PassingFolder) -> None:
    end_children(children, passing.path)
    passing.close()


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
