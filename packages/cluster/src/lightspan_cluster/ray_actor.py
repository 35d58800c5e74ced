"""What a Ray actor of `RayRunners` is, on its node: it looks after runner processes there.

It holds no app itself: each of its processes is one of `LocalRunners`, of the app's interpreter,
which sees none of the actor's modules or folders. What it says and is told is JSON, and its class
travels by its name: the node's own lightspan is what works. This module needs no Ray.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import msgspec

from lightspan import __version__
from lightspan.errors import LightspanError
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores import take_credentials
from lightspan.stores.credentials import keep_secrets

_TOKENS: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""What opens the Ray cluster. Ray has read it by now; an app is to find none of it."""


class ActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is to run, on whatever node it is."""

    slots: int
    isolation: str = "thread"
    python: str | None = None
    """The app's interpreter on the node; None for that of the actor."""
    app_dirs: list[str] = []
    """Folders of the node with the app's modules, beside what is installed."""


class ActorHello(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of itself first."""

    node: str
    """Ray's id of the node."""
    address: str
    """Of the node, and the process there."""
    python: str
    """The interpreter."""
    lightspan: str
    protocol: int
    is_authenticated: bool
    """Whether the node asks who connects for a token."""


class ActorRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Why an actor cannot work: the class of an error of ours, and what it says."""

    kind: str
    message: str


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an actor's processes are."""

    claimed: int = 0
    """Attempts that they have begun so far."""
    failure: ActorRefused | None = None
    """What they cannot work for, or what made them give up."""


class RunnerActor:
    """The runner processes of one place in a Ray cluster. Its methods are called by Ray."""

    def __init__(self, station: bytes) -> None:
        self._station = msgspec.json.decode(station, type=ActorConfig)
        self._runners: LocalRunners | None = None

    async def arrive(self) -> bytes:
        """Say who is here (`ActorHello`)."""
        import ray
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        context = ray.get_runtime_context()
        arrival = ActorHello(
            node=context.get_node_id(),
            address=f"{ray.util.get_node_ip_address()}, process {os.getpid()}",
            python=sys.executable,
            lightspan=__version__,
            protocol=PROTOCOL_VERSION,
            is_authenticated=is_token_auth_enabled(),
        )
        return msgspec.json.encode(arrival)

    async def start(self, plan: bytes) -> bytes:
        """Start the processes; returns how they are (`ActorStatus`)."""
        for variable in _TOKENS:
            os.environ.pop(variable, None)
        told = msgspec.json.decode(plan, type=RunnerPlan)
        try:
            keep_secrets(told.store_url, told.store_secrets)
            take_credentials(told.store_url)
            station = self._station
            runners = LocalRunners(
                station.slots,
                isolation=station.isolation,
                # Always as another one: those of `multiprocessing` would import Ray's script.
                python=station.python or sys.executable,
                app_dirs=station.app_dirs,
            )
            await runners.start(told)
        except LightspanError as error:
            return msgspec.json.encode(ActorStatus(failure=_refusal(error)))
        self._runners = runners
        return await self.look()

    async def look(self) -> bytes:
        """How they are (`ActorStatus`)."""
        if self._runners is None:
            return msgspec.json.encode(ActorStatus())
        failure: ActorRefused | None = None
        try:
            self._runners.check()
        except LightspanError as error:
            failure = _refusal(error)
        return msgspec.json.encode(ActorStatus(claimed=self._runners.claimed, failure=failure))

    async def stop(self) -> None:
        """End the processes, which give back what they have under way."""
        runners, self._runners = self._runners, None
        if runners is not None:
            await runners.stop()


def _refusal(error: LightspanError) -> ActorRefused:
    return ActorRefused(kind=type(error).__name__, message=str(error))
