"""Cost of the web page on a large store: times of its requests, CPU seconds and memory.

    python benchmarks/web_page.py [--rollouts 100000] [--folder FOLDER] [--runs RUNS] [--json PATH]

Serves the run of `benchmarks/inspect_store.py` (ten spans a rollout) with `lightspan ui`, and asks
what a browser asks. `--runs` is a folder of small runs; 50 copies of them are listed.
`web_page_postgres.py` asks the same of PostgreSQL.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import psutil
from _report import Figure, finish
from inspect_store import RUN, make_run

from lightspan.training.folder import RunFolder

PAGE: Final = "limit=50"
MISS: Final = "a text that no span has"


class Served:
    """A running `lightspan ui`, whose requests and CPU time are measured.

    Args:
        places: what it shows.
        database: id of the main process of a PostgreSQL server, whose CPU time counts too.
    """

    def __init__(self, *places: str, database: int | None = None) -> None:
        self._database = None if database is None else psutil.Process(database)
        command = [sys.executable, "-m", "lightspan.cli", "ui", *places, "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if address := re.search(r"(http://[^/]+)/\S*token=(\S+)", line):
                self.origin, self._token = address[1], address[2]
                return self
        raise SystemExit("lightspan ui did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, path: str) -> Any:
        """Return the answer to a GET request."""
        with self._open(path) as response:
            return json.loads(response.read())

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.origin}/api/v1{path}")
        request.add_header("Authorization", f"Bearer {self._token}")
        return urllib.request.urlopen(request, timeout=120)

    def listen(self) -> threading.Thread:
        """Read the events of the page in a thread, as an open page does."""

        def read() -> None:
            with self._open("/events") as response:
                while response.readline():
                    pass

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far of the process, and of the database's processes."""
        used = psutil.Process(self._process.pid).cpu_times()
        seconds = used.user + used.system
        if self._database is not None:
            main = self._database.cpu_times()
            seconds += main.children_user + main.children_system  # of those that have ended
            for process in (self._database, *self._database.children()):
                with suppress(psutil.NoSuchProcess):
                    used = process.cpu_times()
                    seconds += used.user + used.system
        return seconds

    @property
    def peak_mib(self) -> float:
        """Peak resident memory of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def timed(served: Served, what: str, path: str, at_most_s: float | None) -> list[Figure]:
    """Measure a request: seconds until its answer, and CPU seconds of the server."""
    cpu, wall = served.cpu_s, time.perf_counter()
    served.ask(path)
    wall, cpu = time.perf_counter() - wall, served.cpu_s - cpu
    return [
        Figure(what=what, unit="s", ours=wall, at_most=at_most_s),
        Figure(what=f"{what}, server", unit="CPU-s", ours=cpu),
    ]


def requests(place: str) -> list[tuple[str, str, float | None]]:
    """Return what is asked of a large store: a name, a path and the target in seconds."""
    return [
        ("first table", f"/{place}/rollouts?{PAGE}", 2.0),
        ("table again", f"/{place}/rollouts?{PAGE}", 0.3),
        ("sorted by reward", f"/{place}/rollouts?{PAGE}&sort=best", 0.3),
        (
            "filtered by status and reward",
            f"/{place}/rollouts?{PAGE}&status=succeeded&reward_min=1",
            0.3,
        ),
        ("counts of filters", f"/{place}/facets", 0.3),
        ("groups", f"/{place}/groups?{PAGE}&sort=spread", 0.3),
        ("search that finds", f"/{place}/rollouts?{PAGE}&text=northern", 0.3),
    ]


def missed_search(served: Served, path: str) -> list[Figure]:
    """Measure a search that finds nothing: until its first answer, and until all was searched."""
    question = f"/{path}/rollouts?{PAGE}&text={urllib.parse.quote(MISS)}"
    cpu, wall = served.cpu_s, time.perf_counter()
    is_partial = served.ask(question)["is_partial"]
    first = time.perf_counter() - wall
    while is_partial:  # as the page goes on
        is_partial = served.ask(question)["is_partial"]
    whole, used = time.perf_counter() - wall, served.cpu_s - cpu
    name = "search that finds nothing"
    return [
        Figure(what=f"{name}, first answer", unit="s", ours=first, at_most=2.0),
        Figure(what=f"{name}, in all spans", unit="s", ours=whole, at_most=2.0),
        Figure(what=f"{name}, in all spans, server", unit="CPU-s", ours=used),
    ]


def large_store(place: str, kind: str, database: int | None = None) -> list[Figure]:
    """Measure the requests on a large store, then how long its spans take to be read.

    Args:
        place: folder of the run, or URL of the store.
        kind: `runs` or `stores`.
        database: as in `Served`.
    """
    with Served(place, database=database) as served:
        path = f"{kind}/{served.ask('/places')[kind][0]['name']}"
        figures = [each for request in requests(path) for each in timed(served, *request)]
        figures += missed_search(served, path)
        began, cpu = time.perf_counter(), served.cpu_s
        served.ask(f"/{path}/rollouts?{PAGE}&agent=writer")
        peak = served.peak_mib
        figures.append(
            Figure(what="peak memory, table and search", unit="MiB", ours=peak, at_most=300)
        )
        while (page := served.ask(f"/{path}/rollouts?{PAGE}&agent=writer"))["read"] < page[
            "readable"
        ]:
            time.sleep(0.5)
        seconds, used = time.perf_counter() - began, served.cpu_s - cpu
        figures.append(Figure(what="spans of all attempts read", unit="s", ours=seconds))
        figures.append(Figure(what="spans of all attempts read, server", unit="CPU-s", ours=used))
        figures += timed(served, "filtered by agent", f"/{path}/rollouts?{PAGE}&agent=writer", 0.3)
        figures.append(Figure(what="peak memory", unit="MiB", ours=served.peak_mib))
    return figures


def many_runs(source: Path, folder: Path) -> list[Figure]:
    """Measure the list of 50 runs, an idle page, and what a new step costs."""
    runs = [path for path in sorted(source.iterdir()) if (path / "config.json").exists()]
    for number in range(50):
        run = runs[number % len(runs)]
        shutil.copytree(run, folder / f"{run.name}-{number}")
    live = folder / f"{runs[0].name}-0"
    with Served(str(folder)) as served:
        figures = timed(served, "list of 50 runs", "/places", 1.0)
        served.listen()
        time.sleep(3.0)
        cpu = served.cpu_s
        time.sleep(10.0)
        share = 100 * (served.cpu_s - cpu) / 10.0
        figures.append(Figure(what="idle page", unit="% of a core", ours=share, at_most=1.0))
        lines = (live / "metrics.jsonl").read_text().splitlines()
        train = json.loads(next(line for line in lines if '"train"' in line))
        cpu = served.cpu_s
        for step in range(1000, 1020):
            with (live / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**train, "step": step}) + "\n")
            served.ask(f"/runs/{live.name}/metrics?names=reward&points=600")
            time.sleep(0.2)
        used = 1000 * (served.cpu_s - cpu) / 20
        figures.append(Figure(what="a new step", unit="CPU-ms", ours=used, at_most=20))
    return figures


def main() -> int:
    """Measure, print the figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help=f"folder of the run {RUN!r}; kept")
    parser.add_argument("--runs", type=Path, help="folder of small runs, to list 50 copies")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / RUN
        if not RunFolder(folder).is_used:
            make_run(folder, options.rollouts)
        figures += large_store(str(folder), "runs")
        if options.runs:
            (Path(temporary) / "runs").mkdir()
            figures += many_runs(options.runs, Path(temporary) / "runs")
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
