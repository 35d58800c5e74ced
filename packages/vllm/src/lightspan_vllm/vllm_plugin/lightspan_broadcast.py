"""Weights that are sent to servers over torch.distributed: what both ends have to do alike.

One end is the trainer, rank 0; each process of a server is another. It imports nothing but torch,
and is loaded in vLLM's process as `lightspan_vllm_plugin` is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

dist: Final[Any] = torch.distributed

MEETING_S = 60.0
"""How long one end waits for the other before the first weight."""
_POLL_INTERVAL_S = 0.001


def here(rank: int) -> str:
    """The key of the store by which a process says that it has come."""
    return f"here-{rank}"


def group_of(
    store: Any, rank: int, size: int, *, backend: str, address: str, timeout_s: float
) -> Any:
    """One end of a group, which lives for one update. All others have come.

    Args:
        backend: `gloo`, over the CPU's memory, or `nccl`, between GPUs.
        address: of the interface of this machine by which the others are reached; NCCL chooses its
            own.
        timeout_s: how long one may keep the others waiting.

    Raises:
        RuntimeError: torch's, where they do not reach each other.
    """
    inner = dist.PrefixStore(backend, store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(inner, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    # by default it listens where the host's name points: an interface that others may reach
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(inner, rank, size, options)


def broadcast(group: Any, tensor: torch.Tensor, look: Callable[[], None] = lambda: None) -> None:
    """Fill a tensor of all but rank 0 with what it has.

    Args:
        look: is called while it lasts; may raise. NCCL does not notice that another end is gone.

    Raises:
        RuntimeError: torch's: another end is gone, or said nothing for too long.
    """
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work = group.broadcast([tensor], options)
    while not work.is_completed():
        look()
        time.sleep(_POLL_INTERVAL_S)
    work.wait()


def receive(
    sent: Mapping[str, Any], rank: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a trainer sends, each when it is there.

    Args:
        sent: what `Broadcast.info` says.
        rank: of this process among those that receive, from 1.
        device: the GPU that NCCL writes to; Gloo writes to the CPU's memory.

    Raises:
        RuntimeError: torch's: the trainer cannot be reached, or is gone.
    """
    host, port, backend = sent["host"], sent["port"], sent["backend"]
    meeting = timedelta(seconds=MEETING_S)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=meeting)
    store.set(here(rank), "")
    group = group_of(
        store,
        rank,
        sent["workers"] + 1,
        backend=backend,
        address=_facing(host, port),
        timeout_s=sent["timeout_s"],
    )
    target = device if backend == "nccl" else torch.device("cpu")
    for name, dtype, shape in sent["weights"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=target)
        broadcast(group, tensor)
        yield name, tensor


def _facing(host: str, port: int) -> str:
    """This machine's address, as that host sees it. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
