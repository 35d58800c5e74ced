"""Conformance tests of token engines that serve LoRA: subclass `LoRAEngineSuite`.

    class TestMyEngineWithLoRA(LoRAEngineSuite):
        def make_lora_engine(self, models, ranks):
            return MyEngine(models, lora=ranks)

It is the engine suite with every policy served as LoRA on top of its model's weights, and tests of
several such policies at once. The policy `base` has the model's own weights.
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
    Answer,
    EngineSuite,
    generate,
    low_rank,
    of_tokens,
    perturbed,
    reference,
)
from lightspan_torch.engine.weights import load_model

RANK: Final = 8
"""Maximum rank of the policies."""
BASE: Final = "base"


@torch.no_grad()
def merged(folder: Path, weights: LoRAWeights) -> Any:
    """Load a model with these added to its weights."""
    model = load_model(folder)
    for name, (first, second) in weights.layers.items():
        model.get_submodule(name).weight += weights.scale * (second @ first)
    return model


class LoRAEngineSuite(EngineSuite):
    """See the module's docstring."""

    tolerance = 3e-5
    """Unmerged adapters round differently from merged ones: of 16,823 tokens sampled by vLLM 9
    differed by more than 1e-5, at most by 1.6e-5."""

    def make_lora_engine(self, models: Mapping[str, Path], ranks: Mapping[str, int]) -> TokenEngine:
        """Return an unstarted engine for these folders (policy name → folder), each as LoRA of at
        most this rank; 0 for the model's own weights."""
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

    def expect(self, answer: Answer, model: Any, prompt: list[int], version: int) -> None:
        """Check that every token has this version and its log-probability under this model."""
        assert answer.versions == [version] * len(answer.ids)
        expected = of_tokens(reference(model, prompt, answer.ids), answer.ids)
        assert answer.logprobs == pytest.approx(expected, abs=self.tolerance)

    async def test_it_is_declared(self, folder: Path) -> None:
        async with self.running(writer=folder, checker=folder, base=folder) as engine:
            assert set(engine.capabilities.lora) == {"writer", "checker"}

    async def test_several_policies_of_one_model(
        self, folder: Path, model: Any, prompt: list[int]
    ) -> None:
        writer, as_writer = self.other(folder, model, seed=8)
        checker, as_checker = self.other(folder, model, seed=9)
        again, as_again = self.other(folder, model, seed=10)
        async with self.running(writer=folder, checker=folder, base=folder) as engine:
            await engine.update("writer", writer, 1)
            await engine.update("checker", checker, 5)
            for version, now in ((1, as_writer), (2, as_again)):
                answers = await asyncio.gather(
                    *(
                        generate(engine, prompt, policy=policy, request_id=f"{policy}{n}")
                        for policy in ("writer", "checker", BASE)
                        for n in range(3)
                    )
                )
                for answer in answers[:3]:
                    self.expect(answer, now, prompt, version)
                for answer in answers[3:6]:
                    self.expect(answer, as_checker, prompt, 5)
                for answer in answers[6:]:
                    self.expect(answer, model, prompt, 0)
                if version == 1:
                    await engine.update("writer", again, 2)
            assert engine.policies() == {"writer": 2, "checker": 5, BASE: 0}

    async def test_an_update_of_one_policy_cuts_no_call_of_another(
        self, folder: Path, model: Any, prompt: list[int]
    ) -> None:
        writer, as_writer = self.other(folder, model, seed=8)
        checker, as_checker = self.other(folder, model, seed=9)
        async with self.running(writer=folder, checker=folder, base=folder) as engine:
            await engine.update("checker", checker, 1)
            policies = ("checker", BASE)
            running = [
                asyncio.create_task(
                    generate(
                        engine,
                        prompt,
                        policy=policy,
                        stream=n % 2 == 0,
                        max_tokens=self.tokens_in_flight,
                        request_id=f"{policy}{n}",
                    )
                )
                for policy in policies
                for n in range(4)
            ]
            await asyncio.sleep(0)
            await engine.update("writer", writer, 3)
            moved = await generate(engine, prompt)
            answers = await asyncio.gather(*running)
        self.expect(moved, as_writer, prompt, 3)
        for answer in answers[:4]:
            self.expect(answer, as_checker, prompt, 1)
        for answer in answers[4:]:
            self.expect(answer, model, prompt, 0)

    async def test_the_models_own_weights_take_no_update(self, folder: Path, model: Any) -> None:
        async with self.running(writer=folder, base=folder) as engine:
            for wrong in (low_rank(model, seed=9), perturbed(model, seed=9)):
                with pytest.raises(LightspanError, match="base is served with the model's own"):
                    await engine.update(BASE, wrong, 1)
            assert engine.policies() == {"writer": 0, BASE: 0}
