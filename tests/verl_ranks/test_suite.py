"""The learner suite on verl: one rank, and two by FSDP2. References are the trainer's own torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightspan_testing.learner_suite import LearnerSuite
from lightspan_verl.learner import VerlLearner
from lightspan_verl.local_ranks import Workers
from lightspan_verl.rank_group import RankGroup


class OnWorkers(LearnerSuite):
    """The suite on ranks that tests share."""

    _workers: RankGroup
    _made: list[VerlLearner]

    def make_learner(self, models: Mapping[str, Any], **options: Any) -> VerlLearner:
        learner = VerlLearner(models, workers=self._workers, **options)
        self._made.append(learner)
        return learner


class TestOneRank(OnWorkers):
    @pytest.fixture(autouse=True)
    def made(self, one: Workers) -> Iterator[None]:
        self._workers, self._made = one, []
        yield
        for learner in self._made:
            learner.close()


class TestTwoRanks(OnWorkers):
    @pytest.fixture(autouse=True)
    def made(self, two: Workers) -> Iterator[None]:
        self._workers, self._made = two, []
        yield
        for learner in self._made:
            learner.close()
