"""CPU time that lightspan's instrumentation adds to a model call, compared with OpenInference's.

    python benchmarks/adapter.py [--runs 50] [--rounds 20] [--json PATH]

The app is a LangGraph graph of one node that asks ChatOpenAI once, over HTTP, a model server in
another process that answers instantly. Five such processes take turns, all in the environment that
has the packages of both sides: without instrumentation; ours with the call redirected to a gateway
(the model server is used as the gateway); ours with the call recorded but not redirected; ours
outside of any scope; and OpenInference's LangChain and OpenAI instrumentors, with a batch processor
and an exporter that discards all spans. Ours includes writing the spans to SQLite. The added time
is the CPU time minus that of the bare app in the same round; the median over rounds is reported.

Outside of scopes that difference is smaller than its noise. So it is measured without the app too:
the wrapper around the SDK's `request`, and what the adapter adds to LangChain's
`CallbackManager.configure`, as often as one run of the graph calls it. The target is for this.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from _peers import FOLDER, HERE, PeerError, peer_environment, peer_python, run_peer
from _report import Figure, finish, options_of
from _upstream import Upstream

PEER: Final = "openinference+client"
KINDS: Final = ("plain", "outside", "redirected", "recorded", PEER)
OUTSIDE_US: Final = 10.0
HALF: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """An app of one framework, run by `peer_adapter.py`."""

    framework: str
    peer: str
    """Name of the environment, a key of `_peers.PEERS`."""
    agents: int = 1
    """Number of agents; each calls its model once."""
    is_team: bool = False
    """Whether several agents are inside of another agent, which has a span too."""

    @property
    def spans(self) -> dict[str, int]:
        """Kind of recording → number of spans of one run.

        Agents are recorded in each kind; model calls too, unless a gateway records them.
        """
        around = self.agents + self.is_team
        return {"redirected": around, "recorded": around + self.agents}


LANGGRAPH: Final = Case(framework="langgraph", peer="openinference")


class Process:
    """A process that runs one app, `peer_adapter.py`."""

    def __init__(self, kind: str, process: subprocess.Popen[str]) -> None:
        self.kind = kind
        self._process = process

    def ask(self, runs: int) -> dict[str, float]:
        """Make the app run `runs` times, and return what a run costs.

        Raises:
            PeerError: the process ended.
        """
        self.say(str(runs))
        return self.read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> None:
        """Write a line to the process's standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, float]:
        """Return the next line of the process's output, from JSON.

        Raises:
            PeerError: the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the app of kind {self.kind} ended: see its error above")
        return json.loads(line)  # type: ignore[no-any-return]


@contextmanager
def running(case: Case, kind: str, url: str, deal: int = 0) -> Iterator[Process]:
    """Start a process with an app, and end it after the block."""
    script = [str(peer_python(case.peer)), "-I", str(HERE / "peer_adapter.py")]
    command = [*script, case.framework, str(case.agents), kind, url, str(deal)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=FOLDER,
        env=peer_environment(),
    )
    try:
        yield Process(kind, process)
    finally:
        process.communicate()


def measure(
    case: Case, kinds: Sequence[str], url: str, runs: int, rounds: int, deal: int = 0
) -> dict[str, list[float]]:
    """Return kind → CPU microseconds per run, one figure per round.

    `deal` is explained in `peer_adapter.py`.
    """
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        apps = [stack.enter_context(running(case, kind, url, deal)) for kind in kinds]
        for app in apps:
            app.read()
        for number in range(rounds):
            turn = number % len(apps)
            for app in (*apps[turn:], *apps[:turn]):
                got = app.ask(runs)
                check(case, app.kind, got)
                spent[app.kind].append(got["us"])
    return spent


def check(case: Case, kind: str, got: Mapping[str, float]) -> None:
    """Check that an app recorded as many spans and calls as it should.

    Raises:
        PeerError: it did not.
    """
    said = f"{case.framework}, {kind}: {got['spans']} spans and {got['calls']} model calls a run"
    if kind in case.spans and got["spans"] != case.spans[kind]:
        raise PeerError(f"{said}, not {case.spans[kind]} spans")
    if kind.startswith("openinference") and got["calls"] < case.agents:
        raise PeerError(f"{said}: an instrumentor does nothing")


def added(spent: Mapping[str, Sequence[float]], kind: str) -> float:
    """Return the microseconds that a kind adds to a run of the bare app, the median over rounds."""
    pairs = zip(spent[kind], spent["plain"], strict=True)
    return statistics.median(own - bare for own, bare in pairs)


def figures_of(spent: dict[str, list[float]], alone: dict[str, Any]) -> list[Figure]:
    """Return the rows of the table."""
    theirs = added(spent, PEER)
    found = [
        Figure(
            what=f"added to a call, {kind}",
            unit="CPU-us",
            ours=added(spent, kind),
            peer="openinference",
            theirs=theirs,
            at_least=HALF,
        )
        for kind in ("redirected", "recorded")
    ]
    found.append(
        Figure(
            what="added with no scope open",
            unit="CPU-us",
            ours=alone["us"],
            at_most=OUTSIDE_US,
            note=f"shim {alone['shim_us']:.2f}, adapter {alone['adapter_us']:.2f}",
        )
    )
    outside = added(spent, "outside")
    bare = statistics.median(spent["plain"])
    found.append(Figure(what="the same as a difference of runs", unit="CPU-us", ours=outside))
    found.append(Figure(what="the bare run", unit="CPU-us", ours=bare))
    return found


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--runs", type=int, default=50, help="runs in a round, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with Upstream() as url:
        spent = measure(LANGGRAPH, KINDS, url, options.runs, options.rounds)
        alone = run_peer(LANGGRAPH.peer, "peer_adapter.py", "langgraph", "1", "alone", url)
    return finish(figures_of(spent, alone), options.json)


if __name__ == "__main__":
    sys.exit(main())
