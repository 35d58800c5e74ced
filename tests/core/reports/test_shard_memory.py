"""What verl's ranks take, literally; and beside the engine, in the forecast of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL, LoRA, Torch, Trainer, Verl
from lightspan.reports.dry_run.measurements import forecast_memory
from lightspan.reports.forecast import MemoryPart, ModelShape, PolicySize, model_shape
from lightspan.reports.shard_memory import CLUSTER, PROCESS, STEWARD, Sharding, shard_memory

SHAPE = ModelShape(
    parameters=1600,
    bytes_per_parameter=2,
    layers=3,
    hidden=8,
    heads=2,
    query=8,
    key_value=4,
    mlp=16,
    vocabulary=50,
    context=128,
    linear_widths=70,
)
OUTSIDE = 50 * 8 * 2
LAYER = (1600 - OUTSIDE) // 3
KEPT = 3 * (6 * 8 + 2 * 8 + 2 * 4 + 2 + 4 * 16 + 2) + 2 * 8
"""Numbers that autograd keeps of a token."""


def memory(
    *, ranks: int = 2, device: str = "cpu", lora: LoRA | None = None, **changed: Any
) -> list[MemoryPart]:
    options = {name: changed.pop(name) for name in [*changed] if name in Verl.__struct_fields__}
    description = Verl(python="p", ranks=ranks, **options)
    size = PolicySize(shape=SHAPE, lora=lora, model="m")
    known: dict[str, Any] = {"policies": {"writer": size}, "tokens": 100, "trained_share": 0.25}
    devices = [device if device == "cpu" else f"cuda:{rank}" for rank in range(ranks)]
    return shard_memory(Sharding(description=description, devices=devices, **{**known, **changed}))


def sizes(parts: list[MemoryPart]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def test_two_ranks_on_a_cpu() -> None:
    parts = memory()
    gathered = 4 * (OUTSIDE + 2 * LAYER) + 4 * (OUTSIDE + LAYER)
    logits = 50 * (2 * 4 * 100 + 25 * 4 * 4)
    passes = 4 * 800 + gathered + 100 * KEPT * 4 + logits
    assert sizes(parts) == {
        "rank 0: process": PROCESS,
        "rank 0: shards": 12 * 800,
        "rank 0: passes": passes,
        "rank 1: process": PROCESS,
        "rank 1: shards": 12 * 800,
        "rank 1: passes": passes,
        "rank 0: loading": 6400,
        "rank 0: whole weights": 6400,
        "handed over": 6400,
        "publishing": 6400,
    }
    assert {part.place for part in parts} == {"host"}
    assert {part.name for part in parts if part.when == "updating"} == {
        "rank 0: passes",
        "rank 1: passes",
    }
    assert [part.name for part in parts if part.when == "publishing"] == [
        "rank 0: whole weights",
        "handed over",
        "publishing",
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ranks": 4}, 12 * 400),
        ({"ranks": 3}, 2134 + 4267),  # each rounded up
        ({"kl": True}, 16 * 800),
        ({"lora": LoRA(rank=4)}, 4 * (800 + 140) + 8 * 140),
        ({"lora": LoRA(rank=4), "kl": True}, 4 * (800 + 140) + 8 * 140),
    ],
)
def test_shards_are_parts_of_all(changed: dict[str, Any], expected: int) -> None:
    assert sizes(memory(**changed))["rank 0: shards"] == expected


def test_what_adapters_save() -> None:
    """Gradients, of whole layers too; and the engine that takes adapters is sent no more."""
    whole, lora = sizes(memory()), sizes(memory(lora=LoRA(rank=4)))
    saved = whole["rank 0: passes"] - lora["rank 0: passes"]
    assert saved == 4 * (OUTSIDE + LAYER) + 4 * (800 - 140)
    assert lora["handed over"] == 6400
    beside = sizes(memory(lora=LoRA(rank=4), beside=frozenset({"writer"})))
    assert (beside["handed over"], beside["rank 0: whole weights"]) == (4 * 280, 4 * 280)


def test_gpus_have_what_is_not_offloaded() -> None:
    """Between passes; while they compute they have all of it."""
    plain = memory(device="cuda")
    assert {part.device for part in plain if part.name.endswith("passes")} == {"cuda:0", "cuda:1"}
    half, full = (sizes(memory(device=d))["rank 0: passes"] for d in ("cuda", "cpu"))
    assert half < full  # bfloat16
    away = {
        "param_offload": 4 * 800,
        "optimizer_offload": 8 * 800,
    }
    for name, size in away.items():
        parts = memory(device="cuda", **{name: True})
        assert sizes(parts)["rank 1: shards"] == sizes(plain)["rank 1: shards"] - size
        assert sizes(parts)["rank 1: passes"] == sizes(plain)["rank 1: passes"] + size
        [kept] = [part for part in parts if part.name == "rank 1: offloaded"]
        assert (kept.bytes, kept.place, kept.when) == (size, "host", "always")
    assert memory(param_offload=True) == memory()  # nothing moves on a CPU


def test_every_rank_loads_what_has_tied_embeddings() -> None:
    shape = msgspec.structs.replace(SHAPE, tied=True)
    parts = memory(policies={"writer": PolicySize(shape=shape)})
    loading = {part.name: part.bytes for part in parts if part.when == "loading"}
    assert loading == {"rank 0: loading": 6400, "rank 1: loading": 6400}
    assert {part.place for part in memory(device="cuda") if part.when == "loading"} == {"host"}


def test_checkpointing_keeps_the_first_of_each_layer_and_one_whole() -> None:
    plain, less = sizes(memory()), sizes(memory(gradient_checkpointing=True))
    kept = 3 * 8 + KEPT // 3
    assert plain["rank 0: passes"] - less["rank 0: passes"] == 400 * (KEPT - kept)


def test_ray_takes_more_of_the_host() -> None:
    extra = sizes(memory(ray=True)).items() - sizes(memory()).items()
    assert dict(extra) == {
        "Ray: the process that drives the ranks": STEWARD,
        "Ray: its cluster": CLUSTER,
    }
    joined = sizes(memory(ray="head:6379")).items() - sizes(memory()).items()
    assert dict(joined) == {"Ray: the process that drives the ranks": STEWARD}


def test_a_forecast_has_the_engine_and_verls_ranks(tiny: Path) -> None:
    algorithm = LightningRL(tiny, optimize="writer")

    def forecast(**options: Any) -> Any:
        settings = Trainer(algorithm, **options).settings
        return forecast_memory(settings, process_bytes=7, rows=None, rollouts=4, step_rollouts=8)

    found = forecast(learner=Verl(python="p", ranks=2, token_budget=4096))
    known = {part.name: part for part in found.parts}
    shape = model_shape(str(tiny))
    assert known["rank 1: shards"].bytes == 12 * shape.parameters // 2
    assert "4,096 tokens" in known["rank 0: passes"].note
    embedded = {part.name for part in forecast(learner=Torch()).parts}
    assert {name for name in known if name in embedded} == {
        "process",
        "publishing",
        "key-value cache",
        *(name for name in embedded if name.startswith("engine")),
    }
    always = sum(part.bytes for part in found.parts if part.when == "always")
    assert found.host_bytes > always > 2 * PROCESS
    assert found.devices == []
    fewer = forecast(learner=Verl(python="p", ranks=2, token_budget=64))
    assert fewer.host_bytes <= found.host_bytes


def test_a_gpu_run_has_each_ranks_gpu(tiny: Path) -> None:
    settings = Trainer(LightningRL(tiny), learner=Verl(python="p", ranks=2), device="cuda").settings
    found = forecast_memory(settings, process_bytes=7, rows=None, rollouts=4, step_rollouts=8)
    by_device = {each.device: each.bytes for each in found.devices}
    assert set(by_device) == {"cuda:0", "cuda:1"}
    assert by_device["cuda:0"] > by_device["cuda:1"]  # the engine is there too
    parts = {part.name: part for part in found.parts}
    assert by_device["cuda:1"] == parts["rank 1: shards"].bytes + parts["rank 1: passes"].bytes
    assert msgspec.json.encode(found)
