"""What vLLM's servers take, literally; and beside the learner, in the forecast of a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import VLLM, LightningRL, LoRA, Policy, Torch, Trainer
from lightspan.reports.dry_run.measurements import forecast_memory, vllm_memory
from lightspan.reports.forecast import MemoryPart, ModelShape, model_shape
from lightspan.reports.server_memory import PROCESSES, Served, ServerMemory, server_memory
from lightspan.training.embedded import server_groups

SHAPE = ModelShape(
    parameters=1000,
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
WHOLE = Served(policies=("writer",), shape=SHAPE)
CPU = {"VLLM_CPU_KVCACHE_SPACE": "4"}


def memory(
    description: VLLM,
    *groups: Served,
    on_gpu: bool = False,
    total: int | None = None,
    **environ: str,
) -> ServerMemory:
    return server_memory(
        description, groups, on_gpu=on_gpu, capacity=lambda device: total, environ=environ
    )


def sizes(found: ServerMemory) -> dict[str, tuple[str, int]]:
    """Part → its device and bytes."""
    return {part.name: (part.device, part.bytes) for part in found.parts}


def test_a_server_on_the_cpu() -> None:
    found = memory(VLLM(python="p", environment=CPU), WHOLE)
    assert found.missing == []
    assert sizes(found) == {
        "vLLM of writer: processes": ("", PROCESSES),
        "vLLM of writer: weights": ("", 2000),
        "vLLM of writer: keys and values": ("", 4 * 2**30),
        "handed over: writer": ("", 2000),
        "handed over: the next version": ("", 2000),
    }
    assert {part.place for part in found.parts} == {"host"}
    assert [part.when for part in found.parts] == ["always"] * 4 + ["publishing"]


def test_a_wider_type_and_a_head_of_its_own() -> None:
    """A server of a tied model has an output layer of its own, unless it keeps its weights."""
    tied = msgspec.structs.replace(SHAPE, tied=True)
    description = VLLM(python="p", dtype="float32", environment=CPU)
    found = sizes(memory(description, Served(policies=("writer",), shape=tied)))
    assert found["vLLM of writer: weights"] == ("", 4 * (1000 + 50 * 8))
    assert found["handed over: writer"] == ("", 4000)
    kept = Served(policies=("writer",), shape=tied, lora_rank=4)
    assert sizes(memory(description, kept))["vLLM of writer: weights"] == ("", 4000)


def test_policies_with_lora_share_servers() -> None:
    """Of rank 12 and lower: room for three of rank 16, and nothing whole is handed over."""
    group = Served(policies=("writer", "base"), shape=SHAPE, lora_rank=12)
    found = memory(VLLM(python="p", servers=2, environment=CPU), group)
    name = "vLLM 0 of writer+base"
    assert sizes(found)[f"{name}: LoRA"] == ("", 16 * 70 * 2 * 3)
    assert [part.name for part in found.parts] == [
        f"vLLM {number} of writer+base: {part}"
        for number in (0, 1)
        for part in ("processes", "weights", "LoRA", "keys and values")
    ]


def test_what_vllm_decides_itself_is_said_to_be_unknown() -> None:
    for environ in ({}, {"VLLM_CPU_KVCACHE_SPACE": "0"}):
        found = memory(VLLM(python="p"), WHOLE, **environ)
        assert "vLLM of writer: keys and values" not in sizes(found)
        assert found.missing == [
            "memory: keys and values of vLLM of writer, which vLLM itself decides on: give "
            'VLLM(environment={"VLLM_CPU_KVCACHE_SPACE": "4"}), in GiB'
        ]
    inherited = memory(VLLM(python="p"), WHOLE, **CPU)
    assert sizes(inherited)["vLLM of writer: keys and values"] == ("", 4 * 2**30)


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({}, {}, {"cuda:0": 900}),
        ({"arguments": ("--gpu-memory-utilization=0.5",)}, {}, {"cuda:0": 500}),
        ({"arguments": ("-tp", "2")}, {}, {"cuda:0": 900, "cuda:1": 900}),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "3"}}, {}, {"cuda:3": 900}),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": "7"}},
            {"CUDA_VISIBLE_DEVICES": "5,7"},
            {"cuda:1": 900},
        ),
    ],
)
def test_a_server_takes_its_share_of_each_gpu(
    options: dict[str, Any], environ: dict[str, str], expected: dict[str, int]
) -> None:
    found = memory(VLLM(python="p", **options), WHOLE, on_gpu=True, total=1000, **environ)
    shares = {p.device: p.bytes for p in found.parts if p.name == "vLLM of writer: its share"}
    assert shares == expected
    assert "vLLM of writer: weights" not in sizes(found)


def test_a_gpu_that_is_not_seen_from_here() -> None:
    description = VLLM(python="p", environment={"CUDA_VISIBLE_DEVICES": "1"})
    found = memory(description, WHOLE)
    assert sizes(found)["vLLM of writer: weights"] == ("cuda:1", 2000)
    assert found.missing == [
        "memory: keys and values of vLLM of writer on cuda:1, not seen from here"
    ]


def test_servers_of_somebody_else_are_not_forecast() -> None:
    found = memory(VLLM(addresses=["http://127.0.0.1:8000"]), WHOLE)
    assert found.missing == ["memory: that of the servers at VLLM(addresses=…) is not forecast"]
    assert list(sizes(found)) == ["handed over: writer", "handed over: the next version"]


# --- of a run -------------------------------------------------------------------------------


def test_who_shares_servers(tiny: Path) -> None:
    def groups(merge: bool = False, **options: Any) -> dict[tuple[str, ...], int]:
        algorithm = LightningRL(tiny, **options)
        engine = VLLM(python="p", merge=merge)
        return server_groups(Trainer(algorithm, engine=engine).settings)

    two = {
        "optimize": {
            "writer": Policy(name="w", lora=LoRA(rank=4)),
            "critic": Policy(name="c", lora=LoRA(rank=8)),
        },
        "frozen": "base",
    }
    assert set(groups()) == {("policy",)}
    assert set(groups().values()) == {0}
    shared = groups(**two)
    assert list(shared.values()) == [8]
    assert all(rank == 0 for rank in groups(merge=True, **two).values())
    assert len(groups(merge=True, **two)) == 3


def test_a_forecast_has_the_engine_and_the_learner(tiny: Path) -> None:
    """Two ranks of the learner beside a server, all in the host's memory."""
    engine = VLLM(python="p", environment=CPU)
    algorithm = LightningRL(tiny, optimize="writer")
    settings = Trainer(algorithm, engine=engine, learner=Torch(ranks=2)).settings
    servers = vllm_memory(settings, engine)
    forecast = forecast_memory(
        settings, process_bytes=7, rows=None, rollouts=4, step_rollouts=8, servers=servers
    )
    known = {part.name: part for part in forecast.parts}
    shape = model_shape(str(tiny))
    [policy] = algorithm.policies()
    width = shape.bytes_per_parameter
    tied = shape.vocabulary * shape.hidden if shape.tied else 0
    assert known[f"vLLM of {policy}: weights"].bytes == width * (shape.parameters + tied)
    assert known["learner weights"].bytes == 4 * shape.parameters
    assert known["rank 1: learner"].bytes > 3 * 4 * shape.parameters
    assert not [name for name in known if name.startswith(("engine", "key-value cache"))]
    always = sum(part.bytes for part in forecast.parts if part.when == "always")
    assert forecast.host_bytes > always > PROCESSES + 4 * 2**30
    assert forecast.devices == []
    own = Trainer(algorithm, learner=Torch(ranks=2)).settings
    embedded = forecast_memory(own, process_bytes=7, rows=None, rollouts=4, step_rollouts=8)
    rest = [part for part in forecast.parts if part not in servers.parts]
    assert rest == [part for part in embedded.parts if not _of_engine(part)]


def _of_engine(part: MemoryPart) -> bool:
    return part.name.startswith(("engine", "key-value cache"))
