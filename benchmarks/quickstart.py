"""Measure which part uses the wall time of the quickstart's reinforcement learning.

Runs the SQL example as `nox -s quickstart` does (warm start cached or made first) and samples every
thread of the trainer's process and of the runner processes, some forty times a second: how long it
ran, and how long it waited for a core. The wall time of each interval is divided among the parts in
proportion to these times. If all of them together are shorter than the interval, the rest is idle
time. Training steps with checkpoints are counted; evaluations are listed separately.

`gateway` is the event loop with the store's writer: gateway, trainer and recording share it.

Run: python benchmarks/quickstart.py [--steps 20] [--json PATH]
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil
from _report import Figure, finish, options_of

from lightspan.progress import default_reporter
from lightspan.training.sinks import MetricSink, SinkRun
from lightspan_examples.example import Run
from sql_example import training

SCRIPT: Final = Path(__file__).parents[1] / "examples" / "sql" / "train.py"
INTERVAL_S: Final = 0.025
PARTS: Final = ("app", "gateway", "engine", "learner", "idle")
IDLE_REACH: Final = 10.0
"""Maximum share of idle time, in percent."""


class Sampler(threading.Thread):
    """A thread that divides the wall time among the parts until it is stopped."""

    def __init__(self) -> None:
        super().__init__(name="sampler", daemon=True)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._now: dict[str, float] = defaultdict(float)
        self._seen: dict[tuple[int, int], float] = {}
        self._children: list[int] = []
        self.phases: dict[str, dict[str, float]] = {}

    def run(self) -> None:
        last, ticks = time.perf_counter(), 0
        while not self._stopping.wait(INTERVAL_S):
            if ticks % 20 == 0:
                self._children = [child.pid for child in psutil.Process().children(recursive=True)]
            ticks += 1
            spent = self._spent()
            now = time.perf_counter()
            self._share(now - last, spent)
            last = now

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def end_phase(self, name: str) -> None:
        """Assign the time since the last call to the phase `name`."""
        with self._lock:
            into = self.phases.setdefault(name, dict.fromkeys(PARTS, 0.0))
            for part, seconds in self._now.items():
                into[part] += seconds
            self._now.clear()

    def _share(self, wall: float, spent: Mapping[str, float]) -> None:
        busy = sum(spent.values())
        idle = max(0.0, wall - busy)
        with self._lock:
            self._now["idle"] += idle
            for part, seconds in spent.items():
                self._now[part] += (wall - idle) * seconds / busy if busy else 0.0

    def _spent(self) -> dict[str, float]:
        """Return part → seconds that it ran or waited for a core since the last call."""
        spent: dict[str, float] = defaultdict(float)
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        own = os.getpid()
        for pid in (own, *self._children):
            for thread, seconds in _cpu(pid).items():
                before = self._seen.get((pid, thread))
                self._seen[pid, thread] = seconds
                if before is None or thread == self.native_id:
                    continue
                part = "app" if pid != own else _part(names.get(thread))
                spent[part] += seconds - before
        return spent


def _cpu(pid: int) -> dict[int, float]:
    """Return thread → seconds that it ran or waited for a core; empty if the process has ended."""
    found = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                ran, waited, _ = file.read().split()
                found[int(thread)] = (int(ran) + int(waited)) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def _part(name: str | None) -> str:
    """Return the part to which a thread belongs.

    Threads that Python does not know (None) are torch's, which compute for the engine.
    """
    if name is None or "_run_generation_loop" in name:
        return "engine"
    return "learner" if name.startswith("lightspan-learner") else "gateway"


class Phases(MetricSink):
    """A metric sink that ends a phase of `Sampler` at each line of metrics."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def open(self, run: SinkRun) -> None:
        self._sampler.end_phase("opening")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._sampler.end_phase(next(iter(values)).partition("/")[0])

    def close(self) -> None:
        self._sampler.end_phase("closing")


def script() -> Any:
    """Return the example's `train.py` as a module."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--steps", type=int, help="training iterations (the quickstart's)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    example = script().EXAMPLE
    sampler = Sampler()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--folder", f"{folder}/run", "--seed", str(options.seed)]
        if options.steps is not None:
            arguments += ["--steps", str(options.steps)]
        chosen = example.parser("").parse_args(arguments)
        run = Run(example, chosen, default_reporter(), sinks=[Phases(sampler)])
        trainer, questions, held_out = example.prepare(run)
        sampler.start()
        trainer.fit(training.answer, questions, held_out, agents=training.AGENTS)
        sampler.stop()
    phase = sampler.phases["train"]
    whole = sum(phase.values())
    print(f"training steps: {whole:.1f} s of wall time")
    for name, parts in sampler.phases.items():
        print(f"  {name}: " + ", ".join(f"{part} {parts[part]:.1f} s" for part in PARTS))
    figures = [
        Figure(
            what=f"wall time of training: {part}",
            unit="%",
            ours=100 * phase[part] / whole,
            at_most=IDLE_REACH if part == "idle" else None,
        )
        for part in PARTS
    ]
    return finish(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
