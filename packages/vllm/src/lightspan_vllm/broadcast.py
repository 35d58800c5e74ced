"""Weights on their way to servers that cannot read the trainer's files, or should not have to:
over torch.distributed, by Gloo from memory to memory, or by NCCL from GPU to GPU.

A group lives for one update of one server: one that was started again is in the next as any other
is, and nothing has to be found out about what was lost.
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
    MEETING_S,
    broadcast,
    group_of,
    here,
)

dist: Final[Any] = torch.distributed

TIMEOUT_S: Final = 300.0
"""How long one end may keep the other waiting for a weight, which a server also loads."""
_POLL_INTERVAL_S: Final = 0.005
_TYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check_link(link: Link) -> None:
    """Raise `ConfigError` for one that this process cannot send by."""
    if link.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "VLLM: transfer='nccl' sends weights from a GPU of this process, and it has none: use "
            "transfer='gloo', or 'files' on one machine"
        )


class Broken(Exception):
    """The other end is gone, or did not come."""


class Broadcast:
    """Sends a model's weights to the processes of one server, once.

    Args:
        files: what has them.
        workers: processes of the server, each of which takes all.

    Raises:
        ConfigError: this machine has no such address.
    """

    def __init__(self, files: Sequence[str | Path], link: Link, workers: int) -> None:
        self._files = files
        self._link, self._workers = link, workers
        self._stopped = threading.Event()
        try:
            listening = socket.create_server((link.host, 0))
        except OSError as error:
            raise ConfigError(
                f"VLLM: trainer_host={link.host!r} cannot be listened at: {error.strerror}; give "
                "an address of this machine that servers can reach"
            ) from error
        self._port = listening.getsockname()[1]
        # a socket of ours: torch's own would listen on every interface
        self._store = dist.TCPStore(
            link.host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_S),
            master_listen_fd=listening.detach(),
        )

    def info(self) -> dict[str, Any]:
        """What servers have to know to receive them."""
        return {
            "host": self._link.host,
            "port": self._port,
            "backend": self._link.backend,
            "workers": self._workers,
            "timeout_s": TIMEOUT_S,
            "weights": [list(each) for each in self._headers()],
        }

    def send(self) -> None:
        """Wait for all that receive, and send every weight. Blocks.

        Raises:
            Broken: one is gone, or did not come; or `stop` was called.
        """
        self._meet()
        try:
            group = group_of(
                self._store,
                0,
                self._workers + 1,
                backend=self._link.backend,
                address=self._link.host,
                timeout_s=TIMEOUT_S,
            )
            try:
                for tensor in self._tensors():
                    broadcast(group, tensor, self._look)
            except BaseException as error:
                # hang up: what the error's frames hold would keep the others waiting
                del group
                clear_frames(error.__traceback__)
                raise
        except RuntimeError as error:
            raise Broken(str(error).partition("\n")[0]) from error

    def stop(self) -> None:
        """End `send`, from another thread. Idempotent."""
        self._stopped.set()

    def _meet(self) -> None:
        latest = time.monotonic() + MEETING_S
        awaited = [here(rank) for rank in range(1, self._workers + 1)]
        while not self._store.check(awaited):
            self._look()
            if time.monotonic() > latest:
                raise Broken(
                    f"the {self._workers} processes of the server did not come to "
                    f"{self._link.host}:{self._port} within {MEETING_S:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _look(self) -> None:
        if self._stopped.is_set():
            raise Broken("it was given up")

    def _headers(self) -> Iterator[tuple[str, str, list[int]]]:
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(name)
                    yield name, _TYPES[part.get_dtype()], list(part.get_shape())

    def _tensors(self) -> Iterator[torch.Tensor]:
        device = "cuda" if self._link.backend == "nccl" else "cpu"
        for path in self._files:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118
                    yield file.get_tensor(name)
