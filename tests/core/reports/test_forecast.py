"""Forecasts: the arithmetic literally, and a run's real memory and time against them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st

from lightspan.errors import ModelError
from lightspan.learners import LoRA, Optimizer
from lightspan.lightning.episode import Episode
from lightspan.reports.dry_run.measurements import rollout_times
from lightspan.reports.forecast import (
    MemoryInputs,
    ModelShape,
    PolicySize,
    RunSize,
    Speed,
    batch_seconds,
    kept_per_token,
    memory_forecast,
    model_shape,
    time_forecast,
    update_seconds,
)
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.routing import BASE_POLICY
from lightspan.schema.spans import Span, SpanKind

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
    matrices=600,
    linear_widths=70,
)
LORA = LoRA(rank=4)


def inputs(**changed: Any) -> MemoryInputs:
    known: dict[str, Any] = {
        "policies": {"policy": PolicySize(shape=SHAPE)},
        "base": None,
        "device": "cpu",
        "optimizer": Optimizer(),
        "cache_tokens": 256,
        "microbatch_tokens": 100,
        "trained_share": 0.25,
        "process_bytes": 7,
    }
    return MemoryInputs(**{**known, **changed})


def parts(given: MemoryInputs) -> dict[str, int]:
    return {part.name: part.bytes for part in memory_forecast(given).parts}


# --- a model's size -------------------------------------------------------------------------------


def test_the_size_of_a_model_is_read_from_its_configuration(tiny: Path, tmp_path: Path) -> None:
    """Without weights: the folder holds nothing but `config.json`."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    shape = model_shape(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    embedding = sum(p.numel() for p in model.get_input_embeddings().parameters())
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert shape.matrices == shape.parameters - embedding - norms
    assert (shape.layers, shape.hidden, shape.query, shape.key_value) == (2, 64, 64, 64)
    assert (shape.mlp, shape.context, shape.bytes_per_parameter) == (192, 512, 4)
    assert shape.vocabulary == model.config.vocab_size


def test_lora_trains_what_peft_says(tiny: Path) -> None:
    from lightspan.learners.models import TrainedModel

    adapted = TrainedModel(str(tiny), lora=LORA, device="cpu", dtype=torch.float32, seed=0)
    count = sum(parameter.numel() for parameter in adapted.trainable().values())
    assert model_shape(str(tiny)).trained(LORA) == count
    assert model_shape(str(tiny)).trained(None) == model_shape(str(tiny)).parameters


def test_a_dtype_is_read_too(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert model_shape(str(tmp_path)).bytes_per_parameter == 2


def test_a_model_that_is_not_here_is_named_with_what_to_do() -> None:
    with pytest.raises(
        ModelError,
        match=r"the configuration of nobody/nothing is not on this machine: fetch it \(`hf "
        r"download nobody/nothing config.json`\)",
    ):
        model_shape("nobody/nothing")


@pytest.mark.parametrize("grouped", [1, 2, 4])
def test_what_autograd_keeps_of_a_token(grouped: int) -> None:
    """Against the tensors that torch saves in a forward pass of the decoder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lightspan.reports.forecast import shape_of_config

    config = Qwen2Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=grouped,
        max_position_embeddings=256,
    )
    model: Any = Qwen2ForCausalLM(config)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = 2 * 96
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.zeros(2, 96, dtype=torch.int64), use_cache=False)
    saved = sum(
        tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own
    )
    assert saved / 4 / tokens == pytest.approx(kept_per_token(shape_of_config(config)), rel=0.01)


# --- memory ---------------------------------------------------------------------------------------


def test_the_parts_of_full_training() -> None:
    per_token = 3 * (6 * 8 + 2 * 8 + 2 * 4 + 2 + 4 * 16 + 2) + 2 * 8
    assert kept_per_token(SHAPE) == per_token
    assert parts(inputs()) == {
        "process": 7,
        "engine: policy": 2000,
        "key-value cache": 256 * 3 * 2 * 4 * 2,
        "learner weights": 4000,
        "optimiser": 8000,
        "gradients": 4000,
        "activations": 100 * per_token * 4,
        "logits": 25 * 50 * 4 * 4,
        "publishing": 4000,
    }


def test_the_peak_is_updating_or_publishing_whichever_is_larger() -> None:
    known = parts(inputs())
    always = sum(known[name] for name in ("process", "engine: policy", "key-value cache"))
    always += known["learner weights"] + known["optimiser"]
    updating = known["gradients"] + known["activations"] + known["logits"]
    assert memory_forecast(inputs()).host_bytes == always + updating
    small = inputs(microbatch_tokens=0, policies={"policy": PolicySize(shape=SHAPE, lora=LORA)})
    known = parts(small)
    assert known["gradients"] == 4 * 280 < known["publishing"] == 4000
    always = sum(known.values()) - known["gradients"] - known["publishing"]
    assert memory_forecast(small).host_bytes == always + 4000


def test_lora_has_small_states_and_a_whole_copy() -> None:
    known = parts(inputs(policies={"policy": PolicySize(shape=SHAPE, lora=LORA)}, kl=True))
    assert known["learner weights"] == 4 * (1000 + 280)
    assert known["optimiser"] == 4 * 2 * 280
    assert known["gradients"] == 4 * 280
    assert known["starting weights (KL)"] == 0  # the adapters are switched off


def test_the_starting_weights_are_a_second_copy() -> None:
    """Design law 12."""
    known = parts(inputs(base=SHAPE, kl=True))
    assert known["engine: starting weights"] == 2000
    assert known["key-value cache"] == 2 * 256 * 3 * 2 * 4 * 2
    assert known["starting weights (KL)"] == 4000


def test_muon_keeps_one_state_of_matrices() -> None:
    assert parts(inputs(optimizer=Optimizer(name="muon")))["optimiser"] == 4 * (600 + 2 * 400)


def test_an_accelerator_has_a_peak_of_its_own() -> None:
    forecast = memory_forecast(inputs(device="cuda"))
    places = {part.name: part.place for part in forecast.parts}
    assert {name for name, place in places.items() if place == "host"} == {"process", "publishing"}
    assert forecast.host_bytes == 7 + 4000
    known = parts(inputs(device="cuda"))
    assert forecast.device_bytes == sum(known.values()) - 7 - 4000


def test_each_rank_has_its_device_s_memory() -> None:
    """The engine on the first GPU, the learner on the others; nothing else is on the host."""
    forecast = memory_forecast(inputs(device="cuda", ranks=("cuda:1", "cuda:2")))
    known = {part.name: (part.device, part.bytes) for part in forecast.parts}
    engine = sum(size for device, size in known.values() if device == "cuda:0")
    learner = sum(size for device, size in known.values() if device == "cuda:1")
    assert known["engine: policy"][0] == known["key-value cache"][0] == "cuda:0"
    assert known["optimiser"][0] == known["activations"][0] == "cuda:1"
    assert known["rank 1: learner"] == ("cuda:2", learner)
    assert known["rank 1: process"] == ("", 7)
    assert forecast.host_bytes == 7 + 7 + 4000
    assert [(each.device, each.bytes) for each in forecast.devices] == [
        ("cuda:0", engine),
        ("cuda:1", learner),
        ("cuda:2", learner),
    ]


def test_ranks_on_the_cpu_are_all_in_the_host_s_memory() -> None:
    one, two = memory_forecast(inputs()), memory_forecast(inputs(ranks=("cpu", "cpu")))
    assert two.devices == []
    updating = sum(
        part.bytes
        for part in one.parts
        if part.name in ("learner weights", "optimiser", "gradients", "activations", "logits")
    )
    extra = 7 + updating
    assert two.host_bytes >= one.host_bytes + extra - 4000
    assert {part.name for part in two.parts} - {part.name for part in one.parts} == {
        "rank 1: process",
        "rank 1: learner",
    }


def test_a_rank_shares_the_engine_s_gpu() -> None:
    """ "cuda" is the first one."""
    forecast = memory_forecast(inputs(device="cuda", ranks=("cuda:0", "cuda:1")))
    alone = memory_forecast(inputs(device="cuda"))
    assert [each.device for each in forecast.devices] == ["cuda:0", "cuda:1"]
    assert forecast.devices[0] == alone.devices[0]


def test_adapters_are_float32_over_weights_of_two_bytes() -> None:
    """As the learner keeps them on a GPU."""
    small = PolicySize(shape=SHAPE, lora=LORA, weight_bytes=2)
    known = parts(inputs(policies={"policy": small}))
    assert known["learner weights"] == 2 * 1000 + 4 * 280
    assert (known["optimiser"], known["gradients"]) == (4 * 2 * 280, 4 * 280)
    assert (known["activations"], known["publishing"]) == (100 * kept_per_token(SHAPE) * 2, 2000)


def test_two_policies_have_two_of_everything_but_one_pass() -> None:
    both = {name: PolicySize(shape=SHAPE) for name in ("a", "b")}
    one, two = parts(inputs()), parts(inputs(policies=both))
    assert two["learner weights"] == 2 * one["learner weights"]
    assert two["optimiser"] == 2 * one["optimiser"]
    assert two["key-value cache"] == 2 * one["key-value cache"]
    assert (two["activations"], two["publishing"]) == (one["activations"], one["publishing"])


def test_adapters_on_one_model_hold_its_weights_once() -> None:
    """And their own adapters each: 280 parameters of float32 over 1,000 of two bytes."""

    def held(*models: str) -> int:
        sizes = {
            name: PolicySize(shape=SHAPE, lora=LORA, weight_bytes=2, model=model)
            for name, model in zip("ab", models, strict=False)
        }
        return parts(inputs(policies=sizes))["learner weights"]

    assert held("m") == 2 * 1000 + 4 * 280
    assert held("m", "m") == 2 * 1000 + 2 * 4 * 280
    assert held("m", "n") == 2 * (2 * 1000 + 4 * 280)


def test_an_engine_with_lora_holds_the_weights_under_it_once() -> None:
    """And publishes the adapters alone: 280 parameters of float32."""
    sizes = {name: PolicySize(shape=SHAPE, lora=LORA, model="m") for name in "ab"}
    served = inputs(policies=sizes, base=SHAPE, beside=frozenset({"a", "b", BASE_POLICY}))
    known = parts(served)
    engine = {name: size for name, size in known.items() if name.startswith("engine")}
    assert engine == {"engine: under a, b": 2000, "engine: LoRA": 2 * 4 * 280}
    assert known["publishing"] == 4 * 280
    assert known["key-value cache"] == 3 * parts(inputs())["key-value cache"]


@pytest.mark.parametrize(
    ("free", "on_device", "fits"),
    [(None, None, None), (10**9, None, True), (1, None, False), (10**9, 1, False)],
)
def test_whether_it_fits(free: int | None, on_device: int | None, fits: bool | None) -> None:
    import msgspec

    forecast = memory_forecast(inputs(device="cuda"))
    (gpu,) = forecast.devices
    forecast = msgspec.structs.replace(
        forecast,
        host_free_bytes=free,
        devices=[msgspec.structs.replace(gpu, free_bytes=on_device)],
    )
    assert forecast.fits is fits


# --- time -----------------------------------------------------------------------------------------

SPEED = Speed(
    start_s=3.0,
    overhead_s=0.5,
    latency_s=2.0,
    tail_s=1.0,
    engine_cpu_s=0.25,
    step_s=0.1,
    token_s=0.001,
    publish_s=0.2,
    save_s=0.4,
    tokens_per_rollout=100.0,
    varying=0.5,
)
SIZE = RunSize(
    steps=10,
    tasks_per_step=4,
    group_size=8,
    evaluations=2,
    val_tasks=16,
    minibatches=2,
    checkpoint_every=4,
)


def test_comparing_steps_takes_rollouts_and_time() -> None:
    size = msgspec.structs.replace(SIZE, comparisons=5, selection_tasks=8)
    assert size.rollouts == SIZE.rollouts + 40
    more = time_forecast(size, SPEED, 4).total_s - time_forecast(SIZE, SPEED, 4).total_s
    assert more == pytest.approx(5 * batch_seconds(8, SPEED, 4))


def test_steps_that_search_for_prompts_take_rollouts_and_no_update() -> None:
    size = msgspec.structs.replace(SIZE, searches=2, search_rollouts=100)
    assert (size.updates, size.train_rollouts, size.rollouts) == (8, 356, 388)
    forecast = time_forecast(size, SPEED, 4)
    batch = batch_seconds(32, SPEED, 4)
    assert forecast.rollouts_s == 8 * batch + batch_seconds(100, SPEED, 4)
    assert forecast.updates_s == pytest.approx(8 * update_seconds(SIZE, SPEED))
    assert forecast.publish_s == pytest.approx(8 * 0.2)
    assert forecast.save_s == time_forecast(SIZE, SPEED, 4).save_s


def test_the_parts_of_a_runs_time() -> None:
    assert (SIZE.step_rollouts, SIZE.train_rollouts, SIZE.val_rollouts) == (32, 320, 32)
    assert SIZE.rollouts == 352
    batch = 0.5 + 32 * 2.0 / 4 + 1.0  # waiting for four at once takes longer than the engine
    update = 2 * 0.1 + 32 * 100 * 0.5 * 0.001
    assert batch_seconds(32, SPEED, 4) == batch
    assert batch_seconds(32, SPEED, 16) == 0.5 + 32 * 0.25 + 1.0  # here the engine does
    assert batch_seconds(2, SPEED, 16) == 0.5 + 2.0 + 1.0
    assert batch_seconds(0, SPEED, 4) == 0.0
    assert update_seconds(SIZE, SPEED) == pytest.approx(update)
    forecast = time_forecast(SIZE, SPEED, 4)
    assert forecast.rollouts_s == 10 * batch
    assert forecast.updates_s == pytest.approx(10 * update)
    assert forecast.publish_s == 2.0
    assert forecast.save_s == pytest.approx(4 * 0.4)  # before the first step, 4, 8, 10
    assert forecast.evaluations_s == 2 * (0.5 + 16 * 2.0 / 4 + 1.0)
    assert forecast.step_s == pytest.approx(batch + update + 0.2)
    whole = 3.0 + 10 * (batch + update) + 2.0 + 1.6 + forecast.evaluations_s
    assert forecast.total_s == pytest.approx(whole)


@given(st.integers(1, 500), st.integers(1, 64))
def test_more_rollouts_never_take_less_and_more_runners_never_more(
    count: int, runners: int
) -> None:
    assert batch_seconds(count, SPEED, runners) <= batch_seconds(count + 1, SPEED, runners)
    assert batch_seconds(count, SPEED, runners + 1) <= batch_seconds(count, SPEED, runners)


def attempt(name: str, start: float, end: float, outcome: Outcome = Outcome.OK) -> Episode:
    span = Span(
        span_id=name,
        trace_id="t",
        name="attempt",
        kind=SpanKind.CHAIN,
        rollout_id=name,
        attempt_id=name,
        start_ns=int(start * 1e9),
        end_ns=int(end * 1e9),
    )
    status = AttemptStatus.SUCCEEDED if outcome is Outcome.OK else AttemptStatus.LOST
    return Episode(
        rollout_id=name,
        attempt_id=name,
        task_id="t",
        group_id="g",
        mode=Mode.DEV,
        status=status,
        outcome=outcome,
        spans=(span,),
    )


def test_a_rollouts_time_is_that_of_a_warm_runner() -> None:
    """Two at once: the first two import the app; the lost one says nothing."""
    episodes = [
        attempt("a", 0.0, 4.0),
        attempt("b", 0.0, 5.0),
        attempt("c", 4.0, 5.0),
        attempt("d", 5.0, 7.0),
        attempt("e", 5.0, 99.0, Outcome.INFRASTRUCTURE),
    ]
    assert rollout_times(episodes, wall_s=7.5, engine_cpu_s=2.0) == (0.5, 1.5, 0.5, 0.5)


def test_without_a_warm_rollout_all_count() -> None:
    episodes = [attempt("a", 0.0, 2.0), attempt("b", 0.0, 4.0)]
    assert rollout_times(episodes, wall_s=4.0, engine_cpu_s=0.0) == (0.0, 3.0, 1.0, 0.0)
    assert rollout_times([], wall_s=4.0, engine_cpu_s=0.0) == (4.0, 0.0, 0.0, 0.0)


# --- against a real run ---------------------------------------------------------------------------

MEMORY_FACTOR = 1.5


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", ["", "8"], ids=["full", "lora"])
def test_a_runs_real_memory_is_as_forecast(tmp_path: Path, rank: str) -> None:
    """A dry run and then the run, each in a process of its own. Memory is compared above what the
    process takes without a model, so that nothing but the forecast's own parts is. The time, which
    depends on what else the machine does, is compared by benchmarks/forecast.py."""
    from lightspan.testing.tiny import tiny_model

    model = tiny_model(tmp_path / "model", seed=0, hidden=384, layers=6, heads=6, scale=0.02)
    forecast = _said("dev", model, tmp_path / "run", rank)
    real = _said("fit", model, tmp_path / "run", rank)
    memory = forecast["memory"]
    process = next(part["bytes"] for part in memory["parts"] if part["name"] == "process")
    expected, taken = memory["host_bytes"] - process, real["peak_bytes"] - process
    shown = f"{expected / 2**20:.0f} MiB forecast, {taken / 2**20:.0f} MiB taken"
    assert taken / MEMORY_FACTOR < expected < taken * MEMORY_FACTOR, shown


def _said(what: str, model: Path, folder: Path, rank: str) -> Mapping[str, Any]:
    """With two steps: from the second one on the optimiser has its state."""
    script = Path(__file__).parents[2] / "apps" / "forecast_toy.py"
    done = subprocess.run(
        [sys.executable, str(script), what, str(model), str(folder), rank, "2", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
