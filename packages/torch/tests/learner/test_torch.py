"""TorchLearner against the suite, and what is its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightspan.errors import CheckpointError, ConfigError, ModelError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Critic, LoRA, Optimizer, PolicyLoss, SFTLoss
from lightspan_testing.engine_suite import generate
from lightspan_testing.learner_suite import (
    BOTH_CLIPS,
    LearnerSuite,
    make_branching_rows,
    make_rows,
    reference_loss,
    token_logprobs,
)
from lightspan_testing.learner_suite.value_tests import make_call_rows
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model, without_bars
from lightspan_torch.learner.torch import TorchLearner


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


@pytest.mark.parametrize(
    "loss", [BOTH_CLIPS, PolicyLoss(kl=0.2, entropy=0.1), SFTLoss()], ids=["clips", "kl", "sft"]
)
def test_every_gradient_is_the_reference_s(folder: Path, model: Any, loss: Any) -> None:
    """Each parameter's gradient to relative 1e-4, ratios 0.5-2, mixed temperatures."""
    learner = TorchLearner({"writer": folder}, token_budget=100)
    rows = make_rows(model)
    caught: dict[str, torch.Tensor] = {}
    stepper = learner._steppers["writer"]

    def catch() -> float:
        for name, parameter in stepper._parameters.items():
            assert parameter.grad is not None
            caught[name] = parameter.grad.clone()
        return 1.0

    stepper.clip = catch  # type: ignore[method-assign]
    learner.update(rows, loss)
    base = load_model(folder) if getattr(loss, "kl", 0) else None
    reference_loss(model, rows, loss, base=base).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(caught) == set(expected)
    total = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, gradient in expected.items():
        scale = max(float(gradient.norm()), 1e-3 * float(total))
        assert float((caught[name] - gradient).norm()) < 1e-4 * scale, name


def test_a_float64_learner_agrees_to_1e_10(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float64)
    learner = TorchLearner({"writer": folder}, dtype=torch.float64)
    row = make_rows(load_model(folder), 1)[0]
    (score,) = learner.score([row])
    with torch.no_grad():
        logits = model(torch.tensor([row.ids])).logits[0, :-1].float()
    scaled = (logits / torch.tensor(row.temperatures)[1:, None]).log_softmax(-1)
    expected = scaled.gather(1, torch.tensor(row.ids)[1:, None])[:, 0].tolist()
    assert score == pytest.approx([0.0, *expected], abs=1e-6)


async def test_engine_logprobs_are_the_learner_s(folder: Path, model: Any) -> None:
    """At temperature .7, before and after an update that is published."""
    learner = TorchLearner({"writer": folder}, optimizer=Optimizer(learning_rate=1e-2))
    engine = TransformersEngine({"writer": folder})
    await engine.start()
    prompt = engine.tokenizer("writer").render([{"role": "user", "content": "How many?"}])
    for version in (0, 1):
        answer = await generate(engine, prompt, temperature=0.7)
        row = row_of(prompt, answer.ids, answer.logprobs, answer.versions, temperature=0.7)
        (score,) = learner.score([row])
        assert score[len(prompt) :] == pytest.approx(answer.logprobs, abs=1e-5)
        metrics = learner.update([row], PolicyLoss())
        assert metrics["logprob_gap_max"] < 1e-5
        assert metrics["fresh_tokens"] == len(answer.ids)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        await learner.publish(engine, {"writer": version + 1})
    await engine.close()


def row_of(
    prompt: list[int],
    ids: list[int],
    logprobs: list[float],
    versions: list[int],
    temperature: float,
) -> Row:
    before, after = len(prompt), len(ids)
    return Row(
        rollout_id="ro-1",
        policy="writer",
        ids=[*prompt, *ids],
        mask=[False] * before + [True] * after,
        advantages=[0.0] * before + [1.0] * after,
        weights=[0.0] * before + [1.0] * after,
        logprobs=[0.0] * before + logprobs,
        versions=[0] * before + versions,
        temperatures=[1.0] * before + [temperature] * after,
    )


def test_the_gap_looks_at_tokens_of_the_present_weights(folder: Path, model: Any) -> None:
    """Older versions and later steps differ for a good reason."""
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
    with pytest.raises(ConfigError, match="critic"):
        TorchLearner({"writer": folder}, lora={"critic": LoRA()})
    with pytest.raises(ConfigError, match="LoRA"):
        TorchLearner({"writer": folder}, lora=LoRA(target_modules=("no_such_layer",)))


def test_policies_with_adapters_hold_the_weights_of_one_model_once(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    """Each is trained as if it were alone, and the weights under both never move."""
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
    """Name → where the tensor is in memory, under the plain model's names."""
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
    path = tmp_path / "learner.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="99"):
        learner.load(tmp_path)
    path.write_text(json.dumps({**manifest, "optimizer": {"name": "muon"}}))
    with pytest.raises(CheckpointError, match="muon"):
        learner.load(tmp_path)
    path.write_text(json.dumps(manifest))
    weights = tmp_path / "weights-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="weights-0"):
        learner.load(tmp_path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        learner.load(tmp_path)


def test_a_checkpoint_of_another_size(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", seed=5, hidden=64)
    TorchLearner({"writer": other}).save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="shape"):
        TorchLearner({"writer": folder}).load(tmp_path / "checkpoint")


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        TorchLearner({"writer": folder}).save(tmp_path / "file" / "checkpoint")


def test_the_global_generator_is_left_alone(folder: Path, model: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    learner = TorchLearner({"writer": folder}, lora=LoRA(rank=2, dropout=0.3))
    learner.update(make_rows(model), BOTH_CLIPS)
    assert torch.equal(torch.rand(4), expected)


def test_dropout_acts_and_draws_anew_at_each_update(folder: Path, model: Any) -> None:
    rows, hashes = make_rows(model), []
    for dropout in (0.0, 0.5):
        learner = TorchLearner(
            {"writer": folder},
            lora=LoRA(rank=2, dropout=dropout),
            optimizer=Optimizer(learning_rate=1e-2),
        )
        for _ in range(2):
            before = learner._random["cpu"].clone()
            learner.update(rows, BOTH_CLIPS)
            assert torch.equal(learner._random["cpu"], before) is (dropout == 0)
        assert learner.score(rows) == learner.score(rows)
        hashes.append(learner.weight_hash("writer"))
    assert hashes[0] != hashes[1]


def test_a_loaded_model_is_copied_and_its_start_kept(folder: Path, model: Any) -> None:
    learner = TorchLearner({"writer": model}, optimizer=Optimizer(learning_rate=1e-2))
    rows = make_rows(model)
    before = learner.score(rows)
    learner.update(rows, BOTH_CLIPS)
    model.model.norm.weight.data.zero_()
    assert learner.score(rows, "base") == [pytest.approx(row, abs=1e-6) for row in before]
    assert learner.score(rows) != before


def test_options(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy"):
        TorchLearner({})
    with pytest.raises(ConfigError, match="token_budget"):
        TorchLearner({"writer": folder}, token_budget=0)
    with pytest.raises(ModelError, match="gone"):
        TorchLearner({"writer": tmp_path / "gone"})


# --- models whose head alone does not make the logits -----------------------------------------


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Granite, which divides its logits."""
    from transformers import GraniteConfig, GraniteForCausalLM

    folder = tmp_path_factory.mktemp("learner") / "granite"
    config = GraniteConfig(
        vocab_size=405,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        logits_scaling=2.0,
    )
    torch.manual_seed(0)
    with without_bars():
        GraniteForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("budget", [100_000, 64])
def test_scaled_logits_in_trees(scaled: Path, budget: int) -> None:
    """Rows that begin alike are as exact as for other models."""
    model = load_model(scaled)
    learner = TorchLearner({"writer": scaled}, token_budget=budget)
    assert learner.state()["share_prefixes"] == {"writer": "in trees"}
    rows = make_branching_rows(model)
    for row, score in zip(rows, learner.score(rows), strict=True):
        with torch.no_grad():
            assert score == pytest.approx(token_logprobs(model, row).tolist(), abs=1e-5)
    expected = float(reference_loss(model, rows, BOTH_CLIPS).detach())
    assert learner.update(rows, BOTH_CLIPS)["loss"] == pytest.approx(expected, rel=1e-4)


# --- the critic -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["plain", "scaled logits"])
def test_a_value_is_read_off_the_last_hidden_state(
    folder: Path, scaled: Path, which: str, tmp_path: Path
) -> None:
    """w·h + b of the model as transformers runs it."""
    source = folder if which == "plain" else scaled
    learner = TorchLearner(
        {"writer": source}, optimizer=Optimizer(learning_rate=1e-3), critic=Critic()
    )
    rows = make_call_rows(long=40)
    for _ in range(2):
        learner.update(rows, BOTH_CLIPS)
    learner.save(tmp_path)
    model = load_model(source)
    model.load_state_dict(load_file(tmp_path / "weights-0.safetensors"), strict=False)
    head = learner._heads["writer"].saved_tensors()
    _, together = learner.score_and_values(rows)
    for row, values, others in zip(rows, learner.values(rows), together, strict=True):
        with torch.no_grad():
            states = model.get_decoder()(torch.tensor([row.ids])).last_hidden_state[0]
        for call, value, other in zip(row.responses, values, others, strict=True):
            expected = float(states[call.start - 1] @ head["weight"] + head["bias"])
            assert value == pytest.approx(expected, abs=1e-5)
            assert other == pytest.approx(expected, abs=1e-5)


def test_a_head_is_fitted_to_what_was_computed_anyway(folder: Path) -> None:
    """An update has no further pass for it, and what it keeps is bounded."""
    learner = TorchLearner({"writer": folder}, critic=Critic(batches=2, steps=1))
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    decoder = learner._models["writer"].plain.get_decoder()
    handle = decoder.register_forward_hook(count)
    rows = make_call_rows()
    learner.update([replace(row, value_targets=()) for row in rows], BOTH_CLIPS)
    alone, passes = passes, 0
    for _ in range(3):
        learner.update(rows, BOTH_CLIPS)
    handle.remove()
    assert passes == 3 * alone
    kept = learner._heads["writer"].saved_tensors()
    calls = sum(len(row.responses) for row in rows)
    assert [kept[f"states/{number}"].shape for number in range(2)] == [(calls, 32)] * 2
    assert "states/2" not in kept


@pytest.mark.parametrize("ask", ["score", "score_and_values", "values"])
def test_rows_are_computed_once(folder: Path, ask: str) -> None:
    """Scores, and values beside them: few tokens more than there are, since passes are padded."""
    learner = TorchLearner({"writer": folder}, critic=Critic())
    rows = make_call_rows()
    computed: list[int] = []
    decoder = learner._models["writer"].plain.get_decoder()
    handle = decoder.register_forward_hook(
        lambda _module, _inputs, output: computed.append(output[0].shape[:2].numel())
    )
    getattr(learner, ask)(rows)
    handle.remove()
    total = sum(len(row.ids) for row in rows)
    assert 0 < sum(computed) < 1.5 * total


def test_a_damaged_critic(folder: Path, tmp_path: Path) -> None:
    learner = TorchLearner({"writer": folder}, critic=Critic())
    learner.update(make_call_rows(), BOTH_CLIPS)
    learner.save(tmp_path)
    (tmp_path / "critic-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="critic-0"):
        learner.load(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        {"learning_rate": 0},
        {"steps": 0},
        {"batches": 1.5},
        {"weight_decay": -1},
        {"lam": 1.01},
        {"warmup": -1},
    ],
)
def test_options_of_a_critic(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=f"Critic: {name}"):
        Critic(**option)


def test_a_critic_is_a_critic(folder: Path) -> None:
    wrong: Any = True
    with pytest.raises(ConfigError, match="Critic"):
        TorchLearner({"writer": folder}, critic=wrong)
