"""What a training costs more while its page is open, compared with the same training without it.

    python benchmarks/web_page_training.py [--steps 10] [--pairs 5] [--json PATH]

A tiny model is trained by turns without a page and with `Trainer(ui=…)`, several times, after a
training of each kind that is not counted. A client in a process of its own does what a browser with
the run's page does: it follows `/events`, and after each change it asks for the run, its curves and
the list of runs. Compared are the CPU seconds of the trainer's process, all threads together, and
the wall time, which includes what page and client take from the cores. What counts is the median of
the ratios of the pairs. Exit status 1 if the CPU time is more than 5 % above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from _overlap_apps import talk, tasks
from _report import Figure, finish, options_of

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan_testing.tiny import tiny_model

AT_MOST: Final = 1.05
"""Maximum CPU time of the trainer with an open page, as a multiple of that without."""
SETTLE_S: Final = 0.25
"""Seconds that the page waits after a change before it asks, for further changes."""
START_S: Final = 30.0
CURVES: Final = ("reward", "learner/entropy", "learner/approx_kl", "failed", "seconds")


class Cost(NamedTuple):
    """What a training cost."""

    cpu_s: float
    wall_s: float
    answers: int
    """Number of answers that the client got from the page."""


# --- the client ---------------------------------------------------------------------------------
class Browser:
    """A page of a run that is open, without the drawing.

    Args:
        address: the printed address of the page, with the token.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._api = f"http://{parts.netloc}/api/v1"
        self._run = parts.path  # /runs/NAME
        [self._token] = parse_qs(parts.query)["token"]
        self._is_changed = threading.Event()
        self._is_closed = False

    def follow(self) -> int:
        """Ask again after each change until the page ends; return the number of answers."""
        self._wait()
        threading.Thread(target=self._listen, daemon=True).start()
        count = 0
        try:
            while not self._is_closed:
                count += self._ask_all()
                self._is_changed.wait()
                time.sleep(SETTLE_S)
                self._is_changed.clear()
        except OSError:  # the training has ended, and the page with it
            pass
        return count

    def _ask_all(self) -> int:
        names = ",".join(CURVES)
        curves = (f"{self._run}/metrics?names={names}&kind=train&points=600",)
        paths = (self._run, *curves, "/places")
        for path in paths:
            with self._open(path) as response:
                json.loads(response.read())
        return len(paths)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._open("/places").close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _listen(self) -> None:
        try:
            with self._open("/events") as events:
                while line := events.readline():
                    if line.startswith(b"data: "):
                        self._is_changed.set()
        except OSError:
            pass
        self._is_closed = True
        self._is_changed.set()

    def _open(self, path: str) -> Any:
        request = urllib.request.Request(self._api + path)
        request.add_header("Authorization", f"Bearer {self._token}")
        return urllib.request.urlopen(request, timeout=30)


class Opening(SilentReporter):
    """A reporter that opens the page, whose address the training prints."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.client: subprocess.Popen[str] | None = None

    def line(self, text: str) -> None:
        self.lines.append(text)
        if text.startswith("watch: "):
            command = [sys.executable, __file__, "--follow", text.removeprefix("watch: ")]
            self.client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


# --- the training -------------------------------------------------------------------------------
def train(model: Path, folder: Path, steps: int, *, has_page: bool) -> Cost:
    """Train, and return what it cost in this process."""
    algorithm = LightningRL(model, optimize="talker", group_size=8, tasks_per_step=8, seed=0)
    opening = Opening()
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(16, processes=1),
        steps=steps,
        folder=folder,
        reporter=opening,
        ui=0 if has_page else False,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    trainer.fit(talk, tasks(8 * steps, "talk"))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    answers = 0
    if has_page:
        if opening.client is None:
            raise SystemExit("\n".join(["no page was opened:", *opening.lines]))
        answers = int(opening.client.communicate(timeout=60)[0])
        if answers < 2 * steps:
            raise SystemExit(
                f"the client got {answers} answers in {steps} steps: it did not follow"
            )
    return Cost(cpu, wall, answers)


def measured(steps: int, count: int) -> list[tuple[Cost, Cost]]:
    """Return the costs without and with a page of each pair, in alternating order."""
    pairs = []
    with tempfile.TemporaryDirectory() as temporary:
        model = tiny_model(Path(temporary) / "model", seed=0)
        for number in range(count + 1):
            costs = {}
            for has_page in (False, True) if number % 2 else (True, False):
                folder = Path(temporary) / f"run-{number}-{has_page}"
                costs[has_page] = train(model, folder, steps, has_page=has_page)
            if number:  # the first pair warms up
                pairs.append((costs[False], costs[True]))
    return pairs


def figures(pairs: Sequence[tuple[Cost, Cost]]) -> list[Figure]:
    """Return the rows of the table."""
    rows = []
    for what, field, at_most in (
        ("CPU time of the trainer's process", "cpu_s", AT_MOST),
        ("wall time", "wall_s", None),
    ):
        values = [(getattr(without, field), getattr(page, field)) for without, page in pairs]
        ratios = [page / without for without, page in values]
        without, page = (statistics.median(each) for each in zip(*values, strict=True))
        rows.append(
            Figure(
                what=f"{what}, page open",
                unit="times that without",
                ours=statistics.median(ratios),
                at_most=at_most,
                note=f"{min(ratios):.3f} to {max(ratios):.3f}; {page:.2f} s and {without:.2f} s",
            )
        )
    answers = statistics.median(page.answers for _, page in pairs)
    return [*rows, Figure(what="answers of the page in a training", unit="answers", ours=answers)]


def main() -> int:
    """Measure, print the figures, and return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--follow", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        print(Browser(options.follow).follow())
        return 0
    return finish(figures(measured(options.steps, options.pairs)), options.json)


if __name__ == "__main__":
    sys.exit(main())
