"""Run the learner suite with verl on one rank, and on two by FSDP2.

The references are computed by torch in the trainer's environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightspan_testing.learner_suite import LearnerSuite
from lightspan_verl.learner import VerlLearner
from lightspan_verl.workers import Workers


class OnWorkers(LearnerSuite):
    """Run the suite on ranks that tests share."""

    ranks: str
    """Name of the fixture of the ranks."""

    @pytest.fixture(autouse=True)
    def made(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self._workers: Workers = request.getfixturevalue(self.ranks)
        self._made: list[VerlLearner] = []
        yield
        for learner in self._made:
            learner.close()

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> VerlLearner:
        learner = VerlLearner(models, workers=self._workers, **options)
        self._made.append(learner)
        return learner


class TestOneRank(OnWorkers):
    ranks = "one"


class TestTwoRanks(OnWorkers):
    ranks = "two"
