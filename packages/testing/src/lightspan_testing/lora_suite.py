"""Conformance tests of token engines that serve LoRA: subclass `LoRAEngineSuite`.

    class TestMyEngineWithLoRA(LoRAEngineSuite):
        def make_lora_engine(self, models, ranks):
            return MyEngine(models, lora=ranks)

It is the engine suite with every policy served as LoRA on top of its model's weights. It also has
tests of several such policies at once. The policy `base` is the model itself, without LoRA.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from torch import Tensor

from lightspan.errors import LightspanError
from lightspan.protocols.engine import LoRAWeights, TokenEngine
from lightspan_testing.engine_suite import (
    EngineSuite,
    generate,
    low_rank,
    perturbed,
)
from lightspan_torch.engine.weights import load_model

RANK: Final = 8
"""Maximum rank of the policies."""
BASE: Final = "base"


@torch.no_grad()
def merged(folder: Path, weights: LoRAWeights) -> Any:
    """Load the model in `folder`, with the LoRA `weights` added to its own weights."""
    model = load_model(folder)
    for name, (first, second) in weights.layers.items():
        model.get_submodule(name).weight += weights.scale * (second @ first)
    return model


class LoRAEngineSuite(EngineSuite):
    """Tests of a token engine that serves LoRA; the module's docstring shows how to subclass it."""

    tolerance = 3e-5
    """Tolerance of log-probabilities. Unmerged adapters round differently from merged ones.

    Of 16,823 tokens sampled by vLLM, 9 differed by more than 1e-5, and none by more than 1.6e-5.
    """

    def make_lora_engine(self, models: Mapping[str, Path], ranks: Mapping[str, int]) -> TokenEngine:
        """Return an unstarted engine that serves policies as LoRA.

        Args:
            models: policy name → folder of the model.
            ranks: policy name → maximum LoRA rank. 0 serves the model's own weights, without LoRA.
        """
        raise NotImplementedError

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        ranks = {policy: 0 if policy == BASE else RANK for policy in models}
        return self.make_lora_engine(models, ranks)

    def other(self, folder: Path, model: Any, seed: int) -> tuple[Any, Any]:
        weights = low_rank(model, seed)
        return weights, merged(folder, weights)

    def wrong(self, model: Any) -> list[tuple[Any, str]]:
        weights = low_rank(model, seed=9)
        layers = dict(weights.layers)
        name, (first, second) = next(iter(layers.items()))

        def of(changed: Mapping[str, tuple[Tensor, Tensor]]) -> LoRAWeights:
            return msgspec.structs.replace(weights, layers=changed)

        return [
            (of({**layers, "no.such": (first, second)}), r"no\.such"),
            (of({**layers, name: (first[:, :-1], second)}), name),
            (of({**layers, name: (first, second[:-1])}), name),
            (
                low_rank(model, seed=9, rank=2 * RANK),
                "have rank 16; the policy is served with rank 8",
            ),
            (perturbed(model, seed=9), "writer is served as LoRA of rank 8 but"),
        ]

    async def test_several_policies_of_one_model(
        self, folder: Path, model: Any, prompt: list[int]
    ) -> None:
        """An update of one policy does not affect running calls of other policies."""
        first, _ = self.other(folder, model, seed=10)
        writer, as_writer = self.other(folder, model, seed=8)
        checker, as_checker = self.other(folder, model, seed=9)
        async with self.running(writer=folder, checker=folder, base=folder) as engine:
            assert set(engine.capabilities.lora) == {"writer", "checker"}
            await engine.update("writer", first, 1)
            await engine.update("checker", checker, 5)
            calls = [
                generate(
                    engine,
                    prompt,
                    policy=policy,
                    stream=n % 2 == 0,
                    max_tokens=self.tokens_in_flight,
                    request_id=f"{policy}{n}",
                )
                for policy in ("checker", BASE)
                for n in range(4)
            ]
            running = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0)
            await engine.update("writer", writer, 2)
            assert engine.policies() == {"writer": 2, "checker": 5, BASE: 0}
            self.expect(await generate(engine, prompt), as_writer, prompt, 2)
            answers = await asyncio.gather(*running)
        for answer in answers[:4]:
            self.expect(answer, as_checker, prompt, 5)
        for answer in answers[4:]:
            self.expect(answer, model, prompt)

    async def test_the_models_own_weights_take_no_update(self, folder: Path, model: Any) -> None:
        async with self.running(writer=folder, base=folder) as engine:
            for wrong in (low_rank(model, seed=9), perturbed(model, seed=9)):
                with pytest.raises(LightspanError, match="base is served with the model's own"):
                    await engine.update(BASE, wrong, 1)
            assert engine.policies() == {"writer": 0, BASE: 0}
