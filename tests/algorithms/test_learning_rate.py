"""Test the learning rate that is chosen if none is given."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import save_file

from lightspan import LightningRL, LoRA, Optimizer, Policy, Trainer
from lightspan.algorithms.protocol import PolicySpec
from lightspan.errors import ModelError
from lightspan_torch.engine.parameter_count import count_parameters
from lightspan_torch.learning_rate import choose_rate, default_rate


# --- the rule -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("parameters", "lora", "rate"),
    [
        (800_000, False, 4e-4),  # the examples' small model: measured
        (134_515_008, True, 2e-4),  # SmolLM2-135M: measured
        (1_543_714_304, False, 1e-6),  # Qwen2.5-1.5B, as verl and TRL have it
        (7_615_616_512, True, 2e-5),
        (494_032_768, False, 3e-6),
        (70_000_000_000, False, 1e-6),
        (1000, False, 1e-3),  # no more than that, however small
    ],
)
def test_the_rule(parameters: int, lora: bool, rate: float) -> None:
    assert default_rate(parameters, lora=lora) == rate


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_a_larger_model_never_has_a_higher_rate(one: int, other: int) -> None:
    small, large = sorted((one, other))
    for lora in (False, True):
        assert default_rate(small, lora=lora) >= default_rate(large, lora=lora) >= 1e-6
    assert default_rate(one, lora=True) >= default_rate(one, lora=False)


# --- of policies ----------------------------------------------------------------------------
SIZES = {"small": 760_000, "smol": 134_515_008, "large": 7_615_616_512}


def count(model: str) -> int:
    if model not in SIZES:
        raise ModelError(f"nobody knows {model}")
    return SIZES[model]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            PolicySpec(model="small"),
            "learning rate 4e-4: full weights of 0.76 M parameters (learning_rate= sets another)",
        ),
        (
            PolicySpec(model="smol", lora=LoRA(rank=8)),
            "learning rate 2e-4: LoRA of rank 8 on 135 M parameters (learning_rate= sets another)",
        ),
        (
            PolicySpec(model="x", lora=LoRA()),
            "learning rate 2e-5: LoRA of rank 16 of a large model, because its size is unknown: "
            "nobody knows x (learning_rate= sets another)",
        ),
    ],
)
def test_the_reason_is_said(spec: PolicySpec, text: str) -> None:
    assert str(choose_rate({"a": spec, "b": spec}, count)) == text


def test_different_policies_share_the_lowest() -> None:
    found = choose_rate(
        {"a": PolicySpec(model="smol", lora=LoRA()), "b": PolicySpec(model="small")}, count
    )
    assert found.value == 2e-4
    assert found.why == (
        "the lowest of its policies' rates (a: 2e-4, LoRA of rank 16 on 135 M "
        "parameters; b: 4e-4, full weights of 0.76 M parameters)"
    )


# --- of a model on this machine -------------------------------------------------------------
def safetensors(file: Path, **shapes: list[int]) -> None:
    save_file({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_of_several_files_all_are_needed(folder: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    safetensors(folder / shards["a"], a=[3, 5])
    with pytest.raises(ModelError, match="has not all weights as safetensors files"):
        count_parameters(folder)
    safetensors(folder / shards["b"], b=[7])
    assert count_parameters(folder) == 22


@pytest.mark.parametrize("data", [b"", b"12345678", struct.pack("<Q", 3) + b"[1]"])
def test_a_damaged_file_is_said(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors is no complete safetensors file"):
        count_parameters(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", "'no-such-model' is neither a folder nor `owner/name` on the hub"),
        ("nobody/nothing", "cannot get the size of nobody/nothing from the hub: "),
        ("/no/folder", "the model folder /no/folder does not exist"),
    ],
)
def test_a_model_that_is_not_here(
    model: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=message):
        count_parameters(model)


def test_a_real_model_counts_as_when_it_is_loaded(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    assert count_parameters(tiny) == sum(weights.numel() for weights in model.parameters())


# --- of the algorithm -----------------------------------------------------------------------
def test_the_algorithm_chooses_where_nothing_was_given(folder: Path) -> None:
    safetensors(folder / "model.safetensors", weights=[800, 1000])
    full = LightningRL(folder)
    assert full.optimizer == Optimizer(learning_rate=4e-4)
    assert full.config()["optimizer"]["learning_rate"] == 4e-4  # type: ignore[call-overload, index]
    assert full.describe_choices() == [
        "learning rate 4e-4: full weights of 0.8 M parameters (learning_rate= sets another)"
    ]
    adapters = LightningRL(folder, optimize={"a": Policy(lora=LoRA())})
    assert adapters.optimizer == Optimizer(learning_rate=1e-3)
    assert LightningRL(folder, lora=LoRA()).describe_choices() == adapters.describe_choices()


def test_it_is_the_same_in_dev_and_fit(
    apps: Any, tiny: Path, ask: Any, lines: Any, tmp_path: Path
) -> None:
    def trainer() -> Trainer:
        algorithm = LightningRL(tiny, optimize="writer", group_size=2, tasks_per_step=2)
        return Trainer(algorithm, steps=1, folder=tmp_path / "run", reporter=lines)

    said = "learning rate 1e-3: full weights of 0.13 M parameters (learning_rate= sets another)"
    report = trainer().dev(apps.two, ask(2), count=1)
    assert report.choices == report.json()["choices"] == [said]
    assert f"\n{said}\n" in report.text()
    assert trainer().fit(apps.two, ask(2)).steps == 1
    assert lines.texts.count(said) == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["optimizer"]["learning_rate"] == 1e-3
