"""Tests of LoRA results: PEFT adapters and merged models, exported and served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan import LoRA, Optimizer
from lightspan.errors import ConfigError, ModelError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import SFTLoss
from lightspan_testing.learner_suite import make_rows, token_logprobs
from lightspan_torch.learner.policy_model import adapter_base, load_adapter, merge_adapter
from lightspan_torch.learner.torch import TorchLearner


@pytest.fixture(scope="module")
def trained(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchLearner, list[Row], Path]:
    """Train LoRA for a step; return the learner, its batch and the export's folder."""
    from lightspan_torch.engine.weights import load_model

    learner = TorchLearner(
        {"writer": str(tiny)},
        lora=LoRA(rank=4),
        optimizer=Optimizer(learning_rate=2e-2, max_grad_norm=None),
    )
    rows = make_rows(load_model(tiny))
    for _ in range(4):
        learner.update(rows, SFTLoss())
    folder = tmp_path_factory.mktemp("adapter") / "model"
    learner.export("writer", folder)
    return learner, rows, folder


def scores_of(model: Any, rows: list[Row]) -> list[list[float]]:
    with torch.no_grad():
        return [token_logprobs(model, row).tolist() for row in rows]


def close(first: list[list[float]], second: list[list[float]]) -> bool:
    return all(a == pytest.approx(b, abs=1e-4) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_export_is_a_peft_adapter(trained: Any, tiny: Path) -> None:
    """Check that PEFT loads the export and computes the learner's log-probabilities."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner, rows, folder = trained
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == (str(tiny), 4)
    assert config["task_type"] == "CAUSAL_LM"
    assert not (folder / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(folder).chat_template
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, folder).eval()
    learned = learner.score(rows)
    assert close(scores_of(model, rows), learned)
    with model.disable_adapter():
        assert not close(scores_of(model, rows), learned)
    assert adapter_base(folder) == str(tiny)
    assert adapter_base(tiny) is None


def test_a_base_model_elsewhere(trained: Any, tiny: Path, tmp_path: Path) -> None:
    learner, rows, folder = trained
    moved = shutil.copytree(folder, tmp_path / "adapter")
    path = moved / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "/nowhere/model"}))
    with pytest.raises(ModelError, match="/nowhere/model"):
        load_adapter(moved)
    assert close(scores_of(load_adapter(moved, base=tiny), rows), learner.score(rows))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("layers", "options"),
    [("lm_head", {}), ("embed_tokens", {}), ("q_proj", {"modules_to_save": ["lm_head"]})],
)
def test_an_adapter_of_a_tied_weight_is_not_merged(
    layers: str, options: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    """Merged, an adapter of the output layer would change the embeddings too."""
    from peft import LoraConfig, get_peft_model

    from lightspan_torch.engine.weights import load_model

    model = load_model(tiny)
    config = LoraConfig(r=2, target_modules=[layers], task_type="CAUSAL_LM", **options)
    get_peft_model(model, config).save_pretrained(
        str(tmp_path / "adapter"), save_embedding_layers=False
    )
    with pytest.raises(ConfigError, match=r"adapter in .* adapts .* shares its weight with .*tied"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tiny)
    assert not (tmp_path / "merged").exists()


def test_what_is_no_adapter(trained: Any, tiny: Path, tmp_path: Path) -> None:
    _, _, folder = trained
    with pytest.raises(ModelError, match="holds no PEFT adapter"):
        load_adapter(tiny)
    with pytest.raises(ConfigError, match="another folder than the adapter's"):
        merge_adapter(folder, folder / "." / "")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match="does not fit its base model"):
        load_adapter(damaged)
    (damaged / "adapter_model.safetensors").unlink()
    (damaged / "adapter_model.bin").write_bytes(b"a pickle")  # never read
    with pytest.raises(ModelError, match="holds no PEFT adapter"):
        load_adapter(damaged)
    (damaged / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        adapter_base(damaged)
