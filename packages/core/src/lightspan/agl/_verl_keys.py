"""The keys of a verl configuration: which are used, with which default, which have no effect, which
values of others are refused. `agl._verl` says what the classes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
BETAS: Final = f"{ACTOR}.optim.betas"
FORM: Final = f"{ACTOR}.policy_loss.loss_mode"
CORRECTION: Final = "algorithm.rollout_correction"
FILTER: Final = "algorithm.filter_groups"
OVERLONG: Final = "reward_model.overlong_buffer"

ESTIMATORS: Final = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
"""verl's names → ours."""
FORMS: Final = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
WEIGHTS: Final = {
    "token-mean": "token",
    "seq-mean-token-mean": "transition",
    "seq-mean-token-sum": "token",
    "seq-mean-token-sum-norm": "token",
}
"""The last two with a `token_constant`."""
FILTER_METRICS: Final = (None, "acc", "score", "seq_reward", "seq_final_reward")
"""What groups may be told apart by: all are the reward here."""
KL_ESTIMATORS: Final = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}

DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    f"{CORRECTION}.rollout_is": None,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.bypass_mode": False,
    f"{FILTER}.enable": False,
    f"{FILTER}.metric": None,
    f"{FILTER}.max_num_gen_batches": 0,
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
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": None,
    f"{ACTOR}.clip_ratio_high": None,
    f"{ACTOR}.clip_ratio_c": 3.0,
    FORM: "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.loss_scale_factor": None,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.tis_imp_ratio_cap": -1.0,
    f"{OVERLONG}.enable": False,
    f"{OVERLONG}.len": 0,
    f"{OVERLONG}.penalty_factor": 0.0,
    f"{MODEL}.path": None,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    "trainer.critic_warmup": 0,
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
"""Every key that is used, with verl's default."""

WHOLE: Final[Mapping[str, int]] = {
    f"{FILTER}.max_num_gen_batches": 0,
    f"{OVERLONG}.len": 0,
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.seed": 0,
    f"{ROLLOUT}.n": 1,
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.lora_alpha": 1,
    "trainer.critic_warmup": 0,
    "trainer.total_training_steps": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}
"""Keys of whole numbers → the least that makes sense."""

NUMBERS: Final = (
    f"{OVERLONG}.penalty_factor",
    "algorithm.gamma",
    "algorithm.lam",
    f"{CORRECTION}.rollout_is_threshold",
    f"{ROLLOUT}.temperature",
    f"{ROLLOUT}.val_kwargs.temperature",
    f"{ACTOR}.optim.lr",
    f"{ACTOR}.optim.weight_decay",
    f"{ACTOR}.grad_clip",
    f"{ACTOR}.clip_ratio",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.loss_scale_factor",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.tis_imp_ratio_cap",
    "trainer.total_epochs",
)
"""Keys of finite numbers; what uses them says in which range."""

NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "algorithm.use_kl_in_reward": ((False,), f"{ACTOR}.use_kl_loss=True"),
    f"{CORRECTION}.rollout_is_batch_normalize": ((False,), "False: weights are not normalised"),
    f"{CORRECTION}.rollout_rs": ((), "rollout_is: no call is rejected by its ratio"),
    f"{CORRECTION}.rollout_rs_threshold": ((), "rollout_is_threshold"),
    f"{CORRECTION}.rollout_rs_threshold_lower": ((), "rollout_is_threshold"),
    f"{CORRECTION}.rollout_token_veto_threshold": ((), "rollout_is_threshold"),
    f"{CORRECTION}.loss_type": (("ppo_clip",), f"{FORM}: 'vanilla', 'gspo' or 'cispo'"),
    f"{CORRECTION}.use_policy_gradient": ((False,), f"{FORM}: 'vanilla', 'gspo' or 'cispo'"),
    f"{CORRECTION}.bypass_old_logprob_for_rollout": ((False,), f"{CORRECTION}.bypass_mode"),
    f"{CORRECTION}.use_pure_rollout_correction": ((False,), f"{FORM}: 'vanilla' or another"),
    "data.shuffle": ((True,), "leave it out: epochs are shuffled"),
    f"{ROLLOUT}.top_p": ((1,), "1: only then are log-probabilities those of training"),
    f"{ROLLOUT}.top_k": ((-1, 0), "-1: only then are log-probabilities those of training"),
    f"{ROLLOUT}.do_sample": ((True,), "leave it out: training needs sampling"),
    f"{ROLLOUT}.calculate_log_probs": ((True, False), ""),
    f"{ROLLOUT}.val_kwargs.n": ((1,), "1"),
    f"{ROLLOUT}.val_kwargs.top_p": ((1,), "ask for it in the agent's own client"),
    f"{ROLLOUT}.val_kwargs.top_k": ((-1, 0), "ask for it in the agent's own client"),
    f"{ACTOR}.ppo_epochs": ((1,), "1: each batch is learned from once"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": ((0, -1), f"{ACTOR}.optim.lr_warmup_steps"),
    f"{ACTOR}.optim.warmup_style": (("constant",), "'constant'"),
    f"{ACTOR}.optim.lr_scheduler_type": (("constant",), "'constant'"),
    f"{MODEL}.trust_remote_code": ((False,), "False: code of a model is never run"),
    "reward_model.enable": ((False,), "compute the reward in the agent and return it"),
    "custom_reward_function.path": ((), "compute the reward in the agent and return it"),
    "trainer.val_only": ((False,), "lightspan.Trainer.evaluate"),
}
"""Key → the values at which there is nothing to do, and what to use instead of others."""

CLUSTER: Final = (
    "of verl's own processes: VERL(config, python=…) has them, here it is this process alone"
)
CHAT: Final = "the model's own chat template says how tools are called"
DATA: Final = "data is what fit() is given"
CALLS: Final = "calls are never cut: longer ones are rejected, and counted"
NO_CRITIC: Final = "there is no critic"
HEAD: Final = (
    "the critic is a head on the policy's own model, whose rate has another meaning: "
    "lightspan.Critic"
)
PER_CALL: Final = "algorithm.gamma and algorithm.lam are per call here, per token in verl"
OF_GAE: Final[Mapping[str, str]] = {
    "algorithm.gamma": "lightspan.LightningRL(credit='discounted', gamma=…)",
    "algorithm.lam": "1: there is no critic, and no generalised advantage",
    "trainer.critic_warmup": "0: there is no critic",
}
"""Keys of `adv_estimator='gae'` → what to use instead with the others."""

WITHOUT_EFFECT: Final[Sequence[tuple[str, str]]] = (
    ("data.train_files", DATA),
    ("data.val_files", DATA),
    ("data.val_batch_size", DATA),
    ("data.gen_batch_size", "a round samples as many tasks as groups are missing"),
    ("data.dataloader_num_workers", DATA),
    ("data.truncation", CALLS),
    ("data.filter_overlong_prompts*", CALLS),
    ("data.trust_remote_code", "code of a model is never run"),
    ("algorithm.kl_ctrl.*", "no KL in the reward"),
    ("algorithm.kl_penalty", "no KL in the reward"),
    (f"{ROLLOUT}.multi_turn.*", CHAT),
    (f"{ROLLOUT}.engine_kwargs.*tool*", CHAT),
    (f"{ROLLOUT}.engine_kwargs.*", CLUSTER),
    (f"{ROLLOUT}.val_kwargs.do_sample", "the temperature says it"),
    (f"{ROLLOUT}.agent.*", CLUSTER),
    (f"{ROLLOUT}.prompt_length", "data.max_prompt_length says it"),
    (f"{ROLLOUT}.response_length", "data.max_response_length says it"),
    *(
        (f"{ROLLOUT}.{key}", CLUSTER)
        for key in (
            *("name", "mode", "tensor_model_parallel_size", "data_parallel_size", "dtype"),
            *("gpu_memory_utilization", "log_prob_*", "max_num_batched_tokens", "max_num_seqs"),
            *("max_model_len", "enforce_eager", "free_cache_engine", "load_format"),
            *("layered_summon", "enable_chunked_prefill", "enable_prefix_caching"),
            *("disable_log_stats", "update_weights_bucket_megabytes", "trace.*", "profiler.*"),
        )
    ),
    *(
        (f"{ACTOR}.{key}", CLUSTER)
        for key in (
            *("strategy", "ppo_micro_batch_size*", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
            *("ulysses_sequence_parallel_size", "use_torch_compile", "fsdp_config.*"),
            *("entropy_from_logits_with_chunking", "entropy_checkpointing", "checkpoint.*"),
            *("optim.total_training_steps", "shuffle", "profiler.*", "profile.*"),
        )
    ),
    ("actor_rollout_ref.ref.*", CLUSTER),
    ("actor_rollout_ref.hybrid_engine", CLUSTER),
    *(
        (f"{MODEL}.{key}", CLUSTER)
        for key in (
            *("use_remove_padding", "enable_gradient_checkpointing", "use_shm", "use_liger"),
            *("enable_activation_offload", "use_fused_kernels", "fused_kernel_options.*"),
        )
    ),
    ("critic.*", NO_CRITIC),
    ("reward_model.*", "the agent returns its reward"),
    ("custom_reward_function.name", "the agent returns its reward"),
    ("trainer.log_val_generations", "`lightspan inspect` shows them"),
    ("trainer.rollout_data_dir", "`lightspan inspect` shows them"),
    ("trainer.validation_data_dir", "`lightspan inspect` shows them"),
    ("trainer.val_before_train", "there is an evaluation before and after training"),
    ("trainer.n_gpus_per_node", CLUSTER),
    ("trainer.nnodes", CLUSTER),
    ("trainer.balance_batch", CLUSTER),
    ("trainer.max_*_ckpt_to_keep", "checkpoints are kept as the run's folder says"),
    ("trainer.default_hdfs_dir", CLUSTER),
    ("trainer.del_local_ckpt_after_load", CLUSTER),
    ("trainer.esi_redundant_time", CLUSTER),
    ("trainer.ray_wait_register_center_timeout", CLUSTER),
    ("ray_init.*", CLUSTER),
    ("ray_kwargs.*", CLUSTER),
    ("global_profiler.*", CLUSTER),
    ("agentlightning.port", "ports are chosen when they are free"),
    (
        "agentlightning.trace_aggregator.*",
        "calls are joined wherever one continues another token by token, with the same loss",
    ),
)
"""Patterns of keys that are named when training starts → why they have no effect."""

AGREES: Final[Mapping[str, Any]] = {"trainer.val_before_train": True}
"""Keys without effect whose value is what happens anyway: they are not named."""

NEVER: Final = 10**9
"""Steps between checkpoints where only the last is wanted."""
