"""The learner suite on verl's ranks in Ray: one, and two by FSDP2, each in a cluster of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightspan_verl.ray_workers import RayWorkers
from tests.verl_ranks.test_suite import OnWorkers

pytestmark = pytest.mark.timeout(600)  # a cluster takes its time to begin with


@pytest.fixture(scope="class")
def one_in_ray(python: str) -> Iterator[RayWorkers]:
    torch.set_num_threads(1)
    workers = RayWorkers(python, ["cpu"])
    yield workers
    workers.end()


@pytest.fixture(scope="class")
def two_in_ray(python: str) -> Iterator[RayWorkers]:
    torch.set_num_threads(1)
    workers = RayWorkers(python, ["cpu", "cpu"])
    yield workers
    workers.end()


class TestOneInRay(OnWorkers):
    ranks = "one_in_ray"


class TestTwoInRay(OnWorkers):
    ranks = "two_in_ray"
