"""The runner's side of the process that runs trials.

Harbor removes a sandbox when its trial ends or is cancelled, which a runner that is killed cannot
do. So trials run in a host process, one for each runner. The host cancels its trials when its
standard input closes, however the runner has ended. It also saves each trial the ten seconds of
CPU time in which Harbor's libraries are imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.child_processes import blocked_signals
from lightspan.runners.program import ProgramError
from lightspan.schema.records import Outcome
from lightspan_programs.environment import program_environment

EXIT_S: Final = 2.0
"""Maximum seconds for which a runner waits for the end of its host. A host that still removes
sandboxes goes on without the runner."""
LOG: Final = "host.log"
"""File with what Harbor and its libraries print, in the folder of the trials."""
# Code of the process, which finds the same modules as the runner, such as an agent of the user.
_ENTRY: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from lightspan_harbor.host import main
main()
"""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trial to run, or with no `config` the end of one."""

    id: str
    config: dict[str, Any] = {}
    """Fields of Harbor's `TrialConfig`."""
    prompts: list[tuple[str, str, str]] = []
    """Name, place and text of each prompt (`HarborTrial.prompts`)."""
    running: int | None = None
    memory_mb: int | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a trial."""

    id: str
    outcome: Outcome
    message: str = ""
    """What failed, or ended the agent early; empty if nothing did."""
    rewards: dict[str, float] = {}
    trajectory: str = ""
    """Path of the agent's trajectory; empty if it wrote none."""
    verifier_output: str = ""
    """End of the verifier's output."""
    steps: str = ""
    """End of the agent's trajectory as text, and the verifier's output."""


class TrialHost:
    """A host process.

    Args:
        log: file for its output; None to discard it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, log: Path | None) -> None:
        self.users = 0
        """Number of `hosting` blocks that use this host. It ends with the last block."""
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._lock = threading.Lock()
        self._log = log
        # podman-compose may lie next to the interpreter, in an environment that is not active
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        variables = {
            "PATH": os.pathsep.join(filter(None, paths)),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it fetches a list of prices at import
            "HARBOR_TELEMETRY": os.environ.get("HARBOR_TELEMETRY", "0"),
        }
        with contextlib.ExitStack() as stack:
            stderr: Any = subprocess.DEVNULL
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                stderr = stack.enter_context(open(log, "ab"))
            # Ctrl-C and similar signals must not end the host before it has removed its sandboxes.
            stack.enter_context(blocked_signals(signal.SIGINT, signal.SIGHUP))
            folders = msgspec.json.encode([path for path in sys.path if path]).decode()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=program_environment(os.environ, variables, None, "", {}),
                start_new_session=True,
            )
        threading.Thread(target=self._read, name="lightspan-trials", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def run(self, request: Request) -> Reply:
        """Run a trial. If this task is cancelled, the trial is, and its sandbox removed.

        Raises:
            ProgramError: the host ended meanwhile.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting[request.id] = future
        try:
            self._send(request)
            return await future
        except asyncio.CancelledError:
            # Harbor needs seconds to remove the sandbox, the runner may have none: do not wait.
            with contextlib.suppress(ProgramError):
                self._send(Request(id=request.id))
            raise
        finally:
            with self._lock:
                self._waiting.pop(request.id, None)

    def _send(self, request: Request) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(msgspec.json.encode(request) + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._ended() from error

    def _ended(self) -> ProgramError:
        where = "" if self._log is None else f"; {self._log} may say why"
        text = f"the process of Harbor's trials has ended (exit code {self._process.poll()}){where}"
        return ProgramError(text, Outcome.INFRASTRUCTURE)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                reply = msgspec.json.decode(line, type=Reply)
                with self._lock:
                    future = self._waiting.get(reply.id)
                if future is not None:
                    _settle(future, reply)
        self._process.wait()
        with self._lock:
            futures = list(self._waiting.values())
        for future in futures:
            _settle(future, self._ended())

    def close(self) -> None:
        """Let the host cancel its trials and end; wait for it briefly."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)


def _settle(future: asyncio.Future[Reply], result: Reply | Exception) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(result, Reply):
            future.set_result(result)
        else:
            future.set_exception(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)


_lock: Final = threading.Lock()
_host: TrialHost | None = None
"""The host of this process; None if no `hosting` block runs."""


@asynccontextmanager
async def hosting(folder: Path | None = None) -> AsyncIterator[TrialHost]:
    """Yield the host of this process. It runs as long as any `hosting` block runs.

    Args:
        folder: folder of the trials, for the log of a host that is started.

    Raises:
        ProgramError: the host cannot be started.
    """
    global _host
    with _lock:
        if _host is None or not _host.is_alive:
            try:
                _host = TrialHost(None if folder is None else folder / LOG)
            except OSError as error:
                text = f"the process of Harbor's trials cannot be started: {error}"
                raise ProgramError(text, Outcome.INFRASTRUCTURE) from error
        host = _host
        host.users += 1
    try:
        yield host
    finally:
        with _lock:
            host.users -= 1
            is_unused = host.users == 0
            if is_unused and _host is host:
                _host = None
        if is_unused:
            await asyncio.shield(asyncio.to_thread(host.close))
