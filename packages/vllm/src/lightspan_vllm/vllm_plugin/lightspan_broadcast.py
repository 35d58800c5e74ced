"""Broadcast weights over torch.distributed, from the trainer to the processes of a server.

The trainer has rank 0. Both sides use this module. The trainer imports it. vLLM's process loads it,
as it loads `lightspan_vllm_plugin`. The module imports only torch.
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

RENDEZVOUS_S = 60.0
"""Maximum seconds for which trainer and server wait for each other before the first weight."""
_POLL_INTERVAL_S = 0.001


def rendezvous_key(rank: int) -> str:
    """Return the key that process `rank` sets in the store to show that it has connected.

    The store is torch's `TCPStore`, in which the processes find each other.
    """
    return f"here-{rank}"


def make_group(
    store: Any, rank: int, size: int, *, backend: str, address: str, timeout_s: float
) -> Any:
    """Make the process group in which this process sends or receives one update's weights.

    All processes must have connected to the store before.

    Args:
        store: the store in which the processes find each other.
        rank: rank of this process; the trainer is 0.
        size: number of ranks.
        backend: `gloo`, between CPUs, or `nccl`, between GPUs.
        address: this machine's address on the network interface to use, for Gloo. NCCL chooses an
            interface itself.
        timeout_s: maximum seconds to wait for the other ranks.

    Raises:
        RuntimeError: the ranks cannot reach each other.
    """
    inner = dist.PrefixStore(backend, store)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(inner, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    # by default Gloo listens at the address of the host's name, which may be public
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(inner, rank, size, options)


def broadcast(group: Any, tensor: torch.Tensor, poll: Callable[[], None] = lambda: None) -> None:
    """Send a tensor from rank 0 to all other ranks. All ranks must call this.

    Args:
        group: the process group.
        tensor: on rank 0, the tensor to send. On other ranks, a tensor that is filled.
        poll: called repeatedly until the broadcast has ended. It may raise an error to end the
            wait. This is for NCCL, which does not detect lost ranks.

    Raises:
        RuntimeError: a rank is gone, or did not answer in time.
    """
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work = group.broadcast([tensor], options)
    while not work.is_completed():
        poll()
        time.sleep(_POLL_INTERVAL_S)
    work.wait()


def receive(
    sent: Mapping[str, Any], rank: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Connect to a trainer, and yield the name and the tensor of each weight that it sends.

    Args:
        sent: the result of `Broadcast.info` in the trainer.
        rank: rank of this process, from 1.
        device: the GPU on which NCCL puts the tensors. With Gloo, they are on the CPU.

    Raises:
        RuntimeError: the trainer cannot be reached, or is gone.
    """
    host, port, backend = sent["host"], sent["port"], sent["backend"]
    timeout = timedelta(seconds=RENDEZVOUS_S)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set(rendezvous_key(rank), "")
    group = make_group(
        store,
        rank,
        sent["workers"] + 1,
        backend=backend,
        address=_local_address(host, port),
        timeout_s=sent["timeout_s"],
    )
    target = device if backend == "nccl" else torch.device("cpu")
    for name, dtype, shape in sent["weights"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=target)
        broadcast(group, tensor)
        yield name, tensor


def _local_address(host: str, port: int) -> str:
    """Return this machine's own address on the route to `host`. No packet is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
