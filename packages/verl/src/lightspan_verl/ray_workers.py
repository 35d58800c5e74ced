"""verl's ranks as actors of a Ray cluster, through a driver process in verl's environment.

The trainer has neither verl nor Ray: the driver joins or starts the cluster, holds verl's
`RayWorkerGroup`, and forwards the learner's orders. When the trainer ends, even by `kill -9`, a
cluster that the driver started ends too; in a cluster that it joined, its ranks end.
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
from lightspan_verl.rpc import Broadcast, RaySetup, Ready, packed, ready_decoder, results_decoder

MODULE: Final = "lightspan_verl.ray_driver"
POLL_INTERVAL_S: Final = 2.0
"""Seconds between two probes of the cluster's head while ranks work."""
_MAX_FAILED_PROBES: Final = 3
"""Number of consecutive failed probes after which the head counts as lost."""
_PROBE_S: Final = 5.0
"""Timeout of a probe, in seconds."""
_SHUTDOWN_S: Final = 10.0
"""Maximum seconds of a cluster's normal shutdown."""
_KILL_TIMEOUT_S: Final = 5.0
"""Seconds to wait for the cluster's processes before and after SIGKILL."""
_MORE_S: Final = 20.0
"""Seconds by which the driver, which reports late ranks, may exceed the ranks' time limit."""
_LOADING_S: Final = 120.0
"""`_MORE_S` at the start, when the driver loads verl and starts Ray before its own limit begins."""


class RayWorkers(RankGroup):
    """verl's ranks as actors of verl's `RayWorkerGroup`.

    Args:
        python: the interpreter that has verl and Ray.
        devices: the device of each rank.
        ray: True to start a cluster on this machine, which ends with the ranks; or the address of a
            running cluster of which this machine is a node.
        start_s: maximum seconds of the first order.
        timeout_s: maximum seconds of any other order.

    Raises:
        ConfigError: see `check_environment`; or the cluster is not running, needs no token, lacks
            resources, or has other packages.
        RankError: a rank ended during its start.
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
        self._ready = Ready()
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        self._cluster: list[Any] = []
        """psutil's processes of a started cluster, which end with the driver."""
        self._end = weakref.finalize(
            self, _end, self._children, self._links, self._cluster, self._folder
        )
        try:
            if ":" in self._address and not _listens(self._address):
                raise ConfigError(
                    f"Verl(ray={self._address!r}): nothing listens there: give the address of a "
                    f"cluster's head (`{Path(python).parent / 'ray'} start --head` starts one), or "
                    "ray=True for one that is started here"
                )
            self._start()
            self._ready = self._wait_ready()
        except LostError as error:
            self.end()
            raise RankError(str(error)) from None
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return list(self._ready.pids)

    @property
    def driver(self) -> int:
        """Process id of the driver."""
        return self._children[0].pid

    @property
    def head(self) -> str:
        """Address of the cluster's head, from the option or from Ray."""
        return self._address if ":" in self._address else self._ready.head

    @property
    def where(self) -> str:
        return f"Ray {self._ready.ray}, " + (self._address or "a cluster of its own")

    def end(self) -> None:
        self._end()

    # --- start ----------------------------------------------------------------------------
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
                    env=self._driver_environment(),
                    pass_fds=[theirs.fileno()],
                    # Ray's workers search for modules in the driver's working directory
                    cwd=self._folder,
                    start_new_session=True,  # Ctrl-C reaches the trainer only
                )
            )

    def _driver_environment(self) -> dict[str, str]:
        """Return the environment of the driver, and of a cluster that it starts."""
        if self._address:
            return self._environment()
        devices = [] if self._on_cpu else [cuda_device(device) for device in self.devices]
        return {
            **self._environment(without=("RAY_",)),
            **({VISIBLE: ",".join(devices)} if devices else {}),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # by default 30, too little on a busy machine
        }

    def _wait_ready(self) -> Ready:
        """Send the setup to the driver and return its answer.

        Raises:
            LightspanError: the ranks could not be started.
            LostError: the driver ended, or exceeded the time limit.
        """
        setup = RaySetup(
            address=self._address,
            ranks=len(self.devices),
            on_gpu=not self._on_cpu,
            start_s=self._start_s,
            folder=str(self._folder),
            rendezvous=self._rendezvous,
            environment=self._overrides,
        )
        ready = ready_decoder.decode(self._answer(packed(setup), more_s=_LOADING_S))
        if ready.failure is not None:
            raise ready.failure.error()
        if not self._address:
            import psutil

            with contextlib.suppress(psutil.Error):
                self._cluster += psutil.Process(self.driver).children(recursive=True)
        return ready

    # --- orders ---------------------------------------------------------------------------
    def _exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        _, limit = self._limit
        data = self._answer(packed(Broadcast(orders=list(messages), limit_s=limit)))
        results = results_decoder.decode(data)
        if results.late:
            raise self._late(", ".join(map(self.name, results.late)))
        if results.lost is not None:
            pid = self._ready.pids[results.lost]
            raise LostError(
                self._head_lost() or f"{self.name(results.lost)}, process {pid}, {results.how}"
            )
        return results.answers

    def _answer(self, message: bytes, *, more_s: float = _MORE_S) -> bytes:
        """Send a message to the driver and return the answer.

        Args:
            message: the encoded message.
            more_s: seconds in addition to the time limit.

        Raises:
            LostError: the driver or the cluster's head has ended, or exceeded the time limit.
        """
        link = self._links[0]
        end = time.monotonic() + self._limit[1] + more_s
        failed_probes = 0
        try:
            link.settimeout(max(EXIT_DELAY_S, end - time.monotonic()))
            send(link, message)
            while not select.select([link], [], [], POLL_INTERVAL_S)[0]:
                if time.monotonic() > end:
                    raise self._late("the process that drives verl's ranks in Ray")
                failed_probes = failed_probes + 1 if self._head_lost() else 0
                if failed_probes >= _MAX_FAILED_PROBES:
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
        """Return an error message if the cluster's head is gone; empty otherwise."""
        if not self.head or _listens(self.head):
            return ""
        return (
            f"the head of the Ray cluster ({self.head}) does not answer any more, and verl's "
            f"{len(self.devices)} ranks are lost with it"
        )

    def _failure(self) -> str:
        """Describe the end of the driver."""
        [child] = self._children
        end = time.monotonic() + EXIT_DELAY_S
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
        return self._folder / "driver.log"


def _program(python: str) -> str:
    """Return the interpreter's absolute path, without resolving symlinks, which define its venv."""
    return os.path.abspath(shutil.which(python) or python)


def _listens(address: str) -> bool:
    """Return whether connections are accepted at `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _end(
    children: Sequence[subprocess.Popen[bytes]],
    links: Sequence[socket.socket],
    cluster: Sequence[Any],
    folder: Path,
) -> None:
    """End the ranks and a started cluster, by a normal shutdown and then by SIGKILL."""
    for link in links:
        link.close()
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SHUTDOWN_S)
    end_children(children, folder / "none")  # Ray uses the folder until its processes have ended
    if cluster:
        import psutil

        _, alive = psutil.wait_procs(cluster, timeout=_KILL_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_KILL_TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)
