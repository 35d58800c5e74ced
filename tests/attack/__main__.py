"""Attack a training's gateway and `lightspan serve` with hostile requests: `nox -s attack`.

    nox -s attack -- [--requests 500000] [--seed 0] [--victim gateway|serve] [--delays]

Printed are the requests tried, by class of status, those without an answer, and the victim's
memory on the way. What is answered with 5xx, or not at all, is shown, and fails the run; so does
memory that grows by more than 128 MiB and 512 bytes a request after the first look, which is when
one in twenty was sent. `--delays` measures instead how long others wait while the most expensive
requests are in flight, and fails where that is more than 100 ms beyond their share of the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.attack.delays import measured
from tests.attack.run import attacked
from tests.attack.victims import DELAYED, VICTIMS


def main() -> int:
    """Run it; returns the exit status."""
    options = _parser().parse_args()
    failed = False
    for name in options.victim or VICTIMS:
        attacking = (DELAYED if options.delays else VICTIMS)[name]
        with tempfile.TemporaryDirectory() as folder, attacking(Path(folder)) as victim:
            if options.delays:
                delays = asyncio.run(measured(victim))
                print(f"{name}: {delays.text()}", flush=True)
                failed |= delays.failed
                continue
            outcome = asyncio.run(attacked(victim, options.requests, options.seed, say=print))
            print(f"{name}: {outcome.text()}", *outcome.wrong, sep="\n", flush=True)
            grown, allowed = outcome.grown
            print(
                f"grew by {grown / 2**20:,.0f} MiB since the first look; "
                f"{allowed / 2**20:,.0f} are allowed",
                flush=True,
            )
            failed |= bool(outcome.failed or outcome.unanswered or grown > allowed)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nox -s attack --", description=__doc__)
    parser.add_argument("--requests", type=int, default=500_000, help="to each victim")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds send equal requests")
    parser.add_argument("--victim", action="append", choices=sorted(VICTIMS))
    parser.add_argument("--delays", action="store_true", help="measure waits instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
