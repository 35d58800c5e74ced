"""VERL(config): which keys are used, which are named, which are refused; which agents are found."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

import lightspan.agl as agl
from lightspan import Critic, LightningRL, LoRA, Optimizer, Overlong, PolicyLoss
from lightspan.agl._trainer import make_algorithm
from lightspan.agl._verl import make_plan
from lightspan.agl._verl_keys import AGREES, DEFAULTS, NEUTRAL, NEVER, WITHOUT_EFFECT
from lightspan.errors import ConfigError, UnknownAgentError, UnsupportedError
from lightspan.lightning.episode import build_episode
from lightspan.lightning.selection import check_agents
from lightspan.reports.sinks import WandB
from lightspan.schema.routing import Route
from lightspan.testing.strategies import make_attempt, make_record, make_rollout

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
    """The tutorial's configuration with other values at `section__…__key`."""
    config = deepcopy(TUTORIAL)
    for name, value in dotted.items():
        *sections, key = name.replace("arr__", "actor_rollout_ref__").split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


# --- what is used ---------------------------------------------------------------------------


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
    assert plan.trainer == {"epochs": 2.0, "validate_every": 32, "checkpoint_every": NEVER}
    assert plan.sampling == {"train": {"temperature": 1.0}, "val": {"temperature": 0.0}}
    assert (plan.loggers, plan.project, plan.experiment) == (("wandb",), "AgentLightning", "spider")
    assert plan.resume is False


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"algorithm__adv_estimator": "rloo"}, "estimator", "rloo"),
        ({"algorithm__adv_estimator": "reinforce_plus_plus"}, "estimator", "reinforce++"),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "estimator", "dr_grpo"),
        ({"arr__actor__loss_agg_mode": "seq-mean-token-mean"}, "weight", "transition"),
        ({"arr__actor__ppo_mini_batch_size": 8}, "minibatches", 4),
        ({"arr__actor__ppo_mini_batch_size": 5}, "minibatches", 7),
        ({"arr__actor__ppo_mini_batch_size": 64}, "minibatches", 1),
        ({"arr__rollout__temperature": 0.7}, "temperature", 0.7),
        ({"data__seed": 5}, "seed", 5),
        (
            {"arr__model__lora_rank": 8},
            "lora",
            LoRA(rank=8, alpha=16, target_modules="all-linear"),
        ),
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
        (
            {"arr__actor__entropy_coeff": 0.001, "arr__actor__tis_imp_ratio_cap": 2},
            "loss",
            PolicyLoss(clip_high=0.3, entropy=0.001, importance_cap=2.0),
        ),
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


POLICY_LOSS = "arr__actor__policy_loss__loss_mode"
IS = "algorithm__rollout_correction__rollout_is"


@pytest.mark.parametrize(
    ("change", "loss"),
    [
        ({POLICY_LOSS: "vanilla"}, PolicyLoss(clip_high=0.3)),
        (
            {POLICY_LOSS: "cispo", "arr__actor__clip_ratio_low": 10},
            PolicyLoss(form="cispo", clip_low=1.0, clip_high=0.3),
        ),
        ({POLICY_LOSS: "cispo"}, PolicyLoss(form="cispo", clip_low=0.2, clip_high=0.3)),
        (
            {IS: "token"},
            PolicyLoss(clip_high=0.3, importance_cap=2.0),
        ),
        (
            {IS: "sequence", f"{IS}_threshold": "5"},
            PolicyLoss(clip_high=0.3, importance_cap=5.0, importance_level="sequence"),
        ),
        (
            {"algorithm__rollout_correction__bypass_mode": True},
            PolicyLoss(clip_high=0.3),
        ),
        (
            {
                "algorithm__rollout_correction__loss_type": "ppo_clip",
                "algorithm__rollout_correction__rollout_rs": None,
            },
            PolicyLoss(clip_high=0.3),
        ),
    ],
)
def test_losses_of_later_versions(change: dict[str, Any], loss: PolicyLoss) -> None:
    """Of versions after 0.5; what is not said stays as it was."""
    before, after = make_plan(TUTORIAL).algorithm, make_plan(changed(**change)).algorithm
    assert after == {**before, "loss": loss}


def test_gspo_is_a_mean_over_calls() -> None:
    """As in verl, whatever `loss_agg_mode` says."""
    bounds = {"arr__actor__clip_ratio_low": 3e-4, "arr__actor__clip_ratio_high": 4e-4}
    config = changed(**{POLICY_LOSS: "gspo"}, **bounds, arr__actor__clip_ratio_c=10.0)
    plan = make_plan(config)
    assert plan.algorithm["loss"] == PolicyLoss(form="gspo", clip_low=3e-4, clip_high=4e-4)
    assert plan.algorithm["weight"] == "transition"
    assert "clip_ratio_c=10.0 (loss_mode='gspo' has none)" in plan.report()
    assert "loss_agg_mode" not in plan.report()
    config["actor_rollout_ref"]["actor"]["loss_agg_mode"] = "token-mean"
    plan = make_plan(config)
    assert plan.algorithm["weight"] == "transition"
    assert "loss_agg_mode='token-mean' (GSPO's loss is a mean over calls, as" in plan.report()


@pytest.mark.parametrize(
    ("mode", "change", "expected"),
    [
        ("token-mean", {}, {"weight": "token"}),
        ("seq-mean-token-mean", {}, {"weight": "transition"}),
        ("seq-mean-token-sum", {}, {"weight": "token", "token_constant": 1.0}),
        ("seq-mean-token-sum-norm", {}, {"weight": "token", "token_constant": 2048.0}),
        (
            "seq-mean-token-sum-norm",
            {"arr__actor__loss_scale_factor": 512},
            {"weight": "token", "token_constant": 512.0},
        ),
    ],
)
def test_how_the_loss_is_aggregated(
    mode: str, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = make_plan(changed(arr__actor__loss_agg_mode=mode, **change)).algorithm
    assert {name: found[name] for name in ("weight", "token_constant") if name in found} == expected


def test_aggregated_losses_are_verls_where_a_rollout_is_a_call() -> None:
    """Weights of three answers of 1, 2 and 5 tokens, by verl's formulas."""
    lengths = {"a": 1, "b": 2, "c": 5}
    episodes = [
        build_episode(
            make_attempt(name, reward=float(number)),
            make_rollout(name, "g"),
            [],
            [make_record(name, [1, 2], [3] * length, attempt=name)],
        )
        for number, (name, length) in enumerate(lengths.items())
    ]
    expected = {
        "token-mean": {1: 1 / 8, 2: 1 / 8, 5: 1 / 8},
        "seq-mean-token-mean": {1: 1 / 3, 2: 1 / 6, 5: 1 / 15},
        "seq-mean-token-sum": {1: 1 / 3, 2: 1 / 3, 5: 1 / 3},
        "seq-mean-token-sum-norm": {1: 1 / 3 / 2048, 2: 1 / 3 / 2048, 5: 1 / 3 / 2048},
    }
    for mode, weights in expected.items():
        plan = make_plan(changed(arr__actor__loss_agg_mode=mode, arr__actor__entropy_coeff=0.1))
        algorithm = LightningRL("a/model", **plan.algorithm)
        batch = algorithm.build(episodes)
        found = {sum(row.mask): row.weights[-1] for row in batch.rows}
        assert found == pytest.approx(weights), mode


def test_the_overlong_buffer_of_dapo() -> None:
    buffer = {"enable": True, "len": 512, "penalty_factor": 1.0, "log": True}
    config = changed()
    config["reward_model"] = {"overlong_buffer": buffer}
    overlong = Overlong(max_tokens=2048, buffer=512)
    assert make_plan(config).algorithm == {**make_plan(TUTORIAL).algorithm, "overlong": overlong}
    buffer["len"] = 0
    with pytest.raises(ConfigError, match="Overlong: buffer=0 must be at least 1"):
        make_plan(config)


def test_verls_default_estimator_is_ppo() -> None:
    """gae, with one rollout of each task; its critic's own settings are named, not used."""
    config = changed(algorithm__adv_estimator=None, arr__rollout__n=1)
    plan = make_plan(config)
    assert plan.algorithm == {
        **make_plan(TUTORIAL).algorithm,
        "estimator": "ppo",
        "critic": Critic(lam=1.0, warmup=0),
        "gamma": 1.0,
        "group_size": 1,
    }
    algorithm = make_algorithm(plan, None)
    assert (algorithm.credit.name, algorithm.critic) == ("critic(1)", Critic(lam=1.0, warmup=0))
    assert "critic" not in plan.report()
    config["critic"] = {"optim": {"lr": 1e-5}, "model": {"path": "other"}}
    config["algorithm"] |= {"gamma": 0.99, "lam": "0.95"}
    config["trainer"]["critic_warmup"] = 20
    plan = make_plan(config)
    assert plan.algorithm["gamma"] == 0.99
    assert plan.algorithm["critic"] == Critic(lam=0.95, warmup=20)
    assert (
        "critic.optim.lr=1e-05, critic.model.path='other' (the critic is a head on the policy's "
        "own model, whose rate has another meaning: lightspan.Critic)"
    ) in plan.report()
    assert plan.report().endswith(
        ". algorithm.gamma and algorithm.lam are per call here, per token in verl"
    )


def test_a_critic_of_other_estimators_is_named() -> None:
    config = changed(critic__optim={"lr": 1e-5})
    assert "critic.optim.lr=1e-05 (there is no critic)" in make_plan(config).report()


def test_groups_are_filtered_by_resampling() -> None:
    """verl counts the batches it generates, the first too."""
    groups = {"enable": True, "metric": "acc", "max_num_gen_batches": 10}
    config = changed()
    config["algorithm"]["filter_groups"] = groups
    assert make_plan(config).algorithm == {**make_plan(TUTORIAL).algorithm, "resample": 9}
    config["data"]["gen_batch_size"] = 96
    assert "data.gen_batch_size=96 (a round samples as many tasks as" in make_plan(config).report()
    groups["enable"] = False
    assert make_plan(config).algorithm == make_plan(TUTORIAL).algorithm


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
        "steps": 7,
        "epochs": 2.0,
        "checkpoint_every": 2,
        "folder": "runs/x",
        "device": "cpu",
    }
    assert plan.resume is True
    again = changed(trainer__default_local_dir="runs/x", trainer__resume_mode="disable")
    assert make_plan(again).resume is False


def test_the_algorithm_takes_every_argument() -> None:
    plan = make_plan(changed(arr__model__path="/no/model", arr__actor__ppo_mini_batch_size=8))
    config = make_algorithm(plan, "write").config()
    assert config["agent_match"] == "write"
    assert (config["group_size"], config["tasks_per_step"], config["minibatches"]) == (4, 32, 4)
    assert config["frozen"] == "shared"


def test_what_is_not_said_is_verls_default() -> None:
    small = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 2}},
    }
    plan = make_plan(small)
    algorithm = plan.algorithm
    assert (algorithm["tasks_per_step"], algorithm["minibatches"]) == (1024, 4)
    assert (algorithm["max_tokens"], algorithm["max_length"]) == (512, 1024)
    assert plan.trainer == {"epochs": 30.0, "checkpoint_every": NEVER}
    assert plan.report() == "VERL(config) trains with lightspan's own engine and learner"


# --- what is named --------------------------------------------------------------------------


def test_what_has_no_effect_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.agl._verl.find_spec", lambda name: None)
    plan = make_plan(TUTORIAL)
    assert plan.sinks() == ([], ["wandb"])
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    assert plan.report() == (
        "VERL(config) trains with lightspan's own engine and learner. Without effect here: "
        "data.train_files='data/train.parquet' (data is what fit() is given); "
        "data.truncation='error' (calls are never cut: longer ones are rejected, and "
        f"counted); {rollout}.tensor_model_parallel_size=1, {rollout}.name='vllm', "
        f"{rollout}.gpu_memory_utilization=0.8, {actor}.fsdp_config.param_offload=True, "
        "actor_rollout_ref.model.use_remove_padding=True, trainer.n_gpus_per_node=1 (of verl's own "
        "processes: VERL(config, python=…) has them, here it is this process alone); "
        f"{rollout}.multi_turn.format='hermes' (the model's own "
        "chat template says how tools are called); trainer.logger='wandb' (not installed)"
    )


def test_every_key_is_used_or_named() -> None:
    """Nothing of the tutorial's configuration is lost."""
    from lightspan.agl._verl import _leaves

    report = make_plan(TUTORIAL).report()
    for key, value in _leaves(TUTORIAL):
        assert key in DEFAULTS or key in NEUTRAL or AGREES.get(key) == value or key in report


def test_loggers_become_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.agl._verl.find_spec", lambda name: object())
    plan = make_plan(changed(trainer__logger=["console", "wandb", "tensorboard", "swanlab"]))
    (wandb, tensorboard), missing = plan.sinks()
    assert isinstance(wandb, WandB)
    assert (wandb._project, wandb._options) == ("AgentLightning", {"name": "spider"})
    assert (tensorboard, missing) == ("tensorboard", [])
    assert "trainer.logger='swanlab' (metrics go to the run's folder, and to" in plan.report()


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"algorithm__adv_estimator": "remax"},
            "algorithm.adv_estimator='remax': use one of 'gae', 'grpo', 'rloo', "
            "'reinforce_plus_plus', 'reinforce_plus_plus_baseline'",
        ),
        (
            {"algorithm__gamma": 0.9},
            "algorithm.gamma=0.9: use lightspan.LightningRL(credit='discounted', gamma=…)",
        ),
        (
            {"algorithm__lam": 0.95},
            "algorithm.lam=0.95: use 1: there is no critic, and no generalised advantage",
        ),
        (
            {"trainer__critic_warmup": 5},
            "trainer.critic_warmup=5: use 0: there is no critic",
        ),
        (
            {"algorithm__use_kl_in_reward": True},
            "algorithm.use_kl_in_reward=True: use actor_rollout_ref.actor.use_kl_loss=True",
        ),
        (
            {"algorithm__use_raft": True},
            "algorithm.use_raft=True: lightspan does not know it; leave it out",
        ),
        (
            {"arr__actor__ppo_epochs": 2},
            "actor_rollout_ref.actor.ppo_epochs=2: use 1: each batch is learned from once",
        ),
        (
            {"arr__rollout__top_p": 0.9},
            "actor_rollout_ref.rollout.top_p=0.9: use 1: only then are log-probabilities those of "
            "training",
        ),
        (
            {"custom_reward_function__path": "reward.py"},
            "custom_reward_function.path='reward.py': use compute the reward in the agent and "
            "return it",
        ),
        ({"trainer__device": "npu"}, "trainer.device='npu': use one of 'cpu', 'cuda'"),
        (
            {"arr__actor__loss_agg_mode": "seq-sum-no-norm"},
            "actor_rollout_ref.actor.loss_agg_mode='seq-sum-no-norm': use one of 'token-mean', "
            "'seq-mean-token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm'",
        ),
        (
            {POLICY_LOSS: "clip_cov"},
            "actor_rollout_ref.actor.policy_loss.loss_mode='clip_cov': use one of 'vanilla', "
            "'gspo', 'cispo'",
        ),
        (
            {IS: "geometric"},
            "algorithm.rollout_correction.rollout_is='geometric': use one of 'token', 'sequence'",
        ),
        (
            {IS: "token", "algorithm__rollout_correction__bypass_mode": True},
            "algorithm.rollout_correction.rollout_is='token' with bypass_mode=True: the ratio is "
            "to the recorded log-probabilities then, which corrects for both: use one of the two",
        ),
        (
            {IS: "token", "arr__actor__tis_imp_ratio_cap": 2.0},
            "algorithm.rollout_correction.rollout_is='token' with "
            "actor_rollout_ref.actor.tis_imp_ratio_cap: use "
            "algorithm.rollout_correction.rollout_is_threshold",
        ),
        (
            {"algorithm__rollout_correction__rollout_rs": "seq_mean_k3"},
            "algorithm.rollout_correction.rollout_rs='seq_mean_k3': use rollout_is: no call is "
            "rejected by its ratio",
        ),
        (
            {"algorithm__filter_groups__enable": True},
            "algorithm.filter_groups.enable=True without a bound: use "
            "algorithm.filter_groups.max_num_gen_batches=10, say; a step that lacks groups after "
            "that is learned from as it is",
        ),
    ],
)
def test_what_would_change_learning_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        agl.VERL(changed(**change))
    assert str(caught.value).splitlines()[1:] == [f"  {line}"]


def test_everything_that_is_refused_is_in_one_error() -> None:
    config = changed(algorithm__gamma=0.9, data__shuffle=False, new__section={"key": [1]})
    config["algorithm"]["adv_estimator"] = "remax"
    with pytest.raises(UnsupportedError) as caught:
        agl.VERL(config)
    keys = [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert keys == ["data.shuffle", "new.section.key", "algorithm.adv_estimator", "algorithm.gamma"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (changed(arr__model__path=None), r"names no model: set actor_rollout_ref\.model\.path"),
        (changed(data__train_batch_size="four"), r"data\.train_batch_size='four' must be a whole"),
        (changed(data__train_batch_size=-4), r"train_batch_size=-4 must .* of at least 1"),
        (changed(data__max_response_length=0), r"data\.max_response_length=0 must be a whole"),
        (changed(arr__rollout__n=2.5), r"rollout\.n=2\.5 must be a whole number of at least 1"),
        (changed(arr__actor__ppo_mini_batch_size=0), r"ppo_mini_batch_size=0 must be a whole"),
        (changed(arr__rollout__n=True), r"rollout\.n=True must be a whole number"),
        (changed(arr__actor__optim__lr="fast"), r"optim\.lr='fast' must be a finite number"),
        (changed(arr__actor__optim__lr=-1), r"learning_rate=-1\.0 must be a finite number above"),
        (
            changed(**{IS: "token", f"{IS}_threshold": "0.5_5.0"}),
            r"rollout_is_threshold='0\.5_5\.0' must be a finite number",
        ),
        (
            changed(algorithm__adv_estimator="gae", algorithm__lam=2),
            r"Critic: lam=2\.0 must be a finite number",
        ),
        (changed(arr__actor__optim__betas=[0.9]), r"optim\.betas=\[0\.9\] must be two numbers"),
        (["algorithm"], "config must be a mapping"),
    ],
)
def test_malformed_configurations_are_errors(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        agl.VERL(config)


def test_all_malformed_numbers_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        agl.VERL(changed(data__train_batch_size=0, arr__rollout__n=2.5))
    assert str(caught.value) == (
        "VERL(config): data.train_batch_size=0 must be a whole number of at least 1; "
        "actor_rollout_ref.rollout.n=2.5 must be a whole number of at least 1"
    )


def test_numbers_may_be_as_yaml_has_them() -> None:
    config = changed(data__train_batch_size="8", arr__rollout__n=4.0, arr__actor__optim__lr="1e-6")
    algorithm = make_plan(config).algorithm
    assert (algorithm["tasks_per_step"], algorithm["group_size"]) == (8, 4)
    assert algorithm["optimizer"].learning_rate == 1e-6


def test_no_key_is_in_two_classes() -> None:
    assert not DEFAULTS.keys() & NEUTRAL.keys()
    patterns = [pattern for pattern, _ in WITHOUT_EFFECT]
    assert len(patterns) == len(set(patterns))
    assert not set(patterns) & {*DEFAULTS, *NEUTRAL}


def test_a_batch_larger_than_the_data_is_an_error() -> None:
    trainer = agl.Trainer(algorithm=agl.VERL(TUTORIAL))

    @agl.rollout
    def agent(task: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"data\.train_batch_size=32 is more than the 2 tasks"):
        trainer.fit(agent, [{"n": 1}, {"n": 2}])


# --- which agents ---------------------------------------------------------------------------

PATHS = ["write_query", "team/rewrite_query", "check_query", "write/check", "app", "a%2Fwriter"]


@pytest.mark.parametrize(
    ("agent_match", "found"),
    [
        ("write", ["write_query", "team/rewrite_query", "a%2Fwriter"]),
        ("^write", ["write_query"]),
        ("query$", ["write_query", "team/rewrite_query", "check_query"]),
        ("^check|^rewrite", ["team/rewrite_query", "check_query", "write/check"]),
        ("", [path for path in PATHS if path != "app"]),
        ("a", ["a%2Fwriter"]),  # the unnamed agent, app, has no name
        ("a/", ["a%2Fwriter"]),
        (None, PATHS),
    ],
)
def test_agent_match_is_searched_in_the_innermost_name(
    agent_match: str | None, found: list[str]
) -> None:
    routing = make_algorithm(make_plan(TUTORIAL), agent_match).routing()
    routes = {path: routing.target(path).route for path in PATHS}
    assert [path for path, route in routes.items() if route is Route.POLICY] == found
    assert {route for path, route in routes.items() if path not in found} <= {Route.SHARED}
    assert routing.target(found[0]).policy == "policy"
    assert routing.by_url  # a judge at an endpoint of its own is left alone


def test_an_expression_that_is_found_in_no_agent_is_an_error() -> None:
    routing = make_algorithm(make_plan(TUTORIAL), "^writer$").routing()
    with pytest.raises(UnknownAgentError, match=r"no agent matches '\^writer\$'"):
        check_agents(routing, ["write_query", "check_query"])
    check_agents(routing, ["write_query", "team/writer"])
