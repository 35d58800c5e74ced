"""CPU time that each adapter adds to a call and to an agent's step, compared with OpenInference.

    python benchmarks/adapters.py [--frameworks langgraph …] [--units call …] [--runs 20]
        [--rounds 8] [--deals 5] [--instructions] [--json PATH]

For each framework two apps: one agent that asks its model once (*a call*), and four agents that ask
once each, one after the other (*a step* is a fourth of a run). They ask over HTTP a model server in
another process that answers instantly. Four processes of each app take turns, all in one
environment with the packages of both sides: without instrumentation; ours with the calls recorded
but not redirected; ours with the calls redirected to a gateway (the model server is used as the
gateway); and OpenInference's instrumentor of the framework, with a batch processor and an exporter
that discards all spans. If that instrumentor records no model calls (CrewAI), OpenInference's
instrumentor of the OpenAI client is added. Ours includes writing the spans to SQLite.

The added time is the CPU time minus that of the bare app in the same round; the median over rounds
is reported. How fast a process is depends on how its types and names are placed in CPython's method
cache (`peer_adapter.deal`), for as long as it lives. So the four processes are started again for
each of `--deals`. With each ratio, an interval is printed that contains 95 % of 2,000 bootstrap
samples (of deals, and of rounds in them). With `--instructions`, the instructions of ten runs of
each deal are counted too, by valgrind's callgrind (`_instructions.py`); other work on the machine
does not change them. The script fails if a process records another number of spans than it should,
or if the peer records too few model calls.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from _instructions import counting, lacking
from _report import Figure, finish, options_of
from _upstream import Upstream
from adapter import HALF, Case, added, check, measure

PEER: Final = "openinference"
KINDS: Final = ("plain", "redirected", "recorded", PEER)
STEPS: Final = 4
UNITS: Final = ("call", "step")
COUNTED: Final = 10
"""Number of runs whose instructions are counted; as many as a scope has."""
SAMPLES: Final = 2_000

Spent = Mapping[str, Sequence[float]]
"""Kind → what a run cost, one figure per round."""
ENVIRONMENTS: Final = {
    "langgraph": "openinference",
    "autogen": "openinference-autogen",
    "openai_agents": "openinference-openai-agents",
    "crewai": "openinference-crewai",
}


def cases(framework: str) -> dict[str, Case]:
    """Return unit → the app that is measured for it."""
    peer = ENVIRONMENTS[framework]
    team = framework == "autogen"
    return {
        "call": Case(framework=framework, peer=peer),
        "step": Case(framework=framework, peer=peer, agents=STEPS, is_team=team),
    }


def deal_of(number: int) -> int:
    """Return the argument `DEAL` of the processes of deal `number`."""
    return 1 + 97 * number


def pooled(deals: Sequence[Spent]) -> Spent:
    """Return the rounds of all deals together."""
    return {kind: [*chain.from_iterable(deal[kind] for deal in deals)] for kind in KINDS}


def interval(deals: Sequence[Spent], kind: str) -> tuple[float, float]:
    """Return the bounds that contain the ratio in 95 % of bootstrap samples."""
    chance = random.Random(0)  # the same figures have the same interval
    ratios = []
    for _ in range(SAMPLES):
        chosen = pooled([_resampled(chance.choice(deals), chance) for _ in deals])
        ours, theirs = added(chosen, kind), added(chosen, PEER)
        ratios.append(theirs / ours if ours > 0 else float("inf"))
    ratios.sort()
    return ratios[round(0.025 * SAMPLES)], ratios[round(0.975 * SAMPLES) - 1]


def _resampled(deal: Spent, chance: random.Random) -> Spent:
    rounds = range(len(deal["plain"]))
    places = [chance.choice(rounds) for _ in rounds]
    return {kind: [deal[kind][place] for place in places] for kind in KINDS}


def figures_of(unit: str, case: Case, deals: Sequence[Spent], scale: str) -> list[Figure]:
    """Return the rows of one app: what we and the peer add to a call, or to a step."""
    spent = pooled(deals)
    bare = statistics.fmean(spent["plain"]) / case.agents
    rows = []
    for kind in ("recorded", "redirected"):
        low, high = interval(deals, kind)
        rows.append(
            Figure(
                what=f"{case.framework}, added to a {unit}, {kind}",
                unit=scale,
                ours=added(spent, kind) / case.agents,
                peer=PEER,
                theirs=added(spent, PEER) / case.agents,
                at_least=HALF,
                note=f"{low:.2f}x to {high:.2f}x, bare app {bare:,.0f}",
            )
        )
    return rows


def count(case: Case, url: str, deal: int) -> Spent:
    """Return kind → instructions per run."""
    counts = {}
    for kind in KINDS:
        with counting(case, kind, url, deal) as app:
            app.count(COUNTED)  # what is done once is done
            got = app.count(COUNTED)
        check(case, kind, got)
        counts[kind] = [got["instructions"]]
    return counts


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--frameworks", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--runs", type=int, default=20, help="runs in a round, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of a deal; 0: no time")
    parser.add_argument("--deals", type=int, default=5, help="how often processes are begun anew")
    parser.add_argument("--instructions", action="store_true", help="count them, with valgrind")
    options = parser.parse_args()
    if options.instructions and lacking():
        parser.error(f"--instructions needs {lacking()}: install valgrind")
    if options.deals < 1 or options.rounds < (0 if options.instructions else 1):
        parser.error("nothing would be measured: --deals and --rounds are at least 1")
    figures: list[Figure] = []
    dealt = [deal_of(number) for number in range(options.deals)]
    with Upstream() as url:
        for framework in options.frameworks:
            for unit, case in cases(framework).items():
                if unit not in options.units:
                    continue
                if options.rounds:
                    rounds = (options.runs, options.rounds)
                    spent = [measure(case, KINDS, url, *rounds, deal) for deal in dealt]
                    figures += figures_of(unit, case, spent, "CPU-us")
                if options.instructions:
                    counts = [count(case, url, deal) for deal in dealt]
                    figures += figures_of(unit, case, counts, "instructions")
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
