"""A supervised server: it is started, checked, updated, and restarted with the current weights."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from lightspan.errors import EngineClosedError, EngineError
from lightspan.schema.token_records import Sampling
from lightspan.stores.aio import wait_for_event
from lightspan_vllm.client import Chunk, Client, Refused, Unreachable, is_gone
from lightspan_vllm.config import Link
from lightspan_vllm.process import Process
from lightspan_vllm.requirements import check_server_info
from lightspan_vllm.timings import ServerTimings
from lightspan_vllm.weights import LoRAFiles, ServerSpec, TargetWeights, Weights

MAX_DEATHS: Final = 3
"""A server fails when it has died this often without finishing a call in between."""
_ABORT_INTERVAL_S: Final = 0.2
"""Seconds between two requests to abort the calls of a server that is updated."""
_MAX_ABORTS: Final = 300

Launch = Callable[[], tuple[Process, str]]
"""Function that starts a server process, and returns it and the server's address."""


class Server:
    """A server of one policy, or of all LoRA policies of one model.

    Args:
        name: name for messages.
        spec: the server's specification.
        target: returns the current weights.
        start_s: maximum seconds from the server's start until it answers.
        launch: starts the server; None for a server that the user started.
        address: address of a server that the user started; "" if `launch` is given.
        on_loss: called with this server and an error (None if there is none) when the started
            process ends by itself, or when the server is gone while it has calls.
        link: how weights are sent over the network; None if the server reads files.
        timings: timeouts and limits; None for the defaults of `ServerTimings`.
    """

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        target: Callable[[], TargetWeights],
        *,
        start_s: float,
        launch: Launch | None = None,
        address: str = "",
        on_loss: Callable[[Server, Exception | None], None] = lambda *_: None,
        link: Link | None = None,
        timings: ServerTimings | None = None,
    ) -> None:
        self.name = name
        self._timings = timings or ServerTimings()
        self.client = Client(address, self._timings)
        self._address = address
        self.ready = False
        """Whether the server has the current weights and accepts calls."""
        self.changes = 0
        """Number of weight changes so far. If it is the same before and after a call, no update
        aborted the call."""
        self.deaths = 0
        """Number of the server's deaths since its last finished call."""
        self._spec = spec
        self._target = target
        self._start_s = start_s
        self._launch = launch
        self._on_loss = on_loss
        self._link = link
        self._process: Process | None = None
        self._former_cpu_s = 0.0
        """CPU seconds of the processes before the current one."""
        self._log: Path | None = None
        """Log of the started process; None before the first start, and for a server of the user."""
        self._watcher: asyncio.Task[None] | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._label = ""
        self._version = 0
        self._lora: dict[str, LoRAFiles] = {}
        """Policy → the LoRA of the policy that the server has loaded."""
        self._checked = False
        self._was_ready = False
        """Whether the server was ever ready. Its loss is reported only then."""
        self._closed = False
        self._lock = asyncio.Lock()
        self._calls: dict[str, str] = {}
        """Id of a running call → its policy."""
        self._drained = asyncio.Event()
        """Set whenever the last call of a policy ends."""

    # --- calls ----------------------------------------------------------------------------
    @property
    def cpu_s(self) -> float:
        """CPU seconds of the started processes; 0 for a server that the user started."""
        return self._former_cpu_s + (0.0 if self._process is None else self._process.cpu_s())

    @property
    def load(self) -> int:
        """Number of running calls."""
        return len(self._calls)

    async def complete(
        self, policy: str, prompt: Sequence[int], sampling: Sampling, **options: Any
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks of `Client.complete`, each with the version of the current weights.

        Yield no chunk while the weights are updated. The weights of a policy change only while the
        policy has no running call.

        Raises (while iterating):
            Unreachable: the server is gone. Or the user started the server, and it was restarted or
                another program changed its weights.
            Refused: the server refused the call.
        """
        if not self.ready:
            return
        lora = self._lora.get(policy)
        version = self._version if lora is None else lora.version
        with self._call(policy) as request_id:
            if self._launch is None and await self.client.label() != self._label:
                raise Unreachable(f"{self.name} was restarted, or its weights were changed")
            name = "" if lora is None else lora.name
            chunks = self.client.complete(
                prompt, sampling, request_id=request_id, lora=name, **options
            )
            async for chunk in chunks:
                yield chunk._replace(version=version)

    @contextlib.contextmanager
    def _call(self, policy: str) -> Iterator[str]:
        request_id = secrets.token_hex(16)
        self._calls[request_id] = policy
        try:
            yield request_id
        finally:
            del self._calls[request_id]
            if not self._calls_of(policy):
                self._drained.set()

    def _calls_of(self, policy: str | None) -> list[str]:
        """Return the ids of a policy's running calls; of all running calls if `policy` is None."""
        return [key for key, owner in self._calls.items() if policy in (None, owner)]

    # --- weights --------------------------------------------------------------------------
    async def serve(self) -> None:
        """Start the server if it does not run, and load the current weights into it.

        Raises:
            ConfigError: the server does not meet its specification.
            EngineClosedError: the server was closed.
            EngineError: the server does not become ready, dies repeatedly, or refuses the weights.
        """
        async with self._lock:
            self.ready = False
            while not self.ready:
                self._check_open()
                try:
                    await self._connect()
                    target = self._target()
                    if self._label != target.weights.label:
                        await self._load(target.weights)
                    await self._load_lora(target.lora)
                except Unreachable as error:
                    await self._discard(error)
                else:  # a process that has just ended is restarted
                    self.ready = self._process is None or not self._process.ended.is_set()
                    self._was_ready = self._was_ready or self.ready
            if self._monitor is None and not self._closed:
                self._monitor = asyncio.create_task(self._check_health())

    async def close(self) -> None:
        """Abort the calls, and stop the process if the engine started it. Idempotent."""
        self.ready, self._closed = False, True
        if self._monitor is not None:
            self._monitor.cancel()
        await self.client.close()
        await self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError

    async def _load(self, weights: Weights) -> None:
        self._label, self._lora = "", {}
        async with self._loading(weights.version):
            if self._spec.lora_rank:  # the weights are loaded; LoRA of earlier runs may remain
                for name in await self.client.loras():
                    await self.client.unload_lora(name)
                await self.client.name_weights(weights.label)
            else:
                await self.client.pause()
                await self._drain(None)
                await self.client.load(weights, self._link)
                await self.client.resume()
        self._label, self._version = weights.label, weights.version
        self.changes += 1

    async def _load_lora(self, lora: Mapping[str, LoRAFiles]) -> None:
        """Load the LoRA of each policy whose LoRA has changed, and abort the calls of that policy.

        Args:
            lora: policy → its current LoRA.
        """
        for policy, files in lora.items():
            former = self._lora.get(policy)
            if former == files:
                continue
            async with self._loading(files.version):
                await self.client.load_lora(files)
                if calls := self._calls_of(policy):
                    await self.client.abort(calls)
                await self._drain(policy)
                self._lora[policy] = files
                self.changes += 1
                if former is not None:
                    await self.client.unload_lora(former.name)

    @contextlib.asynccontextmanager
    async def _loading(self, version: int) -> AsyncIterator[None]:
        """Convert an error `Refused` in the `with` block, in which the server loads weights.

        Args:
            version: version of the weights, for the error message.

        Raises:
            EngineError: the server refused the weights.
            Unreachable: the server refused the weights because it is ending.
        """
        try:
            yield
        except Refused as error:
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and await self._is_dying():
                raise Unreachable(str(error)) from error
            raise EngineError(
                f"{self.name} did not load version {version} of its weights: {error}"
            ) from error

    async def _is_dying(self) -> bool:
        """Return whether the server is gone, or is found to be gone within `dying_s` seconds.

        It is gone if its process has ended, or if a health check shows it (`is_gone`).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timings.dying_s
        while loop.time() < deadline:
            if await wait_for_event(self._timings.poll_interval_s, self._ended) or is_gone(
                await self.client.health_error()
            ):
                return True
        return False

    async def _drain(self, policy: str | None) -> None:
        """Wait until `policy` has no running call. If `policy` is None, wait for the calls of all.

        The server holds calls that arrive after `pause`. They are aborted here. Otherwise they
        would run with the new weights, although they are labelled with the former version.

        Raises:
            Unreachable: the server does not end the calls.
        """
        for _ in range(_MAX_ABORTS):
            calls = self._calls_of(policy)
            if not calls:
                return
            self._drained.clear()
            if not await wait_for_event(_ABORT_INTERVAL_S, self._drained):
                await self.client.abort(None if policy is None else calls)
        raise Unreachable(f"{self.name} does not end its {len(self._calls_of(policy))} calls")

    # --- lifecycle ------------------------------------------------------------------------
    async def _connect(self) -> None:
        if self._launch is None:
            if not self.client.is_open:
                await self.client.open(self._address)
        elif self._process is None or self._process.ended.is_set():
            await self._stop()
            if self._log is not None:  # a restart
                self._count_death()
            self._process, address = self._launch()
            self._log = self._process.log
            self._watcher = asyncio.create_task(self._watch(self._process))
            self._checked = False
            await self.client.open(address)
        await self._wait()
        if self._checked and self._launch is None:
            self._checked = await self.client.label() == self._label
        if not self._checked:
            self._label = ""
            check_server_info(self.client.address, await self.client.info(), self._spec)
            self._checked = True

    async def _wait(self) -> None:
        """Wait until the server is healthy.

        Raises:
            EngineError: the server does not answer in time, ended during its start, or is not vLLM.
            Unreachable: the server was ready before, and has ended or is ending.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_s
        failed_polls = 0
        while (health_error := await self.client.health_error()) is not None:
            self._check_open()
            if self._process is not None and self._process.ended.is_set():
                failure = self._process.failure(self.name)
                if not self._checked:
                    raise failure
                raise Unreachable(str(failure))  # it was ready before, so restart it
            failed_polls = failed_polls + 1 if is_gone(health_error) else 0
            if failed_polls == self._timings.max_failed_polls and self._checked:
                if self._process is not None:
                    raise Unreachable(f"{self.name} is ending but does not end")
                self._checked = False  # another server may come up at the address
                await self.client.open(self._address)  # fails the running calls
            if (
                self._launch is None
                and isinstance(health_error, Refused)
                and health_error.status < HTTPStatus.INTERNAL_SERVER_ERROR
            ):
                raise EngineError(
                    f"{self.name}: there is no vLLM server at its address, or it requires a key "
                    f"({health_error}): give the address of the server itself in VLLM(addresses=…)"
                )
            if loop.time() > deadline:
                raise EngineError(
                    f"{self.name} at {self.client.address} was not ready within "
                    f"{self._start_s:g} s (VLLM(start_s=…)): {health_error}{self._log_hint}"
                )
            await wait_for_event(self._timings.poll_interval_s, self._ended)

    @property
    def _ended(self) -> asyncio.Event:
        """Event that is set when the started process has ended.

        It is never set if the user started the server.
        """
        return asyncio.Event() if self._process is None else self._process.ended

    async def _watch(self, process: Process) -> None:
        await process.ended.wait()
        self.ready = False
        if self._was_ready:  # otherwise `serve` raises
            self._on_loss(self, None)

    async def _check_health(self) -> None:
        """Check the health of a server with calls at intervals; call `on_loss` if it is gone."""
        while True:
            await asyncio.sleep(self._timings.health_interval_s)
            if self.ready and self._calls:
                health_error = await self.client.health_error()
                if self.ready and is_gone(health_error):
                    self._on_loss(self, health_error)

    async def _discard(self, error: Unreachable) -> None:
        """Close the connections to an unreachable server, and stop it if the engine started it.

        Raises:
            EngineError: the user started the server, and it has been lost `MAX_DEATHS` times.
        """
        await self.client.close()
        await self._stop()
        self._checked = False
        if self._launch is None:  # a started server's death is counted at its restart
            self._count_death(error)

    def _count_death(self, error: BaseException | None = None) -> None:
        self.deaths += 1
        if self.deaths >= MAX_DEATHS:
            why = "" if error is None else f": {error}"
            raise EngineError(
                f"{self.name} was lost {self.deaths} times and finished no call in "
                f"between{why}{self._log_hint}"
            ) from error

    @property
    def _log_hint(self) -> str:
        return "" if self._log is None else f"; {self._log} has its output"

    async def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if self._process is not None:
            process, self._process = self._process, None
            self._former_cpu_s += process.cpu_s()
            await process.stop()
