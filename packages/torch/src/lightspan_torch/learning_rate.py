"""Default learning rate of reinforcement learning.

    full weights    4e-4 · (0.8 M / parameters)^0.75, but at least 1e-6
    LoRA            20 times the rate of full weights

The result is at most 1e-3, and is rounded to one digit. It is meant for AdamW, advantages of about
one and rows whose weights sum to one. It agrees with rates that are known to learn:

| weights | parameters | known to learn | chosen |
|---|---|---|---|
| full, the examples' small model | 0.8 M | 4e-4 (measured: 1e-4 slow, 1e-3 unstable) | 4e-4 |
| LoRA of rank 16 on it | 0.8 M | 1e-3 (measured: .58 to .78 in ten steps of SQL) | 1e-3 |
| LoRA of rank 16 on SmolLM2 | 135 M | 2e-4 (measured) | 2e-4 |
| full | 1.5 to 7 B | 1e-6 (the default of verl and TRL, and of published GRPO runs) | 1e-6 |
| LoRA | 1.5 to 7 B | 1e-5 to 3e-5 | 3e-5 to 2e-5 |

LoRA adapters need a higher rate than full weights: ten times as high for any size (Schulman et al.
2025, "LoRA Without Regret"), 20 to 100 times in the documentation of Tinker. With a fixed alpha of
32, the best rate hardly depends on the rank, because the product of the adapters is divided by the
rank.

The measurements are for models of 0.8 M to 135 M parameters. Rates for larger models are
extrapolated by the power law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightspan.algorithms.protocol import PolicySpec
from lightspan.errors import ModelError
from lightspan_torch.engine.parameter_count import count_parameters

SMALL: Final = 0.8e6
"""Number of parameters of the examples' small model."""
SMALL_RATE: Final = 4e-4
EXPONENT: Final = 0.75
MIN_RATE: Final = 1e-6
"""Minimum rate for training of full weights."""
MAX_RATE: Final = 1e-3
LORA_FACTOR: Final = 20
UNKNOWN: Final = 3_000_000_000
"""Number of parameters assumed for a model of unknown size; it gives the minimum rate."""


class Rate(NamedTuple):
    """A learning rate with the reason for it."""

    value: float
    why: str

    def __str__(self) -> str:
        return f"learning rate {format_rate(self.value)}: {self.why} (learning_rate= sets another)"


def default_rate(parameters: int, *, lora: bool) -> float:
    """Return the default learning rate for a model size.

    The rate falls with the size by a power law, and is 20 times as high for LoRA.

    Args:
        parameters: number of parameters of the whole model, without adapters.
        lora: whether LoRA adapters are trained.
    """
    full = max(MIN_RATE, SMALL_RATE * (SMALL / max(1, parameters)) ** EXPONENT)
    return float(f"{min(MAX_RATE, full * (LORA_FACTOR if lora else 1)):.0e}")


def choose_rate(
    policies: Mapping[str, PolicySpec], count: Callable[[str], int] = count_parameters
) -> Rate:
    """Return the default learning rate for policies that share an optimiser.

    It is the lowest of the policies' default rates, since a higher rate may be unstable for one of
    them.

    Args:
        policies: policy → its starting weights and LoRA settings.
        count: function that counts the parameters of a model and raises `ModelError` if it cannot.
    """
    by_spec = {spec: _rate_of(spec, count) for spec in policies.values()}
    lowest = min(by_spec.values())
    if len(set(by_spec.values())) == 1:
        return lowest
    rates = {name: by_spec[spec] for name, spec in policies.items()}
    each = "; ".join(f"{name}: {format_rate(r.value)}, {r.why}" for name, r in rates.items())
    return Rate(lowest.value, f"the lowest of its policies' rates ({each})")


def _rate_of(spec: PolicySpec, count: Callable[[str], int]) -> Rate:
    kind = "full weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}"
    try:
        parameters = count(spec.model)
    except ModelError as error:
        rate = default_rate(UNKNOWN, lora=spec.lora is not None)
        return Rate(rate, f"{kind} of a large model, because its size is unknown: {error}")
    why = f"{kind} {'of' if spec.lora is None else 'on'} {_size(parameters)} parameters"
    return Rate(default_rate(parameters, lora=spec.lora is not None), why)


def format_rate(rate: float) -> str:
    """Format a rate with one digit.

    Example:
        >>> format_rate(0.0004)
        '4e-4'
    """
    digits, _, exponent = f"{rate:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _size(parameters: int) -> str:
    millions = parameters / 1e6
    if millions >= 1000:
        return f"{millions / 1000:.1f} B"
    return f"{millions:.0f} M" if millions >= 10 else f"{millions:.2g} M"
