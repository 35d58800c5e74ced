"""Runners as actors of a Ray cluster (`lightspan[ray]`), replaced when they or their nodes die.

An actor looks after processes on its node (`actor`), so an app that blocks, hangs or kills its
process is met there as on this machine. Here is what a node can do: be lost. Its attempts are then
ended, and no try is used up; their rollouts are queued again, and another actor takes the place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, TypeVar

import msgspec

import lightspan.errors as errors
from lightspan.errors import ConfigError, LightspanError, UnsupportedError
from lightspan.runners.crash_recovery import ProcessExit, bury
from lightspan.runners.foreign_python import Folders, app_folders, mismatch, of_environment
from lightspan.runners.local import MAX_QUICK_DEATHS, shares
from lightspan.runners.protocol import RunnerPlan, check_leaves_home
from lightspan.schema import clock
from lightspan.schema.records import new_id
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.schema.validation import check_number, check_whole
from lightspan.stores import is_shared, open_store
from lightspan.stores.credentials import secrets_of
from lightspan_cluster import ray_cluster
from lightspan_cluster.ray_actor import (
    ActorConfig,
    ActorHello,
    ActorRefused,
    ActorStatus,
    RunnerActor,
)
from lightspan_cluster.ray_cluster import Membership

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_INTERVAL_S: Final = 0.5
"""How often an actor is asked how its processes are."""
REMIND_S: Final = 10.0
"""How long nothing is said of an actor that waits for room in the cluster."""
_STARTS: Final = 3
"""How often an actor is begun anew where its node is lost as it begins: Ray gives actors a place on
one that is gone until it knows."""
_END_S: Final = 12.0
"""How long actors may take to end their processes, which they do by force after 10 s."""


class _BeginningError(LightspanError):
    """An actor died, or could not be reached, before it was at work."""


@dataclass(slots=True, eq=False)
class _ActorSlot:
    """A place for an actor."""

    slots: int
    actor: Any = None
    """Ray's handle; None while there is none."""
    group: str = ""
    """What the names of the actor's runners begin with, as attempts have them."""
    is_here: bool = False
    """Whether the actor has found room."""
    arrival: ActorHello | None = None
    """Of an actor that is at work."""
    condition: ActorStatus = field(default_factory=ActorStatus)
    useless: int = 0
    """Actors in a row that died before they had run anything."""


class RayRunners:
    """`slots` attempts at once, in `actors` long-lived actors of a Ray cluster.

    Where actors are on other machines than the trainer, the store has to be one that these reach:
    `https://…` or `postgresql://…`. Its key or password is each node's own, in the environment in
    which the node was started (`LIGHTSPAN_STORE_KEY`, `PGPASSWORD`). lightspan, and the app, have
    to be installed on every node; an app is named, as in `fit("my_app:answer", …)`, and nothing of
    the trainer's machine goes along.

    Args:
        slots: attempts at once, over all actors.
        actors: how many; each has one process for its attempts.
        address: `"local"` starts a cluster on this machine, for this training; `"auto"` and
            `HOST:PORT` join one in which this machine is a node. None: as `RAY_ADDRESS` says, or
            local.
        cpus: that each actor takes of the cluster.
        resources: that each actor takes beside, such as `{"apps": 1}` of nodes started with them.
        runtime_env: Ray's, of the actors, such as `{"pip": […]}`.
        isolation: `"thread"` or `"process"`, as in `LocalRunners`.
        python: the interpreter of the app's own environment, a path on the nodes; None for the
            nodes' own.
        app_dirs: folders on the nodes with the app's modules, beside what is installed. None: in a
            local cluster those of `LocalRunners(python=…)`, elsewhere none.
        timeout_s: how long all actors together may find no room in the cluster.
        without_token: take a cluster that asks nobody for a token.

    Raises:
        ConfigError: an option that cannot be honoured, or Ray is not installed.
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
        app_dirs: Folders | None = None,
        timeout_s: float = 300.0,
        without_token: bool = False,
    ) -> None:
        check_whole("slots", slots, 1)
        check_whole("actors", actors, 1)
        if actors > slots:
            raise ConfigError(f"actors={actors} for slots={slots}: each needs one at least")
        check_number("cpus", cpus, low=0)
        check_number("timeout_s", timeout_s, above=0)
        if isolation not in ("thread", "process"):
            raise ConfigError(f'isolation must be "thread" or "process", not {isolation!r}')
        ray_cluster.check_address(address)
        self.slots = slots
        self.actors = actors
        self.isolation = isolation
        self.timeout_s = timeout_s
        self._python = None if python is None else os.fspath(python)
        self._app_dirs = app_dirs
        self._asked = {"CPU": cpus, **(resources or {})}
        self._options = {
            "num_cpus": cpus,
            "resources": dict(resources or {}),
            "runtime_env": dict(runtime_env or {}),
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # another one takes its place, when its attempts are ended
        }
        self._membership = Membership(address, without_token=without_token)
        self._ray = ray_cluster.import_ray()
        self._plan: RunnerPlan | None = None
        self._program: str | None = None
        """On the nodes, the app's interpreter."""
        self._dirs: list[str] = []
        """On the nodes, where the app's modules are."""
        self._seats: list[_ActorSlot] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: LightspanError | None = None
        self._empty_since: float | None = None

    async def start(self, plan: RunnerPlan) -> None:
        """Join the cluster, and wait until each actor has room there and has imported the app.

        Raises:
            AppError: the app cannot be imported on a node.
            ConfigError: the cluster or the store cannot be used so.
            LightspanError: the cluster cannot be reached, or has no room.
        """
        check_leaves_home(plan.app)
        self._failure = self._empty_since = None
        is_local = self._membership.is_local
        if not is_local:
            _check_reach(plan.store_url)
        self._plan = msgspec.structs.replace(
            plan,
            sys_path=[],
            elsewhere=not is_local,
            # to processes of this machine only; other nodes have keys of their own
            store_secrets=secrets_of(plan.store_url) if is_local else {},
        )
        self._dirs = self._folders_here(plan) if is_local else _folders_there(self._app_dirs)
        self._program = _program(self._python, is_local=is_local)
        await _in_thread(self._membership.join)
        self._seats = [_ActorSlot(slots) for slots in shares(self.slots, self.actors)]
        try:
            async with asyncio.TaskGroup() as group:
                for seat in self._seats:
                    group.create_task(self._begin(seat, self.timeout_s))
        except BaseExceptionGroup as failures:
            await self.stop()
            raise _first(failures) from None
        except BaseException:
            await self.stop()
            raise
        self._keepers = [asyncio.create_task(self._keep(seat)) for seat in self._seats]

    async def stop(self) -> None:
        """End the actors, by force after 12 s, and a cluster that was started here. Idempotent."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        try:
            actors = [seat.actor for seat in self._seats if seat.is_here]
            await _ended([actor.stop.remote() for actor in actors], _END_S)
            await asyncio.gather(*keepers, return_exceptions=True)
        finally:
            self._kill_all()
            self._seats = []
            await _in_thread(self._membership.leave)

    def check(self) -> None:
        """Raises what made the runners give up."""
        if self._failure is not None:
            raise self._failure
        if not self._keepers or any(seat.arrival is not None for seat in self._seats):
            self._empty_since = None
            return
        self._empty_since = self._empty_since or clock.monotonic()
        if clock.monotonic() - self._empty_since > self.timeout_s:
            raise LightspanError(self._no_room(self._seats))

    @property
    def nodes(self) -> list[str]:
        """Ray's ids of the nodes on which actors are at work."""
        return [seat.arrival.node for seat in self._seats if seat.arrival is not None]

    def _folders_here(self, plan: RunnerPlan) -> list[str]:
        """Where a cluster of this machine finds the app: as this program does, unless told."""
        if self._app_dirs is not None or self._python is not None:
            return app_folders(self._app_dirs)
        return [path for path in plan.sys_path if os.path.isdir(path) and not of_environment(path)]

    # --- an actor's life ------------------------------------------------------------------
    async def _begin(self, seat: _ActorSlot, timeout_s: float | None) -> None:
        """Have a new actor at work in the seat; begin anew where its node is lost meanwhile."""
        for start in range(1, _STARTS + 1):
            try:
                await self._fill(seat, timeout_s)
            except _BeginningError as error:
                self._discard(seat)
                await self._bury(seat, "the actor that looked after it was lost as it began")
                if start == _STARTS:
                    raise LightspanError(str(error)) from error.__cause__
                log.warning("%s; it is tried again", error)
                await asyncio.sleep(POLL_INTERVAL_S)
            else:
                return

    async def _fill(self, seat: _ActorSlot, timeout_s: float | None) -> None:
        """Have a new actor at work in the seat.

        Raises:
            LightspanError: it cannot work, or found no room in time.
        """
        assert self._plan is not None
        seat.is_here, seat.group = False, new_id("actor")
        plan = msgspec.structs.replace(self._plan, prefix=seat.group)
        station = ActorConfig(
            slots=seat.slots,
            isolation=self.isolation,
            python=self._program,
            app_dirs=self._dirs,
        )
        make = self._ray.remote(RunnerActor).options(**self._options)
        seat.actor = make.remote(msgspec.json.encode(station))
        try:
            arrival = await self._arrival(seat, timeout_s)
            seat.is_here = True
            self._check_arrival(arrival)
            said = await _answer(seat.actor.start.remote(msgspec.json.encode(plan)))
        except self._ray.exceptions.RayError as error:
            raise _BeginningError(
                f"an actor could not begin in the Ray cluster ({_last_line(error)}): lightspan "
                "has to be installed in the environment of each node, and each node to be started "
                "with the RAY_AUTH_MODE of the trainer; Ray's logs on the nodes say more"
            ) from error
        condition = msgspec.json.decode(said, type=ActorStatus)
        if condition.failure is not None:
            raise _raisable(condition.failure, arrival)
        seat.condition = condition
        seat.arrival = arrival

    async def _arrival(self, seat: _ActorSlot, timeout_s: float | None) -> ActorHello:
        """Wait until the actor has room; say now and then what it waits for."""
        coming = asyncio.ensure_future(_answer(seat.actor.arrive.remote()))
        began = clock.monotonic()
        try:
            while not coming.done():
                left_s = inf if timeout_s is None else timeout_s - (clock.monotonic() - began)
                if left_s <= 0:
                    raise LightspanError(self._no_room([seat]))
                done, _ = await asyncio.wait([coming], timeout=min(REMIND_S, left_s))
                if not done:
                    log.warning("waiting for room in the Ray cluster: %s", self._room())
            return msgspec.json.decode(await coming, type=ActorHello)
        finally:
            coming.cancel()

    def _check_arrival(self, arrival: ActorHello) -> None:
        if arrival.protocol != PROTOCOL_VERSION:
            there = f"{arrival.python} ({arrival.address})"
            raise ConfigError(mismatch(there, arrival.lightspan, arrival.protocol))
        self._membership.check_node(arrival.address, is_authenticated=arrival.is_authenticated)

    async def _keep(self, seat: _ActorSlot) -> None:
        """Look after the actor of a seat, and replace it."""
        try:
            while self._failure is None:
                await asyncio.sleep(POLL_INTERVAL_S)
                await self._look(seat)
        except Exception as error:
            self._failure = self._failure or _explained(error)

    async def _look(self, seat: _ActorSlot) -> None:
        lost = self._ray.exceptions
        try:
            said = await _answer(seat.actor.look.remote())
        except lost.ActorUnavailableError:  # for the moment; Ray says when it is lost
            return
        except lost.RayActorError as error:
            await self._replace(seat, _last_line(error))
            return
        seat.condition = msgspec.json.decode(said, type=ActorStatus)
        if seat.condition.failure is not None:
            raise _raisable(seat.condition.failure, seat.arrival)

    async def _replace(self, seat: _ActorSlot, why: str) -> None:
        arrival, condition = seat.arrival, seat.condition
        assert arrival is not None
        seat.arrival, seat.is_here = None, False
        is_lost = not await _in_thread(ray_cluster.is_alive, self._ray, arrival.node)
        what = "was lost with its node" if is_lost else "died"
        log.warning("the actor at %s %s and is replaced: %s", arrival.address, what, why)
        is_useless = not is_lost and not condition.claimed
        seat.useless = seat.useless + 1 if is_useless else 0
        if seat.useless >= MAX_QUICK_DEATHS:
            raise LightspanError(
                f"Ray actors died {seat.useless} times before they ran anything (the last one, at "
                f"{arrival.address}: {why}); Ray's logs on that node say more"
            )
        await self._bury(seat, "the actor that looked after it " + what)
        await self._begin(seat, None)

    async def _bury(self, seat: _ActorSlot, why: str) -> None:
        """End the attempts of an actor's runners, all of which are lost, whichever they were; what
        they may still do counts no more."""
        assert self._plan is not None
        try:
            async with open_store(self._plan.store_url) as store:
                death = ProcessExit(runner=seat.group, how=why, is_blameless=True, is_group=True)
                for report in await bury(death, store, self._plan.run_id):
                    log.warning("attempt %s is lost, and run again", report.attempt_id)
        except LightspanError as error:
            log.warning("the attempts of %s end with their leases: %s", seat.group, error)

    # --- the end --------------------------------------------------------------------------
    def _kill_all(self) -> None:
        for seat in self._seats:
            self._discard(seat)

    def _discard(self, seat: _ActorSlot) -> None:
        """End what is left of an actor. From any thread."""
        if seat.actor is not None:
            with contextlib.suppress(Exception):  # it has ended, or the cluster has
                self._ray.kill(seat.actor)

    def _room(self) -> str:
        return ray_cluster.room(self._ray, self._asked)

    def _no_room(self, seats: Sequence[_ActorSlot]) -> str:
        return (
            f"the Ray cluster had no room for {len(seats)} of {self.actors} actors for "
            f"{self.timeout_s:g} s: {self._room()}; start more nodes, or ask for less (actors=, "
            "cpus=, resources=)"
        )


def _check_reach(store_url: str) -> None:
    """Raise `UnsupportedError` for a store that other machines cannot open."""
    if not is_shared(store_url):
        raise UnsupportedError(
            f"store {store_url!r} is of this machine, and a Ray cluster has others: serve it "
            "(`lightspan serve --store …`) and train with its https://… address, take a "
            'postgresql://… one, or RayRunners(address="local")'
        )


def _folders_there(folders: Folders | None) -> list[str]:
    """Folders of the nodes, as they were given."""
    several = [folders] if isinstance(folders, str | os.PathLike) else folders or []
    paths = [os.fspath(folder) for folder in several]
    for path in paths:
        if not os.path.isabs(path):
            raise ConfigError(
                f"app_dirs: {path!r} is no absolute path, and nodes have no folder "
                "that it could start from"
            )
    return paths


def _program(python: str | None, *, is_local: bool) -> str | None:
    """The app's interpreter as the nodes are told: in a cluster of this machine, from here.

    Raises `ConfigError`.
    """
    if python is None or os.sep not in python or python.startswith("~"):
        return python
    if not is_local and not os.path.isabs(python):
        raise ConfigError(
            f"python: {python!r} is no absolute path, and nodes have no folder that it could start "
            "from"
        )
    return os.path.abspath(python)


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call what blocks; it is waited for even by who is cancelled: Ray is left in one piece."""
    calling = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait([calling])
        raise


async def _answer(reference: Awaitable[T]) -> T:
    """What an actor's method returned, as a coroutine."""
    return await reference


async def _ended(references: Sequence[Awaitable[object]], timeout_s: float) -> None:
    """Wait until what was asked of actors is done, or they are lost, for so long."""
    if not references:
        return
    ends = [asyncio.ensure_future(_answer(each)) for each in references]
    await asyncio.wait(ends, timeout=timeout_s)
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


def _raisable(refusal: ActorRefused, arrival: ActorHello | None) -> LightspanError:
    """An actor's error, here; of a class that this lightspan has."""
    kind = getattr(errors, refusal.kind, LightspanError)
    where = "" if arrival is None else f" (on the Ray node at {arrival.address})"
    is_ours = isinstance(kind, type) and issubclass(kind, LightspanError)
    return (kind if is_ours else LightspanError)(refusal.message + where)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error stands for those of all actors."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _explained(error: Exception) -> LightspanError:
    if isinstance(error, LightspanError):
        return error
    failure = LightspanError(f"the runners in the Ray cluster cannot be kept: {error!r}")
    failure.__cause__ = error
    return failure


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
