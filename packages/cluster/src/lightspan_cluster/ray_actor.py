"""The Ray actor of `RayRunners`: it supervises runner processes on its node.

The actor does not import the app. Its processes are those of `LocalRunners`: they run in the app's
interpreter and inherit no modules or folders from the actor. Messages to and from the actor are
JSON. Its class is pickled by name, so that the node's own lightspan runs. Importing this module
needs no Ray.
"""

from __future__ import annotations

import asyncio
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
from lightspan_cluster.app_sources import source_hashes

_TOKENS: Final = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Environment variables with the token of the Ray cluster. Ray has read them when the actor starts.
They are then removed, so that the app does not get the token."""


class ActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which an actor starts its runner processes; they are the same on every node."""

    slots: int
    isolation: str = "thread"
    python: str | None = None
    """Path of the app's interpreter on the node; None for the actor's interpreter."""
    app_dirs: list[str] = []
    """Folders on the node with the app's modules; installed packages need none."""


class ActorHello(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's first message, which describes its node."""

    node: str
    """Ray's id of the actor's node."""
    address: str
    """The node's address and the actor's process id, for messages."""
    python: str
    """Path of the actor's interpreter."""
    lightspan: str
    """Version of lightspan on the node."""
    protocol: int
    is_authenticated: bool
    """Whether the node requires the cluster's token."""


class ActorRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Class name and message of the error because of which an actor cannot work."""

    kind: str
    message: str


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an actor's processes: the number of their attempts, and an error if there is one."""

    claimed: int = 0
    """Number of attempts that the processes have claimed so far."""
    failure: ActorRefused | None = None
    """The error because of which the processes did not start or have ended; None if there is
    none."""
    sources: dict[str, str] = {}
    """Hashes of the app's modules on the node (`source_hashes`), after the start."""


class RunnerActor:
    """A Ray actor that runs and supervises runner processes. Ray calls its methods."""

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.json.decode(config, type=ActorConfig)
        self._runners: LocalRunners | None = None

    async def hello(self) -> bytes:
        """Return a description of the node: an `ActorHello` as JSON."""
        import ray
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        hello = ActorHello(
            node=ray.get_runtime_context().get_node_id(),
            address=f"{ray.util.get_node_ip_address()}, process {os.getpid()}",
            python=sys.executable,
            lightspan=__version__,
            protocol=PROTOCOL_VERSION,
            is_authenticated=is_token_auth_enabled(),
        )
        return msgspec.json.encode(hello)

    async def start(self, plan: bytes) -> bytes:
        """Start the processes; return their `ActorStatus` as JSON.

        Args:
            plan: a `RunnerPlan` as JSON.
        """
        for variable in _TOKENS:
            os.environ.pop(variable, None)
        runner_plan = msgspec.json.decode(plan, type=RunnerPlan)
        try:
            keep_secrets(runner_plan.store_url, runner_plan.store_secrets)
            take_credentials(runner_plan.store_url)
            runners = LocalRunners(
                self._config.slots,
                isolation=self._config.isolation,
                # Always a path: processes of `multiprocessing` would import Ray's script.
                python=self._config.python or sys.executable,
                app_dirs=self._config.app_dirs,
            )
            await runners.start(runner_plan)
        except LightspanError as error:
            return _status(0, error)
        self._runners = runners
        folders = [*self._config.app_dirs, *runner_plan.sys_path, *sys.path]
        sources = await asyncio.to_thread(source_hashes, runner_plan.app, folders)
        status = msgspec.json.decode(await self.status(), type=ActorStatus)
        return msgspec.json.encode(msgspec.structs.replace(status, sources=sources))

    async def status(self) -> bytes:
        """Return the `ActorStatus` of the processes as JSON."""
        if self._runners is None:
            return _status(0)
        try:
            self._runners.check()
        except LightspanError as error:
            return _status(self._runners.counts["claimed"], error)
        return _status(self._runners.counts["claimed"])

    async def stop(self) -> None:
        """End the processes. Their unfinished attempts are requeued."""
        runners, self._runners = self._runners, None
        if runners is not None:
            await runners.stop()


def _status(claimed: int, error: LightspanError | None = None) -> bytes:
    failure = None
    if error is not None:
        failure = ActorRefused(kind=type(error).__name__, message=str(error))
    return msgspec.json.encode(ActorStatus(claimed=claimed, failure=failure))
