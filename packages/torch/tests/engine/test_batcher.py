"""Test the generation thread: requests come, leave and are interrupted over a small cache."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan_testing.engine_suite import (
    TOLERANCE,
    generate,
    of_tokens,
    perturbed,
    reference,
    with_weights,
)
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine._attention import Chunk, _prefix_group, _Shared, make_step
from lightspan_torch.engine._pages import Pages, PageTable
from lightspan_torch.engine.weights import load_model
from packages.torch.tests.engine.engines import batcher_of, running

REQUESTS = 150
AT_ONCE = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("batcher") / "model", seed=4, context=1024)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_requests_that_come_leave_and_are_interrupted(folder: Path, seed: int) -> None:
    """Each log-probability is that of the weights of its version, and no page stays in use."""
    rng = random.Random(seed)
    base = load_model(folder)
    models: dict[int, Any] = {0: base}
    stems = [[rng.randrange(5, 390) for _ in range(rng.randrange(1, 150))] for _ in range(6)]
    sizes = {
        "num_blocks": rng.choice([4, 6, 12]),
        "batch_tokens": rng.choice([32, 96, 512]),
        "batch_requests": rng.choice([4, 16, 48]),
    }
    versions = set[int]()

    async def one(number: int) -> None:
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randrange(1, len(stem) + 1)], *stem[: rng.randrange(0, 40)]]
        temperature = rng.choice([0.5, 1.0, 1.3])
        answer = await generate(
            engine,
            prompt,
            request_id=str(number),
            max_tokens=rng.randrange(1, 60),
            stream=rng.random() < 0.4,
            temperature=temperature,
        )
        versions.update(answer.versions)
        for version in set(answer.versions):
            table = reference(models[version], prompt, answer.ids, temperature)
            expected = of_tokens(table, answer.ids)
            for place, of in enumerate(answer.versions):
                if of == version:
                    assert answer.logprobs[place] == pytest.approx(expected[place], abs=TOLERANCE)

    async with running(folder, **sizes) as engine:
        pending = set[asyncio.Task[None]]()
        for number in range(REQUESTS):
            pending.add(asyncio.create_task(one(number)))
            await asyncio.sleep(0.05 * rng.random())
            if rng.random() < 0.2:
                rng.choice(sorted(pending, key=id)).cancel()
            if rng.random() < 0.07:
                version = len(models)
                weights = perturbed(base, version)
                models[version] = with_weights(folder, weights)
                await engine.update("writer", weights, version)
            while len(pending) >= AT_ONCE:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [each for each in results if isinstance(each, Exception)] == []
        batcher = batcher_of(engine)
        while batcher._has_work():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert batcher.pages.available == batcher.pages.count
        assert batcher.finished == set()
    assert len(versions) > 1


def test_pages_are_shared_by_their_tokens_and_those_before_them() -> None:
    pages, first, second, third = Pages(24, 4), PageTable(), PageTable(), PageTable()
    assert pages.count == 6
    pages.reserve(first, 9)
    first.computed = 9
    pages.index(first, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert first.indexed == 2
    # the last token is left out, so that there is a token to compute
    assert pages.find([1, 2, 3, 4]) == []
    assert pages.find([1, 2, 3, 4, 5]) == first.pages[:1]
    assert pages.find([1, 2, 3, 4, 5, 6, 7, 8, 0]) == first.pages[:2]
    assert pages.find([5, 6, 7, 8, 9]) == [], "they follow other tokens"
    pages.share(second, pages.find([1, 2, 3, 4, 5]))
    assert (second.computed, pages.is_shared(first.pages[0])) == (4, True)
    pages.free(first)
    pages.free(second)
    assert pages.available == 6
    assert len(pages.find([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 2, "kept until memory is needed"
    pages.reserve(third, 20)  # five pages: of the two that are kept, the end is evicted
    assert len(pages.find([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 1
    assert pages.available == 1
    pages.clear()
    assert pages.find([1, 2, 3, 4, 5]) == []


def test_a_common_prefix_is_read_once() -> None:
    """Two requests share 16 tokens, and each has a complete page and a token of its own."""
    pages, tables = Pages(64, 4), [PageTable(), PageTable()]
    ids = [[*range(16), 20 + n, 30, 31, 32, 33] for n in range(2)]
    pages.reserve(tables[0], 21)
    tables[0].computed = 20
    pages.index(tables[0], ids[0])
    pages.share(tables[1], pages.find(ids[1]))
    pages.reserve(tables[1], 21)
    tables[1].computed = 20
    chunks = [Chunk(each, table, 1) for each, table in zip(ids, tables, strict=True)]
    [group] = make_step(pages, chunks, torch.device("cpu")).plan.groups
    assert len(group.slots) == 16 + 2 * 5


def test_similar_prefixes_are_computed_together() -> None:
    """As on a GPU: two pairs of requests, with prefixes of 16 and of 20 tokens, are one group.

    Each query attends to the tokens of its own request up to its own.
    """
    pages, chunks = Pages(256, 4), list[Chunk]()
    for pair, size in enumerate((16, 20)):
        prompt = [*range(100 * pair, 100 * pair + size)]
        for member in range(2):
            ids, table = [*prompt, 40 + member, 50, 51], PageTable()
            pages.share(table, pages.find(ids))
            pages.reserve(table, len(ids))
            table.computed = size + 1 + member
            pages.index(table, ids)
            chunks.append(Chunk(ids, table, 2 - member))
    step = make_step(pages, chunks, torch.device("cpu"))
    assert len(step.plan.groups) == 2
    sequences = [
        _Shared([(0, chunks[0]), (2, chunks[1])], 16, 3),
        _Shared([(3, chunks[2]), (5, chunks[3])], 20, 3),
    ]
    group = _prefix_group(sequences, torch.device("cpu"))
    assert group.rows.tolist() == [0, 1, 2, 3, 4, 5]
    places = [(c, c.table.computed + n) for c in chunks for n in range(c.size)]
    slots = group.slots.view(2, -1)
    for row, (chunk, place) in enumerate(places):
        mask = group.mask[row // 3, row % 3]
        assert sorted(slots[row // 3][mask].tolist()) == sorted(chunk.table.slots[: place + 1])
        assert int(group.query_positions[row // 3, row % 3]) == place
