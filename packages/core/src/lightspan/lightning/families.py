"""Families: a rollout and its forks, which count once among the rollouts of their group.

A *trunk* is a rollout that forks none. A *family* is a trunk and its forks, which repeat it up to
one call and sample anew from there on. Its *leaves* are the rollouts that share this call's prompt:
the trunk and the forks. With T families in a group, the gradient is the mean over families of

    Σ calls before the fork: (mean of the leaves' returns - b) · score
    + mean over leaves of Σ calls behind it: (return of the leaf - b') · score

where b is the mean over the group's *other* families of the mean of their leaves, and b' the mean
over the *other* leaves of the family (leave one out, arXiv 2402.14740). Calls before the fork were
sampled once, so they are trained in the trunk only. This is unbiased if the call to fork at was
drawn before the rollout, or is the first at which a rule holds; a call that is chosen by a look at
the finished rollout is not. Forks that count as rollouts of the group are biased: the relative
error is .3 to .6 on the random processes of `test_families.py`, and .1 to .2 if what they repeat is
trained again.

Nothing builds batches of families yet. A prototype learned no better with them at equal generated
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from lightspan.errors import DataError
from lightspan.lightning.advantages import BaselineScale, places_by, rloo


class Leaf(NamedTuple):
    """A scored rollout of a family."""

    rollout_id: str
    group_id: str
    """Group of the trunk."""
    trunk_id: str
    """Rollout id of the trunk; for a trunk its own."""
    value: float
    """Return of the rollout."""


class FamilyCredit(NamedTuple):
    """How the calls of a leaf are credited and weighted."""

    mean: float
    """Credit of the trunk's calls before the fork: the mean return of the leaves."""
    before: BaselineScale
    """What `mean` is compared with: other families of the group."""
    behind: BaselineScale
    """What the leaf's return is compared with: other leaves, or other families without a fork."""
    weight: float
    """Factor on the weight of the calls behind the fork: 1 / leaves."""


def family_credits(leaves: Sequence[Leaf]) -> tuple[list[FamilyCredit], int]:
    """Return the credit of each leaf, and the number of families, by which the loss is divided.

    A leaf without a score is left out of `leaves`; its family then has one leaf less.

    Raises:
        DataError: a rollout forks a fork.
    """
    families = places_by(leaves, lambda leaf: leaf.trunk_id)
    trunk_of = {leaf.rollout_id: leaf.trunk_id for leaf in leaves}
    for leaf in leaves:
        if trunk_of.get(leaf.trunk_id, leaf.trunk_id) != leaf.trunk_id:
            raise DataError(f"rollout {leaf.rollout_id} forks {leaf.trunk_id}, which is a fork")
    group_of = {trunk: leaves[places[0]].group_id for trunk, places in families.items()}
    means = {trunk: fmean(leaves[p].value for p in places) for trunk, places in families.items()}
    before: dict[object, BaselineScale] = {}
    for places in places_by(trunks := list(families), group_of.__getitem__).values():
        members = [trunks[place] for place in places]
        before.update(zip(members, rloo([means[trunk] for trunk in members]), strict=True))
    credits: dict[int, FamilyCredit] = {}
    for trunk, places in families.items():
        own = rloo([leaves[place].value for place in places])
        behind = own if len(places) > 1 else [before[trunk]]
        for place, statistics in zip(places, behind, strict=True):
            share = 1 / len(places)
            credits[place] = FamilyCredit(means[trunk], before[trunk], statistics, share)
    return [credits[place] for place in range(len(leaves))], len(families)
