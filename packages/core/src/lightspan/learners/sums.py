"""What an update adds up: over a learner's policies, and over the ranks that share its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from lightspan.learners.tallies import Tally

_GAP: Final = "logprob_gap"


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
        having = _comparable(name, [part for part in parts.values() if name in part])
        values = [part[name] for part in having]
        if name in ("loss", "tokens", "fresh_tokens", "value_calls"):
            combined[name] = sum(values)
        elif name.endswith("_max") or name in ("skipped", "learning_rate", "grad_norm"):
            combined[name] = max(values)
        else:
            count = _counted(name, having)
            total = max(sum(part[count] for part in having), 1.0)
            combined[name] = sum(part[name] * part[count] for part in having) / total
    for policy, part in parts.items():
        combined.update({f"{policy}/{name}": value for name, value in part.items()})
    return {**combined, "rows": float(rows)}


def _comparable(name: str, parts: list[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """The parts whose numbers of a name are of one kind. A gap is of tokens sampled by the present
    weights; where a policy has none, of old ones, from which it differs because it has learned. One
    such policy would make all look as if engine and learner disagreed."""
    if not name.startswith(_GAP):
        return parts
    return [part for part in parts if part.get("fresh_tokens")] or parts


def _counted(name: str, parts: Sequence[Mapping[str, float]]) -> str:
    """How often each part counts in the mean."""
    if name in ("value_loss", "explained_variance"):
        return "value_calls"
    is_fresh = name.startswith(_GAP) and all(part.get("fresh_tokens") for part in parts)
    return "fresh_tokens" if is_fresh else "tokens"
