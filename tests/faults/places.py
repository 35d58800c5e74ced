"""A training on several simulated machines, each of which can be killed or disconnected.

Two servers share one PostgreSQL: one for the trainer, one for the runners. A network connection
leads to each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import chaos_apps  # type: ignore[import-not-found]
import fault_served  # type: ignore[import-not-found]
import psutil

from packages.gateway.tests.remote_store.served import RUNNER, TRAINER
from tests.postgres.cluster import OWNER, Cluster

APP = "chaos_apps:twice"
LEASE_S = 10
_SESSIONS = (
    b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    b"WHERE pid <> pg_backend_pid() AND usename = %s"
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Wire:
    """A TCP proxy to a port, in a thread of its own; used as a context manager."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._whole = asyncio.Event()
        self._ends: set[asyncio.StreamWriter] = set()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self, silent_s: float) -> None:
        """Forward nothing for `silent_s` seconds, then reset every connection."""
        asyncio.run_coroutine_threadsafe(self._cut(silent_s), self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._whole.set()

    async def _end(self) -> None:
        self._server.close()
        self._reset()
        # the handlers see their end
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _cut(self, silent_s: float) -> None:
        self._whole.clear()
        await asyncio.sleep(silent_s)
        self._reset()
        self._whole.set()

    def _reset(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._ends |= ends
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._ends -= ends
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()


class Kept:
    """A program that tests kill and start again.

    Args:
        command: the command.
        log: file of its output.
        ready: text that it prints when it is ready; empty not to wait for one.
        variables: further environment variables.
    """

    def __init__(
        self, command: Sequence[object], log: Path, ready: str = "", **variables: str
    ) -> None:
        self._command = [str(part) for part in command]
        self._log = log
        self._ready = ready
        self._environment = {**os.environ, **variables}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            begun = log.tell()
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment
            )
        while self._ready not in self._log.read_bytes()[begun:].decode():
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def kill(self, *, whole: bool = False) -> None:
        """Kill the process with SIGKILL, and its children too if `whole`."""
        process = psutil.Process(self.process.pid)
        process.suspend()  # it sees none of them die
        for child in process.children(recursive=True) if whole else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        self._died()

    def die_at(self, number: signal.Signals) -> None:
        """Send the signal at which the process kills itself, and wait for its end."""
        self.process.send_signal(number)
        self._died()

    def _died(self) -> None:
        assert self.process.wait() == -signal.SIGKILL, self._log.read_text()

    def end(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(children, timeout=30)


class Places:
    """Run servers and runners of a training, as a context manager.

    Args:
        cluster: the PostgreSQL server.
        schema: schema of the store.
        folder: folder of the programs' logs.
        dice: random generator of choices and times.
    """

    def __init__(self, cluster: Cluster, schema: str, folder: Path, dice: random.Random) -> None:
        self._cluster = cluster
        self._url = cluster.url(schema)
        self._folder = folder
        self._dice = dice
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with self._held as held:
            self._of_trainer, self._to_trainers = self._served("trainer")
            self._of_runners, self._to_runners = self._served("runners")
            self._runners = [self._runner(number) for number in range(2)]
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def url(self) -> str:
        """URL of the store for the trainer."""
        return f"http://127.0.0.1:{self._to_trainers.port}"

    def _served(self, name: str) -> tuple[Kept, Wire]:
        port = free_port()
        command = [sys.executable, fault_served.__file__, self._url, port]
        keys = {"TRAINER_KEY": TRAINER, "RUNNER_KEY": RUNNER}
        server = Kept(command, self._folder / f"server-{name}.log", "serving the store", **keys)
        self._held.callback(server.end)
        return server, self._held.enter_context(Wire(port))

    def _runner(self, number: int) -> Kept:
        store = f"http://127.0.0.1:{self._to_runners.port}"
        command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", store]
        options = ["--slots", 4, "--lease", LEASE_S, "--stay"]
        apps = ["--app-dir", Path(chaos_apps.__file__).parent, APP]
        log = self._folder / f"runner-{number}.log"
        runner = Kept([*command, *options, *apps], log, LIGHTSPAN_STORE_KEY=RUNNER)
        self._held.callback(runner.end)
        return runner

    def tend(self) -> None:
        """Start runners that have ended, as a service manager would.

        A runner that cannot reach its store at its start ends after some seconds.
        """
        for runner in self._runners:
            if runner.process.poll() is not None:
                runner.start()

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return name → function that injects a fault, and returns when it has been repaired."""
        return {
            "the trainer's server killed": lambda: self._kill(self._of_trainer),
            "the runners' server killed": lambda: self._kill(self._of_runners),
            "a server killed before it commits": lambda: self._die(signal.SIGUSR1),
            "a server killed after it commits": lambda: self._die(signal.SIGUSR2),
            "the database killed": self._kill_database,
            "the database's sessions ended": self._end_sessions,
            "a runner killed": lambda: self._kill(self._dice.choice(self._runners)),
            "a runner killed, and its workers": lambda: self._kill(
                self._dice.choice(self._runners), whole=True
            ),
            "the trainer's network cut": lambda: self._to_trainers.cut(self._silence()),
            "the runners' network cut": lambda: self._to_runners.cut(self._silence()),
        }

    def _kill(self, kept: Kept, *, whole: bool = False) -> None:
        kept.kill(whole=whole)
        self._absence()
        kept.start()

    def _die(self, how: signal.Signals) -> None:
        server = self._dice.choice([self._of_trainer, self._of_runners])
        server.die_at(how)
        self._absence()
        server.start()

    def _kill_database(self) -> None:
        self._cluster.kill()
        self._absence()
        self._cluster.start()

    def _end_sessions(self) -> None:
        with self._cluster.connect() as db:
            db.execute(_SESSIONS, (OWNER,))

    def _absence(self) -> None:
        time.sleep(self._dice.choice([0, self._dice.uniform(0, 2)]))

    def _silence(self) -> float:
        return self._dice.choice([0, self._dice.uniform(0, 2)])
