"""Show a run in a browser while it trains: `Trainer(…, ui=True)`.

The page is served by a child process, so that it never slows the training or ends it. The child
ends with the run, also if the trainer is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote

from lightspan.errors import ConfigError
from lightspan.progress import print_line
from lightspan.training.sinks import SinkRun
from lightspan_ui.guard import new_token
from lightspan_ui.main import DEFAULT_PORT
from lightspan_ui.sources import shown_name

KEY_VARIABLE: Final = "LIGHTSPAN_UI_KEY"
"""Environment variable that passes the token to the child, which removes it."""
HOST: Final = "127.0.0.1"
STOP_S: Final = 2.0
"""Seconds for which the end of the run waits until the child has ended."""


class UiSink:
    """Serve a page about the run while it trains. It takes no metrics: the page reads the folder.

    Args:
        port: port; True for 8765. If the port is taken, another one is used.
        note: function that prints the address.

    Raises:
        ConfigError: the port is none.
    """

    def __init__(self, port: bool | int = True, note: Callable[[str], None] = print_line) -> None:
        if not isinstance(port, int) or not 0 <= port <= 65_535:
            raise ConfigError(f"ui={port!r}: give True, or a port from 1 to 65535")
        self._port = DEFAULT_PORT if port is True else int(port)
        self._note = note
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, run: SinkRun) -> None:
        """Start the child process, and print the address of the run's page."""
        port, token = free_port(self._port), new_token()
        arguments = ["--port", str(port), "--key-env", KEY_VARIABLE, "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            # -P: no module of the working folder may replace one of Python's
            [sys.executable, "-P", "-m", "lightspan_ui", str(run.folder.resolve()), *arguments],
            env={**os.environ, KEY_VARIABLE: token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops the trainer, which then ends the child
        )
        name = quote(shown_name(run.folder.resolve()), safe="")
        self._note(f"watch: http://{HOST}:{port}/runs/{name}?token={token}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Ignore metrics, which the page reads from the run's folder."""

    def close(self) -> None:
        """End the child process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port(port: int) -> int:
    """Return the port if it is free, or else another free port."""
    for wanted in (port, 0):
        try:
            with socket.create_server((HOST, wanted)) as server:
                free: int = server.getsockname()[1]
                return free
        except OSError:
            continue
    return port
