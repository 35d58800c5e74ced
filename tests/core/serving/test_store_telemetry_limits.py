"""Traces that are much work are decoded beside what else a store's server does."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.core.serving import test_store_telemetry
from tests.core.serving.test_store_telemetry import SPANS, body, send
from tests.core.stores.served import TRAINER, Served

from lightspan.serving.store import telemetry
from lightspan.stores import open_store
from lightspan.stores.event_loop import run_sync
from lightspan.stores.remote.address import KEY_VARIABLE
from lightspan.testing.store_suite import make_rollout

served = test_store_telemetry.served


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
