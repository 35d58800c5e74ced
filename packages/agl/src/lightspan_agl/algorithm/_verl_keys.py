"""Tables of verl's configuration keys: used, limited to some values, or without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))

ESTIMATORS: Final = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
WEIGHTS: Final = {"token-mean": "token", "seq-mean-token-mean": "transition"}
KL_ESTIMATORS: Final = {
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}

DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.seed": 0,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.betas": (0.9, 0.999),
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": None,
    f"{ACTOR}.clip_ratio_high": None,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{MODEL}.path": None,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.default_local_dir": None,
    "trainer.resume_mode": "auto",
    "trainer.device": None,
    "trainer.logger": ["console"],
    "trainer.project_name": "lightspan",
    "trainer.experiment_name": None,
}
"""Used key → verl's default (verl 0.5, `ppo_trainer.yaml`)."""

KEYS_BY_OPTION: Final[Mapping[str, str]] = {
    "estimator": "algorithm.adv_estimator",
    "reinforce++": "reinforce_plus_plus",
    "ppo": "gae",
    "group_size": f"{ROLLOUT}.n",
    "tasks_per_step": "data.train_batch_size",
    "max_tokens": "data.max_response_length",
    "max_length": "data.max_prompt_length + data.max_response_length",
    "minibatches": f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size",
    "optimize": "agent_match of the adapter",
    "folder": "trainer.default_local_dir",
    "another folder": "another trainer.default_local_dir",
    "resume": "trainer.resume_mode",
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "learning_rate": f"{ACTOR}.optim.lr",
}
"""Word of lightspan's error messages → the key or value of a verl configuration."""

WHOLE: Final[Mapping[str, int]] = {
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.seed": 0,
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 1,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}
"""Key of an integer → its minimum."""

NUMBERS: Final = (
    f"{ROLLOUT}.temperature",
    f"{ROLLOUT}.val_kwargs.temperature",
    *(f"{ACTOR}.optim.{key}" for key in ("lr", "weight_decay")),
    *(f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high", "_c")),
    *(f"{ACTOR}.{key}" for key in ("grad_clip", "kl_loss_coef", "entropy_coeff")),
)
"""Keys of numbers; ranges are checked on use."""

_LIGHTNING: Final = "use lightspan.LightningRL, which has options for it"
_IN_AGENT: Final = "compute the reward in the agent and return it"
_IN_CLIENT: Final = "set it in the agent's client"

ALLOWED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "algorithm.adv_estimator": (tuple(ESTIMATORS), f"use one of {', '.join(ESTIMATORS)}"),
    f"{ACTOR}.loss_agg_mode": (tuple(WEIGHTS), f"use one of {', '.join(WEIGHTS)}"),
    f"{ACTOR}.kl_loss_type": (
        tuple(KL_ESTIMATORS),
        f"use one of {', '.join(KL_ESTIMATORS)}; as a loss, kl (k1) has no gradient but noise",
    ),
    "trainer.resume_mode": (("auto", "disable"), "use auto or disable"),
    "trainer.device": ((None, "cpu", "cuda"), "use cpu or cuda"),
    "algorithm.use_kl_in_reward": ((False,), f"use {ACTOR}.use_kl_loss=True"),
    "algorithm.gamma": ((1,), _LIGHTNING),
    "algorithm.lam": ((1,), _LIGHTNING),
    "algorithm.filter_groups.enable": ((False,), _LIGHTNING),
    "trainer.critic_warmup": ((0,), _LIGHTNING),
    "data.shuffle": ((True,), "leave it out: epochs are shuffled"),
    f"{ROLLOUT}.top_p": ((1,), "use 1: others change the log-probabilities"),
    f"{ROLLOUT}.top_k": ((-1, 0), "use -1: others change the log-probabilities"),
    f"{ROLLOUT}.do_sample": ((True,), "leave it out: training samples"),
    f"{ROLLOUT}.val_kwargs.n": ((1,), "use 1"),
    f"{ROLLOUT}.val_kwargs.do_sample": (
        (),
        f"leave it out: validation is greedy, or samples at {ROLLOUT}.val_kwargs.temperature",
    ),
    f"{ROLLOUT}.val_kwargs.top_p": ((1,), _IN_CLIENT),
    f"{ROLLOUT}.val_kwargs.top_k": ((-1, 0), _IN_CLIENT),
    f"{ACTOR}.policy_loss.loss_mode": (("vanilla",), _LIGHTNING),
    f"{ACTOR}.ppo_epochs": ((1,), "use 1: each batch is used once"),
    f"{ACTOR}.tis_imp_ratio_cap": ((-1,), _LIGHTNING),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": ((0, -1), f"use {ACTOR}.optim.lr_warmup_steps"),
    f"{ACTOR}.optim.warmup_style": (("constant",), "use constant"),
    f"{MODEL}.trust_remote_code": ((False,), "use False: code of a model is never run"),
    f"{MODEL}.lora_adapter_path": ((), "use a merged model as model.path"),
    "reward_model.enable": ((False,), _IN_AGENT),
    "custom_reward_function.path": ((), _IN_AGENT),
    "trainer.val_only": ((False,), "use lightspan.Trainer.evaluate"),
}
"""Key → supported values, and what to do in place of other values."""

CRITIC_OPTIONS: Final = tuple(
    f"critic.{key}"
    for key in (
        *("optim.*", "grad_clip", "cliprange_value", "loss_agg_mode"),
        *("ppo_epochs", "ppo_mini_batch_size", "model.path"),
    )
)
"""Keys of verl's critic that change what is learned."""
CRITIC_HINT: Final = (
    "use lightspan.LightningRL(estimator='ppo', critic=lightspan.Critic(…)): the critic is a "
    "head on the policy, with options of its own"
)
"""What to use instead."""

CLUSTER: Final = (
    "of verl's processes; for those use VERL(config, learner=lightspan.Verl(…), "
    "engine=lightspan.VLLM(…))"
)
_CHAT: Final = "the model's chat template decides how tools are called"
_DATA: Final = "fit() takes the data"
_CALLS: Final = "calls are never truncated: longer ones are rejected and counted"

NO_EFFECT: Final[Sequence[tuple[str, str]]] = (
    ("data.trust_remote_code", "code of a model is never run"),
    ("data.truncation", _CALLS),
    ("data.filter_overlong_prompts*", _CALLS),
    *(
        (f"data.{key}", _DATA)
        for key in (
            *("train_files", "val_files", "val_batch_size", "gen_batch_size"),
            "dataloader_num_workers",
        )
    ),
    ("algorithm.kl_penalty", "there is no KL in the reward"),
    ("algorithm.kl_ctrl.*", "there is no KL in the reward"),
    (f"{ROLLOUT}.multi_turn.*", _CHAT),
    (f"{ROLLOUT}.engine_kwargs.*tool*", _CHAT),
    *(
        (f"{ROLLOUT}.{key}", CLUSTER)
        for key in (
            *("name", "mode", "dtype", "tensor_model_parallel_size", "gpu_memory_utilization"),
            *("engine_kwargs.*", "max_num_batched_tokens", "max_num_seqs", "max_model_len"),
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "enforce_eager"),
            *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
            *("free_cache_engine", "load_format", "agent.*"),
            *("enable_chunked_prefill", "enable_prefix_caching", "enable_sleep_mode"),
        )
    ),
    *(
        (f"{ACTOR}.{key}", CLUSTER)
        for key in (
            *("strategy", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
            *("ppo_max_token_len_per_gpu", "fsdp_config.*"),
            *("use_dynamic_bsz", "use_torch_compile", "ulysses_sequence_parallel_size"),
        )
    ),
    ("actor_rollout_ref.ref.*", CLUSTER),
    ("actor_rollout_ref.hybrid_engine", CLUSTER),
    *(
        (f"{MODEL}.{key}", CLUSTER)
        for key in (
            *("use_remove_padding", "use_shm", "use_liger", "use_fused_kernels"),
            *("enable_gradient_checkpointing", "enable_activation_offload"),
        )
    ),
    ("critic.*", "verl's critic is not used; lightspan.Critic describes the one of gae"),
    ("reward_model.*", "the agent returns its reward"),
    ("trainer.val_before_train", "an evaluation runs before and after training"),
    ("trainer.rollout_data_dir", "`lightspan inspect` shows rollouts"),
    ("trainer.validation_data_dir", "`lightspan inspect` shows rollouts"),
    ("trainer.log_val_generations", "`lightspan inspect` shows rollouts"),
    *((f"trainer.{key}", CLUSTER) for key in ("n_gpus_per_node", "nnodes", "balance_batch")),
    ("ray_init.*", CLUSTER),
    ("ray_kwargs.*", CLUSTER),
    ("agentlightning.trace_aggregator.*", "calls that continue one another are joined"),
    ("agentlightning.port", "free ports are chosen"),
)
"""Pairs of a pattern of keys and the reason why these keys have no effect."""

NEVER: Final = 10**9
"""Steps between checkpoints if only the last checkpoint is wanted."""
