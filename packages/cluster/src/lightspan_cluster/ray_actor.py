"""The code of a Ray actor of `RayRunners`: it supervises runner processes on its node.

The actor does not import the app. Its processes are those of `LocalRunners`, in the app's
interpreter, which inherits no modules or folders of the actor. Its messages are JSON, and its class
is pickled by name, so the node's own lightspan runs. Importing this module needs no Ray.
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
"""Variables with the token of the Ray cluster. Ray has read them when the actor starts; they are
removed so that the app does not get them."""


class ActorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of an actor, on any node."""

    slots: int
    isolation: str = "thread"
    python: str | None = None
    """The app's interpreter on the node; None for the actor's."""
    app_dirs: list[str] = []
    """Folders on the node with the app's modules, in addition to installed packages."""


class ActorHello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of an actor."""

    node: str
    """Ray's id of the node."""
    address: str
    """Address of the node, with the process id."""
    python: str
    """Path of the interpreter."""
    lightspan: str
    """Version of lightspan."""
    protocol: int
    is_authenticated: bool
    """Whether the node requires a token."""


class ActorRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The error that keeps an actor from working: its class and message."""

    kind: str
    message: str


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of an actor's processes."""

    claimed: int = 0
    """Number of attempts that the processes have claimed so far."""
    failure: ActorRefused | None = None
    """The error that kept the processes from starting or ended them; None for no error."""


class RunnerActor:
    """The runner processes of one actor. Its methods are called by Ray."""

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.json.decode(config, type=ActorConfig)
        self._runners: LocalRunners | None = None

    async def hello(self) -> bytes:
        """Return an `ActorHello` as JSON."""
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
        """Start the processes; return their `ActorStatus` as JSON. `plan` is a `RunnerPlan`."""
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
        return await self.status()

    async def status(self) -> bytes:
        """Return the `ActorStatus` of the processes as JSON."""
        if self._runners is None:
            return _status(0)
        try:
            self._runners.check()
        except LightspanError as error:
            return _status(self._runners.claimed, error)
        return _status(self._runners.claimed)

    async def stop(self) -> None:
        """End the processes; unfinished attempts are requeued."""
        runners, self._runners = self._runners, None
        if runners is not None:
            await runners.stop()


def _status(claimed: int, error: LightspanError | None = None) -> bytes:
    failure = None
    if error is not None:
        failure = ActorRefused(kind=type(error).__name__, message=str(error))
    return msgspec.json.encode(ActorStatus(claimed=claimed, failure=failure))
