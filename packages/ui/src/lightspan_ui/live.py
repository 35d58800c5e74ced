"""Tell open pages what has changed, by server-sent events.

One task looks at the times of files once a second, for all pages. It runs only while a page is
open.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan.errors import LightspanError
from lightspan_ui.guard import HEADERS
from lightspan_ui.run_files import Stamp, stamp_of
from lightspan_ui.runs import Run
from lightspan_ui.sources import Place, Sources

INTERVAL_S: Final = 1.0
ALIVE_S: Final = 15.0
"""Seconds after which a line is sent although nothing changed, so that a dead connection ends."""
MAX_CLIENTS: Final = 64
RESTING_LOOKS: Final = 5
"""Number of looks of which one looks at complete runs that no page shows."""
_FILES: Final = ("metrics.jsonl", "result.json", "config.json", "prompts.json", "proposals.jsonl")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a place."""

    place: str
    """`runs/NAME`, `stores/NAME`, or empty if a run began or is gone."""
    lines: int = 0
    """Number of lines of the run's metrics."""
    cursor: int = 0
    """Change cursor of the store; 0 while the store is not open."""


class Changes:
    """The changes of all places, sent to all open pages.

    Args:
        sources: what is shown.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._clients: set[asyncio.Queue[Change]] = set()
        self._stamps: dict[str, tuple[Stamp, ...]] = {}
        self._cursors: dict[str, int] = {}
        self._progress: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._streams: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._looks = 0

    async def close(self) -> None:
        """End all streams. Idempotent."""
        self._is_closed = True
        tasks = [*self._streams, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send changes until the page is closed."""
        if len(self._clients) >= MAX_CLIENTS or self._is_closed:
            raise web.HTTPServiceUnavailable(reason="too many pages are open")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[Change] = asyncio.Queue(maxsize=1_000)
        self._clients.add(queue)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            await response.write(b": open\n\n")
            with suppress(ConnectionError):
                while True:
                    await response.write(await _next_event(queue))
        finally:
            self._streams.discard(task)
            self._clients.discard(queue)
        return response

    async def _watch(self) -> None:
        """Look for changes once a second, while a page is open."""
        is_first = not self._stamps
        while self._clients:
            for change in await self._look(is_first=is_first):
                self._send(change)
            is_first = False
            await asyncio.sleep(INTERVAL_S)
        self._stamps.clear()  # a page that opens later reads everything
        self._cursors.clear()

    def _send(self, change: Change) -> None:
        for queue in self._clients:
            with suppress(asyncio.QueueFull):  # a page that does not read loses changes
                queue.put_nowait(change)

    async def _look(self, *, is_first: bool) -> list[Change]:
        names = {place.name for place in self._sources.places()}
        self._sources.scan()
        places = {place.name: place for place in self._sources.places()}
        changes = [] if is_first or places.keys() == names else [Change(place="")]
        self._looks += 1
        for name, place in places.items():
            if self._looks % RESTING_LOOKS and name in self._stamps and is_resting(place):
                continue
            stamps = tuple(stamp_of(path) for path in files_of(place))
            is_changed = self._stamps.get(name) != stamps
            self._stamps[name] = stamps
            if place.is_open and (is_changed or not stamps):
                is_changed = await self._is_moved(place) or (is_changed and bool(stamps))
            progress = self._progress.get(name, 0)
            self._progress[name] = place.progress
            if (is_changed or progress < place.progress) and not is_first:
                lines = 0 if place.run is None else lines_of(place.run)
                cursor = self._cursors.get(name, 0)
                changes.append(Change(place=name, lines=lines, cursor=cursor))
        return changes

    async def _is_moved(self, place: Place) -> bool:
        """Return whether the store of a place has changes."""
        before = self._cursors.get(place.name)
        try:
            cursor = (await place.catalogue()).cursor
        except (LightspanError, OSError):
            cursor = -1
        self._cursors[place.name] = cursor
        return before is not None and before != cursor


def is_resting(place: Place) -> bool:
    """Return whether a place hardly changes: a complete run whose store is not open."""
    run = place.run
    return run is not None and not place.is_open and run.is_complete


def lines_of(run: Run) -> int:
    """Return the number of lines of a run's metrics that can be read."""
    with suppress(LightspanError):
        run.folder.metrics()
    return len(run.folder.tail.lines)


async def _next_event(queue: asyncio.Queue[Change]) -> bytes:
    try:
        change = await asyncio.wait_for(queue.get(), ALIVE_S)
    except TimeoutError:
        return b": alive\n\n"
    return b"event: change\ndata: " + msgspec.json.encode(change) + b"\n\n"


def files_of(place: Place) -> list[Path]:
    """Return the files that change with a place; empty for a store that is no file."""
    try:
        store = place.file
    except LightspanError:  # the settings of the run are damaged
        store = None
    files = [] if store is None else [store, store.with_name(store.name + "-wal")]
    run = place.run
    return files if run is None else [*files, *(run.folder.path / name for name in _FILES)]
