"""Run nodes of a Ray cluster on this machine as `ray start` does; each can be killed as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

START = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
READY = "Ray runtime started"
LATE = "The current node timed out during startup"


class Node:
    """A Ray node with its raylet, agents and worker processes.

    Args:
        arguments: arguments of `ray start`.
        log: file of its output.
        environment: environment variables of its processes, in addition to the tests'.
        python: interpreter that has Ray.
    """

    def __init__(
        self,
        *arguments: str,
        log: Path,
        environment: dict[str, str],
        python: str = sys.executable,
    ) -> None:
        self._log = log
        self._command = [python, *START, *arguments]
        self._environment = {**os.environ, **environment}
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as out:
            return subprocess.Popen(
                self._command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=self._environment,
            )

    def wait_ready(self) -> None:
        """Wait until the node reports that it has started.

        On a busy machine it may take longer than Ray's fixed limit of 30 s; then it is started
        again.
        """
        while READY not in (said := self._log.read_text(errors="replace")):
            if self.process.poll() is not None:
                assert LATE in said, said
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process = self._begin()
            time.sleep(0.05)

    def running(self, *words: str) -> list[psutil.Process]:
        """Return the node's processes whose command line contains all of `words`."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        return found

    def orphans(self, word: str) -> list[psutil.Process]:
        """Return the processes that were started on the node, whatever their parent is now."""
        raylets = {str(each.pid) for each in self.running("raylet_socket_name")}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_RAYLET_PID") in raylets:
                    found += [process] if word in " ".join(process.cmdline()) else []
        return found

    def kill(self) -> None:
        """Kill all of the node's processes at once, as if the machine lost its power."""
        if self.process.poll() is not None:
            return
        everything = [psutil.Process(self.process.pid), *self.running()]
        for process in everything:  # nobody is to see the others die and to say goodbye
            with contextlib.suppress(psutil.Error):
                process.suspend()
        for process in [*everything, *self.running()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


class Cluster:
    """A Ray cluster: a head without CPUs, and further nodes.

    Args:
        python: interpreter that has Ray.
        environment: environment variables of all nodes, such as the token and the key.
    """

    def __init__(self, python: str = sys.executable, **environment: str) -> None:
        self._python = python
        self._environment = environment
        self._folder = Path(tempfile.mkdtemp(prefix="ls-"))  # short: sockets lie in it
        self._numbers = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        port = self.address.rpartition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=0"]
        self._start(*head, f"--temp-dir={self._folder / 'ray'}").wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, cpus: int = 2) -> Node:
        """Start a node and return it; `wait_ready` waits until it has started."""
        return self._start(f"--address={self.address}", f"--num-cpus={cpus}")

    def _start(self, *arguments: str) -> Node:
        self._numbers += 1
        log = self._folder / f"node-{self._numbers}.log"
        self.nodes.append(
            Node(*arguments, log=log, environment=self._environment, python=self._python)
        )
        return self.nodes[-1]
