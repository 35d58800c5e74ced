"""CPU that each adapter adds to a model call and to an agent's step, against OpenInference's.

    python benchmarks/adapters.py [--frameworks langgraph …] [--runs 20] [--rounds 20] [--json PATH]

For each framework two apps: one agent that asks its model once (*a call*), and four agents that ask
once each, one after the other (*a step* is a fourth of a run). They ask over HTTP a model server in
another process that answers instantly. Of each app four processes take turns, all in one
environment with both sides: nothing installed; ours with the calls recorded where the app pointed
them; ours with the calls redirected to a gateway (the model server stands for it); OpenInference's
instrumentor of the framework, with a batch processor and an exporter that throws everything away.
Its instrumentor of the OpenAI client is added where the framework's own records no model calls
(CrewAI). Ours includes the writing of the spans to SQLite.

What something adds is the median over the rounds of its CPU time less that of the bare app in the
same round. A process that records another number of spans than it should, and a peer that records
fewer model calls than there are, end the script.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from _report import Figure, finish, options_of
from _upstream import Upstream
from adapter import HALF, Case, added, measure

PEER: Final = "openinference"
KINDS: Final = ("plain", "redirected", "recorded", PEER)
STEPS: Final = 4
ENVIRONMENTS: Final = {
    "langgraph": "openinference",
    "autogen": "openinference-autogen",
    "openai_agents": "openinference-openai-agents",
    "crewai": "openinference-crewai",
}


def cases(framework: str) -> dict[str, Case]:
    """What is measured of a framework, by the unit of its figures."""
    peer = ENVIRONMENTS[framework]
    team = framework == "autogen"
    return {
        "call": Case(framework=framework, peer=peer),
        "step": Case(framework=framework, peer=peer, agents=STEPS, is_team=team),
    }


def figures_of(unit: str, case: Case, spent: Mapping[str, Sequence[float]]) -> list[Figure]:
    """The rows of one app: each side's microseconds a call, or a step."""
    bare = sum(spent["plain"]) / len(spent["plain"]) / case.agents
    theirs = added(spent, PEER) / case.agents
    return [
        Figure(
            what=f"{case.framework}, added to a {unit}, {kind}",
            unit="CPU-us",
            ours=added(spent, kind) / case.agents,
            peer=PEER,
            theirs=theirs,
            at_least=HALF,
            note=f"bare app {bare:,.0f}",
        )
        for kind in ("recorded", "redirected")
    ]


def main() -> int:
    """See the module; the exit status says whether the targets are reached."""
    parser = options_of(__doc__)
    parser.add_argument("--frameworks", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--runs", type=int, default=20, help="runs in a round, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    figures: list[Figure] = []
    with Upstream() as url:
        for framework in options.frameworks:
            for unit, case in cases(framework).items():
                spent = measure(case, KINDS, url, options.runs, options.rounds)
                figures += figures_of(unit, case, spent)
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
