"""The RAG example's index with a million passages: memory and latency, against SQLite's FTS5.

    python benchmarks/rag_index.py [--passages 1000000] [--queries 200] [--json PATH]

Both sides index the same generated passages (50 to 70 words, a Zipf-like vocabulary of 200,000 and
a number of their own), answer the same queries of three to eight words (any of which may match)
with the ten best by BM25, and read those passages from disk. FTS5 is the one of this interpreter's
SQLite, ordered by its `bm25()`. Each side builds in a process of its own and is then loaded in
another; the figures are

- building: CPU time and wall time without generating the text, and peak memory;
- loaded: private memory after all queries, and the same with the pages of mapped files;
- a query: wall time at the median and the 99th percentile, and CPU time at the median.

Our best passage must be among the peer's ten for 95 of 100 queries (FTS5 counts lengths exactly, we
in steps). Needs `rag_example`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from _peers import PeerError
from _report import Figure, finish, options_of

from rag_example.index import Index, Passage

PEER: Final = "SQLite FTS5"
SIDES: Final = ("ours", "peer")
BEST: Final = 10
AGREEMENT: Final = 0.95
LATENCY_TARGET: Final = 10.0
"""Minimum factor by which a query must be faster than the peer's."""
MEMORY_TARGET_MIB: Final = 1024.0
"""Maximum memory after loading, with all mapped pages that the queries have read."""

WORDS: Final = 200_000
PHRASES: Final = 50_000

Search = Callable[[str], list[str]]
"""Function from a query to the ids of the best passages."""


# --- data -----------------------------------------------------------------------------------
def passages(count: int) -> Iterator[Passage]:
    """Yield passages of six phrases of about ten words; they are the same in every process."""
    rng = random.Random("passages")
    phrases = [" ".join(words) for words in _phrases(rng, PHRASES, 8, 12)]
    for number in range(count):
        text = ". ".join(rng.choices(phrases, k=6))
        yield Passage(str(number), f"Passage {number}", text)


def queries(count: int) -> list[str]:
    """Return queries of three to eight words, which are as frequent as in the passages."""
    return [" ".join(words) for words in _phrases(random.Random("queries"), count, 3, 8)]


def _phrases(rng: random.Random, count: int, least: int, most: int) -> Iterator[list[str]]:
    vocabulary = _vocabulary()
    weights = list(itertools.accumulate(1 / (rank + 10) for rank in range(WORDS)))
    for _ in range(count):
        yield rng.choices(vocabulary, cum_weights=weights, k=rng.randint(least, most))


def _vocabulary() -> list[str]:
    """Return pronounceable, distinct words in order of their frequency."""
    rng = random.Random("vocabulary")
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < WORDS:
        words["".join(rng.choices(syllables, k=rng.randint(2, 4)))] = None
    return list(words)


# --- the two sides --------------------------------------------------------------------------
def build_ours(folder: Path, found: Iterator[Passage]) -> None:
    """Build our index and save it in `folder`."""
    Index.build(found).save(folder)


@contextmanager
def open_ours(folder: Path) -> Iterator[Search]:
    """Load our index; yield its search function."""
    index = Index.load(folder)
    yield lambda query: [hit.passage.id for hit in index.search(query, BEST)]


def build_peer(folder: Path, found: Iterator[Passage]) -> None:
    """Build the FTS5 table; merge it into one segment, as our index is."""
    folder.mkdir()
    with closing(sqlite3.connect(folder / "passages.sqlite")) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, id UNINDEXED)")
        rows = ((passage.title, passage.text, passage.id) for passage in found)
        connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")


@contextmanager
def open_peer(folder: Path) -> Iterator[Search]:
    """Open the FTS5 table; yield its search function.

    A passage matches if it has any of the words. The order is by `bm25()`, then by row.
    """
    select = (
        "SELECT id, title, text FROM passages WHERE passages MATCH ? "
        f"ORDER BY bm25(passages), rowid LIMIT {BEST}"
    )

    with closing(sqlite3.connect(folder / "passages.sqlite")) as connection:

        def search(query: str) -> list[str]:
            words = " OR ".join(f'"{word}"' for word in dict.fromkeys(query.split()))
            return [row[0] for row in connection.execute(select, (words,))]

        yield search


BUILD: Final = {"ours": build_ours, "peer": build_peer}
OPEN: Final = {"ours": open_ours, "peer": open_peer}


# --- measured in a process of its own -------------------------------------------------------
def measure_building(side: str, folder: Path, count: int) -> dict[str, float]:
    """Return the cost of building an index, without generating the passages."""
    generated = _Generated(passages(count))
    before = time.monotonic(), time.process_time()
    BUILD[side](folder, generated)
    return {
        "wall_s": time.monotonic() - before[0] - generated.wall_s,
        "cpu_s": time.process_time() - before[1] - generated.cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "folder_mib": sum(file.stat().st_size for file in folder.iterdir()) / 2**20,
    }


class _Generated(Iterator[Passage]):
    """Passages, with the time that generating them took so far.

    The time is measured, not estimated by generating them once more: on a busy machine, the
    estimate could be longer than a short build.
    """

    def __init__(self, found: Iterator[Passage]) -> None:
        self._found = found
        self.wall_s = 0.0
        self.cpu_s = 0.0

    def __next__(self) -> Passage:
        # of this thread alone: an index may be building in others meanwhile
        before = time.monotonic(), time.thread_time()
        try:
            return next(self._found)
        finally:
            self.wall_s += time.monotonic() - before[0]
            self.cpu_s += time.thread_time() - before[1]


def measure_searching(side: str, folder: Path, asked: Sequence[str]) -> dict[str, Any]:
    """Return the cost of loading an index and of running every query once."""
    with ExitStack() as stack:
        before = time.monotonic()
        search = stack.enter_context(OPEN[side](folder))
        return {"load_s": time.monotonic() - before, **_measured(search, asked)}


def _measured(search: Search, asked: Sequence[str]) -> dict[str, Any]:
    wall, cpu, best = [], [], []
    for query in asked:
        started = time.perf_counter(), time.process_time()
        found = search(query)
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
        best.append(found)
    memory = psutil.Process().memory_info()
    return {
        "p50_ms": _quantile(wall, 0.5) * 1e3,
        "p99_ms": _quantile(wall, 0.99) * 1e3,
        "cpu_p50_ms": _quantile(cpu, 0.5) * 1e3,
        "private_mib": (memory.rss - memory.shared) / 2**20,
        "resident_mib": memory.rss / 2**20,
        "best": best,
    }


def _quantile(values: Sequence[float], at: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]


# --- the table ------------------------------------------------------------------------------
def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--search", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(_measure(options)))
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="rag-index-"))
    try:
        measured = {side: _both(side, scratch / side, options) for side in SIDES}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ours, theirs = measured["ours"], measured["peer"]
    _check(ours.pop("best"), theirs.pop("best"))
    return finish(figures(options.passages, ours, theirs), options.json)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.search:
        return measure_searching(options.side, options.folder, queries(options.queries))
    return measure_building(options.side, options.folder, options.passages)


def _both(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a side's figures; building and searching are measured in separate processes.

    Raises:
        PeerError: one of the processes failed.
    """
    sizes = ["--passages", str(options.passages), "--queries", str(options.queries)]
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), *sizes]
    measured: dict[str, Any] = {}
    for half in ([], ["--search"]):
        done = subprocess.run([*command, *half], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{side}: {' '.join([*half, 'failed'])}, status {done.returncode}")
        measured.update(json.loads(done.stdout))
    return measured


def _check(ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> None:
    """Check that both sides find about the same passages.

    Raises:
        PeerError: our best passage is too rarely among the peer's.
    """
    pairs = list(zip(ours, theirs, strict=True))
    first = sum(one[:1] == other[:1] for one, other in pairs) / len(pairs)
    among = sum(set(one[:1]) <= set(other) for one, other in pairs) / len(pairs)
    print(
        f"{len(pairs)} queries: our best passage is the peer's best for {first:.1%}, among its",
        end=" ",
    )
    print(f"ten for {among:.1%}")
    if among < AGREEMENT:
        raise PeerError(f"our best is among the ten of {PEER} for {among:.0%} of the queries only")


def figures(count: int, ours: dict[str, float], theirs: dict[str, float]) -> list[Figure]:
    """Return the rows of the table."""
    named = f"{count:,} passages"

    def line(what: str, unit: str, key: str, **targets: Any) -> Figure:
        return Figure(
            what=what, unit=unit, ours=ours[key], peer=PEER, theirs=theirs[key], **targets
        )

    return [
        line(f"build, {named}", "CPU-s", "cpu_s"),
        line("the same, wall", "s", "wall_s"),
        line("peak memory of building", "MiB", "peak_mib"),
        line("folder", "MiB", "folder_mib"),
        line("load", "s", "load_s"),
        line("loaded, private memory", "MiB", "private_mib"),
        line("loaded, with mapped pages", "MiB", "resident_mib", at_most=MEMORY_TARGET_MIB),
        line("query of 3 to 8 words, median", "ms", "p50_ms", at_least=LATENCY_TARGET),
        line("the same, 99th percentile", "ms", "p99_ms"),
        line("the same, median", "CPU-ms", "cpu_p50_ms", at_least=LATENCY_TARGET),
    ]


if __name__ == "__main__":
    sys.exit(main())
