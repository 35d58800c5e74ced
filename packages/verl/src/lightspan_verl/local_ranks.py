"""verl's ranks as child processes, which end with the trainer, however that ends."""

from __future__ import annotations

import select
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightspan_verl.cuda_devices import VISIBLE, cuda_device
from lightspan_verl.framing import receive, send
from lightspan_verl.rank_group import (
    EXIT_DELAY_S,
    LostError,
    RankGroup,
    end_children,
    how_it_ended,
    last_words,
)

MODULE: Final = "lightspan_verl.rank_main"


class Workers(RankGroup):
    """verl's ranks as child processes, which exit when their standard input is closed.

    Args:
        python: the interpreter that has verl.
        devices: the device of each rank.
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
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(python, devices, with_ray=False, start_s=start_s, timeout_s=timeout_s)
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        # also at the exit of the interpreter, without a call of `end`
        self._end = weakref.finalize(self, _end, self._children, self._links, self._folder)
        for rank in range(len(self.devices)):
            self._start(rank)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def end(self) -> None:
        self._end()

    def _start(self, rank: int) -> None:
        own, theirs = socket.socketpair()
        with theirs, self._log(rank).open("wb") as log:
            self._children.append(
                subprocess.Popen(
                    [
                        *(self._python, "-m", MODULE, str(rank), str(len(self.devices))),
                        *(str(theirs.fileno()), self._rendezvous),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment_of(rank),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C reaches the trainer only, which ends the rank
                )
            )
        self._links.append(own)

    def _environment_of(self, rank: int) -> dict[str, str]:
        device = self.devices[rank]
        return {
            **self._environment(),
            **({} if device == "cpu" else {VISIBLE: cuda_device(device)}),
            "PYTHONSAFEPATH": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.devices)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # unused: the rendezvous is a file
        }

    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        end = time.monotonic() + self._limit[1]
        for link, message in zip(self._links, messages, strict=True):
            try:
                # a stopped rank does not read
                link.settimeout(max(EXIT_DELAY_S, end - time.monotonic()))
                send(link, message)
            except TimeoutError:
                raise self._late(self.name(self._links.index(link))) from None
            except OSError:
                raise LostError(self._failure()) from None
        waiting = dict(zip(self._links, range(len(self._links)), strict=True))
        replies: dict[int, bytes] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                slow = ", ".join(self.name(rank) for rank in sorted(waiting.values()))
                raise self._late(slow)
            for link in ready:
                try:
                    link.settimeout(max(EXIT_DELAY_S, end - time.monotonic()))
                    data = receive(link)
                except TimeoutError:
                    raise self._late(self.name(waiting[link])) from None
                if data is None:
                    raise LostError(self._failure())
                replies[waiting.pop(link)] = data
        return [replies[rank] for rank in sorted(replies)]

    def _failure(self) -> str:
        """Describe the lost rank and its end."""
        end = time.monotonic() + EXIT_DELAY_S
        while (rank := self._ended()) is None and time.monotonic() < end:
            time.sleep(0.02)
        if rank is None:
            return "the ranks of verl do not answer any more"
        child = self._children[rank]
        words = last_words(self._log(rank))
        return f"{self.name(rank)}, process {child.pid}, {how_it_ended(child.returncode)}{words}"

    def _ended(self) -> int | None:
        """Return a rank whose process has ended, preferably one that was killed by a signal.

        Other ranks may have failed because they lost that one.
        """
        ended = [
            (child.returncode >= 0, rank)
            for rank, child in enumerate(self._children)
            if child.poll() is not None
        ]
        return min(ended)[1] if ended else None

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"


def _end(
    children: Sequence[subprocess.Popen[bytes]], links: Sequence[socket.socket], folder: Path
) -> None:
    for link in links:
        link.close()
    end_children(children, folder)
