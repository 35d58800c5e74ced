"""Prompts with a common prefix: what is computed once, and what is never shared."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan_testing.engine_suite import TOLERANCE, generate, of_tokens, reference
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import CPU_PAGE, TransformersEngine
from lightspan_torch.engine.weights import load_model
from packages.torch.tests.engine.engines import batcher_of, computed, running

PROMPT = [5 + number * 7 % 300 for number in range(125)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("prefixes") / "model", seed=4, context=1024)


async def together(engine: TransformersEngine, prompts: list[list[int]], **sampling: Any) -> Any:
    """Return the answers to prompts that reach the generation thread at the same moment."""
    tasks = [
        asyncio.create_task(generate(engine, prompt, request_id=str(number), **sampling))
        for number, prompt in enumerate(prompts)
    ]
    batcher = batcher_of(engine)
    with batcher._changed:  # the generation thread waits for the lock
        await asyncio.sleep(0)
        assert len(batcher._submitted) == len(prompts)
    return await asyncio.gather(*tasks)


async def test_a_group_computes_its_prompt_once(folder: Path) -> None:
    async with running(folder) as engine:
        passes = computed(engine)
        await together(engine, [PROMPT] * 8, max_tokens=1)
    # what is left after whole pages: 125 - 31 * 4 = 1 token of each of the others
    assert CPU_PAGE == 4
    assert passes == [125, 7 * 1]


async def test_it_can_be_switched_off(folder: Path) -> None:
    async with running(folder, prefix_sharing=False) as engine:
        passes = computed(engine)
        await together(engine, [PROMPT] * 4, max_tokens=1)
    assert passes == [4 * 125]


async def test_a_common_beginning_is_computed_once_and_kept(folder: Path) -> None:
    """Four prompts, each sent twice, share 64 tokens; later one of them is sent again."""
    prompts = [[*PROMPT[:64], *[200 + n] * 16, n] for n in range(4) for _ in range(2)]
    async with running(folder) as engine:
        passes = computed(engine)
        await together(engine, prompts, max_tokens=1)
        # the beginning with the first question; the other three; whose twins need their last token
        assert passes == [81, 1 + 3 * 17, 3]
        passes.clear()
        await generate(engine, prompts[5], max_tokens=1)
        assert passes == [1]


async def test_a_turn_shares_the_turns_before_it(folder: Path) -> None:
    """The keys and values of an answer are used by the prompt that continues from the answer."""
    async with running(folder) as engine:
        answer = await generate(engine, PROMPT[:20], max_tokens=21, temperature=0.0)
        passes = computed(engine)
        await generate(engine, [*PROMPT[:20], *answer.ids, 9, 9], max_tokens=1)
    # 40 of its tokens were computed: the last one of an answer is never given to the model
    assert passes == [len(answer.ids) + 22 - (20 + len(answer.ids) - 1) // 4 * 4]


async def test_shared_prefixes_change_no_logprob(folder: Path) -> None:
    model = load_model(folder)
    prompts = [[*PROMPT[: 8 * (n % 5) + n % 3], 300 + n % 4, *PROMPT[: n % 7]] for n in range(40)]
    async with running(folder) as engine:
        answers = await together(engine, prompts, temperature=0.8)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = of_tokens(reference(model, prompt, answer.ids, 0.8), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_equally_long_prefixes_are_not_mixed_up(folder: Path) -> None:
    """Two groups with as many common pages each run in the same steps."""
    model = load_model(folder)
    stems = (PROMPT[:40], PROMPT[40:0:-1])
    prompts = [[*stem, 300 + n] for n in range(4) for stem in stems]
    async with running(folder) as engine:
        answers = await together(engine, prompts, temperature=0.8)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = of_tokens(reference(model, prompt, answer.ids, 0.8), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_when_the_first_is_cancelled_another_one_computes(folder: Path) -> None:
    """Two requests wait for the prompt of a third one, which is cancelled halfway."""
    model = load_model(folder)
    prompt = (PROMPT * 8)[:900]
    async with running(folder, batch_tokens=64) as engine:
        passes = computed(engine)
        first = asyncio.create_task(generate(engine, prompt, request_id="first"))
        others = [asyncio.create_task(generate(engine, prompt, request_id=str(n))) for n in "ab"]
        while len(passes) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first.cancel()
        answers = await asyncio.gather(*others)
    for answer in answers:
        expected = of_tokens(reference(model, prompt, answer.ids), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_small_cache_with_much_to_share(folder: Path, seed: int) -> None:
    """Blocks are evicted and requests restarted, but every request gets the right answer."""
    model, rng = load_model(folder), random.Random(seed)
    stems = [[rng.randrange(5, 300) for _ in range(rng.randrange(1, 150))] for _ in range(6)]

    def prompt() -> list[int]:
        stem = rng.choice(stems)
        return [*stem[: rng.randrange(1, len(stem) + 1)], *stem[: rng.randrange(0, 40)]]

    prompts = [prompt() for _ in range(60)]
    async with running(folder, num_blocks=4, batch_tokens=96) as engine:
        answers = await asyncio.gather(
            *(
                generate(engine, prompt, request_id=str(n), max_tokens=rng.randrange(1, 50))
                for n, prompt in enumerate(prompts)
            )
        )
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        expected = of_tokens(reference(model, prompt_ids, answer.ids), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)
