"""Test the memory estimate: one formula, used by each engine and learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightspan import VLLM, LightningRL, LoRA, Torch, Trainer
from lightspan.protocols.learner import PolicyLoss
from lightspan_tools.dry_run.memory import estimate_memory
from lightspan_torch.engine.parameter_count import model_size

P, L = 1000, 50
"""Numbers of parameters of the model and of LoRA."""


def of(learner: Torch, lora: int = 0, **options: Any) -> dict[str, int]:
    return learner.memory(P, lora, **{"device": "cpu", "reference": False, **options})


def test_full_weights() -> None:
    parts = {"learner weights": 4 * P, "gradients": 4 * P, "optimiser states": 8 * P}
    assert of(Torch()) == of(Torch(), device="cuda") == parts
    assert of(Torch(), reference=True) == {**parts, "reference copy": 4 * P}
    assert of(Torch(dtype="bfloat16"))["optimiser states"] == 4 * P


def test_lora_trains_float32_beside_weights_that_are_bfloat16_on_a_gpu() -> None:
    trained = {"gradients": 4 * L, "optimiser states": 8 * L}
    assert of(Torch(), L) == {"learner weights": 4 * P + 4 * L, **trained}
    on_gpu = {"learner weights": 2 * P + 4 * L, **trained}
    assert of(Torch(), L, device="cuda", reference=True) == on_gpu


def estimated(model: Path, **options: Any) -> tuple[dict[str, int], str]:
    algorithm = LightningRL(model, **options.pop("algorithm", {}))
    report, missing = estimate_memory(Trainer(algorithm, **options).settings)
    assert report is not None
    return report.parts, missing


def test_a_run_with_everything_embedded(tiny: Path) -> None:
    size = model_size(str(tiny))
    plain, missing = estimated(tiny)
    assert missing == ""
    assert plain["engine weights"] == size.parameters * size.weight_bytes
    assert plain["learner weights"] == 4 * size.parameters
    based, _ = estimated(tiny, algorithm={"frozen": "base", "loss": PolicyLoss(kl=0.1)})
    assert based["engine weights"] == 2 * plain["engine weights"]
    assert based["key-value cache"] == 2 * plain["key-value cache"]
    assert based["reference copy"] == plain["learner weights"]


def test_policies_with_lora_share_the_weights_beside_them(tiny: Path) -> None:
    size = model_size(str(tiny))
    lora = {"lora": LoRA(rank=2), "optimize": {"a": "one", "b": "two"}}
    parts, _ = estimated(tiny, algorithm=lora)
    assert parts["engine weights"] == size.parameters * size.weight_bytes
    plain, _ = estimated(tiny)
    assert parts["key-value cache"] == 2 * plain["key-value cache"]  # the engine makes one each
    assert parts["learner weights"] == 4 * size.parameters + 4 * 4 * size.lora_values
    assert parts["gradients"] == 4 * 4 * size.lora_values


def test_servers_of_vllm(tiny: Path) -> None:
    size = model_size(str(tiny))
    space = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    servers = VLLM(python="p", servers=2, dtype="bfloat16", environment=space)
    parts, missing = estimated(tiny, engine=servers)
    assert missing == ""
    assert parts["engine weights"] == 2 * 2 * size.parameters
    assert parts["key-value cache"] == 2 * 2 * 2**30
    assert "key-value cache" not in VLLM(python="p").memory(size, "cpu")
    assert VLLM(addresses=["http://127.0.0.1:8000"]).memory(size, "cpu") == {}
    _, missing = estimated(tiny, engine=VLLM(python="p"))
    assert (
        missing == "memory: the key-value cache, whose size the engine's servers choose themselves"
    )
