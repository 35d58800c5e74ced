"""verl's ranks as its `RayWorkerGroup`, in a Ray cluster that is joined or started.

Apart from `verl_adapter`, the only module that uses verl's names: those of its single controller.
Imported in verl's environment only.
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
from lightspan_verl.rank_group import EXIT_DELAY_S, MAX_LINES
from lightspan_verl.rpc import Broadcast, RaySetup, Ready, Results

STORE_BYTES: Final = 2**28
"""Size of Ray's object store in shared memory, for orders and answers; the rest spills to disk."""
_LOOPBACK: Final = "127.0.0.1"
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_POLL_INTERVAL_S: Final = 0.5
_SAME: Final = ("verl", "torch", "transformers", "tensordict", "msgspec", "safetensors")
"""Packages that must have the same version on all nodes."""


class RayRank(Worker):  # type: ignore[misc]
    """A rank as an actor of verl's worker group.

    Args:
        rendezvous: path of the file by which ranks find each other.
    """

    def __init__(self, rendezvous: str) -> None:
        super().__init__()
        from lightspan_verl.rank_main import RankService, connect

        connect(self.rank, self.world_size, rendezvous)
        self._service = RankService(self.rank, self.world_size)

    def presence(self) -> int:
        """Return the process id."""
        return os.getpid()

    def obey(self, order: bytes) -> bytes:
        """Execute an encoded order and return the encoded answer.

        Ray reports errors other than lightspan's, after which the trainer ends all ranks.
        """
        from lightspan_verl.rpc import order_decoder, packed

        return packed(self._service.answer(order_decoder.decode(order)))


class Group:
    """The running ranks.

    Args:
        setup: the cluster's and the ranks' settings.

    Raises:
        ConfigError: the cluster needs no token, lacks resources, has other packages, or is on other
            machines.
        LightspanError: the cluster cannot be joined, or has no free resources in time.
        RankError: a rank ended during its start.
    """

    def __init__(self, setup: RaySetup) -> None:
        self._setup = setup
        self._deadline = time.monotonic() + setup.start_s
        self._membership = Membership(
            setup.address or LOCAL,
            without_token=False,
            refusal="asks for no token: anyone who reaches it can run any code there; "
            f"{TOKEN_HINT}, or take ray=True, for a cluster that is started here",
            options={
                "runtime_env": {"env_vars": dict(setup.environment)},
                "logging_level": logging.ERROR,
            },
            own={
                "num_cpus": setup.ranks,
                "num_gpus": setup.ranks if setup.on_gpu else 0,
                "object_store_memory": STORE_BYTES,
                "_node_ip_address": _LOOPBACK,
                "_temp_dir": str(Path(setup.folder) / "ray"),
            },
        )
        with nullcontext() if setup.address else _on_loopback():
            self._membership.join()
        try:
            self._check_loopback()
            self._group = self._make_group()
            self.ready = self._wait_ready()
        except BaseException:
            self._membership.leave()
            raise

    def _make_group(self) -> Any:
        """Return verl's worker group, whose ranks are starting."""
        setup = self._setup
        self._await_resources()
        pool = RayResourcePool([setup.ranks], use_gpu=setup.on_gpu, max_colocate_count=1)
        self._check_nodes(self._place(pool))
        return RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(ray.remote(RayRank), setup.rendezvous),
            bin_pack=False,
            device_name="cuda" if setup.on_gpu else "cpu",
            master_addr="127.0.0.1",
            master_port="0",  # unused: the rendezvous is a file
        )

    def _wait_ready(self) -> Ready:
        """Wait until all ranks are ready."""
        pids = self._gather(self._group.execute_all_async("presence"), self._deadline)
        if isinstance(pids, Results):
            number = pids.late[0] if pids.late else pids.lost
            how = f"took longer than start_s={self._setup.start_s:g} seconds"
            raise RankError(f"verl's rank {number} {pids.how or how}")
        return Ready(pids=pids, head=_head(), ray=ray.__version__)

    def exchange(self, orders: Broadcast) -> Results:
        """Send the orders and return the answers, or the lost or late ranks."""
        deadline = time.monotonic() + orders.limit_s
        futures = self._group.execute_all_async("obey", list(orders.orders))
        answers = self._gather(futures, deadline)
        return answers if isinstance(answers, Results) else Results(answers=answers)

    def leave(self) -> None:
        """End the ranks, and the cluster if it was started here."""
        for worker in self._group.workers:
            ray.kill(worker, no_restart=True)
        self._membership.leave()

    def _gather(self, futures: Sequence[Any], deadline: float) -> list[Any] | Results:
        """Return each rank's result, or the lost or late ranks."""
        ranks = {future: rank for rank, future in enumerate(futures)}
        results: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        waiting = list(futures)
        while waiting and time.monotonic() < deadline:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_INTERVAL_S)
            for future in ready:
                try:
                    results[ranks[future]] = ray.get(future)
                except ray.exceptions.RayError as error:
                    failed[ranks[future]] = error
                    # a killed rank may be reported after the ranks that fail without it
                    deadline = min(deadline, time.monotonic() + EXIT_DELAY_S)
        if failed:
            dead = [r for r, e in failed.items() if isinstance(e, ray.exceptions.RayActorError)]
            rank = min(dead or failed)
            return Results(lost=rank, how=_describe(failed[rank], is_dead=bool(dead)))
        if waiting:
            return Results(late=sorted(ranks[future] for future in waiting))
        return [results[rank] for rank in range(len(futures))]

    def _check_loopback(self) -> None:
        """Raise `LightspanError` if a cluster that was started here is reachable from outside."""
        if not self._setup.address and not _head().startswith(f"{_LOOPBACK}:"):
            raise LightspanError(
                f"{self._option}: Ray {ray.__version__} listens at {_head()}, not on the loopback "
                "interface only: use Ray 2.60, or start a cluster yourself"
            )

    # --- resources and nodes --------------------------------------------------------------
    @property
    def _resources(self) -> dict[str, float]:
        """Resources of all ranks."""
        names = ("CPU", "GPU") if self._setup.on_gpu else ("CPU",)
        return dict.fromkeys(names, float(self._setup.ranks))

    @property
    def _option(self) -> str:
        """The user's option, for messages."""
        return f"Verl(ranks={self._setup.ranks}, ray={self._setup.address or True!r})"

    def _await_resources(self) -> None:
        """Wait until the cluster has the ranks' resources free.

        Raises:
            ConfigError: the cluster has too few resources.
            LightspanError: the resources are in use for too long.
        """
        total = ray.cluster_resources()
        for name, amount in self._resources.items():
            if total.get(name, 0) < amount:
                raise ConfigError(
                    f"{self._option}: the ranks take {amount:g} {name}, one each, and the Ray "
                    f"cluster has {total.get(name, 0):g}: take fewer ranks, or add nodes"
                )
        while lacking := self._lacking(ray.available_resources()):
            if time.monotonic() > self._deadline:
                raise LightspanError(
                    f"{self._option}: {lacking}, and others have had the rest for "
                    f"start_s={self._setup.start_s:g} seconds: wait for them, or take fewer "
                    "ranks"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _lacking(self, free: Mapping[str, float]) -> str:
        for name, amount in self._resources.items():
            if free.get(name, 0) < amount:
                return (
                    f"the ranks take {amount:g} {name}, of which {free.get(name, 0):g} are free in "
                    "the Ray cluster"
                )
        return ""

    def _place(self, pool: Any) -> Any:
        """Return the placement group of the ranks.

        verl waits for it without a timeout, so a thread does.

        Raises:
            ConfigError: no node has the resources of a rank.
        """
        groups: list[Any] = []

        def place() -> None:
            device = "cuda" if self._setup.on_gpu else "cpu"
            groups.extend(pool.get_placement_groups(strategy="PACK", device_name=device))

        thread = threading.Thread(target=place, daemon=True)
        thread.start()
        thread.join(max(_POLL_INTERVAL_S, self._deadline - time.monotonic()))
        if not groups:
            share = " and ".join(f"1 {name}" for name in self._resources)
            raise ConfigError(
                f"{self._option}: Ray has found no place for {self._setup.ranks} times {share}, "
                f"each on one node, in start_s={self._setup.start_s:g} seconds: see `ray status`"
            )
        return groups[0]

    def _check_nodes(self, placement: Any) -> None:
        """Raise `ConfigError` if a rank's node is another machine, or has other packages."""

        def probe(names: Sequence[str], folder: str, boot: str) -> dict[str, Any]:
            # a local function is pickled by value: the node may have neither lightspan nor verl
            import contextlib
            import os
            import sys
            from importlib.metadata import PackageNotFoundError, version
            from pathlib import Path

            versions = {}
            for name in names:
                with contextlib.suppress(PackageNotFoundError):
                    versions[name] = version(name)
            boot_id = Path(boot).exists() and Path(boot).read_text()
            return {
                "versions": versions,
                "boot": boot_id,
                "is_writable": os.access(folder, os.W_OK),
                "python": sys.executable,
            }

        task = ray.remote(num_cpus=0, max_retries=0)(probe)
        futures = [
            task.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=rank
                )
            ).remote(_SAME, self._setup.folder, _BOOT)
            for rank in range(self._setup.ranks)
        ]
        try:
            nodes = ray.get(
                futures, timeout=max(_POLL_INTERVAL_S, self._deadline - time.monotonic())
            )
        except ray.exceptions.RayError as error:
            raise LightspanError(
                f"{self._option}: the nodes of the Ray cluster do not answer: {_first_line(error)}"
            ) from error
        own = probe(_SAME, self._setup.folder, _BOOT)
        for rank, node in enumerate(nodes):
            self._check_node(rank, node, own)

    def _check_node(self, rank: int, node: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        if node["boot"] != own["boot"] or not node["is_writable"]:
            raise ConfigError(
                f"{self._option}: rank {rank} would be on another machine than the trainer, or of "
                "another user: ranks read models and write weights and checkpoints in the "
                "trainer's folders, so the cluster's nodes have to be of this machine and user"
            )
        python, versions = node["python"], node["versions"]
        program = Path(own["python"]).parent / "ray"
        start = f"start its nodes with verl's environment (`{program} start …`)"
        missing = [name for name in _SAME if name not in versions]
        if missing:
            raise ConfigError(
                f"{self._option}: the Ray cluster's Python ({python}) lacks {', '.join(missing)}: "
                f"{start}, or {python} -m pip install verl=={VERSION} msgspec"
            )
        for name in _SAME:
            if versions[name] != own["versions"].get(name):
                raise ConfigError(
                    f"{self._option}: the Ray cluster's Python ({python}) has {name} "
                    f"{versions[name]}, and {own['python']} has {own['versions'].get(name)}: "
                    f"{start}"
                )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray start a node at 127.0.0.1, so that its servers listen on loopback only.

    Ray 2.60 replaces 127.0.0.1 by the machine's address, and listens on all interfaces.
    """
    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


def _head() -> str:
    """Return the address of the cluster's head."""
    return str(ray.get_runtime_context().gcs_address)


def _describe(error: Exception, *, is_dead: bool) -> str:
    """Describe Ray's error about a lost rank."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    detail = "\n".join(lines[-MAX_LINES:])
    return f"has died; Ray says:\n{detail}\n" if is_dead else f"failed:\n{detail}\n"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
