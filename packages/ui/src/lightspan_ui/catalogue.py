"""Keep the summaries of a store's rollouts in memory, to filter, sort and count them.

The summaries are read once, and then only what changed. What only spans tell (agents, users, tags,
tokens, cost, texts) is read for the rows of a page at once. If a filter needs it, it is read for
all rollouts in the background, in portions, the newest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import msgspec

from lightspan.errors import NotFoundError
from lightspan.schema.records import Json, RolloutState, RolloutSummary
from lightspan.stores.protocol import Store
from lightspan_ui import views
from lightspan_ui.entries import Entry, Scoring, row_of
from lightspan_ui.facts import Texts, facts_of, needs_records, texts_of
from lightspan_ui.filters import (
    SORT_KEYS,
    SPAN_SORTS,
    Filters,
    PageOptions,
    Predicate,
    predicates,
)
from lightspan_ui.groups import group_rows
from lightspan_ui.runs import mean_of
from lightspan_ui.views import MAX_ROWS

PORTION: Final = 128
"""Number of attempts whose spans are read at once in the background."""
READ_AHEAD: Final = 5_000
"""Number of the newest rollouts whose spans are read to list agents, users and tags. All are read
once a filter needs them."""
BINS: Final = 20
"""Number of bins of the histogram of rewards."""
MAX_COUNTS: Final = 200
"""Maximum values of a filter that are counted; the most frequent ones."""
SEARCH_PORTION: Final = 256
"""Number of attempts that are searched for at once."""
SEARCH_DEADLINE_S: Final = 1.8
"""Seconds after which a search for text answers with what it has found so far."""
FIRST_READING_S: Final = 0.1
"""Seconds for which an answer waits for the reading of spans in the background."""
MAX_SEARCHES: Final = 8
"""Maximum number of texts whose attempts are kept."""


class TextSearch:
    """A search for a text in a store's spans, in portions, the newest attempts first.

    It goes on only while an answer needs more attempts.

    Args:
        store: the open store.
        run_id: id of the run; None for all attempts.
        text: the text.
        cursor: cursor of the store now; attempts that changed later may be missing.
    """

    def __init__(self, store: Store, run_id: str | None, text: str, cursor: int) -> None:
        self.cursor = cursor
        self.attempts: dict[str, None] = {}
        """Ids of the attempts with the text so far, the newest first."""
        self.is_complete = False
        self._store, self._run_id, self._text = store, run_id, text
        self._task: asyncio.Task[list[str]] | None = None
        """The portion under way, which may take longer than an answer waits for it."""

    async def advance(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        """Search until there is enough, everything was searched, or the time is over.

        Raises:
            LightspanError: the store cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_complete and not is_enough():
            if self._task is None:
                self._task = asyncio.create_task(self._next())
            left = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait([self._task], timeout=left)
            if not done:
                return
            task, self._task = self._task, None
            ids = task.result()
            self.attempts |= dict.fromkeys(ids)
            self.is_complete = len(ids) < SEARCH_PORTION

    def cancel(self) -> None:
        """Stop the portion under way."""
        if self._task is not None:
            self._task.cancel()

    async def _next(self) -> list[str]:
        before = next(reversed(self.attempts), None)
        return await self._store.search(
            self._text, self._run_id, before=before, limit=SEARCH_PORTION
        )


class Catalogue:
    """The rollouts of a store, or of one run in it.

    Args:
        store: the open store.
        run_id: id of the run; None for all rollouts of the store.
    """

    def __init__(self, store: Store, run_id: str | None) -> None:
        self.store = store
        self.run_id = run_id
        self.cursor = 0
        self.progress = 0
        """Number that grows while more is read in the background."""
        self.scoring = Scoring()
        self.entries: dict[str, Entry] = {}
        self.readable = 0
        """Number of attempts whose spans can be read."""
        self.read = 0
        """Number of attempts whose spans were read."""
        self._version = 0
        """Number that grows when the facts of a rollout change, or rollouts are gone."""
        self._by_attempt: dict[str, str] = {}
        self._ordered: list[Entry] = []
        """The oldest rollout first, unless `_is_sorted` is False."""
        self._is_sorted = True
        self._is_outdated = False
        """Whether rollouts were pruned, which changes no cursor."""
        self._lock = asyncio.Lock()
        self._facets: tuple[object, views.Facets] | None = None
        """The last counts, with what they depend on."""
        self._sorted: tuple[object, list[Entry]] | None = None
        """The last list of rollouts, with what it depends on."""
        self._limit: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self._searches: dict[str, TextSearch] = {}
        self._search_lock = asyncio.Lock()

    async def close(self) -> None:
        """Stop what goes on in the background."""
        for search in self._searches.values():
            search.cancel()
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reading

    # --- reading ------------------------------------------------------------------------------
    async def refresh(self, scoring: Scoring | None = None) -> None:
        """Read what changed in the store.

        Args:
            scoring: how rewards and steps are computed now; None if that is unchanged.

        Raises:
            LightspanError: the store cannot be read.
        """
        async with self._lock:
            if self._is_outdated:
                self._clear()
            changes = await self.store.summaries(self.run_id, after=self.cursor)
            for summary in changes.rows:
                self.scoring.apply(self._update(summary))
            self.cursor = changes.cursor
            if scoring is not None and scoring is not self.scoring:
                earlier, self.scoring = self.scoring, scoring
                for entry in self._ordered:
                    if scoring.changes(earlier, entry):
                        scoring.apply(entry)

    def _update(self, summary: RolloutSummary) -> Entry:
        """Add a rollout, or replace its summary; return its entry."""
        entry = self.entries.get(summary.rollout_id)
        if entry is None:
            entry = self.entries[summary.rollout_id] = Entry(summary)
            is_sorted = not self._ordered or self._ordered[-1].summary.position < summary.position
            self._ordered.append(entry)
            self._is_sorted = self._is_sorted and is_sorted
        else:
            self._count(entry, -1)
            entry.summary = summary
            if entry.facts is not None and entry.facts.change != summary.change:
                entry.facts = None
        self._count(entry, 1)
        if summary.attempt_id is not None:
            self._by_attempt[summary.attempt_id] = summary.rollout_id
        return entry

    def _clear(self) -> None:
        """Forget all rollouts, to read them again."""
        self.entries, self._by_attempt, self._ordered = {}, {}, []
        self.cursor = self.readable = self.read = 0
        self._is_sorted, self._is_outdated = True, False
        self._version += 1

    @property
    def newest(self) -> list[Entry]:
        """All rollouts, the newest first."""
        if not self._is_sorted:
            self._ordered.sort(key=SORT_KEYS["oldest"])
            self._is_sorted = True
        return self._ordered[::-1]

    def find(self, name: str) -> Entry:
        """Return the rollout with an id, or that of the attempt with an id.

        Raises:
            NotFoundError: there is none.
        """
        entry = self.entries.get(self._by_attempt.get(name, name))
        if entry is None:
            raise NotFoundError(f"there is no rollout or attempt {name!r} here")
        return entry

    async def neighbours(self, entry: Entry, filters: Filters, sort: str) -> tuple[str, str]:
        """Return the ids of the rollouts before and after one in a sorted list; empty if none is.

        The rollout itself need not pass the filters, such as after it was rated.

        Args:
            entry: the rollout.
            filters: the filters of the list.
            sort: the order of the list.
        """
        if filters.needs_spans or sort in SPAN_SORTS:
            await self._begin_reading(None)
        before = after = None
        for wanted in (1, None) if filters.text else (None,):  # at first with what a search found
            entries, is_partial = await self._list(filters, sort, wanted)
            before, after = beside(entries, entry, sort)
            if not is_partial or (sort == "newest" and after is not None):
                break
        newer, older = ("" if e is None else e.summary.rollout_id for e in (before, after))
        return newer, older

    async def _list(
        self, filters: Filters, sort: str, wanted: int | None = None
    ) -> tuple[list[Entry], bool]:
        """Return the rollouts that pass filters, sorted, and whether a search is incomplete.

        The last list is kept while nothing changes, to go from row to row.

        Args:
            filters: the filters.
            sort: the order.
            wanted: as in `matching`.
        """
        key = filters, sort, self.cursor, self._version, self.scoring
        if self._sorted is not None and self._sorted[0] == key:
            return self._sorted[1], False
        entries, is_partial = await self.matching(filters, wanted)
        if sort != "newest":
            entries.sort(key=SORT_KEYS[sort])
        self._sorted = None if filters.text or filters.has_age else (key, entries)
        return entries, is_partial

    async def read_facts(self, entries: Sequence[Entry]) -> dict[str, Texts]:
        """Read the spans of rollouts; return the beginnings of their texts, by rollout id."""
        ids = {e.summary.attempt_id: e for e in entries if e.summary.attempt_id is not None}
        if not ids:
            return {}
        spans = await self.store.spans(list(ids))
        doubtful = [name for name in ids if needs_records(spans.get(name, []))]
        records = await self.store.token_records(doubtful) if doubtful else {}
        texts = {}
        for name, entry in ids.items():
            own = spans.get(name, [])
            self._count(entry, -1)
            facts = facts_of(entry.summary, own, records.get(name, []))
            self._version += facts != entry.facts
            entry.facts = facts
            self._count(entry, 1)
            self.scoring.apply(entry)
            texts[entry.summary.rollout_id] = texts_of(entry.summary, own)
        return texts

    def _count(self, entry: Entry, sign: int) -> None:
        """Add a rollout to the counts of attempts that can be read and were read, or remove it."""
        if entry.is_readable:
            self.readable += sign
            self.read += sign * (entry.facts is not None)

    async def tasks(self, entries: Sequence[Entry]) -> dict[str, Json]:
        """Return the tasks of rollouts, by rollout id."""
        states = await self.states(entries)
        return {state.rollout.rollout_id: state.rollout.task for state in states}

    async def states(self, entries: Sequence[Entry]) -> list[RolloutState]:
        """Return the states of rollouts, without those that were pruned meanwhile."""
        ids = [entry.summary.rollout_id for entry in entries]
        try:
            return await self.store.rollouts(ids) if ids else []
        except NotFoundError:
            self._is_outdated = True
        states = []
        for name in ids:
            with contextlib.suppress(NotFoundError):
                states += await self.store.rollouts([name])
        return states

    async def read_again(self, attempt_id: str) -> None:
        """Read an attempt's spans again, because it got feedback."""
        name = self._by_attempt.get(attempt_id)
        if name is not None:
            await self.read_facts([self.entries[name]])

    def note_progress(self, portions: int = 1) -> None:
        """Have pages read again what they show, because more is known of the rollouts.

        Args:
            portions: number of portions that were read; pages read again after 1, 2, 4, 8 … of
                them.
        """
        if portions & (portions - 1) == 0:
            self.progress += 1

    def read_in_background(self, limit: int | None = None) -> None:
        """Begin to read the spans of attempts, if that is not under way.

        Args:
            limit: number of the newest rollouts to read; None for all.
        """
        if self._reading is None or self._reading.done():
            self._limit = limit
            self._reading = asyncio.create_task(self._read_unread())
            self._reading.add_done_callback(_take_error)
        elif limit is None:
            self._limit = None

    async def wait_read(self, timeout_s: float) -> None:
        """Wait for the reading in the background, at most for a time.

        Raises:
            LightspanError: the store cannot be read.
        """
        tasks = [] if self._reading is None else [self._reading]
        done, _ = await asyncio.wait(tasks, timeout=timeout_s) if tasks else ((), ())
        for task in done:
            task.result()

    async def _read_unread(self) -> None:
        number = 0
        while portion := self._unread():
            for start in range(0, len(portion), PORTION):
                async with self._search_lock:  # a search that somebody waits for goes first
                    await self.read_facts(portion[start : start + PORTION])
                number += 1
                self.note_progress(number)
                await asyncio.sleep(0)
        self.note_progress()

    def _unread(self) -> list[Entry]:
        """Return rollouts to read next, the newest first, within the limit."""
        entries = self.newest[: self._limit]
        return [e for e in entries if e.is_readable and e.facts is None][: 64 * PORTION]

    # --- filters ------------------------------------------------------------------------------
    async def matching(
        self, filters: Filters, wanted: int | None = None
    ) -> tuple[list[Entry], bool]:
        """Return the rollouts that pass filters, the newest first.

        The second value is whether a search for text is incomplete, because enough was found or
        its time was over.

        Args:
            filters: the filters.
            wanted: number of rollouts after which a search for text stops; None to search until
                its time is over.
        """
        tests, is_partial = predicates(filters), False
        if filters.text:
            test, is_partial = await self._search(filters.text, tests, wanted)
            tests.append(test)
        entries = self.newest
        for test in tests:  # one test after the other takes half the time of all for each entry
            entries = [entry for entry in entries if test(entry)]
        return list(entries), is_partial

    async def _search(
        self, text: str, tests: Sequence[Predicate], wanted: int | None
    ) -> tuple[Predicate, bool]:
        """Return a condition for rollouts that contain a text, and whether it is incomplete.

        Args:
            text: the text.
            tests: the conditions of the other filters.
            wanted: as in `matching`.
        """
        async with self._search_lock:  # one scan of the store at a time
            search = self._searches.get(text)
            if search is None or (search.is_complete and search.cursor != self.cursor):
                for old in list(self._searches)[: len(self._searches) - MAX_SEARCHES + 1]:
                    self._searches.pop(old).cancel()
                search = self._searches[text] = TextSearch(
                    self.store, self.run_id, text, self.cursor
                )
            is_enough = partial(self._has_matches, search.attempts, tests, wanted)
            await search.advance(is_enough, SEARCH_DEADLINE_S)
        attempts, lower = search.attempts, text.lower()

        def contains(entry: Entry) -> bool:
            summary = entry.summary
            return (
                summary.attempt_id in attempts
                or lower in summary.rollout_id
                or lower in (summary.attempt_id or "")
                or lower in summary.task_id.lower()
                or lower in summary.message.lower()
            )

        return contains, not search.is_complete

    def _has_matches(
        self, attempts: Collection[str], tests: Sequence[Predicate], wanted: int | None
    ) -> bool:
        """Return whether at least `wanted` attempts pass the conditions; False for None."""
        if wanted is None or len(attempts) < wanted:
            return False
        entries = (self.entries.get(self._by_attempt.get(name, "")) for name in attempts)
        count = sum(entry is not None and all(t(entry) for t in tests) for entry in entries)
        return count >= wanted

    async def page(self, filters: Filters, options: PageOptions) -> views.RolloutPage:
        """Return a page of the rollouts that pass filters."""
        if filters.needs_spans or options.sort in SPAN_SORTS:
            await self._begin_reading(None)
        wanted = None  # other sorts need all that match
        if options.sort == "newest":
            wanted = 1 + options.limit + place_of(options.cursor, ())
        entries, is_partial = await self._list(filters, options.sort, wanted)
        start = place_of(options.cursor, (entry.summary.rollout_id for entry in entries))
        shown = entries[start : start + options.limit]
        end = start + len(shown)
        return views.RolloutPage(
            rows=await self.rows(shown),
            total=len(entries),
            cursor=cursor_of(end, shown[-1].summary.rollout_id) if end < len(entries) else "",
            version=self.cursor,
            read=self.read,
            readable=self.readable,
            is_partial=is_partial,
        )

    async def _begin_reading(self, limit: int | None) -> None:
        self.read_in_background(limit)
        await self.wait_read(FIRST_READING_S)

    async def rows(self, entries: Sequence[Entry]) -> list[views.RolloutRow]:
        """Return rollouts as rows of a table, with their texts."""
        texts = await self.read_facts(entries)
        tasks = await self.tasks(entries)
        tasks |= {name: each.task for name, each in texts.items() if each.task is not None}
        titles = {name: task_title(task) for name, task in tasks.items()}
        names = [entry.summary.rollout_id for entry in entries]
        return [
            row_of(entry, titles.get(name, ""), texts.get(name))
            for name, entry in zip(names, entries, strict=True)
        ]

    async def facets(self, filters: Filters) -> views.Facets:
        """Return counts of the rollouts that pass filters.

        The counts of a filter's values leave this filter out, so that another value can be chosen.
        """
        await self._begin_reading(None if filters.needs_spans else READ_AHEAD)
        key = filters, self.cursor, self._version, self.scoring
        if self._facets is not None and self._facets[0] == key and not filters.text:
            return self._facets[1]
        wanted = 1 + MAX_ROWS
        entries, is_partial = await self.matching(filters, wanted)
        others = {}
        for name, fields in FACETS.items():
            if any(getattr(filters, field) is not None for field in fields):
                wider = msgspec.structs.replace(filters, **dict.fromkeys(fields))
                others[name], _ = await self.matching(wider, wanted)
        self._facets = key, facets_of(entries, others, is_partial=is_partial)
        return self._facets[1]

    async def groups(self, filters: Filters, options: PageOptions) -> views.GroupPage:
        """Return a page of the groups of rollouts that pass filters."""
        if filters.needs_spans:
            await self._begin_reading(None)
        entries, is_partial = await self.matching(filters)
        rows = group_rows(entries, options.sort)
        start = place_of(options.cursor, (row.name for row in rows))
        shown = rows[start : start + options.limit]
        end = start + len(shown)
        firsts = [row.entries[0] for row in shown]
        tasks = await self.tasks(firsts)
        texts = [task_title(tasks.get(entry.summary.rollout_id)) for entry in firsts]
        return views.GroupPage(
            groups=[row.view(text) for row, text in zip(shown, texts, strict=True)],
            total=len(rows),
            cursor=cursor_of(end, shown[-1].name) if end < len(rows) else "",
            is_partial=is_partial,
        )


def _take_error(task: asyncio.Task[None]) -> None:
    """Mark the error of a task as seen, which the next answer raises."""
    if not task.cancelled():
        task.exception()


def beside(entries: Sequence[Entry], entry: Entry, sort: str) -> tuple[Entry | None, Entry | None]:
    """Return the entries before and after one, by an order; None if there is none.

    Args:
        entries: entries in this order.
        entry: the entry, which need not be among them.
        sort: the order.
    """
    key = SORT_KEYS[sort]
    low, high = (bisect(entries, key(entry), key=key) for bisect in (bisect_left, bisect_right))
    return entries[low - 1] if low else None, entries[high] if high < len(entries) else None


# --- pages --------------------------------------------------------------------------------------
def cursor_of(place: int, name: str) -> str:
    """Return the cursor of the page after a row: its place, and its name if rows were added."""
    return f"{place}~{name}"


def place_of(cursor: str, names: Iterable[str]) -> int:
    """Return the place of the first row of a page among the names of all rows."""
    place, separator, name = cursor.partition("~")
    if separator:
        for number, each in enumerate(names, 1):
            if each == name:
                return number
    return int(place) if place.isdecimal() and len(place) < 12 else 0


def task_text(task: Json) -> str:
    """Return a task as text."""
    return task if isinstance(task, str) else json.dumps(task, ensure_ascii=False)


def task_title(task: Json) -> str:
    """Return the text of a task that a person reads first, such as its question.

    It is the whole task as text if it has none of the usual fields.
    """
    if isinstance(task, dict):
        for name in TITLES:
            if isinstance(task.get(name), str) and task[name].strip():
                return str(task[name])
    return task_text(task)


TITLES: Final = (
    *("question", "query", "prompt", "input", "text", "message", "instruction", "problem"),
    "title",
)
"""Fields of a task that have its text, the first one that it has."""


# --- counts -------------------------------------------------------------------------------------
def facets_of(
    entries: Sequence[Entry],
    others: Mapping[str, Sequence[Entry]] | None = None,
    *,
    is_partial: bool = False,
) -> views.Facets:
    """Return counts of rollouts by the values of each filter.

    Args:
        entries: the rollouts that pass all filters.
        others: facet → the rollouts that pass all filters but its own; None if all are `entries`.
        is_partial: whether a search for text may find more of them.
    """
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    own = [e.reward for e in entries if e.reward is not None and e.summary.fork is None]
    wider = others or {}

    def counted(name: str) -> list[views.Count]:
        shown, read = wider.get(name, entries), FACET_VALUES.get(name)
        if read is not None:
            return counts(map(read, shown))
        return counts(value for entry in shown for value in FACET_LISTS[name](entry))

    everywhere = wider.get("rewards", entries)
    facets: dict[str, Any] = {name: counted(name) for name in (*FACET_VALUES, *FACET_LISTS)}
    return views.Facets(
        total=len(entries),
        scored=len(rewards),
        mean=mean_of(own),
        rewards=histogram([e.reward for e in everywhere if e.reward is not None]),
        is_partial=is_partial,
        **facets,
    )


FACET_VALUES: Final[Mapping[str, Callable[[Entry], str | None]]] = {
    "status": attrgetter("summary.status"),
    "mode": attrgetter("summary.mode"),
    "outcome": attrgetter("summary.outcome"),
    "service": attrgetter("summary.run_id"),
    "user": lambda entry: None if entry.facts is None else entry.facts.user,
    "session": lambda entry: None if entry.facts is None else entry.facts.session,
    "rated": lambda entry: "yes" if entry.is_rated else "no",
}
"""Facet → the value of a rollout that it counts; None or empty for none."""
FACET_LISTS: Final[Mapping[str, Callable[[Entry], Iterable[str]]]] = {
    "agent": lambda entry: (path for path, _ in entry.facts.agents) if entry.facts else (),
    "tag": lambda entry: entry.facts.tags if entry.facts else (),
}
"""Facet → the values of a rollout that it counts."""
FACETS: Final[Mapping[str, Sequence[str]]] = {
    **{name: (name,) for name in (*FACET_VALUES, *FACET_LISTS)},
    "rewards": ("reward_min", "reward_max"),
}
"""Facet → its own filters."""


def counts(values: Iterable[str | None]) -> list[views.Count]:
    """Return how often values occur, the most frequent first; None and empty ones are left out."""
    items = [(str(value), n) for value, n in Counter(values).items() if value]
    ordered = sorted(items, key=lambda item: (-item[1], item[0]))
    return [views.Count(name=name, n=n) for name, n in ordered[:MAX_COUNTS]]


def histogram(values: Sequence[float]) -> list[views.Bin]:
    """Return the counts of values in bins of equal width, from the lowest to the highest value.

    Values between 0 and 1 get the bins of that range. The list is empty if there are no values.
    """
    if not values:
        return []
    low, high = min(0.0, min(values)), max(1.0, max(values))
    if low < 0 or high > 1:
        low, high = min(values), max(values)
        high = high if high > low else low + 1
    width = (high - low) / BINS
    # without the last digits, which are no more than rounding: 0.95 in place of 0.9500000000000001
    edges = [low, *(float(f"{low + i * width:.12g}") for i in range(1, BINS)), high]
    places = Counter(min(BINS, bisect_right(edges, value)) - 1 for value in values)
    return [views.Bin(low=a, high=b, n=places[i]) for i, (a, b) in enumerate(pairwise(edges))]
