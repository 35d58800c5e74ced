"""TorchLearner: the conformance suite, and tests of this learner alone."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightspan.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from lightspan.protocols.learner import Critic, LoRA, Optimizer, PolicyLoss, SFTLoss
from lightspan_testing.engine_suite import generate
from lightspan_testing.families import make_family
from lightspan_testing.learner_suite import (
    BOTH_CLIPS,
    LearnerSuite,
    make_branching_rows,
    make_rows,
    published,
    reference_loss,
    token_logprobs,
)
from lightspan_testing.learner_suite.rows import random_row
from lightspan_testing.learner_suite.value_tests import make_call_rows
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.learner.gradients import make_model


class TestTorchLearner(LearnerSuite):
    def make_learner(self, models: Mapping[str, Any], **options: Any) -> TorchLearner:
        return TorchLearner(models, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("learner") / "model", seed=4, hidden=32)


@pytest.fixture
def model(folder: Path) -> Any:
    return load_model(folder)


async def test_engine_logprobs_are_the_learner_s(folder: Path, model: Any) -> None:
    """At temperature 0.7, before and after an update that is published to the engine."""
    learner = TorchLearner({"writer": folder}, optimizer=Optimizer(learning_rate=1e-2))
    engine = TransformersEngine({"writer": folder})
    await engine.start()
    prompt = engine.tokenizer("writer").render([{"role": "user", "content": "How many?"}])
    for version in (0, 1):
        answer = await generate(engine, prompt, temperature=0.7)
        ids, nothing, count = [*prompt, *answer.ids], [0.0] * len(prompt), len(answer.ids)
        row = replace(
            random_row(ids, random.Random(0), "ro-1", "writer"),
            mask=[False] * len(prompt) + [True] * count,
            logprobs=nothing + answer.logprobs,
            versions=[0] * len(prompt) + answer.versions,
            temperatures=[1.0] * len(prompt) + [0.7] * count,
        )
        (score,) = learner.score([row])
        assert score[len(prompt) :] == pytest.approx(answer.logprobs, abs=1e-5)
        metrics = learner.update([row], PolicyLoss())
        assert metrics["logprob_gap_max"] < 1e-5
        assert metrics["fresh_tokens"] == len(answer.ids)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        await learner.publish(engine, {"writer": version + 1})
    await engine.close()


def test_the_gap_looks_at_tokens_of_the_present_weights(folder: Path, model: Any) -> None:
    """Tokens of older versions, or after unpublished steps, are not counted as fresh."""
    learner = TorchLearner({"writer": folder})
    exact = make_rows(model, 4, off_policy=0.0)
    stale = [
        replace(
            row, versions=[-5] * len(row.ids), logprobs=[x - 3 if x else 0.0 for x in row.logprobs]
        )
        for row in exact
    ]
    metrics = learner.update([*exact, *stale], PolicyLoss())
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["fresh_tokens"] == sum(sum(row.mask) for row in exact)
    assert learner.update(exact, PolicyLoss())["fresh_tokens"] == 0


def test_muon_needs_a_torch_that_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UnsupportedError, match=r"Optimizer\(name='muon'\) needs torch 2\.9 or"):
        TorchLearner({"writer": folder}, optimizer=Optimizer(name="muon"))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_takes_hidden_matrices_only(folder: Path) -> None:
    learner = TorchLearner({"writer": folder}, optimizer=Optimizer(name="muon"))
    adamw, muon = learner._steppers["writer"]._optimizers
    names = {id(p): name for name, p in learner._models["writer"].model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert all("layers." in name and name.endswith("_proj.weight") for name in matrices)
    assert len(matrices) == 2 * 7
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert "model.embed_tokens.weight" in rest
    assert matrices | rest == set(names.values())


def test_lora_by_policy(folder: Path) -> None:
    learner = TorchLearner(
        {"writer": folder, "checker": folder}, lora={"writer": LoRA(rank=2, alpha=4)}
    )
    assert learner.state()["lora"]["checker"] is None
    assert learner.state()["lora"]["writer"]["rank"] == 2


def test_policies_of_one_model_hold_it_once(folder: Path, model: Any, tmp_path: Path) -> None:
    """Each policy is trained as if alone; the shared weights under the adapters never change."""
    lora, optimizer = LoRA(rank=2), Optimizer(learning_rate=1e-2)
    other = tiny_model(tmp_path / "other", seed=5, hidden=32)
    models = {"writer": folder, "checker": folder, "critic": other}
    learner = TorchLearner(models, lora=lora, optimizer=optimizer)
    held = {name: tensors_under_adapters(learner, name) for name in models}
    assert held["writer"] == held["checker"]
    assert held["writer"].keys() == held["critic"].keys()
    assert set(held["writer"].values()).isdisjoint(held["critic"].values())
    start = {name: learner.weight_hash(name) for name in models}
    alone = TorchLearner({"writer": folder}, lora=lora, optimizer=optimizer)
    for one in (learner, alone):
        one.update(make_rows(model), BOTH_CLIPS)
    assert learner.weight_hash("writer") == alone.weight_hash("writer") != start["writer"]
    assert {name: learner.weight_hash(name) for name in ("checker", "critic")} == {
        name: start[name] for name in ("checker", "critic")
    }
    under = learner._models["writer"].frozen_hash()
    assert under == TorchLearner({"writer": folder}, lora=lora)._models["writer"].frozen_hash()
    learner.save(tmp_path / "saved")
    learner.update(make_rows(model), BOTH_CLIPS)
    learner.load(tmp_path / "saved")
    assert learner.weight_hash("writer") == alone.weight_hash("writer")
    assert tensors_under_adapters(learner, "writer") == held["checker"]


def test_full_weights_are_never_shared(folder: Path, model: Any) -> None:
    learner = TorchLearner({"writer": folder, "checker": folder}, lora={"checker": LoRA(rank=2)})
    held = tensors_under_adapters(learner, "writer"), tensors_under_adapters(learner, "checker")
    assert set(held[0].values()).isdisjoint(held[1].values())


def tensors_under_adapters(learner: TorchLearner, policy: str) -> dict[str, int]:
    """Return the memory address of each frozen tensor, by its name in the plain model."""
    state = learner._models[policy].plain.state_dict()
    return {
        name.replace(".base_layer.", "."): tensor.data_ptr()
        for name, tensor in state.items()
        if ".lora_" not in name
    }


def test_lora_checkpoints_know_the_weights_under_them(folder: Path, tmp_path: Path) -> None:
    TorchLearner({"writer": folder}, lora=LoRA(rank=2)).save(tmp_path / "checkpoint")
    other = tiny_model(tmp_path / "other", seed=5, hidden=32)
    with pytest.raises(CheckpointError, match="other weights"):
        TorchLearner({"writer": other}, lora=LoRA(rank=2)).load(tmp_path / "checkpoint")


def test_damaged_checkpoints(folder: Path, model: Any, tmp_path: Path) -> None:
    learner = TorchLearner({"writer": folder})
    learner.update(make_rows(model), BOTH_CLIPS)
    learner.save(tmp_path)
    path, weights = tmp_path / "learner.json", tmp_path / "weights-0.safetensors"
    manifest = json.loads(path.read_text())
    for text, message in (
        (json.dumps({**manifest, "format": 99}), "99"),
        (json.dumps({**manifest, "optimizer": {"name": "muon"}}), "muon"),
        ("{", "cannot read"),
        (json.dumps(manifest), "weights-0"),
    ):
        path.write_text(text)
        if message == "weights-0":
            weights.write_bytes(weights.read_bytes()[:100])
        with pytest.raises(CheckpointError, match=message):
            learner.load(tmp_path)


def test_a_checkpoint_of_another_size(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=5, hidden=64)
    TorchLearner({"writer": other}).save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="shape"):
        TorchLearner({"writer": folder}).load(tmp_path / "checkpoint")


def test_the_global_generator_is_left_alone(folder: Path, model: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    learner = TorchLearner({"writer": folder}, lora=LoRA(rank=2, dropout=0.3))
    learner.update(make_rows(model), BOTH_CLIPS)
    assert torch.equal(torch.rand(4), expected)


def test_a_loaded_model_is_copied_and_its_start_kept(folder: Path, model: Any) -> None:
    learner = TorchLearner({"writer": model}, optimizer=Optimizer(learning_rate=1e-2))
    rows = make_rows(model)
    before = learner.score(rows)
    learner.update(rows, BOTH_CLIPS)
    model.model.norm.weight.data.zero_()
    assert learner.score(rows, "base") == [pytest.approx(row, abs=1e-6) for row in before]
    assert learner.score(rows) != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "policy"),
        ({"token_budget": 0}, "token_budget"),
        ({"lora": {"critic": LoRA()}}, "critic"),
        ({"lora": LoRA(target_modules=("no_such_layer",))}, "LoRA"),
        ({"lora": LoRA(target_modules=("lm_head", "q_proj"))}, "adapts lm_head, which shares its "),
        (
            {"lora": LoRA(target_modules=("embed_tokens",))},
            r"shares its weight with lm_head.weight",
        ),
        ({"critic": True}, "Critic"),
    ],
)
def test_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchLearner({"writer": folder} if options else {}, **options)


@pytest.mark.parametrize("option", [{"learning_rate": 0}, {"batches": 1.5}, {"lam": 1.01}])
def test_options_of_a_critic(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Critic: {next(iter(option))}"):
        Critic(**option)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone"):
        TorchLearner({"writer": tmp_path / "gone"})


@pytest.mark.parametrize("budget", [100_000, 64])
def test_scaled_logits_in_trees(budget: int) -> None:
    """Trees are exact also for models that scale the output layer's result to get logits."""
    model = make_model("Granite", logits_scaling=2.0)
    learner = TorchLearner({"writer": model}, token_budget=budget)
    assert learner.state()["share_prefixes"] == {"writer": "in trees"}
    rows = make_branching_rows(model)
    for row, score in zip(rows, learner.score(rows), strict=True):
        with torch.no_grad():
            assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)
    expected = float(reference_loss(model, rows, BOTH_CLIPS).detach())
    assert learner.update(rows, BOTH_CLIPS)["loss"] == pytest.approx(expected, rel=1e-4)


# --- the critic -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama4Text", "Mamba2"])
def test_layers_that_cannot_be_adapted(family: str) -> None:
    """A router returns two tensors; a Mamba's kernel bypasses the layer."""
    model = make_family(family, 405)
    with pytest.raises(ConfigError, match=r"does not fit \w+ForCausalLM: .*Name the layers"):
        TorchLearner({"writer": model}, lora=LoRA(rank=4))


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
async def test_adapters_of_the_output_layer_and_the_embeddings_are_merged(layer: str) -> None:
    model = make_model("Qwen2", tie_word_embeddings=False)
    rows = make_rows(model, 4)
    learner = TorchLearner(
        {"writer": model},
        lora=LoRA(rank=4, target_modules=(layer,)),
        optimizer=Optimizer(learning_rate=1e-2),
    )
    learner.update(rows, SFTLoss())
    model.load_state_dict(await published(learner))
    for scores, row in zip(learner.score(rows), rows, strict=True):
        assert scores == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-4)


async def test_adapters_of_experts_are_merged_and_never_served_unmerged() -> None:
    model = make_family("Qwen3Moe", 405)
    rows = make_rows(model, 4)
    learner = TorchLearner(
        {"writer": model}, lora=LoRA(rank=4), optimizer=Optimizer(learning_rate=1e-2)
    )
    learner.update(rows, SFTLoss())
    model.load_state_dict(await published(learner))
    for scores, row in zip(learner.score(rows), rows, strict=True):
        assert scores == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-4)
    if any("experts" in name for name, _ in learner._model("writer")._adapted()):  # not by old PEFT
        with pytest.raises(UnsupportedError, match=r"mlp.experts, which is no linear layer"):
            learner._model("writer").lora_weights()


def _halve_logits(_: Any, __: Any, output: Any) -> None:
    output.logits = output.logits / 2


def test_logits_scaled_by_code_that_no_setting_tells_of() -> None:
    model = make_model("Qwen2")
    model.register_forward_hook(_halve_logits)
    rows = make_branching_rows(model)
    for scores, row in zip(TorchLearner({"writer": model}).score(rows), rows, strict=True):
        assert scores == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)


@pytest.mark.parametrize("options", [{"kind": "Qwen2"}, {"kind": "Granite", "logits_scaling": 2.0}])
def test_a_value_is_read_off_the_last_hidden_state(options: dict[str, Any], tmp_path: Path) -> None:
    """A value is w·h + b, with h as transformers computes it."""
    model = make_model(**options)
    learner = TorchLearner(
        {"writer": model}, optimizer=Optimizer(learning_rate=1e-3), critic=Critic()
    )
    rows = make_call_rows(long=40)
    for _ in range(2):
        learner.update(rows, BOTH_CLIPS)
    learner.save(tmp_path)
    model.load_state_dict(load_file(tmp_path / "weights-0.safetensors"), strict=False)
    head = learner._heads["writer"].saved_tensors()
    for row, values in zip(rows, learner.values(rows), strict=True):
        with torch.no_grad():
            states = model.get_decoder()(torch.tensor([row.ids])).last_hidden_state[0]
        for call, value in zip(row.responses, values, strict=True):
            expected = float(states[call.start - 1] @ head["weight"] + head["bias"])
            assert value == pytest.approx(expected, abs=1e-5)


def test_what_a_head_is_fitted_to_is_bounded(folder: Path) -> None:
    learner = TorchLearner({"writer": folder}, critic=Critic(batches=2, steps=1))
    rows = make_call_rows()
    for _ in range(3):
        learner.update(rows, BOTH_CLIPS)
    kept = learner._heads["writer"].saved_tensors()
    calls = sum(len(row.responses) for row in rows)
    assert [kept[f"states/{number}"].shape for number in range(2)] == [(calls, 32)] * 2
    assert "states/2" not in kept
