"""The meter of a run: the CPU-seconds that its parts used, and how fast a step was."""

from __future__ import annotations

import time
from typing import Final

from lightspan.algorithms.protocol import Metrics
from lightspan.protocols.engine import TokenEngine
from lightspan.protocols.learner import Learner
from lightspan.training.collector import Collector
from lightspan.training.folder import RunFolder

_CPU: Final = "cpu_s/"
"""What the names of CPU-seconds begin with in a line of the metrics."""


class Meter:
    """Reads engine, learner and collector.

    Args:
        engine: what it has used so far is the run's; None where there is none.
        learner: likewise.
        collector: of the rollouts.
        seconds: CPU-seconds of earlier lives, which those of this one are added to: part
            (`engine`, and `engine_evaluation` apart; the learner likewise) → seconds.
    """

    def __init__(
        self,
        engine: TokenEngine | None,
        learner: Learner | None,
        collector: Collector,
        seconds: dict[str, float],
    ) -> None:
        self._engine = engine
        parts = {"engine": engine, "learner": learner}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        self._read = dict.fromkeys(self._parts, 0.0)
        self._collector = collector
        self._seconds = seconds
        self._start = self._now()

    def charge(self, phase: str = "") -> None:
        """Add the CPU-seconds since the last call to a phase (`_evaluation`, or training)."""
        for name, part in self._parts.items():
            used = float(part.usage().get("cpu_s", 0.0))
            before = self._seconds.get(name + phase, 0.0)
            self._seconds[name + phase] = before + used - self._read[name]
            self._read[name] = used

    def spent(self) -> Metrics:
        """The CPU-seconds, as a line of the metrics has them."""
        return {f"{_CPU}{part}": round(value, 6) for part, value in self._seconds.items()}

    def start_step(self) -> None:
        """A step begins."""
        self._start = self._now()

    def end_step(self) -> Metrics:
        """How long the step took, and how fast the engine was."""
        self.charge()
        seconds, waited, tokens = (
            now - before for now, before in zip(self._now(), self._start, strict=True)
        )
        metrics = {"seconds": seconds, "seconds/rollouts": waited}
        if self._engine is None:
            return metrics
        return {
            **metrics,
            "engine/tokens": tokens,
            "engine/tokens_per_s": tokens / waited if waited else 0.0,
        }

    def _now(self) -> tuple[float, float, float]:
        tokens = self._engine.usage().get("tokens", 0.0) if self._engine is not None else 0.0
        return time.monotonic(), self._collector.seconds, tokens


def last_seconds(folder: RunFolder) -> dict[str, float]:
    """CPU-seconds as the last line of the metrics has them: it may be newer than a checkpoint."""
    lines = folder.metrics()
    last = lines[-1] if lines else {}
    return {key[len(_CPU) :]: value for key, value in last.items() if key.startswith(_CPU)}
