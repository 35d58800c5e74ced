"""Metrics of an update: sums over its tokens, and the combination over policies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor

_GAP: Final = "logprob_gap"


class MetricAccumulator:
    """Sums over the tokens of one policy's update."""

    def __init__(self, policy_gradient: bool, rows: int) -> None:
        self._policy_gradient = policy_gradient
        self._sums: dict[str, float] = defaultdict(float, rows=float(rows))
        self._peaks: dict[str, float] = defaultdict(float)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.detach().double().sum())

    def count(self, tokens: int) -> None:
        self._sums["tokens"] += tokens

    def peak(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._peaks[name] = max(self._peaks[name], float(values.detach().max()))

    def add_gap(self, gap: Tensor, fresh: Tensor) -> None:
        """The engine/learner difference, over all tokens and over the fresh ones. Only the latter
        shows whether both run the same model; the rest is what was learned since."""
        for name, values in (("stale", gap), ("fresh", gap[fresh])):
            self.add(f"{name}_gap", values)
            self.peak(f"{name}_gap", values)
            self._sums[f"{name}_tokens"] += values.numel()

    @property
    def so_far(self) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, peaks)"""
        return dict(self._sums), dict(self._peaks)

    def replace(self, parts: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> None:
        """Make this the tally of several, each (sums, peaks), in an order that is the same wherever
        this is done."""
        self._sums.clear()
        self._peaks.clear()
        for sums, peaks in parts:
            for name, value in sums.items():
                self._sums[name] += value
            for name, value in peaks.items():
                self._peaks[name] = max(self._peaks[name], value)

    def metrics(self) -> dict[str, float]:
        count = max(self._sums["tokens"], 1.0)
        metrics = {"loss": self._sums["loss"], "tokens": self._sums["tokens"]}
        metrics["entropy"] = self._sums["entropy"] / count
        metrics["rows"] = self._sums["rows"]
        if self._policy_gradient:
            for name in ("kl", "clip_fraction", "ratio_mean"):
                metrics[name] = self._sums[name] / count
            metrics["ratio_max"] = self._peaks["ratio_max"]
            kind = "fresh" if self._sums["fresh_tokens"] else "stale"
            gap_tokens = max(self._sums[f"{kind}_tokens"], 1.0)
            metrics["logprob_gap_mean"] = self._sums[f"{kind}_gap"] / gap_tokens
            metrics["logprob_gap_max"] = self._peaks[f"{kind}_gap"]
            metrics["fresh_tokens"] = self._sums["fresh_tokens"]
        return metrics


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
