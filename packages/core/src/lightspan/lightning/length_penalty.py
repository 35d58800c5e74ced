"""Overlong: a soft penalty on the credit of calls with too long answers.

This is eq. 13 of DAPO (arXiv 2503.14476). With T the sampled tokens of a call, L the longest answer
and B the buffer before it, the penalty is

    0                           T ≤ L - B
    (L - B - T) / B · penalty   L - B < T ≤ L
    -penalty                    L < T

DAPO adds it to the reward of a rollout that is one answer. Here each *call* has its own: it is
added to that call's credit, and to the numbers that the credit is compared with
(`lightspan.lightning.baselines`).

The scale of a group's advantages, and whether its rewards differ at all, are computed from returns
without penalties. Suppose that all rewards of a group are equal, and one answer is a token too
long. GRPO would divide that small penalty by the group's spread, which is as small, and a step
would learn as much about length as about the task. DAPO excludes such groups as well, because its
dynamic sampling uses accuracy. Evaluations and reported rewards have no penalties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.episode import CallKey
from lightspan.lightning.selection import Coverage
from lightspan.schema.validation import check_number, check_whole


class Overlong(msgspec.Struct, frozen=True, kw_only=True):
    """Penalty on calls whose answers are longer than `max_tokens - buffer` tokens.

    It rises linearly over the buffer and reaches `penalty` at `max_tokens`.

    Raises:
        ConfigError: `max_tokens` or `buffer` is below 1, `buffer` is above `max_tokens`, or
            `penalty` is not above 0.
    """

    max_tokens: int
    """Number of tokens at which the whole penalty applies, usually `LightningRL(max_tokens=)`."""
    buffer: int
    """Number of tokens before `max_tokens` over which the penalty rises. DAPO uses a fifth of
    `max_tokens`.
    """
    penalty: float = 1.0
    """The whole penalty, as a positive number in units of the reward."""

    def __post_init__(self) -> None:
        check_whole("Overlong: max_tokens", self.max_tokens, 1)
        check_whole("Overlong: buffer", self.buffer, 1)
        if self.buffer > self.max_tokens:
            raise ConfigError(
                f"Overlong: buffer={self.buffer} must be at most max_tokens={self.max_tokens}"
            )
        check_number("Overlong: penalty", self.penalty, above=0)

    @property
    def free(self) -> int:
        """Maximum number of tokens without a penalty: `max_tokens - buffer`."""
        return self.max_tokens - self.buffer

    def of(self, tokens: int) -> float:
        """Return the penalty of an answer of `tokens` tokens, from 0 down to -`penalty`.

        Example:
            >>> Overlong(max_tokens=10, buffer=4).of(7)
            -0.25
        """
        over = min(max(tokens - self.free, 0), self.buffer)
        return -self.penalty * (over / self.buffer) if over else 0.0


def overlong_penalties(overlong: Overlong, coverage: Coverage) -> dict[CallKey, float]:
    """Return the penalty of each call of an agent to train: call → a number, at most 0.

    It is 0.0 for a call without recorded tokens.

    Args:
        overlong: settings of the penalty.
        coverage: status of each call of the episode.
    """
    packed = {c.key: c.record.response if c.record else b"" for c in coverage.turns.calls}
    return {key: overlong.of(len(ids) // 4) for key, ids in packed.items()}  # four bytes an id


def overlong_metrics(
    overlong: Overlong, penalties: Iterable[Mapping[CallKey, float]]
) -> dict[str, float]:
    """Return metrics of the length penalties of a batch.

    `penalised` is the share of calls with a penalty, `whole` the share with the whole penalty,
    `penalty` the mean penalty; all are 0 without calls.

    Args:
        overlong: settings of the penalty.
        penalties: per rollout, call → penalty.
    """
    values = [value for of_rollout in penalties for value in of_rollout.values()]
    count = max(len(values), 1)
    return {
        "penalised": sum(value < 0 for value in values) / count,
        "whole": sum(value == -overlong.penalty for value in values) / count,
        "penalty": sum(values) / count,
    }
