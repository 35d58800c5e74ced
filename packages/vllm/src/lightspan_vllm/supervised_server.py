"""One server, kept with the weights of now: started, checked, updated, and started again."""

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
from lightspan_vllm.weights import LoRAFiles, ServerSpec, TargetWeights, Weights

STARTS: Final = 3
"""How often one server may die without a call that it finished in between."""
POLL_INTERVAL_S: Final = 0.5
"""Between looks at a server that is coming up, or seems to be gone."""
PULSE_S: Final = 5.0
"""Between looks at one that has calls on it. When vLLM's engine dies, its front listens no more,
and then waits for its calls, one of which may never be answered."""
_LOOKS: Final = 10
"""So many looks in a row have to say that it is gone."""
_CUT_S: Final = 0.2
_CUTS: Final = 300
_DYING_S: Final = 10.0
"""A server whose engine has died answers with errors for so long, at most."""

Launch = Callable[[], tuple[Process, str]]
"""Starts a process; that, and where it will listen."""


class Server:
    """A server of one policy, or of several that are LoRA beside the same weights.

    Args:
        name: for a person.
        blueprint: what it has to serve.
        wanted: says which weights are those of now.
        start_s: how long it may take until it answers.
        launch: starts it; None for one that somebody else keeps.
        address: of that one.
        died: is told, with why if that is known, when a process of ours ends by itself, and when
            one seems to be gone whose calls are not told.
        link: how weights are sent; None where it reads files of ours.
    """

    def __init__(
        self,
        name: str,
        blueprint: ServerSpec,
        wanted: Callable[[], TargetWeights],
        *,
        start_s: float,
        launch: Launch | None = None,
        address: str = "",
        died: Callable[[Server, Exception | None], None] = lambda *_: None,
        link: Link | None = None,
    ) -> None:
        self.name = name
        self.client = Client(address)
        self._address = address
        self.ready = False
        """Whether calls may go there: it has the weights of now."""
        self.changes = 0
        """How often its weights were replaced: a call before and after which this is the same was
        not cut."""
        self.deaths = 0
        """Since it last finished a call."""
        self._blueprint = blueprint
        self._wanted = wanted
        self._start_s = start_s
        self._launch = launch
        self._died = died
        self._link = link
        self._process: Process | None = None
        self._spent_cpu_s = 0.0
        """By its former processes."""
        self._log: Path | None = None
        """Of the process of ours, once there was one."""
        self._watching: asyncio.Task[None] | None = None
        self._pulse: asyncio.Task[None] | None = None
        self._label = ""
        self._version = 0
        self._lora: dict[str, LoRAFiles] = {}
        """Policy → what it has of it, beside its own weights."""
        self._checked = False
        self._served = False
        """Whether it was ready once: what was never there cannot be lost."""
        self._closed = False
        self._lock = asyncio.Lock()
        self._calls: dict[str, str] = {}
        """Id → policy, of the calls on it."""
        self._left = asyncio.Event()
        """Set when the last call of a policy has left."""

    # --- calls ----------------------------------------------------------------------------
    @property
    def cpu_s(self) -> float:
        """CPU-seconds of its processes; 0 for one that somebody else keeps."""
        return self._spent_cpu_s + (0.0 if self._process is None else self._process.cpu_s())

    @property
    def load(self) -> int:
        """Calls on it."""
        return len(self._calls)

    async def complete(
        self, policy: str, prompt: Sequence[int], sampling: Sampling, **options: Any
    ) -> AsyncIterator[Chunk]:
        """`Client.complete`, with the version that answers: a policy's weights change only where no
        call of it is. Nothing comes if they are changing just now.

        Raises (while iterating):
            Unreachable: also if somebody has started it again since, so that it has other weights.
                One of ours is watched.
            Refused
        """
        if not self.ready:
            return
        lora = self._lora.get(policy)
        version = self._version if lora is None else lora.version
        with self._call(policy) as request_id:
            if self._launch is None and await self.client.label() != self._label:
                raise Unreachable(f"{self.name} was started again, or somebody changed its weights")
            name = "" if lora is None else lora.name
            parts = self.client.complete(
                prompt, sampling, request_id=request_id, lora=name, **options
            )
            async for part in parts:
                yield part._replace(version=version)

    @contextlib.contextmanager
    def _call(self, policy: str) -> Iterator[str]:
        request_id = secrets.token_hex(16)
        self._calls[request_id] = policy
        try:
            yield request_id
        finally:
            del self._calls[request_id]
            if not self._of(policy):
                self._left.set()

    def _of(self, policy: str | None) -> list[str]:
        """The ids of a policy's calls on it, or of all."""
        return [key for key, its in self._calls.items() if policy in (None, its)]

    # --- weights --------------------------------------------------------------------------
    async def serve(self) -> None:
        """Have it serve the weights of now, whatever it takes.

        Raises:
            ConfigError: it is not what it has to be.
            EngineError: it does not come up, dies again and again, or refuses the weights.
        """
        async with self._lock:
            self.ready = False
            while not self.ready:
                self._check_open()
                try:
                    await self._come_up()
                    wanted = self._wanted()
                    if self._label != wanted.weights.label:
                        await self._take_on(wanted.weights)
                    await self._take_on_lora(wanted.lora)
                except Unreachable as error:
                    await self._put_down(error)
                else:  # one that has just ended is started again
                    self.ready = self._process is None or not self._process.ended.is_set()
                    self._served = self._served or self.ready
            if self._pulse is None and not self._closed:
                self._pulse = asyncio.create_task(self._take_pulse())

    async def close(self) -> None:
        """End what is under way, and the process if it is ours. Idempotent."""
        self.ready, self._closed = False, True
        if self._pulse is not None:
            self._pulse.cancel()
        await self.client.close()
        await self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError

    async def _take_on(self, weights: Weights) -> None:
        self._label, self._lora = "", {}
        async with self._refusable(weights.version):
            if self._blueprint.lora_rank:  # it has the weights, and maybe what others left
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

    async def _take_on_lora(self, wanted: Mapping[str, LoRAFiles]) -> None:
        """Replace those that changed, and cut the calls of these policies alone."""
        for policy, files in wanted.items():
            former = self._lora.get(policy)
            if former == files:
                continue
            async with self._refusable(files.version):
                await self.client.load_lora(files)
                if calls := self._of(policy):
                    await self.client.cut(calls)
                await self._drain(policy)
                self._lora[policy] = files
                self.changes += 1
                if former is not None:
                    await self.client.unload_lora(former.name)

    @contextlib.asynccontextmanager
    async def _refusable(self, version: int) -> AsyncIterator[None]:
        """While it is told to take on this version.

        Raises:
            EngineError: it says no.
            Unreachable: it says no because it is dying.
        """
        try:
            yield
        except Refused as error:
            if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and await self._is_dying():
                raise Unreachable(str(error)) from error
            raise EngineError(
                f"{self.name} did not take on version {version} of its weights: {error}"
            ) from error

    async def _is_dying(self) -> bool:
        """Whether it ends by itself, or listens no more, before long."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + _DYING_S
        while loop.time() < latest:
            if await wait_for_event(POLL_INTERVAL_S, self._ended) or is_gone(
                await self.client.health_error()
            ):
                return True
        return False

    async def _drain(self, policy: str | None) -> None:
        """Until no call of a policy, or of any, is on it. One that came too late for the pause
        waits in the server, and is cut as well: it would go on with weights that its version does
        not name."""
        for _ in range(_CUTS):
            calls = self._of(policy)
            if not calls:
                return
            self._left.clear()
            if not await wait_for_event(_CUT_S, self._left):
                await self.client.cut(None if policy is None else calls)
        raise Unreachable(f"{self.name} does not end the {len(self._of(policy))} calls on it")

    # --- life -----------------------------------------------------------------------------
    async def _come_up(self) -> None:
        if self._launch is None:
            if not self.client.is_open:
                await self.client.open(self._address)
        elif self._process is None or self._process.ended.is_set():
            await self._stop()
            if self._log is not None:  # this is not the first time
                self._count_death()
            self._process, address = self._launch()
            self._log = self._process.log
            self._watching = asyncio.create_task(self._watch(self._process))
            self._checked = False
            await self.client.open(address)
        await self._wait()
        if self._checked and self._launch is None:
            self._checked = await self.client.label() == self._label
        if not self._checked:
            self._label = ""
            check_server_info(self.client.address, await self.client.facts(), self._blueprint)
            self._checked = True

    async def _wait(self) -> None:
        """Until it answers.

        Raises:
            EngineError: it does not, or ended, or is something else.
            Unreachable: it was there, and is ending.
        """
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._start_s
        gone = 0
        while (health_error := await self.client.health_error()) is not None:
            self._check_open()
            if self._process is not None and self._process.ended.is_set():
                failure = self._process.failure(self.name)
                if not self._checked:
                    raise failure
                raise Unreachable(str(failure))  # it was there before: once more
            gone = gone + 1 if is_gone(health_error) else 0
            if gone == _LOOKS and self._checked:
                if self._process is not None:
                    raise Unreachable(f"{self.name} is ending, and does not come to an end")
                self._checked = False  # whoever keeps it brings it back, or another
                await self.client.open(self._address)  # its calls are told
            if (
                self._launch is None
                and isinstance(health_error, Refused)
                and health_error.status < HTTPStatus.INTERNAL_SERVER_ERROR
            ):
                raise EngineError(
                    f"{self.name}: what answers there is no vLLM server, or asks for a key "
                    f"({health_error}): give the address of the server itself in VLLM(addresses=…)"
                )
            if loop.time() > latest:
                raise EngineError(
                    f"{self.name} at {self.client.address} was not ready within "
                    f"{self._start_s:g} s (VLLM(start_s=…)): {health_error}{self._said}"
                )
            await wait_for_event(POLL_INTERVAL_S, self._ended)

    @property
    def _ended(self) -> asyncio.Event:
        """Set when a process of ours has ended; never where somebody else keeps it."""
        return asyncio.Event() if self._process is None else self._process.ended

    async def _watch(self, process: Process) -> None:
        await process.ended.wait()
        self.ready = False
        if self._served:  # else who starts it is told
            self._died(self, None)

    async def _take_pulse(self) -> None:
        """While it has calls, look whether it can still answer them."""
        while True:
            await asyncio.sleep(PULSE_S)
            if self.ready and self._calls:
                health_error = await self.client.health_error()
                if self.ready and is_gone(health_error):
                    self._died(self, health_error)

    async def _put_down(self, error: Unreachable) -> None:
        """It was there and is as good as gone.

        Raises:
            EngineError: once too often.
        """
        await self.client.close()
        await self._stop()
        self._checked = False
        if self._launch is None:  # else it counts when it is started again
            self._count_death(error)

    def _count_death(self, error: BaseException | None = None) -> None:
        self.deaths += 1
        if self.deaths >= STARTS:
            why = "" if error is None else f": {error}"
            raise EngineError(
                f"{self.name} was lost {self.deaths} times and finished no call in "
                f"between{why}{self._said}"
            ) from error

    @property
    def _said(self) -> str:
        return "" if self._log is None else f"; {self._log} has what it said"

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._process is not None:
            process, self._process = self._process, None
            self._spent_cpu_s += process.cpu_s()
            await process.stop()
