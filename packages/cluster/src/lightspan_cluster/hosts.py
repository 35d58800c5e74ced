"""Runners on other machines that reach the trainer's machine at one port (`lightspan.Hosts`).

The trainer serves its store there by TLS, and the store's server forwards model calls to the
gateway. The line that the trainer prints has the address and a token: the key of a runner, and the
fingerprint of the server's certificate.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from lightspan.errors import ConfigError, StoreError, UnsupportedError, how_to_install
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema import clock
from lightspan.schema.redaction import add_client_key
from lightspan.schema.validation import check_whole
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_cluster.external_runners import ExternalRunners, is_runner_of
from lightspan_cluster.join_token import JoinToken, fingerprint, new_key

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from lightspan_gateway.http_server import raise_file_limit
    from lightspan_gateway.limits import StoreServerLimits
    from lightspan_gateway.remote_store.roles import Role
    from lightspan_gateway.serving.loopback import is_loopback, own_address
    from lightspan_gateway.store_server.api_keys import Keys
    from lightspan_gateway.store_server.server import StoreServer
except ImportError as error:
    raise ConfigError(f"Hosts() needs {error.name!r}: {how_to_install('hosts')}") from error

VALID_DAYS: Final = 3_650
"""Days for which a certificate is valid. Runners check its fingerprint, not its dates."""
LEAVE_S: Final = 10.0
"""Maximum seconds for which a complete training waits until its runners have noticed."""
_AWAITED_S: Final = 120.0
"""Maximum seconds since the last announcement of a runner for which a complete training waits.

The runners of a resumed training were silent while there was no server."""
_SHUTDOWN_S: Final = 1.0
"""Seconds for which requests may continue when the training ends."""


class Hosts(ExternalRunners):
    """Runners on other machines, which reach the trainer's machine at one port and nothing else.

    While it trains, the trainer serves the run's SQLite store and its gateway at that port by TLS.
    It prints the command that starts a runner, `lightspan runner --join HOST:PORT/TOKEN …`. The
    token has the key of a runner and identifies the server's certificate. Key, certificate and port
    are kept in the folder of the store, so that runners which wait join a resumed run again.

    Args:
        slots: expected number of concurrent attempts of all runners together; `dev` reports it.
        address: name or address of this machine for the other machines. None for the address from
            which this machine reaches other networks. With a loopback address, only programs of
            this machine can join.
        port: port; None for the port that the run had before, or any free port for a new run.
        timeout_s: training fails after this many seconds without a runner; None for no limit.

    Raises:
        ConfigError: an option is invalid, this machine's address is not known, or a package is
            missing.
    """

    def __init__(
        self,
        slots: int = 8,
        *,
        address: str | None = None,
        port: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(slots, timeout_s=timeout_s)
        if address is not None and not (isinstance(address, str) and _is_address(address)):
            raise ConfigError(
                f"address={address!r} is no name or address of a machine, such as '10.0.0.5'; the "
                "port is an option of its own (port=)"
            )
        if port is not None:
            check_whole("port", port, 1, 65_535)
        self._address = _own_address() if address is None else address
        self._port = port
        self._join: JoinToken | None = None
        self._store: Store | None = None
        self._serving = AsyncExitStack()

    async def start(self, plan: RunnerPlan) -> None:
        """Serve the store of `plan`, so that runners can join.

        Raises:
            AppError: runners cannot import the app.
            ConfigError: the port is not available, or a file with the key or certificate is
                damaged.
            UnsupportedError: the store is no file.
        """
        await super().start(plan)
        store = open_store(plan.store_url)
        path: Path | None = getattr(store, "path", None)
        if path is None:
            raise UnsupportedError(
                f"Hosts() serves the run's own SQLite file, and {plan.store_url} has a server: "
                "leave store= out; or use ExternalRunners(), whose runners join by `lightspan "
                "runner --store`"
            )
        host, access = self._address, _Access.of(path)
        raise_file_limit()
        self._store = await self._serving.enter_async_context(store)
        server = StoreServer(
            store,
            Keys({Role.RUNNER: access.key}),
            host=host if is_loopback(host) else "::" if ":" in host else "0.0.0.0",
            port=self._port or access.port,
            limits=StoreServerLimits(shutdown_s=_SHUTDOWN_S),
            tls=access.context,
        )
        try:
            await self._serving.enter_async_context(server)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Hosts(port=…) sets the port; runners that wait for this run at its "
                "earlier port need the new line"
            ) from error
        access.keep(server.port)
        self._join = JoinToken(host, server.port, access.key, access.fingerprint)

    async def watch(self, store: Store, print_line: Callable[[str], None]) -> None:
        """Print the command that starts a runner, and then which runners join and leave."""
        assert self._plan is not None
        assert self._join is not None
        print_line(
            f"runners join at {self._join.place}: on each machine, in the app's environment (who "
            "has this line can work for the run, so keep it to yourself)"
        )
        print_line(f"  {_command(self._join.text, self._plan)}")
        await super().watch(store, print_line)

    def command(self, plan: RunnerPlan) -> str:
        """Return the command that starts a runner, with `TOKEN` in place of the token."""
        return _command(f"{self._join.place if self._join else 'HOST:PORT'}/TOKEN", plan)

    def advice(self, plan: RunnerPlan) -> str:
        """Return, for messages, how a runner is started; they do not contain the token."""
        text = "with the token for TOKEN: the whole line was printed at the start"
        return f"{super().advice(plan)}, {text}"

    async def stop(self) -> None:
        """Stop serving the store. Idempotent.

        If the training is complete, first give its runners time to notice this.
        """
        try:
            if self._store is not None:
                with suppress(StoreError):
                    await self._dismiss(self._store)
        finally:
            self._store = None
            await self._serving.aclose()

    async def _dismiss(self, store: Store) -> None:
        """Wait until the runners of a complete training have left, for at most `LEAVE_S` seconds.

        If the store could no longer be reached, they would wait for the training to be resumed.
        """
        assert self._plan is not None
        plan, deadline = self._plan, clock.monotonic() + LEAVE_S
        while clock.monotonic() < deadline:
            peers = await store.peers()
            if not any(peer.peer_id == plan.run_id and peer.complete for peer in peers):
                return
            if not any(is_runner_of(plan, peer, _AWAITED_S) for peer in peers):
                return
            await asyncio.sleep(0.1)


def _command(join: str, plan: RunnerPlan) -> str:
    return shlex.join(["lightspan", "runner", "--join", join, plan.app])


def _is_address(text: str) -> bool:
    """Return whether a text is the name of a machine, or an IP address, without a port."""
    try:
        return not ip_address(text).is_unspecified  # which means all addresses of this machine
    except ValueError:
        return bool(text) and not set(text) & set(" /:@[]")


def _own_address() -> str:
    """Return the address from which this machine reaches other networks, or that of its name.

    Raises:
        ConfigError: it has neither.
    """
    address = own_address()
    if not address:
        raise ConfigError(
            "no route leads from this machine to others, so its address is not known: give it, "
            "such as Hosts(address='10.0.0.5') (`ip address` lists them)"
        )
    return address


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the JSON file with the key and the port for runners of a training run."""

    key: str
    port: int


class _Access(NamedTuple):
    """Key, port and certificate with which runners join a training run.

    They are kept in two files in the folder of the run's store.

    Args:
        path: file with key and port (JSON).
        key: the key that runners have to send.
        port: the port of the run; 0 if it has had none.
        context: settings of a TLS server with the certificate.
        fingerprint: the fingerprint of the certificate.
    """

    path: Path
    key: str
    port: int
    context: ssl.SSLContext
    fingerprint: str

    @classmethod
    def of(cls, store: Path) -> Self:
        """Read the files in the folder of a store; create the certificate if there is none.

        Raises:
            ConfigError: a file cannot be read or written, or is damaged.
        """
        pem, path = store.with_suffix(".hosts.pem"), store.with_suffix(".hosts.json")
        content = _KeyFile(new_key(), 0)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if not pem.exists():
                _write_private(pem, _new_certificate())
            if path.exists():
                content = msgspec.json.decode(path.read_bytes(), type=_KeyFile)
            context.load_cert_chain(pem)
            _, begin, certificate = pem.read_text("ascii").partition("-----BEGIN CERTIFICATE")
            identity = fingerprint(ssl.PEM_cert_to_DER_cert(begin + certificate))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{pem} or {path} cannot be used ({error}): delete both, and start the run's "
                "runners again with the new line"
            ) from error
        add_client_key(content.key)
        return cls(path, content.key, content.port, context, identity)

    def keep(self, port: int) -> None:
        """Write the key, and `port`, to the file `path`."""
        _write_private(self.path, msgspec.json.encode(_KeyFile(self.key, port)) + b"\n")


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, atomically."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _new_certificate() -> bytes:
    """Return a new private key and a certificate that it signs itself (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lightspan")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
