"""Fixtures for tests of runners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.stores import open_store
from lightspan.stores.protocol import Store


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "")  # so that monkeypatch restores it
    monkeypatch.delenv("OPENAI_API_KEY")
    yield
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store
