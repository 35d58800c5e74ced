"""Run one program as a process group: start it, read its output, end it.

A program may start child processes, and a runner may be killed at any moment; none of the processes
may outlive the attempt. So the program leads its own session and process group, signals go to the
whole group, and a watchdog process kills the groups of a runner that died (`watchdog`).
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

from lightspan.child_processes import blocked_signals
from lightspan.stores.aio import wait_for_event

KEPT_BYTES: Final = 8_192
"""Number of bytes kept from the end of each output stream."""
GRACE_S: Final = 2.0
"""Seconds from SIGTERM to SIGKILL."""

_CHUNK: Final = 65_536
_LAST_CHUNKS: Final = 16
"""Maximum number of chunks that are read after the program has ended: 1 MiB."""
_WATCHDOG: Final = Path(__file__).with_name("watchdog.py")
# Shell code that reports its process id to the watchdog through standard input and then executes
# the program in the same process, so that the watchdog knows every program before it runs.
_GATE: Final = 'echo "+$$" >&0 && exec "$@" </dev/null'


class Tail:
    """The last bytes of an output stream, and the number of all its bytes.

    Args:
        limit: maximum number of bytes that are kept.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._data = bytearray()
        self.count = 0
        """Number of bytes written."""

    def add(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self.count += len(data)
        self._data += data
        if len(self._data) > 2 * self._limit:
            del self._data[: -self._limit]

    @property
    def data(self) -> bytes:
        """The last bytes of the stream, at most `limit`."""
        return bytes(self._data[-self._limit :])

    @property
    def is_whole(self) -> bool:
        """Whether `data` is everything that was written."""
        return self.count <= self._limit


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    """Exit status. If a signal ended the program, the negative number of the signal."""
    timed_out: bool
    """Whether the program ran past its time limit and was ended."""


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
    """Run a program in its own session until it ends, then kill its remaining child processes.

    If the program runs longer than `timeout_s`, or the calling asyncio task is cancelled, its
    process group gets SIGTERM. The group gets SIGKILL when the program has ended, or `grace_s`
    seconds later.

    Args:
        arguments: the program's path and its arguments.
        watchdog: watchdog that kills the program if this process dies.
        stdout: object to which the program's stdout is added.
        stderr: object to which the program's stderr is added.
        env: all environment variables of the program.
        cwd: the program's working folder; None for that of this process.
        timeout_s: seconds that the program may run; None for no limit.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        OSError: no process can be started.
    """
    loop = asyncio.get_running_loop()
    with _reading(loop, stdout) as out, _reading(loop, stderr) as err:
        with _sigint_not_ignored():
            process = subprocess.Popen(  # noqa: ASYNC220 - it waits for no program
                ["/bin/sh", "-c", _GATE, "sh", *arguments],
                stdin=watchdog.pipe,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        timed_out = False
        exited = _watch_exit(process, loop)
        try:
            try:
                timed_out = not await wait_for_event(timeout_s, exited)
            finally:
                if not exited.is_set():  # the program ran too long, or this task is cancelled
                    _signal(process.pid, signal.SIGTERM)
                    await wait_for_event(grace_s, exited)
        finally:
            # before the program is reaped: until then no other group can have its number
            _signal(process.pid, signal.SIGKILL)
            try:
                await exited.wait()
            finally:
                process.wait()
                watchdog.forget(process.pid)
        return Ended(process.returncode, timed_out)


@contextmanager
def _sigint_not_ignored() -> Iterator[None]:
    """Make sure that a program started in the block does not ignore SIGINT.

    A program inherits an ignored signal, and could then not be interrupted. It does not inherit a
    handler function. So if this process ignores SIGINT, a function that does nothing is set.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _watch_exit(process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Return an event that is set when the program has ended, before its process id is freed.

    Raises:
        OSError: no thread can be started; the program was killed.
    """
    exited = asyncio.Event()

    def wait() -> None:
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(exited.set)

    try:
        threading.Thread(target=wait, name="lightspan-program", daemon=True).start()
    except RuntimeError as error:  # no thread can be started
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        raise OSError(str(error)) from error
    return exited


@contextmanager
def _reading(loop: asyncio.AbstractEventLoop, tail: Tail) -> Iterator[int]:
    """Yield the write end of a pipe. What is written to it is added to `tail` while the block runs.

    The block does not wait for the end of the stream, because a process that left the program's
    process group may keep the pipe open for longer than the attempt.
    """
    source, sink = os.pipe()
    os.set_blocking(source, False)

    loop.add_reader(source, _read, source, tail)
    try:
        yield sink
    finally:
        loop.remove_reader(source)
        os.close(sink)
        for _ in range(_LAST_CHUNKS):
            if not _read(source, tail):
                break
        os.close(source)


def _read(source: int, tail: Tail) -> bool:
    """Read a chunk from the pipe `source` into `tail`; return whether there was data."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return False
    tail.add(data)
    return bool(data)


# --- the watchdog ---------------------------------------------------------------------------
class Watchdog:
    """Process that kills programs and removes their files when this process has ended.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self) -> None:
        self.users = 0
        """Number of `guarding` blocks that use this watchdog. It ends with the last block."""
        self.folder = Path(tempfile.mkdtemp(prefix="lightspan-"))
        """Folder of tasks and workspaces; only this user can read it."""
        source, self.pipe = os.pipe()
        try:
            # Ctrl-C and similar signals must not end the watchdog before its runner ends.
            with blocked_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_WATCHDOG), str(self.folder)],
                    stdin=source,
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
            os.close(source)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def forget(self, group: int) -> None:
        """Notify the watchdog that the process group `group` has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, b"-%d\n" % group)

    def close(self) -> None:
        """End the watchdog and wait for its end. It first kills the programs that still run."""
        os.close(self.pipe)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # a watchdog that was killed removed nothing


_lock: Final = threading.Lock()
_watchdog: Watchdog | None = None
"""The watchdog of this process; None if no `guarding` block runs."""


@asynccontextmanager
async def guarding() -> AsyncIterator[Watchdog]:
    """Yield the watchdog of this process. It runs as long as any `guarding` block runs.

    Raises:
        OSError: the watchdog cannot be started.
    """
    global _watchdog
    with _lock:
        if _watchdog is None or not _watchdog.is_alive:
            _watchdog = Watchdog()
        watchdog = _watchdog
        watchdog.users += 1
    try:
        yield watchdog
    finally:
        with _lock:
            watchdog.users -= 1
            is_unused = watchdog.users == 0
            if is_unused and _watchdog is watchdog:
                _watchdog = None
        if is_unused:
            await asyncio.shield(asyncio.to_thread(watchdog.close))
