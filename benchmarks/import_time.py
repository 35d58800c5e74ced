"""What lightspan costs in an app's environment: CPU time of its import, and added distributions.

    python benchmarks/import_time.py [--repeats 7] [--json PATH]

Each import is a fresh isolated process; a figure is the CPU time (user and system) of the median
process minus that of a process that imports nothing. The imports of a runner (the runner, the wire
shim, the stores) are measured too, because `import lightspan` loads names only when they are used.
Distributions are counted in real environments: a LangGraph app's own (langgraph, langchain-openai),
the same with core and the LangGraph adapter, and each peer's. What counts is what an environment
has beyond the LangGraph app's own; pip and setuptools are left out. Nothing is fetched while it is
measured; making the environments needs an index.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from _peers import FOLDER, PeerError, distributions, peer_environment, peer_python
from _report import Figure, finish, options_of

OURS, APP = "langgraph-lightspan", "langgraph"
OLD, NEW = "agentlightning-0.3.0", "agentlightning-1.0.2"
IMPORT_S: Final = 0.25
ADDED: Final = 20

IMPORTS: Final[Mapping[str, tuple[str, str]]] = {
    "import lightspan": (OURS, "import lightspan"),
    "what a runner imports": (
        OURS,
        "import lightspan.runners.runner, lightspan.capture.sdk_instrumentation; "
        "import lightspan.capture.emit, lightspan.stores",
    ),
    OLD: (OLD, "import agentlightning"),
    # The package itself is empty: what its programs, the gateway and the controller, import.
    NEW: (
        NEW,
        "import agentlightning.server.__main__, agentlightning.controller.__main__, "
        "agentlightning.client",
    ),
}


def cpu_s(python: str, code: str) -> float:
    """Return the CPU seconds, user and system, of a new process that runs `code`.

    Raises:
        PeerError: the process failed.
    """
    process = subprocess.Popen(
        [python, "-I", "-c", code],
        env=peer_environment(),
        cwd=FOLDER,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    complaint = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise PeerError(f"{python}: {code!r} failed:\n{complaint[-2000:]}")
    return usage.ru_utime + usage.ru_stime


def imports(repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each import, without the start of the interpreter."""
    pythons = {name: str(peer_python(peer)) for name, (peer, _) in IMPORTS.items()}
    spent: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for repeat in range(repeats + 1):  # the first writes the byte code
        for name, (_, code) in IMPORTS.items():
            own = cpu_s(pythons[name], code) - cpu_s(pythons[name], "pass")
            if repeat:
                spent[name].append(own)
    return {name: statistics.median(values) for name, values in spent.items()}


def added() -> dict[str, list[str]]:
    """Return the distributions of each environment that a LangGraph app does not have anyway."""
    own = distributions(APP).keys()
    return {name: sorted(distributions(name).keys() - own) for name in (OURS, OLD, NEW)}


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="processes of each kind")
    options = parser.parse_args()
    cpu, more = imports(options.repeats), added()
    print(f"core and the LangGraph adapter add: {', '.join(more[OURS])}\n")
    figures = [
        Figure(
            what=what,
            unit="CPU-s",
            ours=cpu[what],
            peer=peer,
            theirs=cpu[peer],
            at_most=IMPORT_S,
        )
        for what in ("import lightspan", "what a runner imports")
        for peer in (OLD, NEW)
    ]
    figures += [
        Figure(
            what="distributions added",
            unit="dists",
            ours=len(more[OURS]),
            peer=peer,
            theirs=len(more[peer]),
            at_most=ADDED,
            note=f"of {len(distributions(peer))} in all",
        )
        for peer in (OLD, NEW)
    ]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
