"""LoRA on servers that speak vLLM's routes: several policies, each version under its own name.

The fake server's tokens show which LoRA sampled them: 51 for the first LoRA that it loaded, 52 for
the second. At the start it loads one LoRA for each policy, in the order of `RANKS`; it leaves the
model's output unchanged.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import ConfigError, EngineError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan_testing.engine_suite import Answer, generate, low_rank
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.weights import ServerSpec
from packages.vllm.tests.vllm_wire import PROMPT, Wire, served

RANKS = {"writer": 4, "checker": 8, "base": 0}


@pytest.fixture(scope="module")
def lora(folder: Path) -> LoRAWeights:
    return low_rank(load_model(folder), seed=3)


def wire(folder: Path, **info: Any) -> Wire:
    """A fake server that serves LoRA, of a model with tied embeddings."""
    room = {"lora_rank": 8, "loras": 4, "lora_updates": True, "transfer": None, "tied": True}
    return Wire(folder, **{**room, **info})


async def of(engine: VLLMEngine, policy: str, **options: Any) -> Answer:
    return await generate(engine, PROMPT, **{"policy": policy, "max_tokens": 1, **options})


async def test_policies_share_a_server(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    server = wire(folder)
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        assert engine.capabilities.lora == ("writer", "checker")
        assert [(await of(engine, policy)).ids for policy in RANKS] == [[51], [52], [53]]
        await engine.update("writer", lora, 3)
        await engine.update("checker", lora, 7)
        found = {policy: await of(engine, policy) for policy in RANKS}
        assert engine.policies() == {"writer": 3, "checker": 7, "base": 0}
    assert {policy: (answer.ids, answer.versions) for policy, answer in found.items()} == {
        "writer": ([54], [3]),
        "checker": ([55], [7]),
        "base": ([53], [0]),
    }
    assert server.loaded == {}, "its own weights were replaced"
    for start in server.brought[:3]:
        assert not any(tensor.any() for tensor in start["tensors"].values())
    assert server.brought[3]["config"]["r"] == 4
    layer = "model.layers.0.self_attn.q_proj"
    came = server.brought[3]["tensors"][f"base_model.model.{layer}.lora_B.weight"]
    assert torch.from_numpy(came).equal(lora.layers[layer][1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_update_cuts_the_calls_of_its_policy_alone(
    folder: Path, tmp_path: Path, lora: LoRAWeights, stream: bool
) -> None:
    server = wire(folder)
    server.hold.clear()  # no call comes to its end before the update
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        tasks = {
            policy: asyncio.create_task(of(engine, policy, max_tokens=4, stream=stream))
            for policy in RANKS
        }
        for _ in range(9):
            await server.served.acquire()
        server.hold, held = asyncio.Event(), server.hold
        await engine.update("writer", lora, 5)
        held.set()
        server.hold.set()
        found = {policy: await task for policy, task in tasks.items()}
    assert found["writer"].ids == [51, 51, 51, 54]
    assert found["writer"].versions == [0, 0, 0, 5]
    for policy, token in (("checker", 52), ("base", 53)):
        assert found[policy].ids == [token] * 4
        assert found[policy].versions == [0, 0, 0, 0]
    assert len(server.asked) == 4, "only the writer's was submitted again"
    assert server.asked[-1]["prompt"] == [*PROMPT, 51, 51, 51]


async def test_only_one_version_is_kept(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    server = wire(folder)
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        await engine.update("checker", lora, 1)
        for version in (2, 3, 4):
            await engine.update("writer", lora, version)
        assert sorted(name.rpartition("-")[0] for name in server.loras) == [
            *("lightspan-0", "lightspan-1", "lightspan-4"),
        ]
        kept = {path.parent.name for path in tmp_path.rglob("adapter_model.safetensors")}
        assert kept == set(server.loras)
        assert (await of(engine, "checker")).ids == [54]
        assert (await of(engine, "writer")).ids == [57]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("in_mid_update", [False, True])
async def test_a_server_that_is_started_again_gets_all_of_them_before_any_call(
    folder: Path, tmp_path: Path, lora: LoRAWeights, in_mid_update: bool
) -> None:
    server = wire(folder)
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        await engine.update("checker", lora, 7)
        if in_mid_update:
            server.dies.add("/v1/load_lora_adapter")
        await engine.update("writer", lora, 8)
        if not in_mid_update:
            await server.restart()
        answers = [await of(engine, policy) for policy in RANKS]
    first = 55 if in_mid_update else 56
    assert [answer.ids for answer in answers] == [[first], [first + 1], [first + 2]]
    assert [answer.versions for answer in answers] == [[8], [7], [0]]


async def test_servers_have_every_policy(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    first, second = wire(folder), wire(folder)
    async with served(folder, tmp_path, first, second, ranks=RANKS) as engine:
        await engine.update("writer", lora, 3)
        await asyncio.gather(*(of(engine, "writer", request_id=str(n)) for n in range(4)))
        probes = await engine.probes("writer")
    assert (len(first.brought), len(second.brought)) == (4, 4)
    assert {probe.where for probe in probes} == {
        f"the vLLM server {number} of policies writer, checker, base" for number in (0, 1)
    }
    assert [(probe.version, probe.ids) for probe in probes] == [(3, [54] * 8)] * 8


async def test_lora_of_a_killed_trainer(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    server = wire(folder)
    server.loras = {"lightspan-9-0123": 77, "somebody-elses": 78}
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        assert "lightspan-9-0123" not in server.loras
        assert server.loras["somebody-elses"] == 78
        assert (await of(engine, "writer")).ids == [51]


async def test_refused_lora_ends_the_run(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    server = wire(folder)
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        server.refuse["/v1/load_lora_adapter"] = 500, "expected target modules"
        with pytest.raises(EngineError, match=r"did not load version 5 .*expected target"):
            await engine.update("writer", lora, 5)
        with pytest.raises(EngineError, match="an update of policies writer, checker, base failed"):
            await of(engine, "checker")


async def test_wrong_updates(folder: Path, tmp_path: Path, lora: LoRAWeights) -> None:
    server = wire(folder)
    high = low_rank(load_model(folder), seed=3, rank=5)
    async with served(folder, tmp_path, server, ranks=RANKS) as engine:
        with pytest.raises(ModelError, match="have rank 5; the policy is served with rank 4"):
            await engine.update("writer", high, 2)
        with pytest.raises(ModelError, match="got whole weights"):
            await engine.update("writer", {}, 2)
        with pytest.raises(ModelError, match="base is served with the model's own weights"):
            await engine.update("base", lora, 2)
        await engine.update("checker", high, 2)  # its own rank is higher
        assert engine.policies() == {"writer": 0, "checker": 2, "base": 0}


async def test_a_server_without_lora_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--enable-lora.*--max-loras 4.*UPDATING=1"):
        async with served(folder, tmp_path, Wire(folder), ranks=RANKS):
            pass


def test_policies_of_other_models_have_servers_of_their_own(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=2, context=256)
    models = {"a": folder, "b": folder, "c": other, "whole": folder}
    addresses = {"a": ("http://127.0.0.1:1",), "c": ("http://127.0.0.1:2",)}
    vllm = VLLM(addresses={**addresses, "b": addresses["a"], "whole": ("http://127.0.0.1:3",)})
    ranks = {"a": 1, "b": 1, "c": 1}
    engine = VLLMEngine(vllm, models, lora=ranks, logs=tmp_path)
    assert engine._groups == [("a", "b"), ("c",), ("whole",)]
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 is given twice"):
        VLLMEngine(vllm, models, logs=tmp_path)


def test_a_model_of_which_it_is_not_known_where_lora_goes(folder: Path) -> None:
    known = ServerSpec.of(folder, dtype=None, context=None)
    odd = replace(known, shapes={"model.layers.0.mixer.weight": (4, 4), "a_proj.weight": (4,)})
    with pytest.raises(ModelError, match=r"VLLM\(merge=True\)"):
        odd.zero_lora()
