"""Overlong: calls whose answers are close to too long are paid less (DAPO, arXiv 2503.14476, eq.
13, the soft overlong punishment).

With T the sampled tokens of a call, L the longest answer and B the buffer before it, the penalty is

    0                           T ≤ L - B
    (L - B - T) / B · penalty   L - B < T ≤ L
    -penalty                    L < T

DAPO adds it to the reward of a rollout that is one answer. Here it is of each *call*, and of no
other call of the rollout, for no other made this answer long: it is added to that call's credit,
and to what that is compared with (`lightspan.lightning.baselines`).

Penalties touch neither the scale of advantages nor whether a group teaches: those are of the
returns alone.
Otherwise a group of equal rewards, in which one answer is a token over, would be divided by that
one token's penalty (GRPO), and a step would learn about length as much as about the task. DAPO
leaves such groups out as well: its dynamic sampling goes by accuracy. Only training knows of it:
evaluations, and the rewards that are reported, are the app's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.episode import CallKey
from lightspan.lightning.selection import Coverage
from lightspan.schema.validation import check_number, check_whole


class Overlong(msgspec.Struct, frozen=True, kw_only=True):
    """Pay calls less whose answers are close to too long (see the module).

    Raises:
        ConfigError: a length below 1, a buffer longer than `max_tokens`, a penalty not above 0.
    """

    max_tokens: int
    """L: an answer of as many tokens has the whole penalty. `LightningRL(max_tokens=)`, as a rule,
    which cuts answers there."""
    buffer: int
    """B: tokens before `max_tokens` over which the penalty rises. DAPO: a fifth of it."""
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
        """Tokens up to which nothing is taken: L - B."""
        return self.max_tokens - self.buffer

    def of(self, tokens: int) -> float:
        """What an answer of as many tokens is paid less: 0 to -penalty.

        Example:
            >>> [Overlong(max_tokens=10, buffer=4).of(tokens) for tokens in (6, 7, 10, 11)]
            [0.0, -0.25, -1.0, -1.0]
        """
        over = min(max(tokens - self.free, 0), self.buffer)
        return -self.penalty * (over / self.buffer) if over else 0.0


def overlong_penalties(overlong: Overlong, coverage: Coverage) -> dict[CallKey, float]:
    """What each selected call is paid less, 0.0 included. A call that has no token record, and so
    is not trained, has no length: 0.0."""
    return {
        entry.call.key: 0.0
        if entry.call.record is None
        # the packed ids are four bytes each
        else overlong.of(len(entry.call.record.response) // 4)
        for entry in coverage.selected
    }


def overlong_metrics(
    overlong: Overlong, penalties: Iterable[Mapping[CallKey, float]]
) -> dict[str, float]:
    """Of a batch's rollouts: the share of selected calls that were paid less (`penalised`), that
    were paid less by the whole penalty (`whole`), and what a call was paid less on average
    (`penalty`)."""
    values = [value for of_rollout in penalties for value in of_rollout.values()]
    count = max(len(values), 1)
    return {
        "penalised": sum(value < 0 for value in values) / count,
        "whole": sum(value == -overlong.penalty for value in values) / count,
        "penalty": sum(values) / count,
    }
