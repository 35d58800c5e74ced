"""Sums over the tokens of an update, from which its metrics are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import Tensor


class Tally:
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
