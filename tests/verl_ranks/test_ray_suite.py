"""The learner suite on verl's ranks in Ray: one, and two by FSDP2, each in a cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.verl_ranks.test_suite import OnWorkers

from lightspan.learners.verl.ray_workers import RayWorkers

pytestmark = pytest.mark.timeout(600)  # a cluster takes its time to begin with


class _InRay(OnWorkers):
    ranks = 1

    @pytest.fixture(scope="class")
    def group(self, python: str) -> Iterator[RayWorkers]:
        torch.set_num_threads(1)
        workers = RayWorkers(python, ["cpu"] * self.ranks)
        yield workers
        workers.end()

    @pytest.fixture(autouse=True)
    def made(self, group: RayWorkers) -> Iterator[None]:
        self._workers, self._made = group, []
        yield
        for learner in self._made:
            learner.close()


class TestOneInRay(_InRay):
    pass


class TestTwoInRay(_InRay):
    ranks = 2
