"""Tests of `VERL(config)`: keys that are used, reported and refused, and the selected agents."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

import lightspan_agl as agl
from lightspan import Critic, LoRA, Optimizer, PolicyLoss
from lightspan.errors import ConfigError, UnknownAgentError, UnsupportedError
from lightspan.lightning.selection import check_agents
from lightspan.schema.routing import Route
from lightspan_agl._agent_match import globs_of
from lightspan_agl.algorithm._verl_keys import NEVER
from lightspan_agl.algorithm.verl import make_plan
from lightspan_agl.trainer import make_algorithm
from lightspan_tools.sinks import WandB

TUTORIAL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "data/train.parquet",
        "train_batch_size": 32,
        "max_prompt_length": 4096,
        "max_response_length": 2048,
        "truncation": "error",
    },
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.8,
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True},
        },
        "model": {"path": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "use_remove_padding": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "AgentLightning",
        "experiment_name": "spider",
        "test_freq": 32,
        "total_epochs": 2,
    },
}


def changed(**dotted: Any) -> dict[str, Any]:
    """Return the tutorial's configuration with changed values; `a__b` is the key `b` in section
    `a`.
    """
    config = deepcopy(TUTORIAL)
    for name, value in dotted.items():
        *sections, key = name.replace("arr__", "actor_rollout_ref__").split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


# --- keys that are used ---------------------------------------------------------------------
def test_the_tutorials_configuration() -> None:
    plan = make_plan(TUTORIAL)
    assert plan.model == "Qwen/Qwen2.5-Coder-1.5B-Instruct"
    assert plan.algorithm == {
        "estimator": "grpo",
        "weight": "token",
        "group_size": 4,
        "tasks_per_step": 32,
        "minibatches": 1,
        "temperature": 1.0,
        "max_tokens": 2048,
        "max_length": 6144,
        "lora": None,
        "loss": PolicyLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0),
        "optimizer": Optimizer(learning_rate=1e-6, betas=(0.9, 0.999), weight_decay=0.01),
        "seed": 0,
    }
    assert plan.trainer == {"validate_every": 32, "checkpoint_every": NEVER}
    assert (plan.epochs, plan.max_steps) == (2, None)
    assert plan.sampling == {"train": {"temperature": 1.0}, "val": {"temperature": 0.0}}
    assert (plan.project, plan.experiment) == ("AgentLightning", "spider")
    assert plan.resume is False


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"algorithm__adv_estimator": "reinforce_plus_plus"}, "estimator", "reinforce++"),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "estimator", "dr_grpo"),
        ({"arr__actor__loss_agg_mode": "seq-mean-token-mean"}, "weight", "transition"),
        ({"arr__actor__ppo_mini_batch_size": 5}, "minibatches", 7),
        ({"arr__rollout__temperature": 0.7}, "temperature", 0.7),
        ({"data__seed": 5}, "seed", 5),
        (
            {"arr__model__lora_rank": 8, "arr__model__target_modules": ["q_proj", "v_proj"]},
            "lora",
            LoRA(rank=8, alpha=16, target_modules=("q_proj", "v_proj")),
        ),
        (
            {"arr__actor__use_kl_loss": True, "arr__actor__kl_loss_coef": 0.01},
            "loss",
            PolicyLoss(clip_high=0.3, kl=0.01, kl_estimator="k3"),
        ),
        ({"arr__actor__kl_loss_type": "mse"}, "loss", PolicyLoss(clip_high=0.3)),
        (
            {
                "arr__actor__clip_ratio": 0.1,
                "arr__actor__clip_ratio_low": None,
                "arr__actor__clip_ratio_high": None,
            },
            "loss",
            PolicyLoss(clip_low=0.1, clip_high=0.1),
        ),
        (
            {"arr__actor__optim__lr_warmup_steps": 10, "arr__actor__grad_clip": 0.5},
            "optimizer",
            Optimizer(betas=(0.9, 0.999), weight_decay=0.01, warmup_steps=10, max_grad_norm=0.5),
        ),
    ],
)
def test_keys_become_arguments_of_the_algorithm(
    change: dict[str, Any], name: str, value: Any
) -> None:
    before, after = make_plan(TUTORIAL).algorithm, make_plan(changed(**change)).algorithm
    assert after[name] == value
    assert {k: v for k, v in after.items() if k != name} == {
        k: v for k, v in before.items() if k != name
    }


def test_the_warmup_has_as_many_training_steps_as_verls() -> None:
    config = changed(arr__actor__optim__lr_warmup_steps=10, arr__actor__ppo_mini_batch_size=8)
    algorithm = make_plan(config).algorithm
    assert (algorithm["minibatches"], algorithm["optimizer"].warmup_steps) == (4, 40)


def test_verls_default_estimator_is_ppo() -> None:
    plan = make_plan(changed(algorithm__adv_estimator=None, arr__rollout__n=1))
    assert plan.algorithm["estimator"] == "ppo"
    assert make_algorithm(plan, None).critic == Critic(lam=0.95)


def test_keys_become_arguments_of_the_trainer() -> None:
    plan = make_plan(
        changed(
            trainer__total_training_steps=7,
            trainer__save_freq=2,
            trainer__test_freq=-1,
            trainer__default_local_dir="runs/x",
            trainer__device="cpu",
        )
    )
    assert plan.trainer == {
        "checkpoint_every": 2,
        "folder": "runs/x",
        "device": "cpu",
    }
    assert (plan.epochs, plan.max_steps) == (2, 7)
    assert plan.resume is True
    again = changed(trainer__default_local_dir="runs/x", trainer__resume_mode="disable")
    assert make_plan(again).resume is False


def test_unset_keys_have_verls_default() -> None:
    small = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 2}},
    }
    plan = make_plan(small)
    algorithm = plan.algorithm
    assert (algorithm["tasks_per_step"], algorithm["minibatches"]) == (1024, 4)
    assert (algorithm["max_tokens"], algorithm["max_length"]) == (512, 1024)
    assert plan.trainer == {"checkpoint_every": NEVER}
    assert (plan.epochs, plan.max_steps) == (30, None)
    assert plan.report() == ""


@pytest.mark.parametrize(
    ("tasks", "epochs", "limit", "steps"),
    [
        (7, 3, None, 3),  # the last 3 tasks of each epoch make no step
        (8, 3, None, 6),
        (10, 1, 6, 2),  # ends with the epoch
        (10, 3, 5, 5),
    ],
)
def test_a_training_has_as_many_steps_as_with_verl(
    tasks: int, epochs: int, limit: int | None, steps: int
) -> None:
    length = {"trainer__total_epochs": epochs, "trainer__total_training_steps": limit}
    plan = make_plan(changed(data__train_batch_size=4, **length))
    assert plan.steps(tasks) == steps


# --- keys without effect --------------------------------------------------------------------


def test_keys_without_effect_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_agl.algorithm.verl.find_spec", lambda name: None)
    plan = make_plan(TUTORIAL)
    assert plan.sinks() == []
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    assert plan.report() == (
        "VERL(config): without effect: "
        "data.train_files='data/train.parquet' (fit() takes the data); "
        "data.truncation='error' (calls are never truncated: longer ones are rejected and "
        "counted); "
        f"{rollout}.tensor_model_parallel_size=1, {rollout}.name='vllm', "
        f"{rollout}.gpu_memory_utilization=0.8, {actor}.fsdp_config.param_offload=True, "
        "actor_rollout_ref.model.use_remove_padding=True, trainer.n_gpus_per_node=1 (of verl's "
        "processes; for those use VERL(config, learner=lightspan.Verl(…), "
        f"engine=lightspan.VLLM(…))); {rollout}.multi_turn.format='hermes' (the model's chat "
        "template decides how tools are called); trainer.logger='wandb' (not installed)"
    )


def test_loggers_become_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_agl.algorithm.verl.find_spec", lambda name: object())
    plan = make_plan(changed(trainer__logger=["console", "wandb", "tensorboard", "swanlab"]))
    wandb, tensorboard = plan.sinks()
    assert isinstance(wandb, WandB)
    assert (wandb._project, wandb._options) == ("AgentLightning", {"name": "spider"})
    assert tensorboard == "tensorboard"
    assert "trainer.logger='swanlab' (unknown)" in plan.report()


# --- keys that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"algorithm__adv_estimator": "remax"},
            "algorithm.adv_estimator='remax': use one of gae, grpo, rloo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline",
        ),
        (
            {"algorithm__gamma": 0.9},
            "algorithm.gamma=0.9: use lightspan.LightningRL, which has options for it",
        ),
        (
            {"arr__rollout__top_p": 0.9},
            "actor_rollout_ref.rollout.top_p=0.9: use 1: others change the log-probabilities",
        ),
        (
            {"custom_reward_function__path": "reward.py"},
            "custom_reward_function.path='reward.py': compute the reward in the agent and "
            "return it",
        ),
        (
            {"arr__rollout__val_kwargs__do_sample": True},
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True: leave it out: validation is "
            "greedy, or samples at actor_rollout_ref.rollout.val_kwargs.temperature",
        ),
        ({"data__shuffle": False}, "data.shuffle=False: leave it out: epochs are shuffled"),
        (
            {"arr__model__enable_gradient_checkpointin": True},
            "actor_rollout_ref.model.enable_gradient_checkpointin=True: unknown to lightspan; "
            "leave it out",
        ),
        (
            {"algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-5},
            "critic.optim.lr=1e-05: leave it out, or use lightspan.LightningRL(estimator='ppo', "
            "critic=lightspan.Critic(…)): the critic is a head on the policy, with options of its "
            "own",
        ),
    ],
)
def test_what_would_change_learning_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        agl.VERL(changed(**change))
    assert str(caught.value).splitlines()[1:] == [f"  {line}"]


def test_keys_of_an_unused_critic_have_no_effect() -> None:
    plan = make_plan(changed(critic__optim__lr=1e-5))
    assert "critic.optim.lr=1e-05 (verl's critic is not used" in plan.report()


def test_other_arguments_of_verl_are_refused() -> None:
    agl.VERL(TUTORIAL, trainer_cls=None)
    with pytest.raises(UnsupportedError, match=r"VERL\(daemon_cls=.*leave it out"):
        agl.VERL(TUTORIAL, daemon_cls=object)


def test_one_error_names_everything_that_is_refused() -> None:
    config = changed(algorithm__gamma=0.9, data__shuffle=False, new__section={"key": [1]})
    with pytest.raises(UnsupportedError) as caught:
        agl.VERL(config)
    keys = [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert keys == ["algorithm.gamma", "data.shuffle", "new.section.key"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (changed(arr__model__path=None), r"names no model: set actor_rollout_ref\.model\.path"),
        (changed(data__train_batch_size="four"), r"data\.train_batch_size='four' must be a whole"),
        (changed(arr__rollout__n=True), r"rollout\.n=True must be a whole number"),
        (changed(arr__actor__optim__lr=-1), r"learning_rate=-1 must be a finite number above"),
        (["algorithm"], "config must be a mapping"),
    ],
)
def test_malformed_configurations_are_errors(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.VERL(config)


def test_a_batch_larger_than_the_data_is_an_error() -> None:
    trainer = agl.Trainer(algorithm=agl.VERL(TUTORIAL))

    @agl.rollout
    def agent(task: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"data\.train_batch_size=32 is more than the 2 tasks"):
        trainer.fit(agent, [{"n": 1}, {"n": 2}])


def test_errors_of_the_trainer_have_the_keys_of_verl() -> None:
    @agl.rollout
    def agent(task: Any) -> float:
        return 1.0

    one = changed(arr__rollout__n=1, data__train_batch_size=1)
    with pytest.raises(ConfigError, match="group_size=1 teaches nothing") as caught:
        agl.Trainer(algorithm=agl.VERL(one)).fit(agent, [{"n": 1}])
    assert caught.value.__notes__ == [
        "see docs/troubleshooting.md#estimator-compares-the-rollouts-of-a-task",
        "In VERL(config): estimator is algorithm.adv_estimator, reinforce++ is "
        "reinforce_plus_plus, ppo is gae, group_size is actor_rollout_ref.rollout.n.",
    ]


# --- which agents ---------------------------------------------------------------------------

PATHS = ["write_query", "team/rewrite_query", "check_query", "write/check", "app", "a%2Fwriter"]


@pytest.mark.parametrize(
    ("agent_match", "trained"),
    [
        ("write", ["write_query", "team/rewrite_query", "a%2Fwriter"]),
        ("^write", ["write_query"]),
        ("^check|^rewrite", ["team/rewrite_query", "check_query", "write/check"]),
        ("^w.*y$", ["write_query"]),
        ("a/", ["a%2Fwriter"]),
        ("", PATHS),
        (None, PATHS),
    ],
)
def test_agent_match_is_searched_in_the_innermost_name(
    agent_match: str | None, trained: list[str]
) -> None:
    routing = make_algorithm(make_plan(TUTORIAL), agent_match).routing()
    routes = {path: routing.target(path).route for path in PATHS}
    assert [path for path, route in routes.items() if route is Route.POLICY] == trained
    assert {route for path, route in routes.items() if path not in trained} <= {Route.SHARED}
    assert routing.target(trained[0]).policy == "policy"


@pytest.mark.parametrize("agent_match", ["(re)?write", "[wW]rite", "("])
def test_other_expressions_are_refused(agent_match: str) -> None:
    with pytest.raises(UnsupportedError, match="lightspan selects agents by name"):
        globs_of(agent_match)


def test_escaped_characters_are_plain() -> None:
    assert globs_of(r"^a\.b$") == ["a.b"]


def test_an_expression_that_is_found_in_no_agent_is_an_error() -> None:
    routing = make_algorithm(make_plan(TUTORIAL), "^writer$").routing()
    with pytest.raises(UnknownAgentError, match="no agent matches 'writer'"):
        check_agents(routing, ["write_query", "check_query"])
    check_agents(routing, ["write_query", "team/writer"])
