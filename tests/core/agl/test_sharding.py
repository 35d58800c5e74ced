"""VERL(config) where verl's environment is given: which keys are `Verl`'s, which are named or
refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

import lightspan.agl as agl
from lightspan import VLLM, Verl
from lightspan.agl import _sharding
from lightspan.agl._verl import make_plan
from lightspan.agl._verl_keys import DEFAULTS, NEUTRAL
from lightspan.errors import ConfigError, UnsupportedError

ACTOR = "actor_rollout_ref.actor"
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 2}},
}


def config(**dotted: Any) -> dict[str, Any]:
    """The configuration with values at `section__…__key`; `actor` and `fsdp` are short."""
    made = deepcopy(CONFIG)
    for name, value in dotted.items():
        name = name.replace("fsdp__", "actor__fsdp_config__")
        if name.split("__")[0] in ("actor", "model", "rollout", "ref"):
            name = f"actor_rollout_ref__{name}"
        *sections, key = name.split("__")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return made


def learner(**dotted: Any) -> Verl | None:
    return make_plan(config(**dotted), python="p").learner


# --- which learner --------------------------------------------------------------------------


def test_without_verls_environment_it_is_the_embedded_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTSPAN_VERL_PYTHON", raising=False)
    plan = agl.VERL(config(trainer__n_gpus_per_node=4)).plan
    assert (plan.learner, plan.engine) == (None, None)
    assert plan.report() == (
        "VERL(config) trains with lightspan's own engine and learner. Without effect here: "
        "trainer.n_gpus_per_node=4 (of verl's own processes: VERL(config, python=…) has them, here "
        "it is this process alone)"
    )


def test_with_it_verl_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(trainer__n_gpus_per_node=2)
    plan = agl.VERL(given, python="verl-env/bin/python").plan
    expected = Verl(python="verl-env/bin/python", ranks=2, gradient_checkpointing=True)
    assert plan.learner == expected
    assert plan.report() == (
        "VERL(config) trains with verl's FSDP2 on 2 ranks (verl-env/bin/python) and lightspan's "
        "own engine"
    )
    monkeypatch.setenv("LIGHTSPAN_VERL_PYTHON", "other/python")
    named = agl.VERL(given).plan.learner
    assert named == Verl(python="other/python", ranks=2, gradient_checkpointing=True)
    chosen = agl.VERL(given, python="verl-env/bin/python").plan.learner
    assert chosen == expected


@pytest.mark.parametrize(
    ("ray", "where"),
    [(True, "in a Ray cluster on this machine"), ("head:6379", "in the Ray cluster head:6379")],
)
def test_its_ranks_may_be_in_ray(
    monkeypatch: pytest.MonkeyPatch, ray: bool | str, where: str
) -> None:
    plan = agl.VERL(config(trainer__n_gpus_per_node=2), python="p", ray=ray).plan
    assert plan.learner is not None
    assert (plan.learner.ranks, plan.learner.ray) == (2, ray)
    assert plan.report() == (
        f"VERL(config) trains with verl's FSDP2 on 2 ranks {where} (p) and lightspan's own engine"
    )
    monkeypatch.delenv("LIGHTSPAN_VERL_PYTHON", raising=False)
    with pytest.raises(
        ConfigError, match=r"VERL\(ray=.*name the interpreter that has verl and Ray"
    ):
        agl.VERL(CONFIG, ray=ray)


def test_vllm_may_be_the_engine_of_either() -> None:
    vllm = VLLM(python="vllm-env/bin/python")
    plan = make_plan(config(trainer__n_gpus_per_node=1), python="p", engine=vllm)
    assert plan.engine == vllm
    assert plan.report() == (
        "VERL(config) trains with verl's FSDP2 on one rank (p) and vLLM as the engine"
    )
    own = make_plan(CONFIG, engine=vllm)
    assert own.report() == "VERL(config) trains with lightspan's own learner and vLLM as the engine"
    with pytest.raises(ConfigError, match=r"VERL\(engine='vllm'\): give VLLM"):
        make_plan(CONFIG, engine="vllm")  # type: ignore[arg-type]


def test_the_trainer_gets_what_the_plan_has() -> None:
    vllm = VLLM(python="vllm-env/bin/python")
    given = config(trainer__n_gpus_per_node=2, trainer__device="cpu")
    algorithm = agl.VERL(given, python="p", engine=vllm)
    settings = agl.Trainer(algorithm=algorithm)._core(algorithm.plan).settings
    assert settings.learner == algorithm.plan.learner
    assert settings.learner_devices == ("cpu", "cpu")
    assert settings.engine == vllm


# --- what is used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"ranks": 8, "gradient_checkpointing": True}),
        ({"trainer__n_gpus_per_node": "4"}, {"ranks": 4}),
        ({"trainer__nnodes": 1}, {}),
        ({"actor__strategy": "fsdp2"}, {}),
        ({"fsdp__param_offload": True}, {"param_offload": True}),
        ({"fsdp__optimizer_offload": True}, {"optimizer_offload": True}),
        ({"fsdp__fsdp_size": 8}, {}),
        ({"fsdp__model_dtype": "float32"}, {}),
        ({"fsdp__dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"fsdp__mixed_precision": {"param_dtype": "bf16"}}, {"dtype": "bfloat16"}),
        ({"fsdp__mixed_precision": {"param_dtype": "fp32"}}, {"dtype": "float32"}),
        ({"actor__ppo_max_token_len_per_gpu": 9000}, {"token_budget": 9000}),
        ({"model__enable_gradient_checkpointing": False}, {"gradient_checkpointing": False}),
    ],
)
def test_keys_mean_what_they_say(change: dict[str, Any], expected: dict[str, Any]) -> None:
    usual = {"ranks": 8, "gradient_checkpointing": True}
    assert learner(**change) == Verl(python="p", **{**usual, **expected})


def test_a_number_of_ranks_that_is_none_is_an_error() -> None:
    for value in (0, 1.5, "many", True):
        with pytest.raises(ConfigError, match=r"n_gpus_per_node=.* must be a whole number"):
            learner(trainer__n_gpus_per_node=value)
    with pytest.raises(ConfigError, match=r"ppo_max_token_len_per_gpu=0 must be a whole number"):
        learner(actor__ppo_max_token_len_per_gpu=0)


# --- what is named --------------------------------------------------------------------------


def test_what_has_no_effect_beside_verl_is_named_with_its_reason() -> None:
    plan = make_plan(
        config(
            trainer__n_gpus_per_node=2,
            rollout__gpu_memory_utilization=0.6,
            actor__ppo_micro_batch_size_per_gpu=4,
            actor__use_dynamic_bsz=True,
            fsdp__reshard_after_forward=True,
            ref__fsdp_config={"param_offload": True},
            ray_init={"num_cpus": 4},
            data__train_files="train.parquet",
        ),
        python="p",
    )
    fsdp = f"{ACTOR}.fsdp_config"
    assert plan.without_effect == {
        "the engine is lightspan's: VERL(config, engine=VLLM(…)) for vLLM": [
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"
        ],
        f"passes are balanced by their tokens: {ACTOR}.ppo_max_token_len_per_gpu": [
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{ACTOR}.use_dynamic_bsz=True",
        ],
        "verl's processes are set up by lightspan": [f"{fsdp}.reshard_after_forward=True"],
        "the starting weights are held as the actor's are": [
            "actor_rollout_ref.ref.fsdp_config.param_offload=True"
        ],
        "whether ranks are in Ray is VERL(config, ray=…)": ["ray_init.num_cpus=4"],
        "data is what fit() is given": ["data.train_files='train.parquet'"],
    }


def test_no_key_is_of_verl_and_of_another_class() -> None:
    assert not _sharding.DEFAULTS.keys() & {*DEFAULTS, *NEUTRAL}


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"trainer__nnodes": 2},
            "trainer.nnodes=2: use 1: ranks are processes of one machine",
        ),
        ({"actor__strategy": "megatron"}, f"{ACTOR}.strategy='megatron': use 'fsdp2'"),
        (
            {"actor__ulysses_sequence_parallel_size": 2},
            f"{ACTOR}.ulysses_sequence_parallel_size=2: use 1: a row is computed by one rank",
        ),
        (
            {"fsdp__offload_policy": True},
            f"{ACTOR}.fsdp_config.offload_policy=True: use param_offload=True and "
            "optimizer_offload=True",
        ),
        (
            {"fsdp__param_offload": "yes"},
            f"{ACTOR}.fsdp_config.param_offload='yes': use True or False",
        ),
        (
            {"fsdp__fsdp_size": 4},
            f"{ACTOR}.fsdp_config.fsdp_size=4: use -1: weights are sharded over all ranks",
        ),
        (
            {"fsdp__model_dtype": "bfloat16"},
            f"{ACTOR}.fsdp_config.model_dtype='bfloat16': use 'fp32': weights are float32; "
            "fsdp_config.dtype says what passes are computed in",
        ),
        (
            {"fsdp__dtype": "float16"},
            f"{ACTOR}.fsdp_config.dtype='float16': use 'float32' or 'bfloat16'",
        ),
        (
            {"algorithm__adv_estimator": "gae"},
            "algorithm.adv_estimator='gae': lightspan's part of verl has no critic: use one of "
            "'grpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline', or lightspan's "
            "own learner (leave python= out)",
        ),
        (
            {"algorithm__adv_estimator": None},
            "algorithm.adv_estimator='gae' (verl's default): lightspan's part of verl has no "
            "critic: use one of 'grpo', 'rloo', 'reinforce_plus_plus', "
            "'reinforce_plus_plus_baseline', or lightspan's own learner (leave python= out)",
        ),
        (
            {"algorithm__use_kl_in_reward": True},
            "algorithm.use_kl_in_reward=True: use actor_rollout_ref.actor.use_kl_loss=True",
        ),
    ],
)
def test_what_verls_processes_cannot_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make_plan(config(**change), python="p")
    assert str(caught.value).splitlines() == [
        "VERL(config) asks for what verl as lightspan drives it does not do:",
        f"  {line}",
    ]
