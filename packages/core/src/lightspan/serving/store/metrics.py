"""What a server has done, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from lightspan.schema.records import RolloutStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4"
_Sample = tuple[str, Mapping[str, object], float]


class Metrics:
    """Counts requests by operation and status: names, nothing of what was said."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def count(self, operation: str, status: int, seconds: float) -> None:
        """One request was answered, after so long."""
        self._requests[operation, status] += 1
        self._seconds[operation] += seconds

    def text(self, inside: Mapping[str, int], rollouts: Mapping[RolloutStatus, int]) -> str:
        """Everything, a line each.

        Args:
            inside: requests under way, by kind.
            rollouts: of the store, by status; those that have none are said too.
        """
        lines = _metric(
            *("lightspan_store_requests_total", "counter", "Requests answered."),
            (
                ("", {"operation": operation, "status": status}, count)
                for (operation, status), count in sorted(self._requests.items())
            ),
        )
        lines += _metric(
            *(
                "lightspan_store_request_seconds",
                "summary",
                "How long they took, waiting included.",
            ),
            (sample for operation in sorted(self._seconds) for sample in self._summary(operation)),
        )
        lines += _metric(
            *("lightspan_store_requests", "gauge", "Requests under way."),
            (("", {"kind": kind}, count) for kind, count in inside.items()),
        )
        lines += _metric(
            *("lightspan_store_rollouts", "gauge", "Rollouts in the store."),
            (("", {"status": status}, rollouts.get(status, 0)) for status in RolloutStatus),
        )
        return "\n".join([*lines, ""])

    def _summary(self, operation: str) -> list[_Sample]:
        answered = sum(n for (name, _), n in self._requests.items() if name == operation)
        labels = {"operation": operation}
        return [("_sum", labels, self._seconds[operation]), ("_count", labels, answered)]


def _metric(name: str, kind: str, said: str, samples: Iterable[_Sample]) -> list[str]:
    lines = [f"# HELP {name} {said}", f"# TYPE {name} {kind}"]
    for ending, labels, value in samples:
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        lines.append(f"{name}{ending}{{{shown}}} {value:.15g}")
    return lines
