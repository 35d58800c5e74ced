"""One server, kept with the weights of now: started, checked, updated, and started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.engines.vllm.checks import check_facts
from lightspan.engines.vllm.client import Client, Part, Refused, Unreachable
from lightspan.engines.vllm.process import Process
from lightspan.engines.vllm.weights import Blueprint, Weights
from lightspan.errors import EngineClosedError, EngineError
from lightspan.schema.tokens import Sampling
from lightspan.stores.event_loop import within

STARTS: Final = 3
"""How often one server may die without a call that it finished in between."""
LOOK_S: Final = 0.5
"""Between looks at a server that is coming up."""
_CUT_S: Final = 0.2
_CUTS: Final = 300
_DYING_S: Final = 10.0
"""A server whose engine has died answers with errors for so long, at most."""

Launch = Callable[[], tuple[Process, str]]
"""Starts a process; that, and where it will listen."""


class Server:
    """A server of one policy.

    Args:
        name: for a person.
        blueprint: what it has to serve.
        weights: says which weights are those of now.
        start_s: how long it may take until it answers.
        launch: starts it; None for one that somebody else keeps.
        address: of that one.
        died: is told when a process of ours ends by itself.
    """

    def __init__(
        self,
        name: str,
        blueprint: Blueprint,
        weights: Callable[[], Weights],
        *,
        start_s: float,
        launch: Launch | None = None,
        address: str = "",
        died: Callable[[Server], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.client = Client(address)
        self._address = address
        self.ready = False
        """Whether calls may go there: it has the weights of `version`."""
        self.version = 0
        self.load = 0
        """Calls on it."""
        self.deaths = 0
        """Since it last finished a call."""
        self._blueprint = blueprint
        self._weights = weights
        self._start_s = start_s
        self._launch = launch
        self._died = died
        self._process: Process | None = None
        self._log: Path | None = None
        """Of the process of ours, once there was one."""
        self._watching: asyncio.Task[None] | None = None
        self._label = ""
        self._checked = False
        self._closed = False
        self._lock = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- calls ----------------------------------------------------------------------------
    async def complete(
        self, prompt: Sequence[int], sampling: Sampling, **options: Any
    ) -> AsyncIterator[Part]:
        """`Client.complete`, with the version that answers: weights change only where no call is.
        Nothing comes if they are changing just now.

        Raises (while iterating):
            Unreachable: also if somebody has started it again since, so that it has other weights.
                One of ours is watched.
            Refused
        """
        if not self.ready:
            return
        with self._call() as version:
            if self._launch is None and await self.client.label() != self._label:
                raise Unreachable(f"{self.name} was started again, or somebody changed its weights")
            async for part in self.client.complete(prompt, sampling, **options):
                yield part._replace(version=version)

    @contextlib.contextmanager
    def _call(self) -> Iterator[int]:
        self.load += 1
        self._idle.clear()
        try:
            yield self.version
        finally:
            self.load -= 1
            if not self.load:
                self._idle.set()

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
                    weights = self._weights()
                    if self._label != weights.label:
                        await self._take_on(weights)
                except Unreachable as error:
                    await self._put_down(error)
                else:
                    self.version, self.ready = weights.version, True

    async def close(self) -> None:
        """End what is under way, and the process if it is ours. Idempotent."""
        self.ready, self._closed = False, True
        await self.client.close()
        await self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError

    async def _take_on(self, weights: Weights) -> None:
        self._label = ""
        try:
            await self.client.pause()
            await self._drain()
            await self.client.load(weights)
            await self.client.resume()
        except Refused as error:
            if self._process is not None and await within(_DYING_S, self._process.ended):
                raise Unreachable(str(error)) from error
            raise EngineError(
                f"{self.name} did not take on version {weights.version} of its weights: {error}"
            ) from error
        self._label = weights.label

    async def _drain(self) -> None:
        """Until no call is on it. One that came too late for the pause waits in the server, and is
        cut as well: it would go on with weights that its version does not name."""
        for _ in range(_CUTS):
            if await within(_CUT_S, self._idle):
                return
            await self.client.cut()
        raise Unreachable(f"{self.name} does not end the {self.load} calls on it")

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
            check_facts(self.client.address, await self.client.facts(), self._blueprint)
            self._checked = True

    async def _wait(self) -> None:
        """Until it answers.

        Raises:
            EngineError: it does not, or ended.
        """
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._start_s
        ended = asyncio.Event() if self._process is None else self._process.ended
        while not await self.client.is_healthy():
            self._check_open()
            if self._process is not None and ended.is_set():
                failure = self._process.failure(self.name)
                if not self._checked:
                    raise failure
                raise Unreachable(str(failure))  # it was there before: once more
            if loop.time() > latest:
                raise EngineError(
                    f"{self.name} at {self.client.address} did not answer within "
                    f"{self._start_s:g} s (VLLM(start_s=…)){self._said}"
                )
            await within(LOOK_S, ended)

    async def _watch(self, process: Process) -> None:
        await process.ended.wait()
        self.ready = False
        self._died(self)

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
            await self._process.stop()
            self._process = None
