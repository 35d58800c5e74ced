"""The learning rate that reinforcement takes where none is given.

    full weights    4e-4 · (0.8 M / parameters)^0.75, and 1e-6 at least
    LoRA            20 times that of the full weights under it
    both            1e-3 at most, rounded to one digit

It is AdamW's, for advantages of about one and rows whose weights sum to one. It goes through what
is known to learn:

| weights | parameters | known to learn | chosen |
|---|---|---|---|
| full, the examples' small model | 0.8 M | 4e-4 (measured: 1e-4 slow, 1e-3 unstable) | 4e-4 |
| LoRA of rank 16 on it | 0.8 M | 1e-3 (measured: .58 to .78 in ten steps of SQL) | 1e-3 |
| LoRA of rank 16 on SmolLM2 | 135 M | 2e-4 (measured) | 2e-4 |
| full | 1.5 to 7 B | 1e-6 (the default of verl and TRL, and of published GRPO runs) | 1e-6 |
| LoRA | 1.5 to 7 B | 1e-5 to 3e-5 | 3e-5 to 2e-5 |

Adapters need more than full weights: ten times as much for any size (Schulman et al. 2025, "LoRA
Without Regret"), 20 to 100 times in the documentation of Tinker. Their rank hardly matters, as long
as alpha stays (32): the product of the adapters is divided by the rank.

What was measured lies between 0.8 M and 135 M parameters; anything else is a power law through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightspan.algorithms.protocol import PolicySpec
from lightspan.errors import ModelError
from lightspan.plugins import load_plugin

SMALL: Final = 0.8e6
"""Parameters of the small model."""
SMALL_RATE: Final = 4e-4
EXPONENT: Final = 0.75
LEAST: Final = 1e-6
"""Of full weights."""
MOST: Final = 1e-3
LORA_FACTOR: Final = 20
UNKNOWN: Final = 3_000_000_000
"""What a model counts as whose size is not known: the least rate there is."""


class Rate(NamedTuple):
    """A learning rate, and why it is that."""

    value: float
    why: str

    def __str__(self) -> str:
        return f"learning rate {shown(self.value)}: {self.why} (learning_rate= sets another)"


def default_rate(parameters: int, *, lora: bool) -> float:
    """The rate by the rule of this module.

    Args:
        parameters: of the whole model, those under adapters too.
    """
    full = max(LEAST, SMALL_RATE * (SMALL / max(1, parameters)) ** EXPONENT)
    return float(f"{min(MOST, full * (LORA_FACTOR if lora else 1)):.0e}")


def choose_rate(
    policies: Mapping[str, PolicySpec], count: Callable[[str], int] | None = None
) -> Rate:
    """The rate for these policies, which share an optimiser: of different ones the lowest, at which
    none is spoiled.

    Args:
        count: the parameters of a model, `count_parameters` of a plugin if it is left out; raises
            `ModelError` where they cannot be known.
    """
    count = count or load_plugin("api", "count_parameters")
    of_spec = {spec: _rate_of(spec, count) for spec in policies.values()}
    least = min(of_spec.values())
    if len(set(of_spec.values())) == 1:
        return least
    each = "; ".join(
        f"{name}: {shown(of_spec[spec].value)}, {of_spec[spec].why}"
        for name, spec in policies.items()
    )
    return Rate(least.value, f"the lowest of what its policies would have alone ({each})")


def _rate_of(spec: PolicySpec, count: Callable[[str], int]) -> Rate:
    kind = "full weights" if spec.lora is None else f"LoRA of rank {spec.lora.rank}"
    try:
        parameters = count(spec.model)
    except ModelError as error:
        rate = default_rate(UNKNOWN, lora=spec.lora is not None)
        return Rate(rate, f"{kind} of a large model, as its size is not known: {error}")
    preposition = "of" if spec.lora is None else "on"
    why = f"{kind} {preposition} {_size(parameters)} parameters"
    return Rate(default_rate(parameters, lora=spec.lora is not None), why)


def shown(rate: float) -> str:
    """A rate for people.

    Example:
        >>> shown(0.0004)
        '4e-4'
    """
    digits, _, exponent = f"{rate:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _size(parameters: int) -> str:
    millions = parameters / 1e6
    if millions >= 1000:
        return f"{millions / 1000:.1f} B"
    return f"{millions:.0f} M" if millions >= 10 else f"{millions:.2g} M"
