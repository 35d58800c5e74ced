"""Test what is logged about attempts that cannot be marked as damaged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightspan.stores.memory import MemoryStore
from lightspan_gateway.call_recorder import CallRecorder


async def test_an_attempt_that_cannot_be_marked_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check two attempts that the store does not know, each with two reasons."""
    async with MemoryStore() as store:
        recorder = CallRecorder(store, store_timeout_s=1.0)
        for number in (1, 2, 1, 2):
            session: Any = SimpleNamespace(attempt_id=f"at-{number}")
            recorder._report_damage(session, "the store refused a call")
        await recorder.drain()
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "is damaged: the store refused a call" in text]) == 4
    unmarked = [text.split(":")[0] for text in texts if "cannot be marked" in text]
    assert sorted(unmarked) == [f"attempt at-{n} cannot be marked damaged" for n in (1, 2)]
