"""One program as a process group of its own: started, listened to, ended.

A program may start others, and a runner may be killed at any moment; nothing of either may outlive
an attempt. So the program leads a session and a process group of its own, the whole group is
signalled, and a watchdog outside of the runner kills the groups that a dead runner leaves
(`watchdog`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from lightspan.stores.aio import wait_for_event

KEPT_BYTES: Final = 8_192
"""Of each output stream, counted from its end."""
GRACE_S: Final = 2.0
"""From SIGTERM to SIGKILL."""

_CHUNK: Final = 65_536
_LAST_CHUNKS: Final = 16
"""What a pipe may hold when its writers are gone: 1 MiB at most."""
_WATCHDOG: Final = Path(__file__).with_name("watchdog.py")
# The program's own process reports itself before the program begins: at no moment does it run
# unknown to the watchdog. Standard input is the watchdog's pipe until then.
_GATE: Final = 'echo "+$$" >&0 && exec "$@" </dev/null'


class Tail:
    """The end of what was written to a stream, and how much was written in all."""

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._data = bytearray()
        self.count = 0
        """Bytes written."""

    def add(self, data: bytes) -> None:
        """More was written."""
        self.count += len(data)
        self._data += data
        if len(self._data) > 2 * self._kept:
            del self._data[: -self._kept]

    @property
    def data(self) -> bytes:
        """The last bytes."""
        return bytes(self._data[-self._kept :])

    @property
    def whole(self) -> bool:
        """Whether `data` is all that was written."""
        return self.count <= self._kept


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    """Its exit status; of one that a signal ended, the signal's number below zero."""
    timed_out: bool
    """It ran past its limit and was ended."""


async def run_program(
    arguments: Sequence[str],
    *,
    watchdog: Watchdog,
    stdout: Tail,
    stderr: Tail,
    env: Mapping[str, str],
    cwd: str | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Ended:
    """Run a program in a session of its own until it ends, and end what it leaves running.

    A program that runs past `timeout_s`, or whose task is cancelled, is ended with its whole
    process group: SIGTERM, and SIGKILL when the program has gone or `grace_s` later.

    Args:
        arguments: the first is the program's path.
        watchdog: ends the program if this process dies.
        stdout: gets the end of what it writes there.
        stderr: likewise.
        env: its whole environment.
        cwd: its working folder.
        timeout_s: seconds that it may run; None for no limit.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        OSError: no process can be started.
    """
    loop = asyncio.get_running_loop()
    with _reading(loop, stdout) as out, _reading(loop, stderr) as err:
        process = _start(arguments, watchdog.pipe, out, err, cwd, env)
        timed_out = False
        exited = _watch_exit(process, loop)
        try:
            timed_out = not await wait_for_event(timeout_s, exited)
            if timed_out:
                await _ask_to_end(process.pid, exited, grace_s)
        except asyncio.CancelledError:
            await _ask_to_end(process.pid, exited, grace_s)
            raise
        finally:
            # before the program is reaped: until then nobody else can have the group's number
            _signal(process.pid, signal.SIGKILL)
            try:
                await exited.wait()
            finally:
                process.wait()
                watchdog.forget(process.pid)
        return Ended(process.returncode, timed_out)


def _start(
    arguments: Sequence[str],
    watchdog: int,
    stdout: int,
    stderr: int,
    cwd: str | None,
    env: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    with _interrupts_heard():
        return subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "sh", *arguments],
            stdin=watchdog,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """A program inherits that its runner ignores Ctrl-C, and could not trap it; it does not inherit
    a handler that does nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


async def _ask_to_end(group: int, exited: asyncio.Event, grace_s: float) -> None:
    _signal(group, signal.SIGTERM)
    await wait_for_event(grace_s, exited)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _watch_exit(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that is set when the program has ended, before it is reaped."""
    exited = asyncio.Event()

    def wait() -> None:
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(exited.set)

    try:
        threading.Thread(target=wait, name="lightspan-program", daemon=True).start()
    except RuntimeError as error:  # no thread is left
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        raise OSError(str(error)) from error
    return exited


@contextmanager
def _reading(loop: asyncio.AbstractEventLoop, tail: Tail) -> Iterator[int]:
    """The writing end of a pipe whose other end is read into `tail` as long as the block runs.

    The block ends with the program, not with the last holder of the pipe: a process that left the
    program's group cannot keep an attempt from ending.
    """
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    loop.add_reader(ours, _take, ours, tail)
    try:
        yield theirs
    finally:
        loop.remove_reader(ours)
        os.close(theirs)
        for _ in range(_LAST_CHUNKS):
            if not _take(ours, tail):
                break
        os.close(ours)


def _take(source: int, tail: Tail) -> bool:
    """Read once; False if nothing was there."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return False
    tail.add(data)
    return bool(data)


# --- the watchdog ---------------------------------------------------------------------------
class Watchdog:
    """A process that ends programs and removes task files when this process is gone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lightspan-"))
        """Of the task files; nobody else can read it."""
        theirs, self.pipe = os.pipe()
        try:
            with _blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_WATCHDOG), str(self.folder)],
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            os.close(self.pipe)
            self.folder.rmdir()
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def forget(self, group: int) -> None:
        """The group has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, b"-%d\n" % group)

    def close(self) -> None:
        """Let it end what is left, and wait for that."""
        os.close(self.pipe)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # if it was killed, it removed nothing


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Keeps these signals from what is started in the block, which inherits the mask: the watchdog
    must end when its runner does, never sooner."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Shared:
    """The watchdog of this process, kept as long as somebody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[Watchdog, int] = {}
        self._latest: Watchdog | None = None

    def take(self) -> Watchdog:
        with self._lock:
            if self._latest is None or not self._latest.alive:
                self._latest = Watchdog()
            self._users[self._latest] = self._users.get(self._latest, 0) + 1
            return self._latest

    def leave(self, watchdog: Watchdog) -> bool:
        """Whether that was its last user."""
        with self._lock:
            self._users[watchdog] -= 1
            if self._users[watchdog]:
                return False
            del self._users[watchdog]
            if self._latest is watchdog:
                self._latest = None
            return True


_shared: Final = _Shared()


@asynccontextmanager
async def guarding() -> AsyncIterator[Watchdog]:
    """This process's watchdog: started for the first block, ended with the last.

    Raises:
        OSError: no process can be started.
    """
    watchdog = _shared.take()
    try:
        yield watchdog
    finally:
        if _shared.leave(watchdog):
            await asyncio.shield(asyncio.to_thread(watchdog.close))
