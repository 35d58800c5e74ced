"""Follow pages of `docs` as their readers do: write every file, run every command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

DOCS = Path(__file__).parents[2] / "docs"
PORT = "8000"
"""Port in the pages' commands, which is replaced by a free port."""
_BLOCK = re.compile(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

TRAIN = (
    "'./packages/core[train]' ./packages/gateway ./packages/tools ./packages/torch "
    "./packages/testing"
)
"""Packages that the pages install for training."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (language, file name or "", text) of each block of code on a page."""
    return _BLOCK.findall((DOCS / page).read_text())


class Follower:
    """Follow a page in an empty folder and one shell.

    Args:
        folder: the empty folder.
        replace: text in the page's files → text to write instead; None for no replacements.
        environment: further variables of the shell.
    """

    def __init__(
        self, folder: Path, replace: Mapping[str, str] | None = None, **environment: str
    ) -> None:
        self.folder = folder
        self.port = str(_free_port())
        self.installed: list[str] = []
        self.printed: dict[str, str] = {}
        """Command → its output."""
        self._replace = {PORT: self.port, **(replace or {})}
        self._exported: list[str] = []
        self._begun: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{folder}/.bin:{os.environ['PATH']}"
        self._environment = {**_environment(), **environment, "PATH": path}
        self.make_programs(".bin")

    def make_programs(self, folder: str) -> None:
        """Write programs `python` and `lightspan` into a subfolder, which run the tests'
        interpreter.
        """
        (self.folder / folder).mkdir(parents=True)
        for name, call in {"python": "", "lightspan": "-m lightspan.cli"}.items():
            program = self.folder / folder / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
            program.chmod(0o700)

    def follow(self, page: str) -> Self:
        """Write every file of a page, then run every command."""
        found = blocks(page)
        for _, name, text in found:
            if name:
                self.write(name, text)
        for kind, name, text in found:
            if kind == "sh" and not name:
                for line in text.splitlines():
                    self.run(line)
        return self

    def write(self, name: str, text: str) -> None:
        for theirs, ours in self._replace.items():
            text = text.replace(theirs, ours)
        (self.folder / name).write_text(text)

    def run(self, command: str) -> None:
        words = command.split()
        if "install" in words:
            self.installed.append(command)
        elif words[0] == "export":
            self._exported.append(command)
        elif words[1:2] in (["serve"], ["runner"]):
            self._begin(command, "Ctrl-C stops" if words[1] == "serve" else "")
        else:
            done = self.shell(command)
            self.printed[command] = done.stdout
            assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", "\n".join([*self._exported, command.replace(PORT, self.port)])],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def _begin(self, command: str, ready: str) -> None:
        """Start a command that keeps running, and wait until it has printed `ready`."""
        log = self.folder / f"{len(self._begun)}.log"
        with log.open("wb") as output:
            self._begun[command] = begun = subprocess.Popen(
                ["bash", "-c", f"exec {command.replace(PORT, self.port)}"],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=output,
            )
        while ready not in log.read_text():
            assert begun.poll() is None, log.read_text()
            time.sleep(0.1)
        self.printed[command] = log.read_text()

    def finish(self) -> None:
        """Wait for the started commands, such as runners, which end with their training."""
        for number, (command, begun) in enumerate(self._begun.items()):
            assert begun.wait(60) == 0
            self.printed[command] = (self.folder / f"{number}.log").read_text()

    def stop(self) -> None:
        for begun in self._begun.values():
            if begun.poll() is None:
                begun.send_signal(signal.SIGINT)
                assert begun.wait(30) == 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _environment() -> dict[str, str]:
    """Return the environment without Python's, OpenAI's, lightspan's and OpenTelemetry's
    variables.
    """
    left_out = ("PYTHON", "OPENAI_", "LIGHTSPAN_", "OTEL_")
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}


def printed(followed: Follower, start: str) -> str:
    """Return the output of the command that begins with `start`."""
    [text] = [text for command, text in followed.printed.items() if command.startswith(start)]
    return text


def gain_low(text: str) -> float:
    """Return the lower bound of the gain on 32 held-out tasks in a training's output."""
    gain = re.search(r"held-out reward: \S+ -> \S+ \(n=32, 95% CI of the gain (\S+?)\.\.", text)
    assert gain is not None, text
    return float(gain[1])
