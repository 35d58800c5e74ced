"""What every store must do: subclass `StoreSuite` and say how a store is made.

    class TestMyStore(StoreSuite):
        def make_store(self, name, clock):
            return MyStore(f"my-host/{name}", clock=clock)

Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`) and hypothesis. A test is skipped only where
the store's capabilities say that it does not apply. No test looks at a clock but the injected one.

A module per subject (`move_tests`, `queue_tests`, `lease_tests`, `watch_tests`, `span_tests`,
`call_tests`, `resource_tests`, `retry_tests`, `number_tests`, `prune_tests`, `load_tests`,
`life_tests`), `model_tests` for random operations, and `base` for what they share; a
store's own tests may use that, too.
"""

from __future__ import annotations

from lightspan_testing.store_suite.base import (
    LEASE_S,
    Clock,
    claim_one,
    make_call,
    make_peer,
    make_production,
    make_record,
    make_report,
    make_rollout,
    make_span,
    make_try,
    ref,
    start,
    state_of,
    status_of,
)
from lightspan_testing.store_suite.call_tests import CallTests
from lightspan_testing.store_suite.lease_tests import LeaseTests
from lightspan_testing.store_suite.lifecycle_tests import LifeTests
from lightspan_testing.store_suite.load_tests import LoadTests
from lightspan_testing.store_suite.model_tests import ModelTests
from lightspan_testing.store_suite.numeric_tests import NumberTests
from lightspan_testing.store_suite.prune_tests import PruneTests
from lightspan_testing.store_suite.queue_tests import QueueTests
from lightspan_testing.store_suite.resource_tests import ResourceTests
from lightspan_testing.store_suite.retry_tests import RetryTests
from lightspan_testing.store_suite.span_tests import SpanTests
from lightspan_testing.store_suite.state_machine_tests import MoveTests
from lightspan_testing.store_suite.watch_tests import WatchTests


class StoreSuite(
    MoveTests,
    QueueTests,
    LeaseTests,
    WatchTests,
    SpanTests,
    CallTests,
    ResourceTests,
    RetryTests,
    NumberTests,
    PruneTests,
    LoadTests,
    LifeTests,
    ModelTests,
):
    """The protocol of `lightspan.stores.protocol.Store`, stated once. See the module."""


__all__ = [
    "LEASE_S",
    "Clock",
    "StoreSuite",
    "claim_one",
    "make_call",
    "make_peer",
    "make_production",
    "make_record",
    "make_report",
    "make_rollout",
    "make_span",
    "make_try",
    "ref",
    "start",
    "state_of",
    "status_of",
]
