"""Start embedded engines, and reach into them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lightspan_testing.engine_suite import generate
from lightspan_torch.engine._batcher import Batcher
from lightspan_torch.engine.transformers import TransformersEngine


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[TransformersEngine]:
    """Yield an engine whose generation thread runs; close it after the block."""
    engine = TransformersEngine({"writer": folder}, seed=0, **options)
    await engine.start()
    try:
        await generate(engine, [5], max_tokens=1)
        yield engine
    finally:
        await engine.close()


def batcher_of(engine: TransformersEngine) -> Batcher:
    """Return the batcher, which runs the generation thread."""
    batcher = engine._workers["writer"]._batcher
    assert batcher is not None
    return batcher


def computed(engine: TransformersEngine) -> list[int]:
    """Return a list to which each later forward pass appends its number of tokens."""
    batcher, passes = batcher_of(engine), list[int]()
    step = batcher._step

    def note(counts: dict[Any, int]) -> None:
        passes.append(sum(counts.values()))
        step(counts)

    batcher._step = note  # type: ignore[method-assign]
    return passes
