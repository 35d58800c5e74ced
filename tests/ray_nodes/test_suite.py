"""Run the runners suite in a Ray cluster that was joined, with a served store."""

from __future__ import annotations

import pytest

from lightspan import RayRunners
from lightspan.runners.protocol import Runners
from lightspan.stores.protocol import Store
from lightspan_testing.runners_suite import RunnersSuite
from tests.ray_nodes.nodes import Cluster, Node

pytestmark = pytest.mark.timeout(600)


class TestJoined(RunnersSuite):
    @pytest.fixture
    def runners(self, cluster: Cluster, node: Node) -> Runners:
        return RayRunners(4, actors=2, address=cluster.address)

    @pytest.fixture
    def store(self, store: Store) -> Store:
        return store
