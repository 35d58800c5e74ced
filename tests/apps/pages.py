"""Pages of `docs`, followed as their readers do: every file written, every command run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

DOCS = Path(__file__).parents[2] / "docs"
PORT = "8000"
"""What pages serve at; followed, it is a free port."""
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TRAIN = "'./packages/core[train]' ./packages/gateway ./packages/tools ./packages/torch"
"""What pages install for training."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(language, file name or "", text) of each block of code on a page."""
    return _BLOCK.findall((DOCS / page).read_text())


class Follower:
    """Does what the page says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(_free_port())
        self.printed: dict[str, str] = {}
        """Command → what it printed."""
        self._served: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text.replace(PORT, self.port))

    def run(self, command: str) -> None:
        program, *rest = shlex.split(command.replace(PORT, self.port))
        module = {"python": [], "lightspan": ["-m", "lightspan.cli"]}[program]
        arguments = [sys.executable, *module, *rest]
        if "serve" in rest:
            self._serve(command, arguments)
            return
        done = subprocess.run(
            arguments, cwd=self.folder, env=_environment(), capture_output=True, text=True
        )
        self.printed[command] = done.stdout
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"

    def _serve(self, command: str, arguments: list[str]) -> None:
        log = self.folder / "serve.log"
        self._output = log.open("wb")
        self._served = subprocess.Popen(
            arguments, cwd=self.folder, env=_environment(), stdout=self._output, stderr=self._output
        )
        deadline = time.monotonic() + 90
        while "Ctrl-C stops" not in log.read_text():
            assert self._served.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.printed[command] = log.read_text()

    def stop(self) -> None:
        if self._served is not None and self._output is not None:
            self._served.send_signal(signal.SIGINT)
            assert self._served.wait(30) == 0
            self._output.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _environment() -> dict[str, str]:
    """A newcomer's: the folder is importable, and no settings of the tests are left."""
    left_out = ("PYTHONSAFEPATH", "PYTHONPATH", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    return {key: value for key, value in os.environ.items() if key not in left_out}


def printed(followed: Follower, start: str) -> str:
    """What the command that begins like this printed."""
    [text] = [text for command, text in followed.printed.items() if command.startswith(start)]
    return text
