"""TransformersEngine: the conformance suite, and tests of this engine alone."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import ConfigError, EngineError, ModelError, UnsupportedError
from lightspan.protocols.engine import GenerationRequest, PromptRefused
from lightspan.schema.token_records import Sampling
from lightspan_testing.engine_suite import (
    TOLERANCE,
    EngineSuite,
    generate,
    of_tokens,
    perturbed,
    reference,
)
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine._pages import Pages
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from packages.torch.tests.engine.engines import batcher_of, computed, running

PROMPT = [7, 8, 9, 10, 11, 12]


class TestTransformersEngine(EngineSuite):
    def make_engine(self, models: Mapping[str, Path]) -> TransformersEngine:
        return TransformersEngine(models)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("engine") / "model", seed=2, context=1024)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    async with running(folder) as engine:
        yield engine


def expected_logprobs(model: Any, prompt: list[int], ids: list[int], t: float = 1.0) -> Any:
    return pytest.approx(of_tokens(reference(model, prompt, ids, t), ids), abs=TOLERANCE)


async def idle(engine: TransformersEngine) -> Pages:
    """Wait until the generation thread has no request; return its key-value cache."""
    batcher = batcher_of(engine)
    while batcher._has_work():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return batcher.pages


async def test_cancelled_requests_free_their_blocks(engine: TransformersEngine) -> None:
    request = GenerationRequest(
        request_id="r",
        policy="writer",
        prompt_ids=PROMPT,
        sampling=Sampling(max_tokens=900, temperature=0.0),  # which does not end by itself
    )
    chunks = engine.generate(request, stream=True)
    await anext(chunks)
    pages, passes = batcher_of(engine).pages, computed(engine)
    assert pages.available < pages.count
    await chunks.aclose()  # type: ignore[attr-defined]
    await idle(engine)
    assert len(passes) < 890, "it was not cancelled but ran to its end"
    stopped = await generate(engine, PROMPT, temperature=0.0, max_tokens=900, stop=("e", "a", " "))
    assert len(stopped.ids) < 900
    assert (await idle(engine)).available == pages.count
    assert engine._workers["writer"]._jobs == {}


async def test_a_request_that_is_cancelled_while_it_waits_is_never_computed(folder: Path) -> None:
    async with running(folder, batch_requests=1) as engine:
        passes, options = computed(engine), {"temperature": 0.0, "max_tokens": 900}
        first = asyncio.create_task(generate(engine, PROMPT, request_id="1", **options))
        while not passes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        second = asyncio.create_task(generate(engine, [5] * 200, request_id="2", **options))
        while not batcher_of(engine)._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for task in (second, first):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await idle(engine)
        assert max(passes) < 200


async def test_a_dead_thread_fails_every_request(engine: TransformersEngine, folder: Path) -> None:
    broken = {
        name: torch.full_like(tensor, torch.nan)
        for name, tensor in load_model(folder).named_parameters()
    }
    # Nearly the likeliest token each time: so the requests do not end by themselves before the
    # update, and are sampled all the same, which is what fails.
    sampling = {"max_tokens": 900, "temperature": 0.01}
    tasks = [
        asyncio.create_task(
            generate(engine, PROMPT, request_id=str(n), stream=n % 2 == 0, **sampling)
        )
        for n in range(6)
    ]
    await asyncio.sleep(0)
    await engine.update("writer", broken, 1)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
    with pytest.raises(EngineError, match="writer"):
        await generate(engine, PROMPT)
    with pytest.raises(EngineError, match="writer"):
        await engine.update("writer", dict(load_model(folder).named_parameters()), 2)


async def test_a_chunked_prompt_equals_a_whole(engine: TransformersEngine, folder: Path) -> None:
    """Prompts longer than one forward pass (512 tokens) run among short prompts."""
    model = load_model(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(5, 390, (length,), generator=generator).tolist()
        for length in (900, 3, 600, 1, 40, 511, 512, 513)
    ]
    answers = await asyncio.gather(
        *(
            generate(engine, prompt, temperature=0.7, request_id=str(number))
            for number, prompt in enumerate(prompts)
        )
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == expected_logprobs(model, prompt, answer.ids, 0.7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:0': torch .* sees no CUDA GPU"):
        TransformersEngine({"writer": folder}, device="cuda:0")


@pytest.mark.parametrize("key_heads", [1, 2, 4])
async def test_grouped_heads(tmp_path: Path, key_heads: int) -> None:
    folder = tiny_model(tmp_path / "model", seed=0, hidden=32, key_heads=key_heads)
    prompts = [list(range(5, 5 + length)) for length in (2, 90, 17)]
    async with running(folder) as engine:
        answers = await asyncio.gather(
            *(generate(engine, prompt, request_id=str(n)) for n, prompt in enumerate(prompts))
        )
    model = load_model(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.logprobs == expected_logprobs(model, prompt, answer.ids)


async def test_the_seed_decides_what_is_sampled(folder: Path) -> None:
    answers = []
    for seed in (0, 0, 1):
        engine = TransformersEngine({"writer": folder}, seed=seed)
        await engine.start()
        answers.append((await generate(engine, PROMPT, max_tokens=24)).ids)
        await engine.close()
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


async def test_a_loaded_model_is_copied(folder: Path) -> None:
    model = load_model(folder)
    engine = TransformersEngine({"writer": model, "checker": model})
    await engine.start()
    await engine.update("writer", perturbed(model, 5), 1)
    before = model.state_dict()["model.norm.weight"].clone()
    model.model.norm.weight.data.mul_(3)
    answer = await generate(engine, PROMPT, policy="checker")
    await engine.close()
    model.model.norm.weight.data.copy_(before)
    assert answer.logprobs == expected_logprobs(model, PROMPT, answer.ids)
    assert model.config._attn_implementation == "sdpa"


async def test_an_update_outlives_its_caller(engine: TransformersEngine, folder: Path) -> None:
    model = load_model(folder)
    tasks = [
        asyncio.create_task(generate(engine, PROMPT, max_tokens=60, request_id=str(n)))
        for n in range(5)
    ]
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.update("writer", perturbed(model, 5), 4))
    await asyncio.sleep(0)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    answers = await asyncio.gather(*tasks)
    assert engine.policies() == {"writer": 4}
    assert all(answer.versions[-1] == 4 for answer in answers)


async def test_an_update_leaves_alone_what_has_just_finished(engine: TransformersEngine) -> None:
    """The update runs before the event loop has received the finished result."""
    worker = engine._workers["writer"]
    task = asyncio.create_task(generate(engine, PROMPT, max_tokens=3, temperature=0.0))
    await asyncio.sleep(0)
    (key,) = worker._jobs
    assert worker._batcher is not None
    while key not in worker._batcher.finished:  # the event loop stands still
        time.sleep(0.001)
    assert worker._interrupt(lambda: None) == {}
    assert len((await task).ids) == 3


async def test_threads_start_with_the_first_request_and_end_with_close(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = TransformersEngine({"writer": folder, "checker": folder})
    await engine.start()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)  # transformers does not wait for the threads that read a checkpoint for it
    assert set(threading.enumerate()) <= before
    await generate(engine, PROMPT)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    spent = engine.usage()["cpu_s"]
    assert spent > 0
    await engine.close()
    assert not thread.is_alive()
    assert engine.usage()["cpu_s"] >= spent


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        (PROMPT, {"temperature": float("nan")}, UnsupportedError, "temperature"),
        (PROMPT, {"top_p": 0.0}, UnsupportedError, "top_p"),
        (PROMPT, {"top_k": -1}, UnsupportedError, "top_k"),
        ([], {}, EngineError, "prompt"),
        ([405], {}, PromptRefused, "prompt"),  # the gateway answers 400
    ],
)
async def test_impossible_requests_do_not_reach_the_thread(
    engine: TransformersEngine,
    prompt: list[int],
    sampling: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        await generate(engine, prompt, **sampling)
    # more candidates than the vocabulary has are all of it
    assert (await generate(engine, PROMPT, max_tokens=1, top_k=2**40)).ids


async def test_it_belongs_to_the_loop_that_started_it(folder: Path) -> None:
    engine = TransformersEngine({"writer": folder})
    with pytest.raises(EngineError, match="not started"):
        await generate(engine, PROMPT)
    await engine.start()
    with pytest.raises(EngineError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, generate(engine, PROMPT))
    await engine.close()


def test_a_pickled_model_is_not_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "pickled")
    torch.save(load_model(folder).state_dict(), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load_model(copy)


def test_no_policies() -> None:
    with pytest.raises(ConfigError, match="policy"):
        TransformersEngine({})
