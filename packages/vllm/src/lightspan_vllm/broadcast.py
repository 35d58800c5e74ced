"""Send weights to servers over torch.distributed: Gloo between CPUs, or NCCL between GPUs.

Each update of each server uses a new process group. So an update does not depend on whether the
server was restarted since the last update.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import Any, Final

import torch
import torch.distributed
from safetensors import safe_open

from lightspan.errors import ConfigError
from lightspan_vllm.config import Link
from lightspan_vllm.vllm_plugin.lightspan_broadcast import (
    RENDEZVOUS_S,
    broadcast,
    make_group,
    rendezvous_key,
)
from lightspan_vllm.weights import FILE_TYPES

dist: Final[Any] = torch.distributed

TIMEOUT_S: Final = 300.0
"""Maximum seconds between two weights; the server loads each weight before it receives the next."""
_POLL_INTERVAL_S: Final = 0.005


def check_link(link: Link) -> None:
    """Raise `ConfigError` if the link's backend is `nccl` and this process has no GPU."""
    if link.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "VLLM: transfer='nccl' sends weights from a GPU, but this process has none: use "
            "transfer='gloo', or 'files' on one machine"
        )


class BroadcastError(Exception):
    """The weights could not be sent: the server's processes are gone or did not connect."""


class Broadcast:
    """One broadcast of a model's weights to the processes of one server.

    Args:
        files: safetensors files of the weights.
        link: the backend of torch.distributed, and this machine's address.
        workers: number of processes of the server, each of which receives all weights.

    Raises:
        ConfigError: this machine cannot listen at the address.
    """

    def __init__(self, files: Sequence[str | Path], link: Link, workers: int) -> None:
        self._files = files
        self._link, self._workers = link, workers
        self._stopped = threading.Event()
        try:
            listening = socket.create_server((link.host, 0))
        except OSError as error:
            raise ConfigError(
                f"VLLM: cannot listen at trainer_host={link.host!r}: {error.strerror}; give an "
                "address of this machine that servers can reach"
            ) from error
        self._port = listening.getsockname()[1]
        # torch's own socket would listen on every interface
        self._store = dist.TCPStore(
            link.host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=RENDEZVOUS_S),
            master_listen_fd=listening.detach(),
        )

    def info(self) -> dict[str, Any]:
        """Return what the server needs to receive the weights.

        The server passes it to `lightspan_broadcast.receive` as the argument `sent`.
        """
        return {
            "host": self._link.host,
            "port": self._port,
            "backend": self._link.backend,
            "workers": self._workers,
            "timeout_s": TIMEOUT_S,
            "weights": list(self._headers()),
        }

    def send(self) -> None:
        """Wait until all processes of the server have connected, and send every weight. Blocks.

        Raises:
            BroadcastError: a process is gone or did not connect, or `stop` was called.
        """
        self._wait_for_workers()
        try:
            group = make_group(
                self._store,
                0,
                self._workers + 1,
                backend=self._link.backend,
                address=self._link.host,
                timeout_s=TIMEOUT_S,
            )
            try:
                for tensor in self._tensors():
                    broadcast(group, tensor, self._check_stopped)
            except BaseException as error:
                # the error's frames reference the group, which would keep the server waiting
                del group
                clear_frames(error.__traceback__)
                raise
        except RuntimeError as error:
            raise BroadcastError(str(error).partition("\n")[0]) from error

    def stop(self) -> None:
        """Make `send` in another thread end with `BroadcastError`."""
        self._stopped.set()

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + RENDEZVOUS_S
        keys = [rendezvous_key(rank) for rank in range(1, self._workers + 1)]
        while not self._store.check(keys):
            self._check_stopped()
            if time.monotonic() > deadline:
                raise BroadcastError(
                    f"the {self._workers} processes of the server did not connect to "
                    f"{self._link.host}:{self._port} within {RENDEZVOUS_S:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise BroadcastError("the broadcast was stopped")

    def _headers(self) -> Iterator[list[Any]]:
        """Yield [name, data type, shape] of each weight."""
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    yield [name, FILE_TYPES[part.get_dtype()], list(part.get_shape())]

    def _tensors(self) -> Iterator[torch.Tensor]:
        device = "cuda" if self._link.backend == "nccl" else "cpu"
        for path in self._files:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118
                    yield file.get_tensor(name)
