"""Conformance tests of stores: subclass `StoreSuite` and implement `make_store`.

    class TestMyStore(StoreSuite):
        def make_store(self, name, clock):
            return MyStore(f"my-host/{name}", clock=clock)

Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`) and hypothesis. A test is skipped only if the
store's capabilities exclude what it tests. The store must read the time from `clock` only.

The tests are in `queue_tests`, `lease_tests`, `span_tests`, `read_tests`, `resource_tests`,
`retry_tests`, `image_tests`, `lifecycle_tests` and `limit_tests`. `model_tests` has random
operations. `base` has common parts, also for a store's own tests.
"""

from __future__ import annotations

from lightspan_testing.store_suite.base import (
    IMAGE,
    LEASE_S,
    Clock,
    claim_one,
    make_call,
    make_peer,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)
from lightspan_testing.store_suite.image_tests import ImageTests
from lightspan_testing.store_suite.lease_tests import LeaseTests
from lightspan_testing.store_suite.lifecycle_tests import LifecycleTests
from lightspan_testing.store_suite.limit_tests import LimitTests
from lightspan_testing.store_suite.model_tests import ModelTests
from lightspan_testing.store_suite.queue_tests import QueueTests
from lightspan_testing.store_suite.read_tests import ReadTests
from lightspan_testing.store_suite.resource_tests import ResourceTests
from lightspan_testing.store_suite.retry_tests import RetryTests
from lightspan_testing.store_suite.span_tests import SpanTests


class StoreSuite(
    QueueTests,
    LeaseTests,
    SpanTests,
    ReadTests,
    ResourceTests,
    RetryTests,
    ImageTests,
    LifecycleTests,
    LimitTests,
    ModelTests,
):
    """Tests of the protocol `lightspan.stores.protocol.Store`.

    The module's docstring shows how to subclass it.
    """


__all__ = [
    "IMAGE",
    "LEASE_S",
    "Clock",
    "StoreSuite",
    "claim_one",
    "make_call",
    "make_peer",
    "make_production",
    "make_report",
    "make_rollout",
    "make_span",
    "ref",
    "start",
]
