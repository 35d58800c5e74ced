"""Traces that are much work are refused, or done beside what else a store's server does."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from tests.core.serving import test_store_telemetry
from tests.core.serving.test_store_telemetry import PROTOBUF, SPANS, body, send
from tests.core.stores.served import TRAINER, Served

from lightspan.otel.otlp import MOST_PARTS
from lightspan.serving.store import telemetry
from lightspan.stores import open_store
from lightspan.stores.event_loop import run_sync
from lightspan.stores.remote.address import KEY_VARIABLE
from lightspan.testing.store_suite import make_rollout

served = test_store_telemetry.served


def _resources() -> TracesData:
    return TracesData(resource_spans=[ResourceSpans()] * (MOST_PARTS + 1))


def _events() -> TracesData:
    span = Span(events=[Span.Event()] * (MOST_PARTS + 1))
    return TracesData(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])


def _values() -> TracesData:
    many = AnyValue(array_value=ArrayValue(values=[AnyValue()] * (MOST_PARTS + 1)))
    span = Span(attributes=[KeyValue(key="k", value=many)])
    return TracesData(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])


@pytest.mark.parametrize("make", [_resources, _events, _values])
def test_little_that_is_much_work_is_refused(served: Served, make: Callable[[], Any]) -> None:
    """Two bytes each, and a thousandth of that when packed."""
    sent = gzip.compress(make().SerializeToString())
    assert len(sent) < 20_000
    status, _, answer = send(served, sent, PROTOBUF, packing="gzip")
    assert (status, b"more than 500,000 resources, scopes, spans" in answer) == (400, True)


def test_no_request_to_the_store_waits_for_traces(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they take to be read, and however many they are."""
    monkeypatch.setenv(KEY_VARIABLE, TRAINER)
    read, others = telemetry._decoded, threading.Event()

    def slowly(*given: Any) -> Any:
        assert others.wait(60)
        return read(*given)

    monkeypatch.setattr(telemetry, "_decoded", slowly)
    sent = gzip.compress(body(*SPANS))
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(send, served, sent, packing="gzip") for _ in range(3)]
        while served.server._telemetry._gate.inside < 3:
            time.sleep(0.001)
        for size in (20_000, 300_000):
            run_sync(_enqueued(served.url, f"ro-{size}", size))
        others.set()
        assert [answer.result()[0] for answer in answers] == [200] * 3


async def _enqueued(url: str, name: str, size: int) -> None:
    async with open_store(url) as store:
        await store.enqueue([make_rollout(name, task="x" * size)])
