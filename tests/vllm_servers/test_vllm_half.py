"""Test the check after an update with servers that compute in half precision."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from lightspan.errors import EngineError
from lightspan_testing.engine_suite import generate
from lightspan_torch.learner.torch import TorchLearner
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.weight_sync_check import check_probes
from tests.vllm_servers.conftest import Start

PROMPTS = [[5 + (7 * place + number) % 300 for place in range(24)] for number in range(4)]

pytestmark = pytest.mark.timeout(900)


def learner_of(folder: Path, *, by: float) -> TorchLearner:
    """Return a learner whose weights have random noise with the standard deviation `by`."""
    learner = TorchLearner({"writer": str(folder)})
    generator = torch.Generator().manual_seed(4)
    for parameter in learner._models["writer"].trainable().values():
        parameter.data += by * torch.randn(parameter.shape, generator=generator)
    return learner


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_rounding_passes(start: Start, served: Path, tmp_path: Path, dtype: str) -> None:
    address = await asyncio.to_thread(start, "--dtype", dtype)
    learner, other = learner_of(served, by=0.03), learner_of(served, by=0.06)
    vllm = VLLM(addresses=(address,), dtype=dtype)  # type: ignore[arg-type]
    engine = VLLMEngine(vllm, {"writer": served}, logs=tmp_path)
    await engine.start()
    try:
        for number, prompt in enumerate(PROMPTS):
            await generate(engine, prompt, request_id=str(number), max_tokens=1)
        await learner.publish(engine, {"writer": 1})
        probes = await engine.probes("writer")
        assert [probe.prompt_ids for probe in probes] == PROMPTS
        await check_probes(probes, "writer", 1, partial(asyncio.to_thread, learner.score))
        with pytest.raises(EngineError, match=r"reports version 1 of policy writer, but .* differ"):
            await check_probes(probes, "writer", 1, partial(asyncio.to_thread, other.score))
    finally:
        await engine.close()
