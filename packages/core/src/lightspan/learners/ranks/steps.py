"""The part of an update in which ranks have to agree: its tally, its gradient, or its failure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lightspan.errors import LightspanError
from lightspan.learners.ranks.group import Group
from lightspan.learners.ranks.messages import Failure, Said, packed, sayings
from lightspan.learners.sums import Sums
from lightspan.learners.tallies import Tally


class RankSums(Sums):
    """Of one rank of several.

    For each policy of an update every rank speaks once, before gradients are added up; one that
    has failed says so there. So no rank waits for another's gradient in vain, and none takes a
    step that another does not.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._due = 0
        """How often this rank has still to speak."""

    def begin(self, policies: int) -> None:
        """An update of so many policies begins."""
        self._due = policies

    def over_ranks(self, tally: Tally, parameters: Sequence[Tensor]) -> None:
        sums, peaks = tally.so_far
        having = [parameter.grad is not None for parameter in parameters]
        said = self._speak(Said(sums=sums, peaks=peaks, having=having))
        tally.replace((each.sums, each.peaks) for each in said)
        gradients = []
        for number, parameter in enumerate(parameters):
            # what no rank has a gradient of is left alone, as on one device
            if any(each.having[number] for each in said):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        self._group.add_up(gradients)

    def fail(self, error: LightspanError) -> None:
        """Tell the others, if they will listen, that this rank cannot go on with the update."""
        if self._due:
            self._due = 1
            self._speak(Said(failure=Failure.of(error)), raising=False)

    def seed(self, seed: int, steps: int) -> int | None:
        # rank 0's random state is the one that is saved; the others' follows from the step
        if self._group.rank == 0:
            return None
        return random.Random(f"{seed}/{steps}/{self._group.rank}").getrandbits(63)

    def _speak(self, own: Said, *, raising: bool = True) -> list[Said]:
        due, self._due = self._due - 1, 0
        said = [sayings.decode(data) for data in self._group.gather(packed(own))]
        for rank, each in enumerate(said):
            if raising and each.failure is not None:
                raise each.failure.error(self._group.name(rank))
        self._due = due
        return said
