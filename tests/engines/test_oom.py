"""Test errors for missing memory: engine and learner name the setting to lower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan import LightningRL, Trainer, Transformers
from lightspan.errors import (
    ContextOverflowError,
    EngineMemoryError,
    LightspanError,
    OutOfMemoryError,
)
from lightspan.protocols.learner import LoRA, SFTLoss
from lightspan_testing.engine_suite import generate
from lightspan_testing.learner_suite import make_rows
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.oom import allocation, explained, is_out_of_memory
from lightspan_torch.engine.transformers import (
    GPU_CACHE_TOKENS,
    TransformersEngine,
    default_cache_tokens,
)
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.policy_model import default_dtype
from lightspan_torch.learner.torch import TorchLearner

CUDA = (
    "CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 3.02 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 1610612736 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("memory") / "model", seed=0)


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (torch.OutOfMemoryError(CUDA), " (it tried to allocate 9.27 GiB)"),
        (RuntimeError(CPU), " (it tried to allocate 1.50 GiB)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), ""),
        (MemoryError("Memory footprint 10 is more than available memory 9"), ""),
        (RuntimeError("std::bad_alloc"), ""),
    ],
)
def test_what_out_of_memory_looks_like(error: Exception, size: str) -> None:
    assert is_out_of_memory(error)
    assert allocation(error) == size
    with pytest.raises(OutOfMemoryError) as caught, explained("it", lambda: "Lower this."):
        raise error
    assert str(caught.value) == f"it ran out of memory{size}. Lower this."
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, LightspanError)


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, explained("it", lambda: pytest.fail("not asked")):
        raise error
    assert caught.value is error


# --- the learner ----------------------------------------------------------------------------
def test_the_learner_names_its_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    rows = make_rows(load_model(folder), 2)
    longest = max(len(row.ids) for row in rows)
    learner = TorchLearner({"writer": folder}, token_budget=1024)
    monkeypatch.setattr(learner.__class__, "_step", explode)
    with pytest.raises(OutOfMemoryError) as caught:
        learner.update(rows, SFTLoss())
    assert str(caught.value) == (
        f"the learner, updating on cpu with rows of up to {longest} tokens, ran out of memory "
        "(it tried to allocate 9.27 GiB). Lower token_budget, now 1024: "
        "learner=Torch(token_budget=512). If that is not enough: a shorter max_tokens or "
        "max_length, adapters instead of full weights (lora=LoRA()), a smaller key-value cache "
        "(engine=Transformers(num_blocks=…)), or a smaller model"
    )
    learner = TorchLearner({"writer": folder}, token_budget=longest, lora=LoRA(rank=2))
    with pytest.raises(OutOfMemoryError) as caught:
        learner.update(rows, SFTLoss())
    text = str(caught.value)
    assert f"the longest has {longest} tokens; LightningRL(max_length={longest // 2})" in text
    assert "lora=" not in text


PROGRAM = """
import resource, sys
import torch
from lightspan.errors import OutOfMemoryError
from lightspan.protocols.learner import SFTLoss
from lightspan_torch.learner.torch import TorchLearner
from lightspan.lightning.rows import Row

torch.set_num_threads(1)
learner = TorchLearner({"writer": sys.argv[1]}, token_budget=4096)

def row(size):
    return Row(rollout_id="r", policy="writer", ids=[n * n % 389 + 5 for n in range(size)],
               mask=[n > 0 for n in range(size)], advantages=[1.0] * size, weights=[1.0] * size,
               logprobs=[-1.0] * size, versions=[0] * size, temperatures=[1.0] * size)

assert learner.update([row(64)], SFTLoss())["skipped"] == 0
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 250 * 2**20, -1))
try:
    learner.update([row(4096)], SFTLoss())
except OutOfMemoryError as error:
    print(error)
assert learner.update([row(64)], SFTLoss())["skipped"] == 0
print("went on")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS bounds memory on Linux")
def test_a_learner_that_really_runs_out_of_memory(tmp_path: Path) -> None:
    """Check the learner's error with a limited address space; then a smaller update succeeds."""
    folder = tiny_model(tmp_path / "model", seed=0, hidden=512, layers=4, context=8192)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said, went_on = done.stdout.splitlines()
    assert said.startswith(
        "the learner, updating on cpu with rows of up to 4,096 tokens, ran out of memory"
    )
    assert "learner=Torch(token_budget=2048)" in said
    assert went_on == "went on"


# --- the engine -----------------------------------------------------------------------------
async def test_a_cache_that_is_too_large_names_its_size(folder: Path) -> None:
    """Check the engine's error with a cache of 70 TB, more than any machine has."""
    engine = TransformersEngine({"writer": folder}, num_blocks=10**9)
    await engine.start()
    lower = (
        r"engine ran out of memory.* while generating for policy writer\. Lower num_blocks, now "
        r"1000000000 \(64,000,000,000 tokens of keys and values\), and batch_tokens, now 512: "
        r"engine=Transformers\(num_blocks=500000000, batch_tokens=256\)"
    )
    for _ in range(2):
        with pytest.raises(EngineMemoryError, match=lower):
            await generate(engine, [7, 8, 9])
    with pytest.raises(EngineMemoryError, match="Lower num_blocks"):
        engine.usage()
    await engine.close()


def test_a_check_at_load_that_runs_out_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that such a model is not refused as one that the engine cannot compute."""

    def explode(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr("lightspan_torch.engine._attention.forward", explode)
    message = r"loading the model of policy writer on cpu ran out of memory \(.* 9.27 GiB\)\. Lower"
    with pytest.raises(OutOfMemoryError, match=message):
        TransformersEngine({"writer": folder})


@pytest.mark.slow
def test_a_run_ends_with_its_engine(folder: Path, apps: Any, tmp_path: Path) -> None:
    """Check that the run ends, because every further rollout would be lost without an engine."""
    algorithm = LightningRL(folder, optimize="writer", group_size=2, tasks_per_step=2)
    trainer = Trainer(
        algorithm,
        runners=2,
        steps=9,
        folder=tmp_path / "run",
        engine=Transformers(num_blocks=10**9),
    )
    with pytest.raises(EngineMemoryError, match="Lower num_blocks, now 1000000000"):
        trainer.fit(apps.spell, [{"q": "One?"}, {"q": "Two?"}])


async def test_no_call_is_longer_than_the_cache(folder: Path) -> None:
    engine = TransformersEngine({"writer": folder}, num_blocks=2)
    await engine.start()
    with pytest.raises(ContextOverflowError, match=r"holds 128, .* context_length and num_blocks"):
        await generate(engine, list(range(5, 5 + 128)))
    answer = await generate(engine, list(range(5, 105)), temperature=0.0, max_tokens=400)
    assert len(answer.ids) <= 28
    await engine.close()


def test_the_cache_leaves_a_gpu_room_for_the_learner() -> None:
    assert default_cache_tokens("cuda:0", 1_000_000) == GPU_CACHE_TOKENS == 131_072
    assert default_cache_tokens("cpu", 512) == 16_384
    assert default_cache_tokens("cpu", 32_768) == 65_536


def test_a_model_that_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def explode(self: Any, *arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "to", explode)
    with pytest.raises(OutOfMemoryError, match=r"do not fit into the memory of cuda:1 .*lora=LoRA"):
        load_model(folder, device="cuda:1")


# --- what weights are kept in ---------------------------------------------------------------
def test_weights_that_move_are_float32(folder: Path) -> None:
    assert default_dtype("cpu", None) == default_dtype("cuda", None) == torch.float32
    assert default_dtype("cpu", LoRA()) == torch.float32
    assert default_dtype("cuda:1", LoRA()) == torch.bfloat16
    model = TorchLearner({"writer": folder})._models["writer"].plain
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_adapters_on_bfloat16_weights_are_float32(folder: Path) -> None:
    """Check LoRA weights as on a GPU, including update and publishing."""
    learner = TorchLearner({"writer": folder}, lora=LoRA(rank=2), dtype=torch.bfloat16)
    trained = learner._models["writer"]
    assert {parameter.dtype for parameter in trained.trainable().values()} == {torch.float32}
    assert trained.plain.lm_head.weight.dtype == torch.bfloat16
    rows = make_rows(load_model(folder), 4)
    before = learner.score(rows)
    exact = TorchLearner({"writer": folder}).score(rows)
    for scores, expected in zip(before, exact, strict=True):
        assert scores == pytest.approx(expected, abs=0.3)
    result = learner.update(rows, SFTLoss())
    assert (result["skipped"], result["grad_norm"] > 0) == (0.0, True)
