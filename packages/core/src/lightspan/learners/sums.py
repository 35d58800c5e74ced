"""What an update adds up: over a learner's policies, and over the ranks that share its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightspan.learners.tallies import Tally


class Sums:
    """Of a learner that has all rows: there is nothing to add."""

    def over_ranks(self, tally: Tally, parameters: Sequence[Tensor]) -> None:
        """Make the tally, and the parameters' gradients, those of the rows of all ranks."""

    def seed(self, seed: int, steps: int) -> int | None:
        """What dropout is drawn from in the coming step; None: the learner's own random state."""
        return None


def over_policies(parts: Mapping[str, Mapping[str, float]], rows: int) -> dict[str, float]:
    """One policy: its metrics. Several: totals, and each policy's as `<policy>/<metric>`."""
    if not parts:
        return {"loss": 0.0, "tokens": 0.0, "rows": float(rows), "skipped": 1.0}
    if len(parts) == 1:
        return {**next(iter(parts.values())), "rows": float(rows)}
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        having = [part for part in parts.values() if name in part]
        values = [part[name] for part in having]
        if name in ("loss", "tokens", "fresh_tokens", "value_calls"):
            combined[name] = sum(values)
        elif name.endswith("_max") or name in ("skipped", "learning_rate", "grad_norm"):
            combined[name] = max(values)
        else:
            count = "value_calls" if name in ("value_loss", "explained_variance") else "tokens"
            total = max(sum(part[count] for part in having), 1.0)
            combined[name] = sum(part[name] * part[count] for part in having) / total
    for policy, part in parts.items():
        combined.update({f"{policy}/{name}": value for name, value in part.items()})
    return {**combined, "rows": float(rows)}
