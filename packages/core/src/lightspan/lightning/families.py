"""Families: a rollout and its forks, which count once among the rollouts of their group.

A *trunk* is a rollout that forks none. A *family* is a trunk and its forks, which repeat it up to
one call and sample anew from there on. Its *leaves* are the rollouts that share this call's prompt:
the trunk and the forks. With T families in a group, the gradient is the mean over families of

    Σ calls before the fork: (mean of the leaves' returns - b) · score
    + mean over leaves of Σ calls behind it: (return of the leaf - b') · score

where b is the mean over the group's *other* families of the mean of their leaves, and b' the mean
over the *other* leaves of the family (leave one out, arXiv 2402.14740), or b if there are none.
Calls before the fork were sampled once, so they are trained in the trunk only.

This is unbiased if the call to fork at was drawn before the rollout, or is the first at which a
rule holds; a call that is chosen by a look at the finished rollout is not. Forks that count as
rollouts of the group are biased: the relative error is .42 to .46 on the random processes
of `test_families.py`, and .19 to .28 if what they repeat is trained again.

`prepare_batch` makes one rollout of each family with the credit rule `family`. Measured, families
learn no better than `terminal` at equal generated tokens (`docs/reference/credit.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.lightning.selection import Coverage
from lightspan.lightning.states import StateKey, check_key, key_of, state_of
from lightspan.schema.validation import check_whole


class Forks(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and at which of its calls, each rollout is forked (`credit="family"`).

    Only calls of agents to train are counted and looked at. A rollout without the call is not
    forked, and still counts as a family.

    Args:
        each: number of forks of each rollout.
        at: number of the call at which rollouts are forked, from 1; or a function of a
            `lightspan.lightning.states.State`: the first call for which it returns a true value. It
            gets what precedes the call, and must depend on nothing else, or the gradient is biased.
            None for the call after half of the mean number of calls in the step before; the first
            step then forks no rollout.

    Raises:
        ConfigError: `each` or `at` is below 1, or `at` is neither a number nor a plain function.
    """

    each: int = 1
    at: int | StateKey | None = None

    def __post_init__(self) -> None:
        check_whole("Forks: each", self.each, 1)
        if callable(self.at):
            check_key(self.at, "Forks: at")
        else:
            check_whole("Forks: at", self.at, 1, optional=True)

    def points(
        self, trunks: Sequence[Episode], coverages: Sequence[Coverage], middle: int | None
    ) -> list[ForkPoint]:
        """Return the points at which rollouts are forked: those that count and have the call.

        A point may have a `refusal`.

        Args:
            trunks: rollouts that fork none.
            coverages: status of the calls of each rollout.
            middle: number of the call if `at` is None; None to fork no rollout then.
        """
        at, points = middle if self.at is None else self.at, list[ForkPoint]()
        for trunk, coverage in zip(trunks, coverages, strict=True):
            is_counted = trunk.finished and trunk.scored()
            for place, (call, turn) in enumerate(_calls(coverage) if is_counted else (), start=1):
                state = state_of(call, trunk.task_id, turn)
                if key_of(at, state, "Forks: at") if callable(at) else place == at:
                    own = fork_points(trunk)
                    points += [p for p in own if p.call and p.call.call_id == call.call_id]
                    break
        return points


def middle_call(coverages: Sequence[Coverage]) -> int | None:
    """Return the number of the call after half of the mean number of calls; None without calls."""
    counts = [len(calls) for calls in map(_calls, coverages) if calls]
    return 1 + int(fmean(counts) / 2) if counts else None


def _calls(coverage: Coverage) -> list[tuple[Call, int]]:
    """Return each call of an agent to train, of its choices one, with its turn."""
    return list({call.call_id: (call, turn) for call, turn in coverage.turns}.values())
