"""Count the instructions that an app of `peer_adapter.py` executes, by valgrind's callgrind.

    with counting(case, "recorded", url) as app:
        app.count(10)        # of ten runs, each: {"instructions": …, "spans": …, "calls": …}

CPU time varies by more than an adapter adds to it; the instructions of one process, all its threads
together, vary by less than a thousandth. The whole process runs under valgrind, but only its runs
are counted: before and after them it waits, while callgrind is made (by `vgdb`, which comes with
valgrind) to start counting and to write the sum. Instructions of the kernel are not counted, and
neither is time without instructions, such as waits and cache misses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from _peers import FOLDER, HERE, PeerError, peer_environment, peer_python
from adapter import Case, Process

TOOLS: Final = ("valgrind", "vgdb")
_SUM: Final = re.compile(r"^totals: (\d+)$", re.MULTILINE)


def lacking() -> str:
    """Return the programs needed for counting that are not installed; "" if all are."""
    return ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)


class Counted(Process):
    """A process with an app under callgrind."""

    def __init__(self, kind: str, process: subprocess.Popen[str], folder: Path) -> None:
        super().__init__(kind, process)
        self._folder = folder
        self._sums = 0

    def count(self, runs: int) -> dict[str, float]:
        """Return what one of `runs` runs takes on average: instructions, spans and model calls.

        Raises:
            PeerError: the process ended, or callgrind does not answer.
        """
        self.say(f"{runs} stop")
        self.read()  # it is about to begin
        self._tell("instrumentation", "on")
        self._tell("zero")
        self.say("go")
        self.read()  # it has done them
        self._tell("dump", "runs")
        self._tell("instrumentation", "off")
        self.say("go")
        return {**self.read(), "instructions": self._sum() / runs}

    def _tell(self, *command: str) -> None:
        script = ["vgdb", f"--pid={self.pid}", "--wait=60", *command]
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerError(f"{self.kind}: {' '.join(script)} failed:\n{done.stderr[-2000:]}")

    def _sum(self) -> int:
        self._sums += 1
        text = (self._folder / f"out.{self._sums}").read_text()
        match = _SUM.search(text)
        if match is None:
            raise PeerError(f"{self.kind}: callgrind wrote no sum:\n{text[:2000]}")
        return int(match[1])


@contextmanager
def counting(case: Case, kind: str, url: str, deal: int = 0) -> Iterator[Counted]:
    """Start an app under callgrind, and end it after the block.

    Python's option -I is not used, because with it Python ignores PYTHONHASHSEED. Sets and dicts,
    and so the number of instructions, would differ between processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no"]
        valgrind.append(f"--callgrind-out-file={folder}/out")
        python = [str(peer_python(case.peer)), "-P", "-s", str(HERE / "peer_adapter.py")]
        process = subprocess.Popen(
            [*valgrind, *python, case.framework, str(case.agents), kind, url, str(deal)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=FOLDER,
            env=peer_environment(PYTHONHASHSEED="0"),
        )
        try:
            app = Counted(kind, process, Path(folder))
            app.read()
            yield app
        finally:
            process.communicate()
