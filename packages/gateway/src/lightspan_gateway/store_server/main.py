"""`lightspan serve --store URL`: a store behind HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lightspan.errors import ConfigError
from lightspan.progress import Reporter, default_reporter
from lightspan.stores import open_store
from lightspan_gateway.http_server import check_port
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.url import KEY_VARIABLE, names_server
from lightspan_gateway.serving.loopback import is_loopback
from lightspan_gateway.serving.signals import stop_signals
from lightspan_gateway.store_server.api_keys import Keys, take_keys
from lightspan_gateway.store_server.server import StoreServer

_ALONE: Final = "without a key everybody who reaches it could read and change all that is there"


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """What to serve, and to whom."""

    url: str
    """Of the store: a file or a database."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    key_variables: Mapping[Role, str] = field(default_factory=dict)
    """The variables with keys, by role."""
    without_key: bool = False
    """Let in every program of this machine, and nobody else."""

    def keys(self) -> Keys:
        """Who is let in. Takes the keys out of the environment.

        Raises:
            ConfigError: nobody could come in, or everybody of elsewhere.
        """
        if not self.without_key:
            return take_keys(self.key_variables)
        if self.key_variables:
            raise ConfigError("--without-key contradicts the variables named for keys")
        if not is_loopback(self.host):
            raise ConfigError(
                f"--without-key serves this machine only, and host {self.host!r} lets others in; "
                f"{_ALONE}: name a variable with a key (--trainer-key-env NAME), or stay on "
                "127.0.0.1"
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
        options: what, and to whom.
        reporter: where the address goes.
        ready: called once it answers.

    Raises:
        ConfigError: keys, address or port cannot be honoured, or the store ends with this process.
        StoreError: the store cannot be opened.
    """
    keys = options.keys()
    if names_server(options.url):
        raise ConfigError(
            f"store {options.url!r} is served already: give its address to whoever is to use it"
        )
    check_port(options.host, options.port)
    asyncio.run(_serve(options, keys, reporter or default_reporter(), ready))


async def _serve(
    options: StoreOptions,
    keys: Keys,
    lines: Reporter,
    ready: Callable[[StoreServer], None] | None,
) -> None:
    store = open_store(options.url)
    server = StoreServer(store, keys, host=options.host, port=options.port)
    async with store, server:
        with stop_signals() as stopping:
            for line in describe(options, store.url, server.url):
                lines.line(line)
            if ready is not None:
                ready(server)
            await stopping.wait()
        lines.line("stopping")


def describe(options: StoreOptions, store_url: str, url: str) -> list[str]:
    """Who may use it and how; the last line says that it is ready."""
    lines = [f"{role} key: ${name}" for role, name in options.key_variables.items()]
    if options.without_key:
        lines.append("no key: every program of this machine may use it as a trainer does")
    else:
        lines.append(f"who uses it has a key in {KEY_VARIABLE}, or names it with ?api_key_env=NAME")
    if not is_loopback(options.host):
        lines.append(
            "keys and data are not encrypted on this port: let others reach it through a proxy "
            "that speaks https"
        )
    return [
        *lines,
        f'a trainer:  Trainer(…, store="{url}")',
        f"a runner:   lightspan runner --store {url} MODULE:APP",
        f"serving the store {store_url} at {url} (Ctrl-C stops)",
    ]


__all__ = ["StoreOptions", "describe", "serve_store"]
