"""verl's ranks as processes of this machine, which end with the trainer however that ends."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import lightspan
from lightspan.errors import ConfigError, RankError
from lightspan.learners.ranks.processes import end_children, how_it_ended
from lightspan.learners.verl.environment import check_environment
from lightspan.learners.verl.frames import receive, send
from lightspan.learners.verl.orders import Answer, Order, answers, packed

MODULE: Final = "lightspan.learners.verl.rank"
GO_ON: Final = "What the last checkpoint holds is whole: go on with resume=True (--resume)"
_SEEN_S: Final = 2.0
"""How long the end of a process may take to show after its connection has closed."""
_SHOWN: Final = 12
PLATFORM: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "lightspan.testing.verl_platform",
}
"""What verl is told where the device is the CPU, of which it knows nothing."""


_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def _card(device: str) -> str:
    """What a rank is told to see, of the cards that this process sees.

    Raises:
        ConfigError: it sees fewer.
    """
    number = int(device.partition(":")[2] or 0)
    seen = os.environ.get(_VISIBLE)
    if seen is None:
        return str(number)
    cards = list(takewhile(_is_card, map(str.strip, seen.split(","))))
    if number >= len(cards):
        raise ConfigError(
            f"Verl: {_VISIBLE}={seen!r} shows {len(cards)} devices, and a rank is to be on "
            f"{device!r}: show more, or take fewer ranks"
        )
    return cards[number]


def _is_card(named: str) -> bool:
    """Whether CUDA takes it for one: what follows one that it does not, it does not see either."""
    return named.isdecimal() or named.startswith(("GPU-", "MIG-"))


class Workers:
    """verl's ranks, each a process whose standard input is its lifeline.

    Args:
        python: the interpreter that has verl.
        devices: of each rank.
        timeout_s: how long an order may take.

    Raises:
        ConfigError: see `check_environment`.
    """

    def __init__(
        self,
        python: str,
        devices: Sequence[str],
        *,
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
    ) -> None:
        self.devices = tuple(devices)
        self.versions = check_environment(python)
        self._python = python
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._started = False
        self._lost = ""
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="lightspan-verl-"))  # nobody else reads it
        # a folder with lightspan alone: beside it in the trainer's lie packages that verl excludes
        paths = self._folder / "path"
        paths.mkdir()
        (paths / "lightspan").symlink_to(Path(lightspan.__file__).parent)
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        # also where nobody calls `end`: at the end of the interpreter
        self._end = weakref.finalize(self, _end, self._children, self._links, self._folder)
        for rank in range(len(self.devices)):
            self._start(rank)

    @property
    def pids(self) -> list[int]:
        """Of all ranks."""
        return [child.pid for child in self._children]

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
            except _LostError as error:
                self._lost = f"{error}. {GO_ON}"
                self.end()
                raise RankError(self._lost) from None
            except BaseException as error:  # nobody knows what is still on its way
                self._lost = f"the learner has failed before: {error!r}"
                self.end()
                raise
        failures = [(rank, each) for rank, each in enumerate(received) if each.failure is not None]
        for rank, answer in failures:
            assert answer.failure is not None
            raise answer.failure.error(self.name(rank))
        return received

    def name(self, rank: int) -> str:
        """A rank, for a message."""
        return f"verl's rank {rank} ({self.devices[rank]})"

    def end(self) -> None:
        """End all, whatever they are doing. Idempotent."""
        self._end()

    def _start(self, rank: int) -> None:
        own, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            self._children.append(
                subprocess.Popen(
                    [
                        *(self._python, "-m", MODULE, str(rank), str(len(self.devices))),
                        *(str(theirs.fileno()), str(self._folder / "rendezvous")),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment(rank),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the trainer's, which ends it in order
                )
            )
        self._links.append(own)

    def _environment(self, rank: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name[:5] != "VERL_"}
        device = self.devices[rank]
        placed = PLATFORM
        if device != "cpu":
            placed = {_VISIBLE: _card(device)}
        return {
            **inherited,
            **placed,
            "PYTHONPATH": str(self._folder / "path"),
            "PYTHONSAFEPATH": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.devices)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # nobody listens: ranks meet by a file
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            # of a rank's last words none should be about engines that it does not use
            "PYTHONWARNINGS": "ignore",
            "TQDM_DISABLE": "1",
            "VERL_LOGGING_LEVEL": "ERROR",
        }

    def _exchanged(self, messages: Sequence[bytes]) -> list[Answer]:
        """What the ranks answer.

        Raises:
            _LostError: one has ended, or takes too long.
        """
        limit = self._timeout_s if self._started else self._start_s
        setting = "timeout_s" if self._started else "start_s"
        end = time.monotonic() + limit
        for link, message in zip(self._links, messages, strict=True):
            try:
                link.settimeout(
                    max(_SEEN_S, end - time.monotonic())
                )  # a stopped rank reads nothing
                send(link, message)
            except TimeoutError:
                late = self.name(self._links.index(link))
                raise _LostError(f"{late} took longer than {setting}={limit:g} seconds") from None
            except OSError:
                raise _LostError(self._failure()) from None
        waiting = dict(zip(self._links, range(len(self._links)), strict=True))
        found: dict[int, Answer] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                slow = ", ".join(self.name(rank) for rank in sorted(waiting.values()))
                raise _LostError(f"{slow} took longer than {setting}={limit:g} seconds")
            for link in ready:
                try:
                    link.settimeout(max(_SEEN_S, end - time.monotonic()))
                    data = receive(link)
                except TimeoutError:
                    late = self.name(waiting[link])
                    raise _LostError(
                        f"{late} took longer than {setting}={limit:g} seconds"
                    ) from None
                if data is None:
                    raise _LostError(self._failure())
                found[waiting.pop(link)] = answers.decode(data)
        self._started = True
        return [found[rank] for rank in sorted(found)]

    def _failure(self) -> str:
        """Which rank is lost, and how."""
        end = time.monotonic() + _SEEN_S
        while (rank := self._ended()) is None and time.monotonic() < end:
            time.sleep(0.02)
        if rank is None:
            return "the ranks of verl do not answer any more"
        child = self._children[rank]
        said = self._log(rank).read_text(errors="replace").strip().splitlines()[-_SHOWN:]
        words = "; it said at the end:\n" + "\n".join(said) + "\n" if said else ""
        return f"{self.name(rank)}, process {child.pid}, {how_it_ended(child.returncode)}{words}"

    def _ended(self) -> int | None:
        """A rank whose process has ended; one that was killed before one that lost its peer."""
        ended = [
            (child.returncode >= 0, rank)
            for rank, child in enumerate(self._children)
            if child.poll() is not None
        ]
        return min(ended)[1] if ended else None

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"


class _LostError(Exception):
    """A rank has ended, or takes too long."""


def _end(
    children: Sequence[subprocess.Popen[bytes]], links: Sequence[socket.socket], folder: Path
) -> None:
    for link in links:
        link.close()
    end_children(children, folder)
