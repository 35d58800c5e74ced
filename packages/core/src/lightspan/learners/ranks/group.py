"""Ranks, connected: orders and answers as bytes, and gradients added up.

torch's process groups are made directly, and not by `init_process_group`: that would take the one
default group of the user's process. Gloo carries what is said, on the loopback interface alone,
and it notices at once when a process at the other end has ended. NCCL adds gradients where each
rank has a GPU of its own; a call of it waits for a dead rank for ever, so it is never waited for
without looking whether all others live. NCCL is not yet run on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from lightspan.errors import RankError

dist: Final[Any] = torch.distributed
"""Most of its names are not in its stubs."""
FOREVER: Final = timedelta(days=365)
"""Rollouts may take days, in which other ranks have nothing to do."""
BUCKET: Final = 2**24
"""Numbers that are added up at once: 64 MiB of float32, beside the gradients themselves."""
_LOOK_S: Final = 0.001


class GroupError(Exception):
    """Another rank has ended, or said nothing for too long."""

    @property
    def is_late(self) -> bool:
        """Whether one said nothing for too long."""
        return "timed out" in str(self).lower()


def runs() -> str:
    """What this process computes with."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"lightspan {version('lightspan')}, torch {torch.__version__}, Python {python}"


def ready(rank: int) -> str:
    """The key by which a rank says, when it is about to connect, what it `runs`."""
    return f"ready/{rank}"


def check_same(store: Any, size: int) -> None:
    """Raise `RankError` for a rank, all of which are ready, that runs something else than this one:
    what they tell each other may differ, and what they compute."""
    own = runs()
    for rank in range(1, size):
        other = str(store.get(ready(rank)), "utf-8")
        if other != own:
            raise RankError(
                f"rank {rank} of the learner runs {other}, and rank 0 {own}: start all ranks from "
                "one environment, and start again after an upgrade"
            )


class Group:
    """One rank's connections to all others. Its methods are called by all ranks in one order.

    Args:
        store: where the ranks find each other.
        devices: of each rank.
        timeout_s: how long one may keep the others waiting.
        look: raises `GroupError` if another rank is known to have ended.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        devices: Sequence[str],
        *,
        timeout_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.devices = tuple(devices)
        self._timeout = timedelta(seconds=timeout_s)
        self._look = look
        self._gloo = self._made(lambda: _gloo(store, rank, len(devices), self._timeout))
        self._nccl: Any = None
        if _own_gpus(devices):
            torch.cuda.set_device(torch.device(devices[rank]))
            self._nccl = self._made(lambda: _nccl(store, rank, len(devices), self._timeout))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    def name(self, rank: int) -> str:
        """A rank, for a message."""
        return f"rank {rank} ({self.devices[rank]})"

    def close(self) -> None:
        """Hang up: the others notice at once, whatever they wait for. Nothing can be said after."""
        self._gloo = None

    def send(self, rank: int, data: bytes, *, within: timedelta | None = None) -> None:
        """To one other rank, which has to take it.

        Args:
            within: None for the group's own timeout.
        """
        within = within or self._timeout
        size = torch.tensor([len(data)], dtype=torch.int64)
        self._made(lambda: self._gloo.send([size], rank, 0).wait(within))
        self._made(lambda: self._gloo.send([_tensor(data)], rank, 0).wait(within))

    def receive(self, rank: int, *, within: timedelta | None = None) -> bytes:
        """What another rank sent.

        Args:
            within: None for the group's own timeout.
        """
        within = within or self._timeout
        size = torch.zeros(1, dtype=torch.int64)
        self._made(lambda: self._gloo.recv([size], rank, 0).wait(within))
        data = torch.empty(int(size), dtype=torch.uint8)
        self._made(lambda: self._gloo.recv([data], rank, 0).wait(within))
        return _bytes(data)

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank says, to all."""
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        own = torch.tensor([len(data)], dtype=torch.int64)
        self._made(lambda: self._gloo.allgather([counts], [own]).wait())
        sizes = [int(count) for count in counts]
        longest = max(sizes)
        padded = _tensor(data.ljust(longest, b"\0"))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._made(lambda: self._gloo.allgather([texts], [padded]).wait())
        return [_bytes(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each the sum of what all ranks have of it; bit for bit the same on all of them.

        Sums are taken in float32 at least: bfloat16 would round each partial sum.
        """
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
            total = self._summed(flat)
            sizes = [tensor.numel() for tensor in bucket]
            parts = total.split(sizes)  # type: ignore[no-untyped-call]
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _summed(self, flat: Tensor) -> Tensor:
        if self._nccl is None:
            host = flat.cpu()
            self._made(lambda: self._gloo.allreduce([host]).wait())
            return host.to(flat.device)
        work = self._made(lambda: self._nccl.allreduce([flat]))
        end = time.monotonic() + self._timeout.total_seconds()
        while not self._made(work.is_completed):
            self._look()
            if time.monotonic() > end:
                raise GroupError("timed out while gradients were added up")
            time.sleep(_LOOK_S)
        self._made(work.wait)
        return flat

    def _made(self, call: Callable[[], Any]) -> Any:
        """What a call of torch's returned; its errors as ours."""
        try:
            return call()
        except RuntimeError as error:
            self._look()
            raise GroupError(str(error).partition("\n")[0]) from error


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # by default it listens where the host's name points: an interface that others may reach
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)


def _own_gpus(devices: Sequence[str]) -> bool:
    """Whether each rank has a GPU of its own: NCCL refuses two ranks on one."""
    gpus = [device if ":" in device else f"{device}:0" for device in devices]
    return all(gpu.startswith("cuda") for gpu in gpus) and len(set(gpus)) == len(gpus)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, of about `BUCKET` numbers; a larger one is by itself."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(each.numel() for each in bucket) + tensor.numel()
        if bucket and (size > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()
