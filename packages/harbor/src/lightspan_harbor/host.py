"""The process that runs the trials of one runner, by Harbor (`trial_host` starts it).

It reads a `Request` per line from its standard input, and writes a `Reply` per line. When the input
closes, it cancels its trials, waits until Harbor has removed their sandboxes, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
from harbor.environments.factory import EnvironmentFactory
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent
from harbor.trial.trial import Trial

from lightspan.schema.records import Outcome
from lightspan_harbor.trial_host import Reply, Request

LOCAL: Final = ("docker", "podman", "apple-container", "singularity", "sbx")
"""Kinds of sandboxes that use this machine's memory."""
DEFAULT_MEMORY_MB: Final = 2048
"""Memory of a sandbox whose task names none."""
MAX_START_S: Final = 600.0
"""Maximum seconds for which a cancelled trial waits for its sandbox to start."""
SKILL: Final = "Rules for this task. Read them before you begin."
"""Description of a skill whose text has none."""
MAX_TEXT: Final = 4_000
"""Maximum characters of an excerpt of the verifier's output or of the trajectory."""


class Host:
    """Runs trials.

    Args:
        output: file descriptor for replies.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._trials: dict[str, asyncio.Task[None]] = {}
        self._memory: Memory | None = None
        self._running: asyncio.Semaphore | None = None
        self._preflights: dict[str, asyncio.Task[str]] = {}

    async def serve(self) -> None:
        """Run trials until the standard input closes or SIGTERM arrives; remove the sandboxes."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, ended.set)

        def read() -> None:
            for line in sys.stdin.buffer:
                loop.call_soon_threadsafe(self._receive, line)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        for task in self._trials.values():
            _cancel(task)
        # Harbor goes on stopping a sandbox in a task of its own
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    def _receive(self, line: bytes) -> None:
        request = msgspec.json.decode(line, type=Request)
        task = self._trials.get(request.id)
        if request.config:
            self._trials[request.id] = asyncio.create_task(self._answer(request))
        elif task is not None:
            _cancel(task)

    async def _answer(self, request: Request) -> None:
        try:
            reply = await self._run(request)
        except (Exception, SystemExit) as error:  # such as of an option that Harbor does not know
            message = f"{type(error).__name__}: {error}"
            reply = Reply(id=request.id, outcome=Outcome.APP_ERROR, message=message)
        finally:
            del self._trials[request.id]
        # a runner that is gone cancels the trials
        with contextlib.suppress(BrokenPipeError):
            os.write(self._output, msgspec.json.encode(reply) + b"\n")

    async def _run(self, request: Request) -> Reply:
        config = TrialConfig.model_validate(request.config)
        files = place_prompts(config, request)
        kind = "" if config.environment.type is None else config.environment.type.value
        if kind:
            if kind not in self._preflights:
                self._preflights[kind] = asyncio.create_task(_preflight(config))
            if problem := await self._preflights[kind]:
                del self._preflights[kind]
                return Reply(id=request.id, outcome=Outcome.INFRASTRUCTURE, message=problem)
        trial = await Trial.create(config)
        needed = trial.task.config.environment.memory_mb or DEFAULT_MEMORY_MB
        if config.environment.override_memory_mb:
            needed = config.environment.override_memory_mb
        self._memory = self._memory or Memory(request.memory_mb or free_memory_mb() * 3 // 4)
        if request.running is not None and self._running is None:
            self._running = asyncio.Semaphore(request.running)
        is_local = kind in LOCAL
        finish_starting(trial.agent_environment)
        async with self._memory.reserved(needed if is_local else 0), self._turn(trial):
            if files:
                trial.add_hook(TrialEvent.AGENT_START, uploading(trial, files))
            result = await trial.run()
        return reply_of(request.id, result, trial.paths.trial_dir)

    @asynccontextmanager
    async def _turn(self, trial: Trial) -> AsyncIterator[None]:
        """Let the agent of `trial` wait for its turn when its sandbox is ready."""
        if self._running is None:
            yield
            return
        semaphore, held = self._running, list[bool]()

        async def acquire(_: Any) -> None:
            await semaphore.acquire()
            held.append(True)

        async def release(_: Any = None) -> None:
            if held:
                held.pop()
                semaphore.release()

        trial.add_hook(TrialEvent.AGENT_START, acquire)
        trial.add_hook(TrialEvent.AGENT_END, release)
        try:
            yield
        finally:
            await release()


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a trial, unless it is ending already: a second time would stop its cleaning up."""
    if not task.cancelling():
        task.cancel()


class Memory:
    """Memory that sandboxes share.

    Args:
        limit_mb: megabytes of all sandboxes together.
    """

    def __init__(self, limit_mb: int) -> None:
        self._limit_mb = limit_mb
        self._used_mb = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserved(self, needed_mb: int) -> AsyncIterator[None]:
        """Wait until `needed_mb` are free, and keep them during the block.

        A sandbox that needs more than there is gets all of it, alone.
        """
        needed_mb = min(needed_mb, self._limit_mb)
        async with self._changed:
            await self._changed.wait_for(lambda: self._used_mb + needed_mb <= self._limit_mb)
            self._used_mb += needed_mb
        try:
            yield
        finally:
            self._used_mb -= needed_mb
            async with self._changed:
                self._changed.notify_all()


def free_memory_mb() -> int:
    """Return the free memory of this machine; a very large number if it is unknown."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) // 1024
    return 1 << 40


async def _preflight(config: TrialConfig) -> str:
    """Return why no sandbox of this kind can be started here; empty if one can."""
    environment = config.environment
    try:
        await asyncio.to_thread(EnvironmentFactory.run_preflight, environment.type)
    except SystemExit as error:
        return f"no sandbox can be started: {error}"
    return ""


def finish_starting(environment: Any) -> None:
    """Let the start of a sandbox finish before a cancellation, so that all of it is removed.

    Harbor cancels the start but not the programs that it runs, such as `docker compose up`. They
    would create containers while, or after, the sandbox is removed.
    """
    start = environment.start

    async def finished(*args: Any, **kwargs: Any) -> None:
        task = asyncio.ensure_future(start(*args, **kwargs))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            end = time.monotonic() + MAX_START_S
            while not task.done() and time.monotonic() < end:
                with contextlib.suppress(asyncio.CancelledError):  # Harbor's own time limits
                    await asyncio.wait([task], timeout=end - time.monotonic())
            if task.done() and not task.cancelled():
                task.exception()  # it is of no interest any more
            raise

    environment.start = finished


# --- prompts ----------------------------------------------------------------------------------
def place_prompts(config: TrialConfig, request: Request) -> list[tuple[str, str]]:
    """Put the prompts of a trial into its configuration; return path and text of the files."""
    files = []
    for name, place, text in request.prompts:
        if place == "instruction":
            config.extra_instructions.append(text)
        elif place == "skill":
            folder = Path(config.trials_dir, f"{config.trial_name}.skills", name)
            folder.mkdir(parents=True, exist_ok=True)
            if not text.startswith("---"):  # programs ignore a skill without it
                text = f"---\nname: {name}\ndescription: {SKILL}\n---\n\n{text}"
            (folder / "SKILL.md").write_text(text, "utf-8")
            config.agent.skills.append(str(folder))
        elif place.startswith("option:"):
            *path, last = place.removeprefix("option:").split(".")
            options = config.agent.kwargs
            for key in path:
                options = options.setdefault(key, {})
            options[last] = text
        else:
            files.append((place, text))
    return files


def uploading(trial: Trial, files: list[tuple[str, str]]) -> Callable[[Any], Awaitable[None]]:
    """Return a hook that writes files into the sandbox of `trial` before the agent starts."""

    async def upload(_: Any) -> None:
        environment, folder = trial.agent_environment, Path(trial.paths.trial_dir, "prompts")
        working = (await environment.exec("pwd")).stdout or "/"
        for number, (path, text) in enumerate(files):
            folder.mkdir(exist_ok=True)
            source = folder / f"{number}-{Path(path).name}"
            source.write_text(text, "utf-8")
            await environment.upload_file(source, str(PurePosixPath(working.strip(), path)))

    return upload


# --- results ----------------------------------------------------------------------------------
def reply_of(name: str, result: TrialResult, folder: Path) -> Reply:
    """Return the reply for a trial that has ended.

    Args:
        name: id of the request.
        result: what Harbor says of the trial.
        folder: folder of the trial's files.
    """
    outcome, message = outcome_of(result)
    rewards = {} if result.verifier_result is None else result.verifier_result.rewards or {}
    trajectory = folder / "agent" / "trajectory.json"
    outputs = sorted(folder.glob("**/verifier/test-stdout.txt"))
    verifier = outputs[-1].read_text("utf-8", "replace")[-MAX_TEXT:] if outputs else ""
    return Reply(
        id=name,
        outcome=outcome,
        message=message,
        rewards={key: float(value) for key, value in rewards.items()},
        trajectory=str(trajectory) if trajectory.is_file() else "",
        verifier_output=verifier,
        steps=f"{_steps(trajectory)}\nverifier: {verifier}"[-2 * MAX_TEXT :],
    )


def outcome_of(result: TrialResult) -> tuple[Outcome, str]:
    """Return the outcome of a trial, and what failed or ended the agent early.

    A reward that Harbor calls valid counts, also if the agent ran out of time or of context. If the
    agent did not begin, the sandbox or the agent's installation failed; Harbor says of other errors
    whether a repetition may help, such as one of an endpoint.
    """
    errors = result.recorded_exceptions()
    message = f"{errors[0].exception_type}: {errors[0].exception_message}" if errors else ""
    steps = [result, *(result.step_results or [])]
    has_begun = any(step.agent_execution is not None for step in steps)
    if errors and result.environment_setup is not None and not has_begun:
        return Outcome.INFRASTRUCTURE, f"the sandbox or its agent did not start: {message}"
    if result.reward_valid:
        return Outcome.OK, message
    if not errors:
        return Outcome.APP_ERROR, "the verifier gave no reward"
    if any(error.policy.should_retry for error in errors):
        return Outcome.INFRASTRUCTURE, message
    if errors[0].exception_type.endswith("TimeoutError"):
        return Outcome.TIMEOUT, message
    return Outcome.APP_ERROR, message


def _steps(trajectory: Path) -> str:
    """Return the end of a trajectory in Harbor's format (ATIF) as text."""
    try:
        steps = json.loads(trajectory.read_text("utf-8"))["steps"]
        lines = [
            f"{step.get('source')}: {step.get('message')}"
            + "".join(f"\n{each.get('content')}" for each in _observed(step))
            for step in steps
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return "\n".join(lines)[-MAX_TEXT:]


def _observed(step: dict[str, Any]) -> list[dict[str, Any]]:
    return (step.get("observation") or {}).get("results") or []


def main() -> None:
    """Run trials for the process at the other end of the standard input."""
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print
    for number in (signal.SIGINT, signal.SIGHUP):
        # No signal may be ignored or blocked: the programs in a sandbox would inherit that.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGHUP])
    asyncio.run(Host(output).serve())
