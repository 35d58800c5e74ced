"""A trainer's part in a Ray cluster: joined or started, with a token, and left.

Ray 2.60 asks for a token where `RAY_AUTH_MODE` is `token`, and starts clusters of its own so. Who
may connect to a cluster without one runs what they like on its nodes: such a cluster is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final

from lightspan.errors import ConfigError, LightspanError, how_to_install

LOCAL: Final = "local"
_ADDRESS: Final = "RAY_ADDRESS"
_MODE: Final = "RAY_AUTH_MODE"
_PROBE_S: Final = 5.0
HOW: Final = (
    f"set {_MODE}=token where each node and the trainer are started, with the same token in "
    "RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token "
    "(`ray get-auth-token --generate` makes one)"
)
NO_TOKEN: Final = (
    f"asks for no token: whoever reaches it runs what they like there; {HOW}, or say "
    "RayRunners(without_token=True) where nobody else reaches it"
)


def check_address(address: str | None) -> None:
    """Raise `ConfigError` for an address that cannot be joined."""
    if address is None:
        return
    if not isinstance(address, str) or not address:
        raise ConfigError(f"address must be {LOCAL!r}, 'auto', 'HOST:PORT' or None: {address!r}")
    if "://" in address:
        raise ConfigError(
            f"address={address!r}: runners go by Ray itself, not by Ray Client; make the trainer's "
            "machine a node of the cluster (`ray start --address=HOST:PORT --num-cpus=0`), and "
            "name HOST:PORT, or 'auto'"
        )


def import_ray() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"RayRunners needs Ray ({error}): {how_to_install('ray')}") from error
    return ray


class Membership:
    """A connection to a Ray cluster.

    Args:
        address: `"local"`, `"auto"` or `HOST:PORT`; None for that of `RAY_ADDRESS`, or `"local"`.
        without_token: take a cluster that asks for none.
        refusal: what is said of one that does not ask, after its name.
        options: of `ray.init`.
        own: the same, of a cluster that is started here.
    """

    def __init__(
        self,
        address: str | None,
        *,
        without_token: bool,
        refusal: str = NO_TOKEN,
        options: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._given = address
        self._without_token = without_token
        self._refusal = refusal
        self._options = dict(options or {})
        self._own = {"include_dashboard": False, **(own or {})}
        self._ours = False
        """Whether it was made here, and ends here."""

    @property
    def address(self) -> str:
        """Which cluster is meant."""
        return self._given or os.environ.get(_ADDRESS) or LOCAL

    @property
    def is_local(self) -> bool:
        """Whether the cluster is this machine, and made for this training."""
        return self.address == LOCAL and not _is_connected()

    def join(self) -> None:
        """Connect, or start a cluster. For another thread than the main one: Ray would change what
        signals do there.

        Raises:
            ConfigError: Ray is not installed, or no token is asked for, or ours is wrong.
            LightspanError: the cluster cannot be reached, or not started.
        """
        ray = import_ray()
        if ray.is_initialized():
            if self._given is not None:
                raise ConfigError(
                    f"this process has joined a Ray cluster already, so address={self._given!r} "
                    "has no meaning: leave it out, or leave that cluster (ray.shutdown())"
                )
            self._check_token("the Ray cluster that this process has joined")
            return
        address = self.address
        where = "a Ray cluster on this machine" if address == LOCAL else f"Ray cluster {address}"
        # Ray itself takes a token that it finds, where this says nothing, for these two only.
        unsaid = "token" if address in (LOCAL, "auto") else ""
        if os.environ.get(_MODE, unsaid).lower() != "token":
            self._refuse(where)
        options = {**self._options, **(self._own if address == LOCAL else {})}
        try:
            ray.init(address=address, **options)
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            # A wrong token is logged to stderr by Ray, and raised as any failure to connect.
            is_refused = isinstance(error, ConnectionError) and _listens(address)
            if is_refused or isinstance(error, ray.exceptions.AuthenticationError):
                raise ConfigError(
                    f"{where} is there, and does not take the token of this process: {HOW}"
                ) from error
            verb = "started" if address == LOCAL else "joined"
            raise LightspanError(f"{where} cannot be {verb}: {_first_line(error)}") from error
        self._ours = True
        self._check_token(where)

    def leave(self) -> None:
        """Disconnect, and end a cluster that was started here. Idempotent."""
        if self._ours:
            self._ours = False
            sys.modules["ray"].shutdown()

    def check_node(self, address: str, *, is_authenticated: bool) -> None:
        """Raise `ConfigError` if a node asks for no token."""
        if not is_authenticated:
            self._refuse(f"Ray's node at {address}")

    def _check_token(self, where: str) -> None:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        if not is_token_auth_enabled():
            self._refuse(where)

    def _refuse(self, where: str) -> None:
        if not self._without_token:
            self.leave()
            raise ConfigError(f"{where} {self._refusal}")


def room(ray: Any, asked: Mapping[str, float]) -> str:
    """What a runner asks for, and what the cluster has, for a message."""
    total, free = ray.cluster_resources(), ray.available_resources()
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
    has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in asked)
    return f"each asks for {wanted}; free are {has}"


def is_alive(ray: Any, node: str) -> bool:
    """Whether Ray takes a node for alive."""
    return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _listens(address: str) -> bool:
    """Whether somebody accepts connections at `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
