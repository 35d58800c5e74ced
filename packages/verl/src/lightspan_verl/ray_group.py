"""verl's ranks as its own `RayWorkerGroup`, in a cluster that is joined or started here.

Beside `internals` the only file that knows verl by its names: those of its single controller.
Imported in verl's environment alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import ray
from ray._private import services
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from lightspan.errors import ConfigError, LightspanError, RankError
from lightspan_cluster.ray_cluster import LOCAL, TOKEN_HINT, Membership
from lightspan_verl.environment import VERSION
from lightspan_verl.rank_group import SEEN_S, SHOWN
from lightspan_verl.rpc import Assembly, Broadcast, Ready, Results

STORE_BYTES: Final = 2**28
"""What Ray holds in shared memory of what is ordered and answered; more of it goes to disk."""
_LOOPBACK: Final = "127.0.0.1"
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_POLL_INTERVAL_S: Final = 0.5
_SAME: Final = ("verl", "torch", "transformers", "tensordict", "msgspec", "safetensors")
"""What has to be there in the same version as here."""


class RayRank(Worker):  # type: ignore[misc]
    """A rank, as an actor of verl's group.

    Args:
        rendezvous: the file by which ranks find each other.
    """

    def __init__(self, rendezvous: str) -> None:
        super().__init__()
        from lightspan_verl.rank_main import RankService, connect

        connect(self.rank, self.world_size, rendezvous)
        self._served = RankService(self.rank, self.world_size)

    def presence(self) -> int:
        """Its process."""
        return os.getpid()

    def obey(self, order: bytes) -> bytes:
        """What comes of an order. An error that is none of ours is Ray's to tell: the trainer then
        ends all ranks."""
        from lightspan_verl.rpc import orders, packed

        return packed(self._served.answer(orders.decode(order)))


class Group:
    """The ranks, once they are there.

    Raises:
        ConfigError: the cluster asks for no token, has too little, or other packages, or is on
            other machines.
        LightspanError: it cannot be joined, or has no room in time.
        RankError: a rank ended before it was there.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._until = time.monotonic() + assembly.start_s
        self._membership = Membership(
            assembly.address or LOCAL,
            without_token=False,
            refusal="asks for no token: whoever reaches it runs what they like there; "
            f"{TOKEN_HINT}, or take ray=True, for a cluster that is started here",
            options={
                "runtime_env": {"env_vars": dict(assembly.environment)},
                "logging_level": logging.ERROR,
            },
            own={
                "num_cpus": assembly.ranks,
                "num_gpus": assembly.ranks if assembly.on_gpu else 0,
                "object_store_memory": STORE_BYTES,
                "_node_ip_address": _LOOPBACK,
                "_temp_dir": str(Path(assembly.folder) / "ray"),
            },
        )
        with nullcontext() if assembly.address else _on_loopback():
            self._membership.join()
        try:
            self._check_closed()
            self._group = self._made()
            self.roll = self._present()
        except BaseException:
            self._membership.leave()
            raise

    def _made(self) -> Any:
        """verl's group, whose ranks are beginning."""
        assembly = self._assembly
        self._await_room()
        pool = RayResourcePool([assembly.ranks], use_gpu=assembly.on_gpu, max_colocate_count=1)
        self._check_nodes(self._placed(pool))
        return RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(RayRank), assembly.rendezvous),
            bin_pack=False,
            device_name="cuda" if assembly.on_gpu else "cpu",
            master_addr="127.0.0.1",
            master_port="0",  # nobody listens: ranks meet by a file
        )

    def _present(self) -> Ready:
        """Who is there, once all are."""
        found = self._gathered(self._group.execute_all_async("presence"), self._until)
        if isinstance(found, Results):
            number = found.late[0] if found.late else found.lost
            how = f"took longer than start_s={self._assembly.start_s:g} seconds"
            raise RankError(f"verl's rank {number} {found.how or how}")
        return Ready(pids=found, head=_head(), ray=ray.__version__)

    def exchange(self, orders: Broadcast) -> Results:
        """What the ranks answer; or which one is lost, or late."""
        until = time.monotonic() + orders.limit_s
        found = self._gathered(self._group.execute_all_async("obey", list(orders.orders)), until)
        return found if isinstance(found, Results) else Results(answers=found)

    def leave(self) -> None:
        """End the ranks, and a cluster that was started here."""
        for worker in self._group.workers:
            ray.kill(worker, no_restart=True)
        self._membership.leave()

    def _gathered(self, asked: Sequence[Any], until: float) -> list[Any] | Results:
        """What each rank gave back, or which one is lost or late."""
        ranks = {reference: rank for rank, reference in enumerate(asked)}
        found: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting = list(asked)
        while waiting and time.monotonic() < until:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_INTERVAL_S)
            for reference in ready:
                try:
                    found[ranks[reference]] = ray.get(reference)
                except ray.exceptions.RayError as error:
                    failed[ranks[reference]] = error
                    # one that was killed may show after one that missed it
                    until = min(until, time.monotonic() + SEEN_S)
        if failed:
            dead = [r for r, e in failed.items() if isinstance(e, ray.exceptions.RayActorError)]
            rank = min(dead or failed)
            return Results(lost=rank, how=_how(failed[rank], is_dead=bool(dead)))
        if waiting:
            return Results(late=sorted(ranks[each] for each in waiting))
        return [found[rank] for rank in range(len(asked))]

    def _check_closed(self) -> None:
        """Raise `LightspanError` if a cluster that was started here listens to others."""
        if not self._assembly.address and not _head().startswith(f"{_LOOPBACK}:"):
            raise LightspanError(
                f"{self._named}: Ray {ray.__version__} listens at {_head()}, and not on the "
                "loopback interface alone: take Ray 2.60, or start a cluster yourself"
            )

    # --- where they are -------------------------------------------------------------------
    @property
    def _asked(self) -> dict[str, float]:
        """What all ranks take of the cluster."""
        names = ("CPU", "GPU") if self._assembly.on_gpu else ("CPU",)
        return dict.fromkeys(names, float(self._assembly.ranks))

    @property
    def _named(self) -> str:
        """The option, for a message."""
        return f"Verl(ranks={self._assembly.ranks}, ray={self._assembly.address or True!r})"

    def _await_room(self) -> None:
        """Wait until the cluster has what the ranks take.

        Raises:
            ConfigError: it never will.
            LightspanError: others have it for too long.
        """
        total = ray.cluster_resources()
        for name, amount in self._asked.items():
            if total.get(name, 0) < amount:
                raise ConfigError(
                    f"{self._named}: the ranks take {amount:g} {name}, one each, and the Ray "
                    f"cluster has {total.get(name, 0):g}: take fewer ranks, or add nodes"
                )
        while lacking := self._lacking(ray.available_resources()):
            if time.monotonic() > self._until:
                raise LightspanError(
                    f"{self._named}: {lacking}, and others have had the rest for "
                    f"start_s={self._assembly.start_s:g} seconds: wait for them, or take fewer "
                    "ranks"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _lacking(self, free: Mapping[str, float]) -> str:
        for name, amount in self._asked.items():
            if free.get(name, 0) < amount:
                return (
                    f"the ranks take {amount:g} {name}, of which {free.get(name, 0):g} are free in "
                    "the Ray cluster"
                )
        return ""

    def _placed(self, pool: Any) -> Any:
        """The placement group of the ranks. verl waits for it without an end, so another thread
        does.

        Raises:
            ConfigError: no node has what one rank takes.
        """
        made: list[Any] = []

        def place() -> None:
            device = "cuda" if self._assembly.on_gpu else "cpu"
            made.extend(pool.get_placement_groups(strategy="PACK", device_name=device))

        thread = threading.Thread(target=place, daemon=True)
        thread.start()
        thread.join(max(_POLL_INTERVAL_S, self._until - time.monotonic()))
        if not made:
            each = " and ".join(f"1 {name}" for name in self._asked)
            raise ConfigError(
                f"{self._named}: Ray has found no place for {self._assembly.ranks} times {each}, "
                f"each on one node, in start_s={self._assembly.start_s:g} seconds: see `ray status`"
            )
        return made[0]

    def _check_nodes(self, placement: Any) -> None:
        """Raise `ConfigError` if a rank's node is another machine, or has other packages."""

        def look(names: Sequence[str], folder: str, boot: str) -> dict[str, Any]:
            # Within a function it travels as it is: the node may have no lightspan, and no verl.
            import contextlib
            import os
            import sys
            from importlib.metadata import PackageNotFoundError, version
            from pathlib import Path

            found = {}
            for name in names:
                with contextlib.suppress(PackageNotFoundError):
                    found[name] = version(name)
            here = Path(boot).exists() and Path(boot).read_text()
            reached = os.access(folder, os.W_OK)
            return {"found": found, "boot": here, "reached": reached, "python": sys.executable}

        task = ray.remote(num_cpus=0, max_retries=0)(look)
        asked = [
            task.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=rank
                )
            ).remote(_SAME, self._assembly.folder, _BOOT)
            for rank in range(self._assembly.ranks)
        ]
        try:
            seen = ray.get(asked, timeout=max(_POLL_INTERVAL_S, self._until - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise LightspanError(
                f"{self._named}: the nodes of the Ray cluster cannot be asked: {_first(error)}"
            ) from error
        own = look(_SAME, self._assembly.folder, _BOOT)
        for rank, each in enumerate(seen):
            self._check_node(rank, each, own)

    def _check_node(self, rank: int, seen: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if seen["boot"] != own["boot"] or not seen["reached"]:
            raise ConfigError(
                f"{self._named}: rank {rank} would be on another machine than the trainer, or of "
                "another user: ranks read models and write weights and checkpoints in the "
                "trainer's folders, so the cluster's nodes have to be of this machine and user"
            )
        python, found = seen["python"], seen["found"]
        start = f"start its nodes with verl's environment (`{_ray_of(own['python'])} start …`)"
        lacking = [name for name in _SAME if name not in found]
        if lacking:
            raise ConfigError(
                f"{self._named}: the Ray cluster's Python ({python}) lacks {', '.join(lacking)}: "
                f"{start}, or {python} -m pip install verl=={VERSION} msgspec"
            )
        for name in _SAME:
            if found[name] != own["found"].get(name):
                raise ConfigError(
                    f"{self._named}: the Ray cluster's Python ({python}) has {name} "
                    f"{found[name]}, and {own['python']} has {own['found'].get(name)}: {start}"
                )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a node be at 127.0.0.1. Ray's servers then listen there alone; but Ray 2.60 puts the
    machine's address in place of that one, and listens to everybody."""
    resolved = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolved


def _head() -> str:
    """The address of the head of the cluster that was joined."""
    return str(ray.get_runtime_context().gcs_address)


def _ray_of(python: str) -> str:
    return str(Path(python).parent / "ray")


def _how(error: Exception, *, is_dead: bool) -> str:
    """What Ray says of a rank that is lost."""
    said = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    words = "\n".join(said[-SHOWN:])
    return f"has died; Ray says:\n{words}\n" if is_dead else f"failed:\n{words}\n"


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
