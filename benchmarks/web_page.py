"""Cost of the web page (`lightspan ui`) on a run with many rollouts, by its API.

    python benchmarks/web_page.py [--rollouts 100000] [--folder FOLDER] [--json PATH]

The server runs in a process of its own. Each request reports the CPU time that the server used and
the wall time until the answer. The run is that of `inspect_store.py`; `--folder` keeps it, and uses
the run that is already there. At the end a new step with its rollouts is added to the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import Request, urlopen

import psutil
from _report import Figure, finish
from inspect_store import RUN, STEP_SIZE, add_step, make_run

from lightspan.training.folder import RunFolder

KEY: Final = "a-key-of-the-benchmark-0123456789"
MiB: Final = 2**20
IDLE_S: Final = 10.0
REQUESTS: Final[Mapping[str, str]] = {
    "list of runs": "/places",
    "first table": "/runs/{run}/rollouts",
    "table again": "/runs/{run}/rollouts",
    "worst first": "/runs/{run}/rollouts?sort=worst",
    "by reward, longest first": "/runs/{run}/rollouts?reward_min=0.5&sort=longest",
    "one step": "/runs/{run}/rollouts?step=20",
    "groups by spread": "/runs/{run}/groups?sort=spread",
    "one group": "/runs/{run}/groups/group-100?step=1",
    "one rollout": "/runs/{run}/rollouts/large-000020-007",
    "counts": "/runs/{run}/facets?step=20",
    "a text that no span has": "/runs/{run}/rollouts?text=nowhere%20to%20be%20found",
    "page of the run": "/runs/{run}",
}
LIMITS: Final = {"first table": 2.0, "a text that no span has": 2.0, "page of the run": 1.0}
"""Request → target of its CPU time in seconds; 0.3 for the others."""


class Server(NamedTuple):
    """A running server."""

    process: psutil.Process
    url: str

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        with urlopen(Request(f"{self.url}/api/v1{path}", headers=headers), timeout=60) as answer:
            return json.loads(answer.read())

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss / MiB)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a run in another process."""
    command = [sys.executable, "-m", "lightspan_ui", str(folder), "--port", "0", "--key-env", "KEY"]
    environment = {**os.environ, "KEY": KEY}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1].partition("/?")[0]
        try:
            yield Server(psutil.Process(process.pid), url)
        finally:
            process.terminate()


def figure(server: Server, name: str, path: str) -> list[Figure]:
    """Send a request; return the wall time of the answer and the CPU time of the server."""
    cpu, wall = server.cpu_s(), time.perf_counter()
    server.get(path)
    wall, cpu = time.perf_counter() - wall, server.cpu_s() - cpu
    print(f"{name}: {wall:.3f} s, {cpu:.3f} CPU-s, {server.rss_mib():.0f} MiB")
    limit = LIMITS.get(name, 0.3)
    return [
        Figure(what=name, unit="CPU-s", ours=cpu, at_most=limit),
        Figure(what=f"{name}, wall time", unit="s", ours=wall),
    ]


def idle(server: Server, name: str) -> Figure:
    """Return the share of a core that an open page uses."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with urlopen(Request(f"{server.url}/api/v1/events", headers=headers), timeout=60) as stream:
        stream.readline()
        time.sleep(2)
        cpu = server.cpu_s()
        time.sleep(IDLE_S)
        share = 100 * (server.cpu_s() - cpu) / IDLE_S
    return Figure(what=name, unit="% of a core", ours=share, at_most=1.0)


def step(server: Server, folder: Path, number: int) -> list[Figure]:
    """Add a step to the run; return what an open page of the run costs because of it."""
    run = RunFolder(folder)
    headers = {"Authorization": f"Bearer {KEY}"}
    with urlopen(Request(f"{server.url}/api/v1/events", headers=headers), timeout=60) as stream:
        stream.readline()
        time.sleep(2)
        cpu = server.cpu_s()
        asyncio.run(add_step(run, number))
        time.sleep(2)
        wall = time.perf_counter()
        run.add_metrics({"kind": "train", "step": number, "rollouts": STEP_SIZE, "reward": 0.5})
        while True:
            line = stream.readline()
            if line.startswith(b"data: ") and json.loads(line[6:])["lines"] > number:
                break
        wall = time.perf_counter() - wall
        server.get(f"/runs/{folder.name}/metrics?names=reward&after={number}")
    return [
        Figure(what="a step appears after", unit="s", ours=wall, at_most=2.0),
        Figure(what="a step of 512 rollouts", unit="CPU-ms", ours=1e3 * (server.cpu_s() - cpu)),
    ]


def figures_of(folder: Path) -> list[Figure]:
    """Measure all requests on the run in `folder`."""
    figures = []
    with serving(folder) as server:
        figures.append(idle(server, "an open page"))
        for name, path in REQUESTS.items():
            figures += figure(server, name, path.format(run=folder.name))
        while (run := server.get(f"/runs/{folder.name}"))["coverage_of"] < run["rollouts"]:
            time.sleep(1)
        figures.append(idle(server, "an open page, store open"))
        figures += step(server, folder, len(RunFolder(folder).metrics()))
        figures.append(Figure(what="memory", unit="MiB", ours=server.rss_mib(), at_most=300.0))
    return figures


def _options() -> Namespace:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="folder of the run; kept")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / RUN
        if not RunFolder(folder).is_used:
            make_run(folder, options.rollouts)
        return finish(figures_of(folder), options.json)


if __name__ == "__main__":
    sys.exit(main())
