"""The main function of `lightspan serve --store URL`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightspan.errors import ConfigError
from lightspan.progress import Reporter, default_reporter
from lightspan.stores import open_store
from lightspan_gateway.http_server import check_port
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.url import KEY_VARIABLE
from lightspan_gateway.serving.loopback import is_loopback
from lightspan_gateway.serving.signals import stop_signals
from lightspan_gateway.store_server.api_keys import Keys, take_keys
from lightspan_gateway.store_server.server import StoreServer


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of the server."""

    url: str
    """URL of the store, a file or a database."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 for any free port."""
    key_variables: Mapping[Role, str] = field(default_factory=dict)
    """Role → environment variable with the role's key."""
    without_key: bool = False
    """Whether every program of this machine has access without a key. Other machines have none
    then."""

    def keys(self) -> Keys:
        """Read the keys, and remove their variables from the environment.

        Raises:
            ConfigError: a key is missing or invalid. Or `without_key` is set, but keys are given
                too, or other machines could reach the server.
        """
        if not self.without_key:
            return take_keys(self.key_variables)
        if self.key_variables:
            raise ConfigError("--without-key contradicts the variables named for keys")
        if not is_loopback(self.host):
            raise ConfigError(
                f"--without-key is for this machine only, and host {self.host!r} is reachable from "
                "others, which could read and change the whole store: name a variable with a key "
                "(--trainer-key-env NAME), or stay on 127.0.0.1"
            )
        return Keys(None)


def serve_store(
    options: StoreOptions,
    *,
    reporter: Reporter | None = None,
    ready: Callable[[StoreServer], None] | None = None,
) -> None:
    """Serve a store until SIGINT or SIGTERM.

    Args:
        options: options of the server.
        reporter: output for the addresses; None for the default output.
        ready: function that is called when the server is ready; None for none.

    Raises:
        ConfigError: keys, address or port are invalid, or the store is not durable.
        StoreError: the store cannot be opened.
    """
    keys = options.keys()
    if options.url.lower().startswith(("http://", "https://")):
        raise ConfigError(f"store {options.url!r} is served already: use this URL to open it")
    check_port(options.host, options.port)
    lines = reporter or default_reporter()

    async def run() -> None:
        store = open_store(options.url)
        server = StoreServer(store, keys, host=options.host, port=options.port)
        async with store, server:
            with stop_signals() as stopping:
                for line in describe(options, store.url, server.public_url):
                    lines.line(line)
                if ready is not None:
                    ready(server)
                await stopping.wait()
            lines.line("stopping")

    asyncio.run(run())


def describe(options: StoreOptions, store_url: str, url: str) -> list[str]:
    """Return the lines to print when the server is ready: variables of the keys, and addresses.

    Args:
        options: options of the server.
        store_url: URL of the store.
        url: URL of the server.
    """
    lines = [f"{role} key: ${name}" for role, name in options.key_variables.items()]
    if options.without_key:
        lines.append("no key: every program of this machine has full access")
    else:
        lines.append(
            f"clients need a key in {KEY_VARIABLE}, or in the variable of ?api_key_env=NAME"
        )
    if not is_loopback(options.host):
        lines.append(
            "keys and data are not encrypted on this port: put a proxy with https in front of it "
            "for other machines"
        )
    return [
        *lines,
        f'a trainer:  Trainer(…, store="{url}")',
        f"a runner:   lightspan runner --store {url} MODULE:APP",
        f"serving the store {store_url} at {url} (Ctrl-C stops)",
    ]
