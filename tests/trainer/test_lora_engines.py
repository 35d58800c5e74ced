"""Test policies as LoRA on one copy of a model, and the check of the engine's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan import LoRA, Policy, Trainer, Transformers
from lightspan.errors import EngineError, UnsupportedError
from lightspan.protocols.engine import GenerationRequest, LoRAWeights, ProbedEngine, Score
from lightspan.schema.token_records import Sampling
from lightspan.training.backends import make_engine
from lightspan.training.checkpoints import latest
from lightspan_testing.engine_suite import generate, of_tokens, reference
from lightspan_testing.lora_suite import merged
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner
from lightspan_vllm.weight_sync_check import Probe, check_probes

pytestmark = pytest.mark.slow

Make = Callable[..., Any]

PROMPT = [5, 6, 7, 8, 9]
TWO = {"checker": Policy(lora=LoRA(rank=8)), "writer": Policy(lora=LoRA(rank=4))}


class Probed(TransformersEngine, ProbedEngine):
    """An engine in the trainer's process whose weights are checked like those of servers."""

    asked = 0
    stale = False
    """Whether the engine keeps the weights of the first update."""
    _first: Any = None

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        self._first = self._first or weights
        await super().update(policy, self._first if self.stale else weights, version)

    async def check_weights(self, policy: str, version: int, score: Score) -> None:
        self.asked += 1
        request = GenerationRequest(
            request_id=f"probe{self.asked}",
            policy=policy,
            prompt_ids=PROMPT,
            sampling=Sampling(max_tokens=8),
        )
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in self.generate(request, stream=False):
            ids, logprobs = [*ids, *chunk.ids], [*logprobs, *chunk.logprobs]
        probe = Probe(
            where="the engine",
            version=self.policies()[policy],
            prompt_ids=PROMPT,
            ids=ids,
            logprobs=logprobs,
            tolerance=1e-3,
        )
        await check_probes([probe], policy, version, score)


def test_an_engine_that_keeps_old_weights_ends_the_run(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    """Check that the run ends at the first update that the engine has ignored."""
    engine = Probed({"policy": tiny}, seed=1)
    engine.stale = True
    trainer = Trainer(rl(learning_rate=0.03), engine=engine, steps=3, folder=tmp_path / "run")
    with pytest.raises(EngineError, match=r"the engine reports version 2 of policy .* differ"):
        trainer.fit(apps.spell, ask(4))
    assert engine.asked == 2
    found = latest(tmp_path / "run")
    assert found is None or found.is_dir()


def test_an_engine_is_looked_at_after_every_update(
    apps: Any, rl: Make, tiny: Path, tmp_path: Path, ask: Make
) -> None:
    engine = Probed({"policy": tiny}, seed=1)
    trainer = Trainer(rl(learning_rate=0.03), engine=engine, steps=2, folder=tmp_path / "run")
    trainer.fit(apps.spell, ask(4))
    assert engine.asked == 3  # at the start too


# --- which policies are LoRA beside what --------------------------------------------------------


def settings_of(algorithm: Any, **options: Any) -> Any:
    return Trainer(algorithm, steps=1, **options).settings


@pytest.mark.parametrize(
    ("options", "engine", "beside"),
    [
        ({"optimize": TWO}, None, ("checker", "writer")),
        ({"optimize": TWO}, Transformers(merge_lora=True), ()),
        # one policy has a copy for itself either way, and computes less per token merged
        ({"lora": LoRA(rank=4)}, None, ()),
        ({"lora": LoRA(rank=4), "frozen": "base"}, None, ("policy",)),
        ({"optimize": {"writer": Policy(lora=LoRA(rank=4)), "checker": Policy()}}, None, ()),
    ],
)
def test_policies_that_share_a_copy(
    rl: Make, tmp_path: Path, options: Any, engine: Any, beside: tuple[str, ...]
) -> None:
    more = {"engine": engine} if engine else {}
    settings = settings_of(rl(**options), folder=tmp_path / "run", **more)
    assert make_engine(settings, seed=0).capabilities.lora == beside


# --- trained ------------------------------------------------------------------------------------


async def test_a_learner_sends_what_it_computes_with(tiny: Path) -> None:
    learner = TorchLearner(
        {"writer": str(tiny), "whole": str(tiny)}, lora={"writer": LoRA(rank=4, alpha=12)}
    )
    for name, parameter in learner._models["writer"].trainable().items():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    engine = TransformersEngine({"writer": tiny, "whole": tiny}, lora={"writer": 4})
    await engine.start()
    await learner.publish(engine, {"writer": 1, "whole": 2})
    sent = learner._models["writer"].lora_weights()
    assert (sent.rank, sent.scale) == (4, 3.0)
    answer = await generate(engine, PROMPT)
    expected = of_tokens(reference(merged(tiny, sent), PROMPT, answer.ids), answer.ids)
    assert answer.logprobs == pytest.approx(expected, abs=1e-5)
    assert engine.policies() == {"writer": 1, "whole": 2}
    await engine.close()


def test_lora_of_what_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "untied", seed=2)
    model = load_model(path)
    model.config.tie_word_embeddings = False
    embeddings = model.get_input_embeddings()
    head = torch.nn.Linear(embeddings.embedding_dim, embeddings.num_embeddings, bias=False)
    model.set_output_embeddings(head)
    model.save_pretrained(path)
    lora = LoRA(rank=4, target_modules=("embed_tokens", "q_proj"))
    learner = TorchLearner({"writer": str(path)}, lora={"writer": lora})
    with pytest.raises(UnsupportedError, match=r"adapts model\.embed_tokens.*VLLM\(merge=True\)"):
        learner._models["writer"].lora_weights()
