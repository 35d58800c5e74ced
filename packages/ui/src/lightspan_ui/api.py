"""Answer the requests of the API (`server` has the paths)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan.errors import ConfigError, LightspanError, NotFoundError
from lightspan.production.feedback import feedback
from lightspan.schema.images import Image
from lightspan.stores import public_url
from lightspan.stores.protocol import Store
from lightspan_tools.alerts import STEP_FAILS
from lightspan_tools.overview import newest_failure
from lightspan_tools.rollout_view import RolloutView
from lightspan_tools.tokenizer_files import find_tokenizer
from lightspan_ui import views
from lightspan_ui.catalogue import Catalogue, task_text, task_title
from lightspan_ui.comparison import comparison
from lightspan_ui.coverage import Coverage
from lightspan_ui.entries import Entry
from lightspan_ui.export import export_text
from lightspan_ui.facts import beginning, completed
from lightspan_ui.filters import GroupSort, Sort, read_filters, read_page
from lightspan_ui.groups import best_first, group_of
from lightspan_ui.links import links_of
from lightspan_ui.rollouts import (
    call_detail,
    group_rollout,
    rollout_detail,
    span_detail,
    views_of,
)
from lightspan_ui.run_page import RunScoring, detail_of
from lightspan_ui.runs import Failure, Run, error_text, metrics_view, secretless
from lightspan_ui.searches import prompts_of
from lightspan_ui.sources import Place, Sources, open_to_read
from lightspan_ui.tokens import Tokenizer

MAX_GROUP: Final = 64
"""Maximum number of rollouts of a group that are shown side by side; the best ones."""
MAX_COMMENT: Final = 2_000
MAX_COMPARED: Final = 12
UNUSED_S: Final = 900.0
"""Seconds after which a store that no page needed is closed, to free its memory."""
STORE_S: Final = 1.5
"""Seconds for which the list of places waits for a store."""


class Api:
    """The answers of the API.

    Args:
        sources: what is shown.
        write: whether rollouts may be rated.
        version: version of lightspan.
    """

    def __init__(self, sources: Sources, *, write: bool, version: str) -> None:
        self._sources = sources
        self._write = write
        self._version = version
        self._runs: dict[str, _OpenRun] = {}
        self._summarising = asyncio.Lock()

    def close(self) -> None:
        """End what goes on in the background."""
        for run in self._runs.values():
            run.coverage.close()

    # --- runs -----------------------------------------------------------------------------------
    async def places(self, request: web.Request) -> views.Places:
        self._sources.scan()
        places = list(self._sources.runs.values())
        runs = [_run(place) for place in places]
        async with self._summarising:  # in a thread: many long runs take seconds at first
            summaries = await asyncio.to_thread(lambda: [run.summary() for run in runs])
        summaries = await asyncio.gather(
            *(self._with_failure(*each) for each in zip(places, summaries, strict=True))
        )
        summaries.sort(key=lambda summary: -(summary.changed or 0.0))
        stores = [await _store_summary(place) for place in self._sources.stores.values()]
        return views.Places(runs=summaries, stores=stores, write=self._write, version=self._version)

    async def run(self, request: web.Request) -> views.RunDetail:
        place, run = self._run_of(request)
        summary = await self._summary(place)
        parts = self._open_run(place, run)
        catalogue, error = None, ""
        try:
            if not summary.error:
                catalogue = await self._catalogue(place)
                await parts.coverage.refresh(catalogue)
        except (LightspanError, OSError) as problem:
            error = error_text(problem)
        return detail_of(summary, run.folder, catalogue, parts.coverage, error)

    async def metrics(self, request: web.Request) -> views.Metrics:
        _, run = self._run_of(request)
        query = request.query
        names = [name for name in query.get("names", "").split(",") if name]
        size = _whole(query.get("points", "500"), "points", 1, views.MAX_POINTS)
        after = _whole(query.get("after", "0"), "after", 0, 2**31)
        lines = run.folder.metrics()
        return metrics_view(lines, query.get("kind", "train"), names, after, size)

    async def prompts(self, request: web.Request) -> views.Prompts:
        place, run = self._run_of(request)
        summary = await self._summary(place)
        tasks: dict[str, str] = {}
        catalogue: Catalogue | None = None
        try:
            catalogue = await self._catalogue(place)
        except (LightspanError, OSError):
            catalogue = None
        answer = await asyncio.to_thread(prompts_of, run.folder, summary.state)
        if catalogue is not None:
            tasks = await _tasks_of(catalogue, answer)
        searches = [
            msgspec.structs.replace(
                search, tasks={name: tasks[name] for name in search.tasks if name in tasks}
            )
            for search in answer.searches
        ]
        return msgspec.structs.replace(answer, searches=searches)

    async def compare(self, request: web.Request) -> views.Comparison:
        names = list(dict.fromkeys(request.query.getall("run", [])))
        if not 1 <= len(names) <= MAX_COMPARED:
            raise ConfigError(f"name 1 to {MAX_COMPARED} runs to compare: ?run=a&run=b")
        places = [self._sources.find("runs", name) for name in names]
        summaries = [await self._summary(place) for place in places]
        return comparison([_run(place) for place in places], summaries)

    # --- rollouts -------------------------------------------------------------------------------
    async def rollouts(self, request: web.Request) -> views.RolloutPage:
        filters, options = read_filters(request.query), read_page(request.query, Sort)
        catalogue = await self._catalogue(self._place_of(request))
        return await catalogue.page(filters, options)

    async def facets(self, request: web.Request) -> views.Facets:
        filters = read_filters(request.query)
        catalogue = await self._catalogue(self._place_of(request))
        return await catalogue.facets(filters)

    async def groups(self, request: web.Request) -> views.GroupPage:
        filters, options = read_filters(request.query), read_page(request.query, GroupSort)
        catalogue = await self._catalogue(self._place_of(request))
        return await catalogue.groups(filters, options)

    async def group(self, request: web.Request) -> views.GroupDetail:
        place, name = self._place_of(request), request.match_info["group"]
        catalogue = await self._catalogue(place)
        step = request.query.get("step")
        wanted = None if not step else _whole(step, "step", 0, 2**31)
        members = group_members(catalogue, name, wanted)
        if not members:
            raise NotFoundError(f"there is no group {name!r}")
        shown = sorted(members, key=best_first)[:MAX_GROUP]
        rows = await catalogue.rows(shown)
        by_id = await self._views(place, catalogue, shown)
        rollouts = [
            group_rollout(by_id[row.rollout_id], row)
            if row.rollout_id in by_id
            else views.GroupRollout(row=row, answers=[])
            for row in rows
        ]
        first = shown[0]
        group = group_of(name, str(first.summary.mode), first.step, members)
        agents = dict.fromkeys(answer.agent for each in rollouts for answer in each.answers)
        tasks = await catalogue.tasks(shown[:1])
        return views.GroupDetail(
            group=name,
            task=task_text(tasks.get(first.summary.rollout_id))[: views.MAX_TEXT],
            mode=group.mode,
            step=group.step,
            mean=group.mean,
            spread=group.spread,
            agents=list(agents),
            rollouts=rollouts,
        )

    async def rollout(self, request: web.Request) -> views.RolloutDetail:
        place = self._place_of(request)
        catalogue = await self._catalogue(place)
        entry = catalogue.find(request.match_info["rollout"])
        [row] = await catalogue.rows([entry])
        store, rollout_id = catalogue.store, entry.summary.rollout_id
        attempts = await store.attempts([rollout_id])
        spans = await _spans_of(store, entry)
        members = group_members(catalogue, entry.group, entry.step, str(entry.summary.mode))
        scored = sorted((e for e in members if e.reward is not None), key=best_first)
        filters, options = read_filters(request.query), read_page(request.query, Sort)
        newer, older = await catalogue.neighbours(entry, filters, options.sort)
        is_ranked = entry in scored and len(members) > 1
        others: dict[str, Any] = {
            "rank": 1 + sum(e.reward > entry.reward for e in scored) if is_ranked else None,  # type: ignore[operator]
            "group_size": len(members),
            "newer": newer,
            "older": older,
        }
        view = (await self._views(place, catalogue, [entry])).get(rollout_id)
        if view is None:  # no runner started it yet
            tasks = await catalogue.tasks([entry])
            task = task_text(tasks.get(rollout_id))[: views.MAX_TEXT]
            return views.RolloutDetail(row=row, task=task, spans=[], calls=[], **others)
        detail = rollout_detail(view, row, attempts, spans, **others)
        return msgspec.structs.replace(detail, links=links_of(detail.trace_id))

    async def span(self, request: web.Request) -> views.SpanDetail:
        catalogue = await self._catalogue(self._place_of(request))
        entry = catalogue.find(request.match_info["rollout"])
        return span_detail(await _spans_of(catalogue.store, entry), request.match_info["span"])

    async def call(self, request: web.Request) -> views.CallDetail:
        place = self._place_of(request)
        catalogue = await self._catalogue(place)
        entry = catalogue.find(request.match_info["rollout"])
        [row] = await catalogue.rows([entry])
        view = (await self._views(place, catalogue, [entry])).get(entry.summary.rollout_id)
        if view is None:
            raise NotFoundError(f"no runner has started the rollout {entry.summary.rollout_id}")
        tokenizer = None
        if place.run is not None:
            tokenizer = await asyncio.to_thread(self._open_run(place, place.run).tokenizer)
        group = group_members(catalogue, entry.group, entry.step, str(entry.summary.mode))
        shown = sorted(group, key=best_first)
        return call_detail(view, row, request.match_info["call"], tokenizer, shown)

    async def image(self, request: web.Request) -> Image:
        digest = request.match_info["digest"]
        catalogue = await self._catalogue(self._place_of(request))
        image = (await catalogue.store.images([digest])).get(digest)
        if image is None:
            raise NotFoundError(f"the store does not have the bytes of the image {digest:.100}")
        return image

    async def export(self, request: web.Request) -> views.Export:
        filters = read_filters(request.query)
        place = self._place_of(request)
        catalogue = await self._catalogue(place)
        return await export_text(catalogue, filters, place)

    # --- ratings --------------------------------------------------------------------------------
    async def feedback(self, request: web.Request) -> views.Rated:
        if not self._write:
            raise PermissionError("this page is read-only: start it with --write to rate")
        place = self._place_of(request)
        try:
            wish = msgspec.json.decode(await request.read(), type=views.FeedbackRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"no rating: {error}") from error
        if len(wish.comment) > MAX_COMMENT:
            raise ConfigError(f"a comment has at most {MAX_COMMENT} characters")
        catalogue = await self._catalogue(place)
        comment = wish.comment.strip() or None
        rated = await asyncio.to_thread(
            feedback, wish.id, wish.reward, store=place.url, comment=comment
        )
        await catalogue.read_again(rated.attempt_id)
        return views.Rated(
            attempt_id=rated.attempt_id, call_id=rated.call_id or "", reward=wish.reward
        )

    # --- parts ----------------------------------------------------------------------------------
    def _place_of(self, request: web.Request) -> Place:
        return self._sources.find(request.match_info["kind"], request.match_info["name"])

    def _run_of(self, request: web.Request) -> tuple[Place, Run]:
        place = self._sources.find("runs", request.match_info["name"])
        return place, _run(place)

    async def _summary(self, place: Place) -> views.RunSummary:
        async with self._summarising:
            summary = await asyncio.to_thread(_run(place).summary)
        return await self._with_failure(place, summary)

    async def _with_failure(self, place: Place, summary: views.RunSummary) -> views.RunSummary:
        """Return the summary with the message of a failed rollout, if the latest step failed."""
        run = _run(place)
        step = next((each.step for each in summary.alerts if each.name == STEP_FAILS), None)
        if step is None or run.failure.step == step:
            return summary
        run.failure = Failure(step, await _newest_failure(place))
        return await asyncio.to_thread(run.summary)

    async def _catalogue(self, place: Place) -> Catalogue:
        place.used = time.monotonic()
        await self._sources.close_unused(place.used - UNUSED_S)
        if place.run is None:
            return await place.catalogue()
        return await place.catalogue(self._open_run(place, place.run).scoring.read())

    def _open_run(self, place: Place, run: Run) -> _OpenRun:
        opened = self._runs.get(place.name)
        if opened is None or opened.run is not run:
            opened = self._runs[place.name] = _OpenRun(run)
        return opened

    async def _views(
        self, place: Place, catalogue: Catalogue, entries: Sequence[Entry]
    ) -> dict[str, RolloutView]:
        """Return the views of rollouts by id, without those that no runner started."""
        folder = None if place.run is None else place.run.folder
        shown = await views_of(catalogue, folder, entries)
        return {view.state.rollout.rollout_id: view for view in shown}


class _OpenRun:
    """What is kept of a run whose page was opened."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scoring = RunScoring(run.folder)
        self.coverage = Coverage(run.folder)
        self._tokenizer: tuple[Path, Tokenizer | None] | None = None

    def tokenizer(self) -> Tokenizer | None:
        """Return the run's tokenizer; None if it has none, or if it cannot be read."""
        path = find_tokenizer(self.run.folder.path, self.run.folder.read_config())
        if path is None:
            return None
        if self._tokenizer is None or self._tokenizer[0] != path:
            try:
                tokenizer = Tokenizer(path)
            except Exception:  # not installed, or a file that the package cannot read
                tokenizer = None
            self._tokenizer = path, tokenizer
        return self._tokenizer[1]


def group_members(
    catalogue: Catalogue, name: str, step: int | None, mode: str | None = None
) -> list[Entry]:
    """Return the rollouts of a group.

    Args:
        catalogue: the rollouts.
        name: id of the group, or of the task for rollouts without a group.
        step: their step; None for the latest step that has some.
        mode: their mode; None for that of the newest.
    """
    entries = [entry for entry in catalogue.newest if entry.group == name]
    if step is None and entries:
        step = entries[0].step
    entries = [entry for entry in entries if entry.step == step]
    if mode is None and entries:
        mode = str(entries[0].summary.mode)
    return [entry for entry in entries if entry.summary.mode == mode]


def _run(place: Place) -> Run:
    assert place.run is not None
    return place.run


async def _spans_of(store: Store, entry: Entry) -> Sequence[Any]:
    attempt_id = entry.summary.attempt_id
    if attempt_id is None:
        return []
    spans = (await store.spans([attempt_id])).get(attempt_id, [])
    return completed(entry.summary, spans)[1]


async def _tasks_of(catalogue: Catalogue, prompts: views.Prompts) -> dict[str, str]:
    """Return the beginnings of the tasks that searches compare candidates by."""
    wanted = {name for search in prompts.searches for name in search.tasks}
    by_task = {e.summary.task_id: e for e in catalogue.newest if e.summary.task_id in wanted}
    tasks = await catalogue.tasks(list(by_task.values()))
    titles = {name: task_title(tasks.get(e.summary.rollout_id)) for name, e in by_task.items()}
    return {name: beginning(title) for name, title in titles.items()}


async def _newest_failure(place: Place) -> str:
    """Return the message of a run's newest failed rollout.

    Empty if there is none, if the store cannot be read, or if its server does not answer.
    """
    try:
        async with asyncio.timeout(STORE_S), open_to_read(place.url) as store:
            return await newest_failure(store, place.run_id)
    except (LightspanError, OSError, TimeoutError):
        return ""


async def _store_summary(place: Place) -> views.StoreSummary:
    """Return the summary of a store, whose server may not answer for a while."""
    name = place.name.partition("/")[2]
    url = secretless(public_url(place.url))
    task = asyncio.create_task(place.count())
    done, _ = await asyncio.wait([task], timeout=STORE_S)
    if not done:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return views.StoreSummary(name=name, url=url, error=f"no answer for {STORE_S:g} s so far")
    try:
        return views.StoreSummary(name=name, url=url, rollouts=task.result())
    except (LightspanError, OSError) as error:
        return views.StoreSummary(name=name, url=url, error=error_text(error))


def _whole(text: str, name: str, low: int, high: int) -> int:
    """Return a parameter as a whole number.

    Raises:
        ConfigError: it is none, or beyond the limits.
    """
    if not text.isdecimal() or len(text) > 10 or not low <= int(text) <= high:
        raise ConfigError(f"{name}={text[:40]}: give a whole number from {low} to {high}")
    return int(text)
