"""Start the server of the page, and print its address."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from lightspan.errors import ConfigError
from lightspan.progress import Reporter, default_reporter
from lightspan.schema.redaction import MIN_MESSAGE_KEY_LENGTH, add_client_key, add_key_variable
from lightspan_gateway.http_server import check_port
from lightspan_gateway.remote_store.url import check_key
from lightspan_gateway.serving.loopback import is_loopback
from lightspan_gateway.serving.signals import stop_signals
from lightspan_ui.guard import new_token
from lightspan_ui.server import UiServer
from lightspan_ui.sources import Sources

DEFAULT_PORT: Final = 8765
PARENT_S: Final = 0.5
"""Seconds between two looks at whether the parent process still runs."""
NICENESS: Final = 5
"""Increase of the niceness of a page that belongs to a training."""


@dataclass(frozen=True, kw_only=True)
class UiOptions:
    """Options of the page's server."""

    places: tuple[str, ...]
    """Folders of runs, folders of a run, and URLs of stores."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """Port; 0 for any free port."""
    write: bool = False
    """Whether the page may rate rollouts."""
    opens: bool = False
    """Whether to open the page in a browser."""
    key_variable: str | None = None
    """Environment variable with the key; None for a random token."""
    parent: int | None = None
    """Id of the process with which the server ends; None to serve until it is stopped."""


def serve(
    options: UiOptions,
    *,
    reporter: Reporter | None = None,
    ready: Callable[[UiServer], None] | None = None,
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        options: options of the server.
        reporter: output for the address; None for the default output.
        ready: function that is called when the server is ready; None for none.

    Raises:
        ConfigError: a place, the address, the port or the key is invalid.
    """
    if options.parent is not None:
        os.nice(NICENESS)
    token = take_token(options)
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port {options.port} is no port: give one from 1 to 65535, or 0")
    check_port(options.host, options.port)
    sources = Sources(options.places)
    lines = reporter or default_reporter()

    async def run() -> None:
        server = UiServer(
            sources, host=options.host, port=options.port, token=token, write=options.write
        )
        async with server:
            with stop_signals() as stopping:
                page = sources.front_page
                for line in describe(options, server, page, token):
                    lines.line(line)
                if options.opens:
                    webbrowser.open(address(server, page, token))
                if ready is not None:
                    ready(server)
                await ended(stopping, options.parent)

    asyncio.run(run())


async def ended(stopping: asyncio.Event, parent: int | None) -> None:
    """Wait until a signal stops the server, or until its parent process has ended.

    Args:
        stopping: event that the signals set.
        parent: id of the parent process; None to wait for a signal alone.
    """
    while not stopping.is_set() and parent in (None, os.getppid()):
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), None if parent is None else PARENT_S)


def take_token(options: UiOptions, environment: MutableMapping[str, str] = os.environ) -> str:
    """Return the secret that every request needs: the key in a variable, or a random token.

    The variable is removed from the environment.

    Raises:
        ConfigError: the variable is not set or its value is no key, or other machines could reach
            the server without one.
    """
    name = options.key_variable
    if name is None:
        if not is_loopback(options.host):
            raise ConfigError(
                f"--host {options.host} can be reached from other machines: name a variable with a "
                "key (--key-env NAME), or stay on 127.0.0.1"
            )
        return new_token()
    key = environment.pop(name, "")
    add_key_variable(name)
    if not key:
        raise ConfigError(f"--key-env {name}: that variable is not set; set it to the key")
    if len(key) < MIN_MESSAGE_KEY_LENGTH:
        raise ConfigError(
            f"--key-env {name}: a key of {len(key)} characters can be guessed; it needs at least "
            f"{MIN_MESSAGE_KEY_LENGTH} (`openssl rand -hex 32` creates one)"
        )
    check_key(key, name)
    add_client_key(key)
    return key


def describe(options: UiOptions, server: UiServer, page: str, token: str) -> Iterator[str]:
    """Yield the lines to print when the server is ready.

    The address has the random token; a key of the user is not printed.

    Args:
        options: options of the server.
        server: the server, which listens.
        page: path of the page to open.
        token: the secret that every request needs.
    """
    if not is_loopback(options.host):
        yield (
            "the key and the data are not encrypted on this port: on a network that others use, "
            "stay on 127.0.0.1 and forward the port by ssh -L"
        )
    if options.key_variable is None:
        yield f"watch: {address(server, page, token)} (Ctrl-C stops)"
    else:
        yield (
            f"watch: {server.public_url}{page}?token=… with the key of {options.key_variable} "
            "(Ctrl-C stops)"
        )
    if options.write:
        yield "--write: the page may rate rollouts"


def address(server: UiServer, page: str, token: str) -> str:
    """Return the address of a page with the token."""
    return f"{server.public_url}{page}?token={quote(token, safe='')}"
