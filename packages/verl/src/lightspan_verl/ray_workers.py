"""verl's ranks as actors of a Ray cluster, by a process of verl's environment that drives them.

The trainer has neither verl nor Ray: the `steward` joins or starts the cluster, holds verl's
`RayWorkerGroup`, and hands on what the learner orders. A cluster of the trainer's own ends with it,
`kill -9` included; of another one its ranks do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ConfigError, RankError
from lightspan_verl.cuda_devices import VISIBLE, card
from lightspan_verl.framing import receive, send
from lightspan_verl.rank_group import (
    SEEN_S,
    LostError,
    Team,
    end_children,
    how_it_ended,
    last_words,
)
from lightspan_verl.rpc import Assembly, Broadcast, Ready, packed, returns, rolls

MODULE: Final = "lightspan_verl.ray_driver"
POLL_INTERVAL_S: Final = 2.0
"""How often somebody looks whether the cluster's head is there, while ranks work."""
_MISSED: Final = 3
"""Looks in a row that find nobody, after which the head is gone."""
_PROBE_S: Final = 5.0
_SHUTDOWN_S: Final = 10.0
"""How long Ray may take to end a cluster in order."""
_STRAGGLING_S: Final = 5.0
_MORE_S: Final = 20.0
"""How much longer than the ranks the steward may take, which tells of those that are late."""
_LOADING_S: Final = 120.0
"""The same at its beginning, when it loads verl and starts Ray before it waits for anybody."""


class RayWorkers(Team):
    """verl's ranks, each an actor of verl's `RayWorkerGroup`.

    Args:
        python: the interpreter that has verl, and Ray.
        devices: of each rank.
        ray: True for a cluster on this machine that is started for these ranks and ended with
            them; the address of one that is there, of which this machine is a node.

    Raises:
        ConfigError: see `check_environment`; the cluster is not there, asks for no token, or has
            too little, or other packages.
        RankError: a rank ended before it was there.
    """

    def __init__(
        self,
        python: str,
        devices: Sequence[str],
        *,
        ray: bool | str = True,
        start_s: float = 600.0,
        timeout_s: float = 1800.0,
    ) -> None:
        self._address = ray if isinstance(ray, str) else ""
        super().__init__(python, devices, with_ray=True, start_s=start_s, timeout_s=timeout_s)
        self._roll = Ready()
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        self._known: list[Any] = []
        """Processes of psutil that are ended with the steward: those of its own cluster."""
        self._end = weakref.finalize(
            self, _end, self._children, self._links, self._known, self._folder
        )
        try:
            if ":" in self._address and not _listens(self._address):
                raise ConfigError(
                    f"Verl(ray={self._address!r}): nobody listens there: give the address of a "
                    f"cluster's head (`{_beside(python, 'ray')} start --head` starts one), or "
                    "ray=True for one that is started here"
                )
            self._start()
            self._roll = self._called()
        except LostError as error:
            self.end()
            raise RankError(str(error)) from None
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return list(self._roll.pids)

    @property
    def steward(self) -> int:
        """The process that drives the ranks."""
        return self._children[0].pid

    @property
    def head(self) -> str:
        """The address of the cluster's head: as it was given, or as Ray has it."""
        return self._address if ":" in self._address else self._roll.head

    @property
    def where(self) -> str:
        return f"Ray {self._roll.ray}, " + (self._address or "a cluster of its own")

    def end(self) -> None:
        self._end()

    # --- a beginning ----------------------------------------------------------------------
    def _start(self) -> None:
        own, theirs = socket.socketpair()
        self._links.append(own)
        with theirs, self._log.open("wb") as log:
            self._children.append(
                subprocess.Popen(
                    [_program(self._python), "-m", MODULE, str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._environment_there(),
                    pass_fds=[theirs.fileno()],
                    # Ray has its workers find modules where its driver was started
                    cwd=self._folder,
                    start_new_session=True,  # Ctrl-C is the trainer's, which ends it in order
                )
            )

    def _environment_there(self) -> dict[str, str]:
        """Of the steward, and so of a cluster that it starts."""
        if self._address:
            return self._environment()
        cards = [] if self._on_cpu else [card(device) for device in self.devices]
        seen = {VISIBLE: ",".join(cards)} if cards else {}
        return {
            **self._environment(without=("RAY_",)),
            **seen,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # by default 30, too little on a busy machine
        }

    def _called(self) -> Ready:
        """Who is there, as the steward says.

        Raises:
            LightspanError: why nobody is.
            LostError: it ended before, or takes too long.
        """
        assembly = Assembly(
            address=self._address,
            ranks=len(self.devices),
            on_gpu=not self._on_cpu,
            start_s=self._start_s,
            folder=str(self._folder),
            rendezvous=self._rendezvous,
            environment=self._told,
        )
        roll = rolls.decode(self._answer(packed(assembly), more_s=_LOADING_S))
        if roll.failure is not None:
            raise roll.failure.error()
        if not self._address:
            self._know()
        return roll

    def _know(self) -> None:
        """Note the processes of the cluster that was started."""
        import psutil

        with contextlib.suppress(psutil.Error):
            self._known += psutil.Process(self.steward).children(recursive=True)

    # --- a round --------------------------------------------------------------------------
    def _exchanged(self, messages: Sequence[bytes]) -> list[bytes]:
        _, limit = self._limit
        data = self._answer(packed(Broadcast(orders=list(messages), limit_s=limit)))
        found = returns.decode(data)
        if found.late:
            raise self._late(", ".join(map(self.name, found.late)))
        if found.lost is not None:
            pid = self._roll.pids[found.lost]
            raise LostError(
                self._head_lost() or f"{self.name(found.lost)}, process {pid}, {found.how}"
            )
        return found.answers

    def _answer(self, message: bytes, *, more_s: float = _MORE_S) -> bytes:
        """What the steward answers.

        Args:
            more_s: how much longer it may take than is set.

        Raises:
            LostError: it has ended, or takes too long; or the cluster's head has ended.
        """
        link = self._links[0]
        end = time.monotonic() + self._limit[1] + more_s
        missed = 0
        try:
            link.settimeout(max(SEEN_S, end - time.monotonic()))
            send(link, message)
            while not select.select([link], [], [], POLL_INTERVAL_S)[0]:
                if time.monotonic() > end:
                    raise self._late("the process that drives verl's ranks in Ray")
                missed = missed + 1 if self._head_lost() else 0
                if missed >= _MISSED:
                    raise LostError(self._head_lost())
            data = receive(link)
        except TimeoutError:
            raise self._late("the process that drives verl's ranks in Ray") from None
        except OSError:
            data = None
        if data is None:
            raise LostError(self._head_lost() or self._failure())
        return data

    def _head_lost(self) -> str:
        """That the cluster's head is gone, if it is."""
        if not self.head or _listens(self.head):
            return ""
        return (
            f"the head of the Ray cluster ({self.head}) does not answer any more, and verl's "
            f"{len(self.devices)} ranks are lost with it"
        )

    def _failure(self) -> str:
        """How the steward ended."""
        [child] = self._children
        end = time.monotonic() + SEEN_S
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        name = f"the process that drives verl's ranks in Ray ({child.pid})"
        if child.returncode is None:
            return f"{name} does not answer any more"
        return f"{name} {how_it_ended(child.returncode)}{last_words(self._log)}"

    @property
    def _on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    @property
    def _log(self) -> Path:
        return self._folder / "steward.log"


def _program(python: str) -> str:
    """The interpreter, wherever one stands. Its links stay: they say which environment it has."""
    return os.path.abspath(shutil.which(python) or python)


def _beside(python: str, program: str) -> str:
    """A program of an interpreter's environment, as one types it."""
    return str(Path(python).parent / program)


def _listens(address: str) -> bool:
    """Whether somebody accepts connections at `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _end(
    children: Sequence[subprocess.Popen[bytes]],
    links: Sequence[socket.socket],
    known: Sequence[Any],
    folder: Path,
) -> None:
    """End the ranks and the cluster that was started for them: in order, and then by force."""
    for link in links:
        link.close()
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SHUTDOWN_S)
    end_children(children, folder / "none")  # the folder is Ray's until its processes have ended
    if known:
        import psutil

        _, alive = psutil.wait_procs(known, timeout=_STRAGGLING_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_STRAGGLING_S)
    shutil.rmtree(folder, ignore_errors=True)
