"""RanksLearner: two ranks against the suite, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightspan.learners.ranks.learner import Ranks, RanksLearner
from lightspan.testing.learner_suite import LearnerSuite


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks that all learners here share: a process takes seconds to start."""
    ranks = Ranks(["cpu", "cpu"])
    yield ranks
    ranks.end()


class TestRanksLearner(LearnerSuite):
    @pytest.fixture(autouse=True)
    def made(self, two: Ranks) -> Iterator[None]:
        """The learners of a test, forgotten after it."""
        self._ranks, self._made = two, list[RanksLearner]()
        yield
        for learner in self._made:
            learner.close()

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> RanksLearner:
        learner = RanksLearner(models, ranks=self._ranks, **options)
        self._made.append(learner)
        return learner
