"""How a store scales: over HTTP, with a million rollouts, and with ten thousand concurrent ones.

Over HTTP it is compared with the store of agentlightning 0.3.0.

    python benchmarks/scale.py [--parts server idle beside postgres …] [--json PATH]

- server: `lightspan serve` over a SQLite file, with 8 real runner processes that use it over HTTP.
  Rollouts that do nothing, from enqueued to known to have ended; and rollouts that write 8 LLM
  spans each, with 2.5 kB of text, 640 token ids and 128 log-probabilities, one at a time, each
  acknowledged. The peer's store server, in the same run, is only asked, in the ways that are
  cheapest for it (`peer_scale.py`): no runner or tracer of its own takes part. Ours is then asked
  in the same way too, by 8 processes that only ask (`_scale_clients.py`).
- idle: the server's CPU time while 8 runner processes have nothing to do.
- beside: the rollouts per second of one client, alone and while 250 clients wait for other work.
- postgres: like `server`, with a PostgreSQL that this run starts (with fsync), without the peer.
- million: a SQLite file filled to 1,000,000 rollouts; CPU per rollout at 1,000, 10,000, 100,000,
  300,000 and 1,000,000 stored ones. Takes a few GB of disk.
- concurrent: 10,000 rollouts at once with 8 model calls each, whose latencies are log-normal with a
  median of 6 s, on a virtual clock, over a SQLite file: every write is done, waiting is not.

Of several rounds the best counts, for us and for the peer. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
from _peers import run_peer
from _report import Figure, finish, options_of
from _scale_clients import measure_clients
from _scale_load import (
    Load,
    measured_beside,
    measured_idle,
    measured_load,
    served,
    spans_per_s,
)
from _scale_million import Window, fill
from _scale_simulation import Simulated, simulate

PEER: Final = "agentlightning-0.3.0"
PROCESSES: Final = 8
"""Number of runner processes."""
ROLLOUTS_AT_LEAST: Final = 2.5
SPANS_AT_LEAST: Final = 6.0
IDLE_S: Final = (10.0, 30.0)
WAITING: Final = 250
BESIDE_S: Final = 6.0
BESIDE_AT_LEAST: Final = 0.7
"""Minimum rate of a client next to waiting clients, as a fraction of its rate alone."""
SIZES: Final = (1_000, 10_000, 100_000, 300_000, 1_000_000)
FLAT_FROM: Final = 10_000
MAX_GROWTH: Final = 1.5
SIMULATED: Final = 10_000
MAX_SIMULATED_S: Final = 60.0


def measure_server(options: argparse.Namespace) -> list[Figure]:
    """Return the figures of our store server and of the peer's."""
    peers = [_peer(options) for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with served(f"sqlite:///{folder}/run.db", log) as server:
            loads = _loads(server, options)
            asked = [_asked(server.url, options) for _ in range(options.rounds)]
    rollouts, spans = _best(peers, "rollouts"), _best(peers, "spans")
    return [
        *_load_figures("server + SQLite", loads, rollouts, spans),
        _asked_figure("rollouts", _best(asked, "rollouts"), rollouts, ROLLOUTS_AT_LEAST),
        _asked_figure("LLM spans", _best(asked, "spans"), spans, SPANS_AT_LEAST),
    ]


def measure_idle(options: argparse.Namespace) -> list[Figure]:
    """Return the server's CPU time while runner processes have nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with served(f"sqlite:///{folder}/run.db", log) as server:
            first, later = asyncio.run(measured_idle(server, PROCESSES, IDLE_S))
    return [
        _idle_figure(f"the first {IDLE_S[0]:g} s", first),
        _idle_figure(f"the next {IDLE_S[1]:g} s", later),
    ]


def measure_beside(options: argparse.Namespace) -> list[Figure]:
    """Return the rate of one client while many others wait for other work."""
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with served(f"sqlite:///{folder}/run.db", log) as server:
                rounds.append(asyncio.run(measured_beside(server, WAITING, BESIDE_S)))
    alone, beside = (max(one) for one in zip(*rounds, strict=True))
    return [
        Figure(
            what=f"rollouts of one client while {WAITING} others wait",
            unit="per s",
            ours=beside,
            peer="alone",
            theirs=alone,
            more_is_better=True,
            at_least=BESIDE_AT_LEAST,
        )
    ]


def measure_postgres(options: argparse.Namespace) -> list[Figure]:
    """Return the figures over PostgreSQL; [] if it is not installed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.postgres.cluster import Cluster, programs

    found = programs()
    if found is None:
        print("no PostgreSQL server here (apt-get install postgresql): not measured")
        return []
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(found, place="/var/tmp") as cluster,
        served(cluster.url("scale"), Path(folder) / "log", _servers(cluster.folder)) as server,
    ):
        loads = _loads(server, options)
    return _load_figures("server + PostgreSQL", loads, None, None)


def measure_million(options: argparse.Namespace) -> list[Figure]:
    """Return the CPU time per rollout for each number of stored rollouts."""
    sizes = [size for size in SIZES if size <= options.stored]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        windows = fill(sizes, Path(folder) / "full.db", options.minutes)
    by_size = dict(zip(sizes, windows, strict=False))
    base = by_size.get(FLAT_FROM)
    return [
        *(_window_figure(size, window, base) for size, window in by_size.items()),
        *(
            Figure(what=f"  with {size:,} stored", unit="ms", ours=0.0, note="no time left for it")
            for size in sizes[len(windows) :]
        ),
    ]


def measure_concurrent(options: argparse.Namespace) -> list[Figure]:
    """Return the figures of the simulation of concurrent rollouts."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = simulate(options.simulated, options.seed, Path(folder) / "many.db")
    found.check()
    return _simulation_figures(found)


PARTS: Final[dict[str, Callable[[argparse.Namespace], list[Figure]]]] = {
    "server": measure_server,
    "idle": measure_idle,
    "beside": measure_beside,
    "postgres": measure_postgres,
    "million": measure_million,
    "concurrent": measure_concurrent,
}

Loads = dict[str, Load]


def _loads(server: Any, options: argparse.Namespace) -> Loads:
    """Return app → the best round."""
    numbers = {"_scale_apps:nothing": options.rollouts, "_rollout_apps:records": options.recording}
    loads = {}
    for app, number in numbers.items():
        rounds = asyncio.run(measured_load(server, app, PROCESSES, number, options.rounds))
        loads[app] = max(rounds, key=lambda load: load.per_s)
    return loads


def _peer(options: argparse.Namespace) -> dict[str, float]:
    arguments = ("--processes", str(options.peer_processes), "--number", str(options.peer_number))
    found: dict[str, float] = run_peer(PEER, "peer_scale.py", *arguments)
    return found


def _asked(url: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the rates of clients that only send requests, as those of the peer do."""
    return {
        name: measure_clients(name, url, PROCESSES, options.rollouts)
        for name in ("rollouts", "spans")
    }


def _best(rounds: list[dict[str, float]], name: str) -> float:
    return max(one[name] for one in rounds)


def _servers(folder: Path) -> list[int]:
    """Return the id of PostgreSQL's main process, whose children are the sessions."""
    [line, *_] = (folder / "data" / "postmaster.pid").read_text().splitlines()
    return [psutil.Process(int(line)).pid]


# --- figures --------------------------------------------------------------------------------
def _load_figures(
    where: str, loads: Loads, peer_rollouts: float | None, peer_spans: float | None
) -> list[Figure]:
    empty, records = loads["_scale_apps:nothing"], loads["_rollout_apps:records"]
    has_peer = peer_rollouts is not None
    return [
        Figure(
            what=f"{where}, {PROCESSES} runner processes: rollouts",
            unit="per s",
            ours=empty.per_s,
            peer="0.3.0" if has_peer else "",
            theirs=peer_rollouts,
            more_is_better=True,
            at_least=ROLLOUTS_AT_LEAST if has_peer else None,
        ),
        *_cpu_figures(where, "a rollout", empty),
        Figure(
            what=f"{where}, {PROCESSES} runner processes: LLM spans, 8 a rollout",
            unit="per s",
            ours=spans_per_s(records),
            peer="0.3.0" if has_peer else "",
            theirs=peer_spans,
            more_is_better=True,
            at_least=SPANS_AT_LEAST if has_peer else None,
        ),
        *_cpu_figures(where, "a rollout of 8 spans", records),
    ]


def _cpu_figures(where: str, what: str, load: Load) -> list[Figure]:
    return [
        Figure(what=f"  {where}: CPU of the server, {what}", unit="ms", ours=load.server_ms),
        Figure(what=f"  {where}: CPU of the runners, {what}", unit="ms", ours=load.runners_ms),
    ]


def _asked_figure(what: str, ours: float, theirs: float, at_least: float) -> Figure:
    return Figure(
        what=f"server + SQLite, {PROCESSES} processes that only ask: {what}",
        unit="per s",
        ours=ours,
        peer="0.3.0",
        theirs=theirs,
        more_is_better=True,
        at_least=at_least,
    )


def _idle_figure(when: str, share: float) -> Figure:
    return Figure(
        what=f"{PROCESSES} idle runner processes, {when}",
        unit="% of a core of the server",
        ours=100 * share,
    )


def _window_figure(size: int, window: Window, base: Window | None) -> Figure:
    larger = base is not None and size > FLAT_FROM
    return Figure(
        what=f"a rollout with 2 calls, with {size:,} stored",
        unit="CPU-ms",
        ours=window.cpu_ms,
        at_most=MAX_GROWTH * base.cpu_ms if base is not None and larger else None,
        note=f"{window.wall_ms:.2f} ms of wall time; a file of {window.file_mb:,.0f} MiB",
    )


def _simulation_figures(found: Simulated) -> list[Figure]:
    return [
        Figure(
            what=f"{found.rollouts:,} rollouts at once, {found.calls:,} model calls",
            unit="s",
            ours=found.wall_s,
            at_most=MAX_SIMULATED_S,
            note=f"{found.cpu_s:.1f} CPU-s for {found.virtual_s:.0f} s of virtual time",
        )
    ]


def main() -> int:
    """Measure the parts that were chosen; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=2, help="of servers, ours and the peer's")
    parser.add_argument("--rollouts", type=int, default=4000, help="that do nothing, a round")
    parser.add_argument("--recording", type=int, default=800, help="with 8 spans each, a round")
    parser.add_argument("--peer-number", type=int, default=800, help="its rollouts, and its spans")
    parser.add_argument(
        "--peer-processes", type=int, default=2, help="that ask its one server process"
    )
    parser.add_argument("--stored", type=int, default=SIZES[-1], help="rollouts to fill up to")
    parser.add_argument("--minutes", type=float, default=60.0, help="for filling, at most")
    parser.add_argument("--simulated", type=int, default=SIMULATED, help="rollouts at once")
    parser.add_argument("--seed", type=int, default=0, help="of the latencies")
    parser.add_argument("--folder", help="where the large files go; the system's for such files")
    options = parser.parse_args()
    figures = [figure for part in options.parts for figure in PARTS[part](options)]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
