"""Metrics of an update: sums over its tokens, and their combination over policies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

_Value: TypeAlias = float | Tensor
"""A number, or a float64 tensor without dimensions on the device of the tokens."""
_GAP: Final = "logprob_gap"


class MetricAccumulator:
    """Sums and maxima of metrics over the tokens of one policy's update.

    They stay on the device until they are read, because reading one waits for the device.
    """

    def __init__(self, policy_gradient: bool, rows: int) -> None:
        self._policy_gradient = policy_gradient
        self._sums: dict[str, _Value] = defaultdict(float, rows=float(rows))
        self._maxima: dict[str, _Value] = defaultdict(float)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums[name] + values.detach().double().sum()

    def count(self, tokens: int) -> None:
        self._sums["tokens"] += tokens

    def update_max(self, name: str, values: Tensor) -> None:
        if values.numel():
            largest = values.detach().max().double()
            before = torch.as_tensor(self._maxima[name]).to(largest)
            self._maxima[name] = torch.fmax(before, largest)  # unlike `maximum`, it leaves out NaN

    def add_gap(self, gap: Tensor, fresh: Tensor) -> None:
        """Add the differences between the log-probabilities of engine and learner to the metrics.

        They are counted for all tokens and for fresh tokens. Only fresh tokens show whether engine
        and learner compute the same. The difference of an older token also includes what was
        learned since the token was sampled.

        Args:
            gap: [n] absolute difference of each token.
            fresh: [n] True for tokens that the current weights sampled.
        """
        self._sums["stale_tokens"] += gap.numel()
        self.add("fresh_tokens", fresh)
        # not `gap[fresh]`, for whose size the CPU would wait
        for name, values in (("stale", gap), ("fresh", torch.where(fresh, gap, 0.0))):
            self.add(f"{name}_gap", values)
            self.update_max(f"{name}_gap", values)

    @property
    def state(self) -> tuple[dict[str, float], dict[str, float]]:
        """The sums and the maxima, each as metric name → value."""
        return _floats(self._sums), _floats(self._maxima)

    def replace(self, states: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> None:
        """Set the sums and maxima to those over several accumulators, such as those of all ranks.

        Args:
            states: the `state` of each accumulator. Every rank must pass them in the same order,
                because float sums depend on the order.
        """
        self._sums.clear()
        self._maxima.clear()
        for sums, maxima in states:
            for name, value in sums.items():
                self._sums[name] += value
            for name, value in maxima.items():
                self._maxima[name] = max(float(self._maxima[name]), value)

    def metrics(self) -> dict[str, float]:
        """Return the metrics that `Learner.update` reports, except those of the optimiser step."""
        sums, maxima = (defaultdict(float, values) for values in self.state)
        count = max(sums["tokens"], 1.0)
        metrics = {"loss": sums["loss"], "tokens": sums["tokens"]}
        metrics["entropy"] = sums["entropy"] / count
        metrics["rows"] = sums["rows"]
        if "reverse_kl" in sums:
            metrics["reverse_kl"] = sums["reverse_kl"] / count
        if self._policy_gradient:
            for name in ("kl", "clip_fraction", "ratio_mean"):
                metrics[name] = sums[name] / count
            metrics["ratio_max"] = maxima["ratio_max"]
            kind = "fresh" if sums["fresh_tokens"] else "stale"
            gap_tokens = max(sums[f"{kind}_tokens"], 1.0)
            metrics["logprob_gap_mean"] = sums[f"{kind}_gap"] / gap_tokens
            metrics["logprob_gap_max"] = maxima[f"{kind}_gap"]
            metrics["fresh_tokens"] = sums["fresh_tokens"]
        return metrics


def _floats(values: Mapping[str, _Value]) -> dict[str, float]:
    """Return values as numbers; all that are on a device are read at once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = torch.stack(list(tensors.values())).tolist() if tensors else []
    return {
        **{name: value for name, value in values.items() if not isinstance(value, Tensor)},
        **dict(zip(tensors, numbers, strict=True)),
    }


def over_policies(parts: Mapping[str, Mapping[str, float]], rows: int) -> dict[str, float]:
    """Combine the metrics of all policies into the metrics of an update.

    With several policies, the metrics of each are also included, as `<policy>/<metric>`.

    Args:
        parts: policy → its metrics; empty if no policy has rows.
        rows: number of rows of the update.
    """
    if not parts:
        return {"loss": 0.0, "tokens": 0.0, "rows": float(rows), "skipped": 1.0}
    if len(parts) == 1:
        return {**next(iter(parts.values())), "rows": float(rows)}
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts.values() for name in part):
        comparable = _comparable(name, [part for part in parts.values() if name in part])
        values = [part[name] for part in comparable]
        if name in ("loss", "tokens", "fresh_tokens", "value_calls"):
            combined[name] = sum(values)
        elif name.endswith("_max") or name in ("skipped", "learning_rate", "grad_norm"):
            combined[name] = max(values)
        else:
            weight = _weight_of(name, comparable)
            total = max(sum(part[weight] for part in comparable), 1.0)
            combined[name] = sum(part[name] * part[weight] for part in comparable) / total
    for policy, part in parts.items():
        combined.update({f"{policy}/{name}": value for name, value in part.items()})
    return {**combined, "rows": float(rows)}


def _comparable(name: str, parts: list[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the policies' metrics from which the metric `name` of the update is computed.

    Usually these are all of them. The gap between the log-probabilities of engine and learner is
    taken only from policies with fresh tokens, which the current weights sampled. The gap of older
    tokens also includes what was learned since they were sampled. If no policy has fresh tokens,
    all are used.
    """
    if not name.startswith(_GAP):
        return parts
    return [part for part in parts if part.get("fresh_tokens")] or parts


def _weight_of(name: str, parts: Sequence[Mapping[str, float]]) -> str:
    """Return the name of the metric by which policies are weighted in the mean of `name`."""
    if name in ("value_loss", "explained_variance"):
        return "value_calls"
    is_fresh = name.startswith(_GAP) and all(part.get("fresh_tokens") for part in parts)
    return "fresh_tokens" if is_fresh else "tokens"
