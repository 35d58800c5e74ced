"""Test what `lightspan fork` keeps after Ctrl-C."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lightspan.stores.memory import MemoryStore
from lightspan_tools.forking.session import ForkSession


def test_nothing_has_ended_before_it_was_queued() -> None:
    async def ended() -> list[Any]:
        async with MemoryStore() as store:
            session: Any = SimpleNamespace(store=store)
            return await ForkSession._ended(session, ["fork-2-0"])

    assert asyncio.run(ended()) == []
