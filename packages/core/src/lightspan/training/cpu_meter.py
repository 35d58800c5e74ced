"""Measure CPU-seconds and the speed of steps."""

from __future__ import annotations

import time
from typing import Final

from lightspan.algorithms.protocol import Metrics
from lightspan.protocols.engine import TokenEngine
from lightspan.protocols.learner import Learner
from lightspan.training.collector import Collector
from lightspan.training.folder import RunFolder

_CPU: Final = "cpu_s/"
"""Prefix of the names of CPU-seconds in the metrics."""


class Meter:
    """Meter of the CPU-seconds of engine and learner, and of the duration of steps.

    Args:
        engine: engine of the run; None without an engine.
        learner: learner of the run; None without a learner.
        collector: collector of the rollouts, which measures how long rollouts run.
        seconds: the CPU-seconds before the last restart, by part (`engine`, `engine_evaluation`,
            `learner`, `learner_evaluation`). The meter adds to this dict.
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
        """Add the CPU-seconds that were used since the last `charge` to the totals.

        Args:
            phase: suffix of the metrics' names: empty for training, `_evaluation` for evaluation.
        """
        for name, part in self._parts.items():
            used = float(part.usage().get("cpu_s", 0.0))
            before = self._seconds.get(name + phase, 0.0)
            self._seconds[name + phase] = before + used - self._read[name]
            self._read[name] = used

    def spent(self) -> Metrics:
        """Return the CPU-seconds so far, as a metric `cpu_s/<part>` per part."""
        return {f"{_CPU}{part}": round(value, 6) for part, value in self._seconds.items()}

    def start_step(self) -> None:
        """Mark the beginning of a step."""
        self._start = self._now()

    def end_step(self) -> Metrics:
        """Return the metrics of the step since `start_step`.

        `seconds` is the duration of the step. `seconds/rollouts` is the part of it during which
        rollouts ran or waited for a runner. The engine's tokens and tokens per second follow if
        there is an engine.
        """
        self.charge()
        pairs = zip(self._now(), self._start, strict=True)
        seconds, waited, tokens = (now - before for now, before in pairs)
        metrics = {"seconds": seconds, "seconds/rollouts": waited}
        if self._engine is not None:
            speed = tokens / waited if waited else 0.0
            metrics |= {"engine/tokens": tokens, "engine/tokens_per_s": speed}
        return metrics

    def _now(self) -> tuple[float, float, float]:
        tokens = self._engine.usage().get("tokens", 0.0) if self._engine is not None else 0.0
        return time.monotonic(), self._collector.seconds, tokens


def last_seconds(folder: RunFolder) -> dict[str, float]:
    """Return the CPU-seconds of each part in the last line of `metrics.jsonl`.

    The result is empty if there is no line. The numbers may be higher than those in the last
    checkpoint, if steps were run after it.
    """
    lines = folder.metrics()
    last = lines[-1] if lines else {}
    return {key[len(_CPU) :]: value for key, value in last.items() if key.startswith(_CPU)}
