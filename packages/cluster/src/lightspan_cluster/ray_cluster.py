"""The connection of a trainer to a Ray cluster, which must require a token.

Everyone who can connect to a cluster without a token can run code on its nodes, so such a cluster
is rejected. Ray 2.60 requires a token if `RAY_AUTH_MODE` is `token`, and in the clusters that it
starts itself.
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
_PROBE_S: Final = 5.0
TOKEN_HINT: Final = (
    "set RAY_AUTH_MODE=token where each node and the trainer are started, with the same token in "
    "RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token "
    "(`ray get-auth-token --generate` makes one)"
)
_NO_TOKEN: Final = (
    f"requires no token, so everybody who reaches it can run code there; {TOKEN_HINT}, or use "
    "RayRunners(without_token=True) if nobody else reaches it"
)


def check_address(address: str | None) -> None:
    """Raise `ConfigError` unless `address` is None, `"local"`, `"auto"` or `HOST:PORT`."""
    if address is None:
        return
    if not isinstance(address, str) or not address:
        raise ConfigError(f"address must be {LOCAL!r}, 'auto', 'HOST:PORT' or None: {address!r}")
    if "://" in address:
        raise ConfigError(
            f"address={address!r}: Ray Client is not supported; make the trainer's machine a node "
            "of the cluster (`ray start --address=HOST:PORT --num-cpus=0`), and use HOST:PORT, or "
            "'auto'"
        )


def import_ray() -> Any:
    """Return the module `ray`; raise `ConfigError` if Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"RayRunners needs Ray ({error}): {how_to_install('ray')}") from error
    return ray


class Membership:
    """A connection to a Ray cluster.

    Args:
        address: `"local"`, `"auto"` or `HOST:PORT`; None for `RAY_ADDRESS`, or `"local"` if it is
            not set.
        without_token: whether to accept a cluster that requires no token.
        refusal: end of the error message about a cluster that requires no token.
        options: options of `ray.init`; None for no options.
        own: options of `ray.init` only for a cluster that it starts itself; None for no options.
    """

    def __init__(
        self,
        address: str | None,
        *,
        without_token: bool,
        refusal: str = _NO_TOKEN,
        options: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._option = address
        self._without_token = without_token
        self._refusal = refusal
        self._options = dict(options or {})
        self._own_options = {"include_dashboard": False, **(own or {})}
        self._is_own = False
        """Whether `join` made the connection. If so, `leave` ends it."""

    @property
    def address(self) -> str:
        """Address of the cluster: "local", "auto" or HOST:PORT."""
        return self._option or os.environ.get("RAY_ADDRESS") or LOCAL

    @property
    def is_local(self) -> bool:
        """Whether `join` will start a cluster on this machine for this training."""
        ray = sys.modules.get("ray")
        return self.address == LOCAL and not (ray is not None and ray.is_initialized())

    def join(self) -> None:
        """Connect to the cluster; start it if the address is "local".

        Do not call this in the main thread, because Ray would change the signal handlers.

        Raises:
            ConfigError: Ray is not installed, the cluster requires no token, or the token of this
                process is wrong. It is also raised if an address was given, but this process is
                already connected to a cluster.
            LightspanError: the cluster cannot be reached or started.
        """
        ray = import_ray()
        if ray.is_initialized():
            if self._option is not None:
                raise ConfigError(
                    f"this process has joined a Ray cluster already, so address={self._option!r} "
                    "has no effect: leave it out, or leave that cluster (ray.shutdown())"
                )
            self._check_token("the Ray cluster that this process has joined")
            return
        address = self.address
        where = "a Ray cluster on this machine" if address == LOCAL else f"Ray cluster {address}"
        # Without RAY_AUTH_MODE, Ray uses a token file for these two addresses only.
        mode = os.environ.get("RAY_AUTH_MODE", "token" if address in (LOCAL, "auto") else "")
        has_token = mode.lower() == "token"
        setting = f"RAY_AUTH_MODE={mode}" if mode else "RAY_AUTH_MODE is not set"
        without = f"without a token ({setting})"
        if not has_token:
            # Whether the cluster requires one is not known yet.
            verb = "start" if address == LOCAL else "join"
            self._reject(
                f"this process would {verb} {where} {without}; a cluster that accepts this"
            )
        try:
            own = self._own_options if address == LOCAL else {}
            ray.init(address=address, **self._options, **own)
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.shutdown()
            # Ray logs a wrong token to stderr, and raises the error of any failed connection.
            is_rejected = isinstance(error, ConnectionError) and _listens(address)
            if is_rejected or isinstance(error, ray.exceptions.AuthenticationError):
                what = "the token of this process" if has_token else f"a process {without}"
                raise ConfigError(f"{where} runs, but rejects {what}: {TOKEN_HINT}") from error
            verb = "started" if address == LOCAL else "joined"
            line = next(iter(str(error).strip().splitlines()), "")
            text = f"{where} cannot be {verb}: {type(error).__name__}: {line}"
            raise LightspanError(text) from error
        self._is_own = True
        self._check_token(where)

    def leave(self) -> None:
        """Disconnect from the cluster if `join` connected to it. Idempotent.

        If `join` started the cluster, the cluster ends.
        """
        if self._is_own:
            self._is_own = False
            sys.modules["ray"].shutdown()

    def check_node(self, address: str, *, is_authenticated: bool) -> None:
        """Raise `ConfigError` if a node requires no token and `without_token` is False.

        Args:
            address: address of the node, for the error message.
            is_authenticated: whether the node requires the cluster's token.
        """
        if not is_authenticated:
            self._reject(f"Ray's node at {address}")

    def _check_token(self, where: str) -> None:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        if not is_token_auth_enabled():
            self._reject(where)

    def _reject(self, where: str) -> None:
        if not self._without_token:
            self.leave()
            raise ConfigError(f"{where} {self._refusal}")


def _listens(address: str) -> bool:
    """Return whether `HOST:PORT` accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):
        return False
    return True
