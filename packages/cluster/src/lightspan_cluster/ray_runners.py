"""Runners as actors of a Ray cluster (`lightspan[ray]`), replaced when they or their nodes die.

An actor supervises processes on its node (`ray_actor`), so it handles an app that blocks, hangs or
kills its process, as `LocalRunners` do. This module handles the loss of a node: the node's attempts
end without using up a try, their rollouts are requeued, and another actor takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

import lightspan.errors as errors
from lightspan.errors import ConfigError, LightspanError, UnsupportedError
from lightspan.progress import plural
from lightspan.runners import foreign_python
from lightspan.runners.crash_recovery import ProcessExit, requeue_attempts
from lightspan.runners.local import as_failure, shares
from lightspan.runners.protocol import RunnerPlan, check_importable
from lightspan.schema import clock
from lightspan.schema.records import new_id
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.schema.validation import check_choice, check_number, check_whole
from lightspan.stores import is_shared, open_store
from lightspan.stores.credentials import secrets_of
from lightspan_cluster import ray_actor, ray_cluster
from lightspan_cluster.app_sources import difference, source_hashes
from lightspan_cluster.ray_cluster import Membership

log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.5
"""Seconds between two polls of an actor's status."""
REMIND_S: Final = 10.0
"""Seconds between two warnings that the cluster has no room for an actor."""
_MAX_STARTS: Final = 3
"""Maximum number of starts of one actor, if its node is lost each time. Ray places actors on a lost
node until it has noticed the loss."""
_END_S: Final = 12.0
"""Seconds to wait until actors have ended; an actor kills its processes after 10 s."""


@dataclass(slots=True, eq=False)
class _ActorSlot:
    """One of the actors of `RayRunners`. When it dies, a new actor takes its place."""

    config: ray_actor.ActorConfig
    actor: Any = None
    """Ray's handle of the actor; None before the first start."""
    group: str = ""
    """Prefix of the names of the actor's runners."""
    is_placed: bool = False
    """Whether Ray has placed the actor on a node."""
    hello: ray_actor.ActorHello | None = None
    """The actor's first message; None until the actor works."""
    status: ray_actor.ActorStatus = field(default_factory=ray_actor.ActorStatus)
    quick_deaths: int = 0
    """Number of consecutive actors in this place that died before they had claimed an attempt."""


class RayRunners:
    """Runs up to `slots` concurrent attempts in `actors` long-lived actors of a Ray cluster.

    If actors are on other machines than the trainer, the store must be `https://…` or
    `postgresql://…`. Each node has its own key or password for the store, in the environment in
    which the node was started (`LIGHTSPAN_STORE_KEY`, `PGPASSWORD`). lightspan and the app must be
    installed on every node. The app is given by name, as in `fit("my_app:answer", …)`, because no
    code is sent from the trainer's machine to the nodes.

    Args:
        slots: maximum number of concurrent attempts, over all actors.
        actors: number of actors; each has one process for its attempts.
        address: `"local"` starts a cluster on this machine for this training; `"auto"` and
            `HOST:PORT` join a cluster in which this machine is a node; None uses `RAY_ADDRESS`, or
            `"local"` if it is not set.
        cpus: CPUs of the cluster that each actor occupies.
        resources: other Ray resources that each actor occupies, such as `{"apps": 1}` for
            nodes that were started with `--resources`; None for no others.
        runtime_env: Ray's `runtime_env` of the actors, such as `{"pip": […]}`; None for the nodes'
            own environment.
        isolation: `"thread"` or `"process"`, as in `LocalRunners`.
        python: path, on the nodes, of the interpreter of the app's own environment; None for the
            nodes' interpreter.
        app_dirs: folders on the nodes with the app's modules; installed packages need none. None
            for no folders or, in a local cluster, for the folders that `LocalRunners` would use.
        timeout_s: training fails after this many seconds in which no actor has a place in the
            cluster.
        without_token: whether to accept a cluster that requires no token.

    Raises:
        ConfigError: an option is invalid, or Ray is not installed.
    """

    def __init__(
        self,
        slots: int = 8,
        *,
        actors: int = 1,
        address: str | None = None,
        cpus: float = 1.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        isolation: str = "thread",
        python: str | os.PathLike[str] | None = None,
        app_dirs: foreign_python.Folders | None = None,
        timeout_s: float = 300.0,
        without_token: bool = False,
    ) -> None:
        check_whole("slots", slots, 1)
        check_whole("actors", actors, 1)
        if actors > slots:
            raise ConfigError(f"actors={actors} for slots={slots}: each needs one at least")
        check_number("cpus", cpus, low=0)
        check_number("timeout_s", timeout_s, above=0)
        check_choice("isolation", isolation, ("thread", "process"))
        ray_cluster.check_address(address)
        self.slots = slots
        self.actors = actors
        self.isolation = isolation
        self.timeout_s = timeout_s
        self._python = None if python is None else os.fspath(python)
        self._app_dirs = app_dirs
        self._resources = {"CPU": cpus, **(resources or {})}
        self._options = {
            "num_cpus": cpus,
            "resources": dict(resources or {}),
            "runtime_env": dict(runtime_env or {}),
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # another actor replaces it after its attempts have ended
        }
        self._membership = Membership(address, without_token=without_token)
        self._ray = ray_cluster.import_ray()
        self._plan: RunnerPlan | None = None
        self._sources: dict[str, str] = {}
        """Hashes of the app's modules on this machine; empty before `start`."""
        self._actor_slots: list[_ActorSlot] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._failure: LightspanError | None = None
        self._empty_since: float | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the actors may be on other machines than the trainer."""
        return not self._membership.is_local

    async def start(self, plan: RunnerPlan) -> None:
        """Join the cluster, and wait until each actor has a place and has imported the app.

        Actors that have no place after `timeout_s` seconds join later, when there is room.

        Raises:
            AppError: the app cannot be imported on a node.
            ConfigError: the cluster or the store cannot be used.
            LightspanError: the cluster cannot be reached, or has no room.
            UnsupportedError: nodes on other machines cannot open the store.
        """
        check_importable(plan.app)
        self._failure = self._empty_since = None
        is_local = self._membership.is_local
        if not is_local and not is_shared(plan.store_url):
            raise UnsupportedError(
                f"store {plan.store_url!r} is of this machine, and other nodes cannot open it: "
                "serve it (`lightspan serve --store …`) and train with its https://… address, use "
                'a postgresql://… store, or RayRunners(address="local")'
            )
        self._plan = msgspec.structs.replace(
            plan,
            sys_path=[],
            elsewhere=not is_local,
            # for processes of this machine only; other nodes have their own keys
            store_secrets=secrets_of(plan.store_url) if is_local else {},
        )
        python, app_dirs = self._paths(plan, is_local=is_local)
        self._sources = await asyncio.to_thread(source_hashes, plan.app, plan.sys_path)
        await _in_thread(self._membership.join)
        self._actor_slots = [
            _ActorSlot(
                ray_actor.ActorConfig(
                    slots=slots, isolation=self.isolation, python=python, app_dirs=app_dirs
                )
            )
            for slots in shares(self.slots, self.actors)
        ]
        starts = [asyncio.create_task(self._start_actor(slot)) for slot in self._actor_slots]
        try:
            await self._wait_started(starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop()
            raise
        self._supervisors = [
            asyncio.create_task(self._supervise(slot, start))
            for slot, start in zip(self._actor_slots, starts, strict=True)
        ]

    async def _wait_started(self, starts: Sequence[asyncio.Task[None]]) -> None:
        """Wait until each actor works, but no longer than `timeout_s`.

        Args:
            starts: the tasks that start the actors.

        Raises:
            LightspanError: an actor cannot work, or none has a place in time.
        """
        done, _ = await asyncio.wait(
            starts, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for start in done:
            start.result()
        waiting = [slot.is_placed for slot in self._actor_slots].count(False)
        if waiting == self.actors:
            raise self._no_room()
        if waiting:
            log.warning(
                "%d of %d actors have no place in the Ray cluster and join when there is room: %s",
                *(waiting, self.actors, self._room()),
            )

    async def stop(self) -> None:
        """End the actors, and the cluster if `start` started it. Idempotent.

        Actors that have not ended after 12 s are killed.
        """
        supervisors, self._supervisors = self._supervisors, []
        for supervisor in supervisors:
            supervisor.cancel()
        try:
            placed = [slot.actor for slot in self._actor_slots if slot.is_placed]
            ends = [asyncio.ensure_future(actor.stop.remote()) for actor in placed]
            if ends:
                await asyncio.wait(ends, timeout=_END_S)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, *supervisors, return_exceptions=True)
        finally:
            for slot in self._actor_slots:
                self._kill(slot)
            self._actor_slots = []
            await _in_thread(self._membership.leave)

    def check(self) -> None:
        """Raise the error that ended the runners, if there is one.

        Raise `LightspanError` if, for more than `timeout_s` seconds, no actor has had a place in
        the cluster.
        """
        if self._failure is not None:
            raise self._failure
        if not self._supervisors or any(slot.is_placed for slot in self._actor_slots):
            self._empty_since = None
            return
        self._empty_since = self._empty_since or clock.monotonic()
        if clock.monotonic() - self._empty_since > self.timeout_s:
            raise self._no_room()

    def _paths(self, plan: RunnerPlan, *, is_local: bool) -> tuple[str | None, list[str]]:
        """Return the app's Python interpreter and the folders of its modules.

        Both are paths on the nodes. The interpreter is None if the nodes' own interpreter is used.

        Raises:
            ConfigError: a path is not absolute, and nodes are on other machines.
        """
        python, dirs = self._python, foreign_python.folder_paths(self._app_dirs or [])
        paths = [] if python is None or os.sep not in python or python[0] == "~" else [python]
        if is_local:
            if self._app_dirs is not None or python is not None:
                dirs = foreign_python.app_folders(self._app_dirs)
            else:
                dirs = [
                    x
                    for x in plan.sys_path
                    if os.path.isdir(x) and not foreign_python.is_environment(x)
                ]
            return os.path.abspath(python) if python in paths else python, dirs
        for option, path in [*(("python", x) for x in paths), *(("app_dirs", x) for x in dirs)]:
            if not os.path.isabs(path):
                raise ConfigError(
                    f"{option}: {path!r} is no absolute path, and nodes have no common working "
                    "folder"
                )
        return python, dirs

    # --- one actor ------------------------------------------------------------------------
    async def _start_actor(self, slot: _ActorSlot) -> None:
        """Start an actor in `slot`; try again if its node is lost while it starts.

        Raises:
            LightspanError: the actor cannot work.
        """
        for number in range(1, _MAX_STARTS + 1):
            try:
                await self._try_start(slot)
                return
            except self._ray.exceptions.RayError as error:
                self._kill(slot)
                await self._requeue(slot)
                message = (
                    f"an actor could not start in the Ray cluster ({_last_line(error)}): install "
                    "lightspan in the environment of each node, and start each node with the "
                    "RAY_AUTH_MODE of the trainer; Ray's logs on the nodes have details"
                )
                if number == _MAX_STARTS:
                    raise LightspanError(message) from error
                log.warning("%s; it is tried again", message)
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _try_start(self, slot: _ActorSlot) -> None:
        assert self._plan is not None
        slot.is_placed, slot.group = False, new_id("actor")
        plan = msgspec.structs.replace(self._plan, prefix=slot.group)
        make = self._ray.remote(ray_actor.RunnerActor).options(**self._options)
        slot.actor = make.remote(msgspec.json.encode(slot.config))
        hello = await self._wait_placed(slot)
        slot.is_placed = True
        if hello.protocol != PROTOCOL_VERSION:
            node = f"{hello.python} ({hello.address})"
            raise ConfigError(foreign_python.mismatch(node, hello.lightspan, hello.protocol))
        self._membership.check_node(hello.address, is_authenticated=hello.is_authenticated)
        answer = await slot.actor.start.remote(msgspec.json.encode(plan))
        status = msgspec.json.decode(answer, type=ray_actor.ActorStatus)
        if status.failure is not None:
            raise _as_error(status.failure, hello)
        slot.status, slot.hello = status, hello
        own = {"this machine": self._sources}
        if text := difference(f"the node of {hello.address}", status.sources, own):
            log.warning("%s", text)

    async def _wait_placed(self, slot: _ActorSlot) -> ray_actor.ActorHello:
        """Wait until Ray has placed the actor, and return its first message.

        Log a warning at intervals while the cluster has no room.
        """
        answer = asyncio.ensure_future(slot.actor.hello.remote())
        try:
            while not (await asyncio.wait([answer], timeout=REMIND_S))[0]:
                log.warning("waiting for an actor in the Ray cluster: %s", self._room())
            return msgspec.json.decode(await answer, type=ray_actor.ActorHello)
        finally:
            answer.cancel()

    async def _supervise(self, slot: _ActorSlot, start: asyncio.Task[None]) -> None:
        """Wait for the `start` of an actor, poll its status, and replace the actor when it dies."""
        try:
            await start
            while self._failure is None:
                await asyncio.sleep(POLL_INTERVAL_S)
                await self._poll(slot)
        except Exception as error:
            text = "the runners in the Ray cluster cannot be supervised"
            self._failure = self._failure or as_failure(error, text)

    async def _poll(self, slot: _ActorSlot) -> None:
        try:
            answer = await slot.actor.status.remote()
        except self._ray.exceptions.ActorUnavailableError:  # Ray reports later if it is lost
            return
        except self._ray.exceptions.RayActorError as error:
            await self._replace(slot, _last_line(error))
            return
        slot.status = msgspec.json.decode(answer, type=ray_actor.ActorStatus)
        if slot.status.failure is not None:
            raise _as_error(slot.status.failure, slot.hello)

    async def _replace(self, slot: _ActorSlot, reason: str) -> None:
        hello = slot.hello
        assert hello is not None
        assert self._plan is not None
        slot.hello, slot.is_placed = None, False
        nodes = await _in_thread(self._ray.nodes)
        is_alive = any(node["NodeID"] == hello.node and node["Alive"] for node in nodes)
        what = "died" if is_alive else "was lost with its node"
        log.warning("the actor at %s %s and is replaced: %s", hello.address, what, reason)
        is_useless = is_alive and not slot.status.claimed
        slot.quick_deaths = slot.quick_deaths + 1 if is_useless else 0
        if slot.quick_deaths >= self._plan.timings.max_quick_deaths:
            raise LightspanError(
                f"Ray actors died {slot.quick_deaths} times before they ran anything (the last "
                f"one, at {hello.address}: {reason}); Ray's logs on that node have details"
            )
        await self._requeue(slot)
        await self._start_actor(slot)

    async def _requeue(self, slot: _ActorSlot) -> None:
        """End the attempts of an actor that died, and requeue their rollouts.

        Later reports of these attempts are ignored.
        """
        assert self._plan is not None
        death = ProcessExit(runner=slot.group, how="died", is_blameless=True)
        try:
            async with open_store(self._plan.store_url) as store:
                for report in await requeue_attempts(death, store, self._plan.run_id):
                    log.warning("attempt %s is given back, and run again", report.attempt_id)
        except LightspanError as error:
            log.warning("the attempts of %s end with their leases: %s", slot.group, error)

    def _kill(self, slot: _ActorSlot) -> None:
        if slot.actor is not None:
            with contextlib.suppress(Exception):  # the actor or the cluster has ended
                self._ray.kill(slot.actor)

    def _room(self) -> str:
        """Return, for a message, which resources an actor needs and which the cluster has."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        needs = ", ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
        has = ", ".join(f"{free.get(x, 0):g} of {total.get(x, 0):g} {x}" for x in self._resources)
        fits = all(free.get(name, 0) >= amount for name, amount in self._resources.items())
        start = "Ray is still starting the actor's process, or no single node has as much"
        return f"each asks for {needs}; free are {has}{f': {start}' if fits else ''}"

    def _no_room(self) -> LightspanError:
        return LightspanError(
            f"the Ray cluster had no room for any of {plural(self.actors, 'actor')} for "
            f"{self.timeout_s:g} s: {self._room()}; start more nodes, or ask for less (actors=, "
            "cpus=, resources=)"
        )


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Call a blocking function in a thread, and return its result.

    If the caller is cancelled, wait until `function` has ended, so that Ray's state is consistent.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _as_error(
    refusal: ray_actor.ActorRefused, hello: ray_actor.ActorHello | None
) -> LightspanError:
    """Convert an actor's error into an exception.

    Args:
        refusal: class name and message of the error. If `lightspan.errors` has no such class, the
            exception is a `LightspanError`.
        hello: the actor's first message, which names its node; None if there was none.
    """
    kind = getattr(errors, refusal.kind, LightspanError)
    if not (isinstance(kind, type) and issubclass(kind, LightspanError)):
        kind = LightspanError
    where = "" if hello is None else f" (on the Ray node at {hello.address})"
    return kind(refusal.message + where)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
