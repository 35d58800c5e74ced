"""What two ranks really take, against what is forecast: of the model, and of the process alone."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from lightspan.engines.weights import load_model
from lightspan.learners.protocol import LoRA, Optimizer
from lightspan.learners.verl.description import Verl
from lightspan.learners.verl.learner import VerlLearner
from lightspan.learners.verl.ray_workers import RayWorkers
from lightspan.learners.verl.workers import Workers
from lightspan.reports.forecast import MemoryPart, PolicySize, model_shape
from lightspan.reports.shard_memory import CLUSTER, PROCESS, STEWARD, Sharding, shard_memory
from lightspan.testing.learner_suite import BOTH_CLIPS, make_rows, published
from lightspan.testing.tiny import tiny_model

FACTOR = 1.5
BUDGET = 256

pytestmark = pytest.mark.timeout(900)


def peak_of(pid: int) -> int:
    """The most that a process has held, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)


async def peaks(python: str, model: Path, lora: LoRA | None) -> list[int]:
    """Of two ranks that have trained and published a model."""
    workers = Workers(python, ["cpu", "cpu"])
    learner = VerlLearner(
        {"writer": model},
        workers=workers,
        own=True,
        lora=lora,
        token_budget=BUDGET,
        optimizer=Optimizer(learning_rate=1e-4),
    )
    rows = make_rows(load_model(model))
    for _ in range(3):
        learner.update(rows, BOTH_CLIPS)
    await published(learner)
    found = [peak_of(pid) for pid in workers.pids]
    learner.close()
    return found


def at_peak(parts: list[MemoryPart], rank: int) -> int:
    """Of a rank, its process apart."""
    own = [part for part in parts if part.name.startswith(f"rank {rank}: ")]
    sums = {
        when: sum(p.bytes for p in own if p.when == when and not p.name.endswith("process"))
        for when in ("always", "loading", "updating", "publishing")
    }
    return sums.pop("always") + max(sums.values())


@pytest.mark.parametrize("lora", [None, LoRA(rank=8)], ids=["full", "lora"])
async def test_ranks_take_what_is_forecast(python: str, tmp_path: Path, lora: LoRA | None) -> None:
    """Above what they take with next to no model, so that nothing but the model's part is compared;
    and that against what the forecast has for a process."""
    torch.set_num_threads(1)
    small = tiny_model(tmp_path / "small", seed=0, hidden=32)
    large = tiny_model(tmp_path / "large", seed=0, hidden=768, layers=8, heads=12, scale=0.02)
    bare = await peaks(python, small, lora)
    taken = await peaks(python, large, lora)
    sharding = Sharding(
        description=Verl(python=python, ranks=2, token_budget=BUDGET),
        policies={"writer": PolicySize(shape=model_shape(str(large)), lora=lora, model=str(large))},
        devices=["cpu", "cpu"],
        tokens=BUDGET,
        trained_share=1.0,
    )
    parts = shard_memory(sharding)
    said = []
    for rank, (with_model, without) in enumerate(zip(taken, bare, strict=True)):
        expected, found = at_peak(parts, rank), with_model - without
        fits = found / FACTOR < expected < found * FACTOR
        shown = f"rank {rank}: {expected / 2**20:.0f} MiB forecast, {found / 2**20:.0f} MiB taken"
        said.append((fits, shown))
        near = without / FACTOR < PROCESS < without * FACTOR
        said.append((near, f"rank {rank}: a process of {without / 2**20:.0f} MiB"))
    assert all(fits for fits, _ in said), said


def test_ray_takes_what_is_forecast(python: str, tmp_path: Path) -> None:
    """The process that drives the ranks, and the cluster that it starts, workers apart, once the
    ranks have trained."""
    torch.set_num_threads(1)
    model = tiny_model(tmp_path / "model", seed=0, hidden=32)
    workers = RayWorkers(python, ["cpu", "cpu"])
    learner = VerlLearner({"writer": model}, workers=workers, own=True, token_budget=BUDGET)
    try:
        learner.update(make_rows(load_model(model)), BOTH_CLIPS)
        steward = psutil.Process(workers.steward)
        cluster = [
            each
            for each in steward.children(recursive=True)
            if each.pid not in workers.pids and not "".join(each.cmdline()).startswith("ray::")
        ]
        assert {"gcs_server", "raylet"} <= {each.name() for each in cluster}
        taken = {STEWARD: peak_of(steward.pid), CLUSTER: sum(peak_of(each.pid) for each in cluster)}
    finally:
        learner.close()
    fits = [found / FACTOR < expected < found * FACTOR for expected, found in taken.items()]
    assert all(fits), taken
