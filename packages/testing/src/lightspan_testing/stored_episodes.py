"""Read the episodes of a store in one call."""

from __future__ import annotations

import os

from lightspan.lightning.episode import Episode
from lightspan.schema.records import Mode
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync
from lightspan.training.collector import read_episodes


def stored_episodes(
    url: str | os.PathLike[str], *, run_id: str | None = None, mode: Mode | None = None
) -> list[Episode]:
    """Return the episodes in a store, such as the store of a run (`runs/<name>/store.db`).

    Args:
        url: URL or file of the store.
        run_id: only episodes of this training run; None for all runs.
        mode: only episodes of this mode; None for all modes.

    Raises:
        StoreError: the store cannot be read.
    """

    async def read() -> list[Episode]:
        async with open_existing(url) as store:
            states = await store.rollouts(run_id=run_id, mode=mode)
            return await read_episodes(store, states)

    return run_sync(read())
