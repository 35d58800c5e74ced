"""Divide the CPU time of a process among parts of its code, by sampling all of its threads.

At each sample the CPU time that a thread has used since the last one, by the thread's own clock,
goes to the code that the thread executes then. The sampler's own thread is left out, and so is the
time of threads without Python code.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Final, Self

INTERVAL_S: Final = 0.001
SWITCH_S: Final = 0.0001
"""Seconds after which a thread hands over Python's lock to the sampler. By default 0.005: then most
samples would be of places that give the lock away, such as the waiting for a socket.
"""
ELSE: Final = "event loop, threads and all else"


class CpuParts(threading.Thread):
    """Sample until `stop`; as a context manager, for the block.

    Args:
        rules: part → pieces of the paths of its files. The innermost frame that a rule names
            decides. Frames that no rule names, such as those of the standard library, belong to the
            frame that called them.
    """

    def __init__(self, rules: Mapping[str, Sequence[str]]) -> None:
        super().__init__(name="cpu-parts", daemon=True)
        self._pieces = [(piece, part) for part, pieces in rules.items() for piece in pieces]
        self._part_of: dict[str, str | None] = {}
        self._used: dict[int, int] = {}
        self._halt = threading.Event()
        self._switch_s = sys.getswitchinterval()
        self.ns: Counter[str] = Counter()
        """Part → CPU nanoseconds."""
        self.lines: Counter[tuple[str, str]] = Counter()
        """(part, function in which the part's code was) → CPU nanoseconds."""

    def run(self) -> None:
        own = threading.get_ident()
        sys.setswitchinterval(SWITCH_S)
        while not self._halt.wait(INTERVAL_S):
            for thread, frame in sys._current_frames().items():
                if thread != own:
                    self._add(thread, frame)

    def _add(self, thread: int, frame: FrameType | None) -> None:
        now = time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
        used, self._used[thread] = now - self._used.get(thread, now), now
        if used <= 0:
            return
        innermost = "" if frame is None else _name(frame)
        while frame is not None:
            part = self._of(frame.f_code.co_filename)
            if part is not None:
                self.ns[part] += used
                self.lines[part, f"{_name(frame)} ({innermost})"] += used
                return
            frame = frame.f_back
        self.ns[ELSE] += used
        self.lines[ELSE, innermost] += used

    def _of(self, path: str) -> str | None:
        if path not in self._part_of:
            found = (part for piece, part in self._pieces if piece in path)
            self._part_of[path] = next(found, None)
        return self._part_of[path]

    def stop(self) -> None:
        """Stop sampling."""
        self._halt.set()
        self.join()
        sys.setswitchinterval(self._switch_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _name(frame: FrameType) -> str:
    path = frame.f_code.co_filename.rpartition("site-packages/")[2]
    return f"{'/'.join(path.split('/')[-2:])}:{frame.f_code.co_name}"
