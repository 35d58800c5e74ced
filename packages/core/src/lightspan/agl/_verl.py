"""`VERL(config)`: what a verl configuration means for lightspan's own engine and learner.

Each key of the configuration is in one of four classes:

- *used*: it becomes an argument of `LightningRL` or of the trainer;
- *without effect here*: it is about a cluster, or about something that is done in another way. It
  is named, with the reason, in one line when training starts;
- *refused*: it would change what is learned, and cannot be honoured;
- *unknown*: refused too.

What is not said has verl's own default (verl 0.5, `ppo_trainer.yaml`). Keys of later versions that
say how the loss is computed are known too; left out, they change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Final, get_args

from lightspan.errors import ConfigError, UnsupportedError
from lightspan.learners.protocol import Critic, ImportanceLevel, LoRA, Optimizer, PolicyLoss
from lightspan.lightning.overlong import Overlong
from lightspan.schema.records import Json
from lightspan.training.sinks import SINKS, MetricSink, MLflow, Trackio, WandB

_ROLLOUT, _ACTOR, _MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
_BETAS: Final = f"{_ACTOR}.optim.betas"
_FORM: Final = f"{_ACTOR}.policy_loss.loss_mode"
_CORRECTION: Final = "algorithm.rollout_correction"
_FILTER: Final = "algorithm.filter_groups"
_OVERLONG: Final = "reward_model.overlong_buffer"

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
    f"{_CORRECTION}.rollout_is": None,
    f"{_CORRECTION}.rollout_is_threshold": 2.0,
    f"{_CORRECTION}.bypass_mode": False,
    f"{_FILTER}.enable": False,
    f"{_FILTER}.metric": None,
    f"{_FILTER}.max_num_gen_batches": 0,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.seed": 0,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.temperature": 1.0,
    f"{_ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.optim.lr_warmup_steps": 0,
    f"{_ACTOR}.grad_clip": 1.0,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_low": None,
    f"{_ACTOR}.clip_ratio_high": None,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    _FORM: "vanilla",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.loss_scale_factor": None,
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
    f"{_ACTOR}.entropy_coeff": 0.0,
    f"{_ACTOR}.tis_imp_ratio_cap": -1.0,
    f"{_OVERLONG}.enable": False,
    f"{_OVERLONG}.len": 0,
    f"{_OVERLONG}.penalty_factor": 0.0,
    f"{_MODEL}.path": None,
    f"{_MODEL}.lora_rank": 0,
    f"{_MODEL}.lora_alpha": 16,
    f"{_MODEL}.target_modules": "all-linear",
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
    f"{_FILTER}.max_num_gen_batches": 0,
    f"{_OVERLONG}.len": 0,
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.seed": 0,
    f"{_ROLLOUT}.n": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 1,
    f"{_ACTOR}.optim.lr_warmup_steps": -1,
    f"{_MODEL}.lora_rank": 0,
    f"{_MODEL}.lora_alpha": 1,
    "trainer.critic_warmup": 0,
    "trainer.total_training_steps": 1,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}
"""Keys of whole numbers → the least that makes sense."""

NUMBERS: Final = (
    f"{_OVERLONG}.penalty_factor",
    "algorithm.gamma",
    "algorithm.lam",
    f"{_CORRECTION}.rollout_is_threshold",
    f"{_ROLLOUT}.temperature",
    f"{_ROLLOUT}.val_kwargs.temperature",
    f"{_ACTOR}.optim.lr",
    f"{_ACTOR}.optim.weight_decay",
    f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.clip_ratio",
    f"{_ACTOR}.clip_ratio_low",
    f"{_ACTOR}.clip_ratio_high",
    f"{_ACTOR}.clip_ratio_c",
    f"{_ACTOR}.loss_scale_factor",
    f"{_ACTOR}.kl_loss_coef",
    f"{_ACTOR}.entropy_coeff",
    f"{_ACTOR}.tis_imp_ratio_cap",
    "trainer.total_epochs",
)
"""Keys of finite numbers; what uses them says in which range."""

NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "algorithm.use_kl_in_reward": ((False,), f"{_ACTOR}.use_kl_loss=True"),
    f"{_CORRECTION}.rollout_is_batch_normalize": ((False,), "False: weights are not normalised"),
    f"{_CORRECTION}.rollout_rs": ((), "rollout_is: no call is rejected by its ratio"),
    f"{_CORRECTION}.rollout_rs_threshold": ((), "rollout_is_threshold"),
    f"{_CORRECTION}.rollout_rs_threshold_lower": ((), "rollout_is_threshold"),
    f"{_CORRECTION}.rollout_token_veto_threshold": ((), "rollout_is_threshold"),
    f"{_CORRECTION}.loss_type": (("ppo_clip",), f"{_FORM}: 'vanilla', 'gspo' or 'cispo'"),
    f"{_CORRECTION}.use_policy_gradient": ((False,), f"{_FORM}: 'vanilla', 'gspo' or 'cispo'"),
    f"{_CORRECTION}.bypass_old_logprob_for_rollout": ((False,), f"{_CORRECTION}.bypass_mode"),
    f"{_CORRECTION}.use_pure_rollout_correction": ((False,), f"{_FORM}: 'vanilla' or another"),
    "data.shuffle": ((True,), "leave it out: epochs are shuffled"),
    f"{_ROLLOUT}.top_p": ((1,), "1: only then are log-probabilities those of training"),
    f"{_ROLLOUT}.top_k": ((-1, 0), "-1: only then are log-probabilities those of training"),
    f"{_ROLLOUT}.do_sample": ((True,), "leave it out: training needs sampling"),
    f"{_ROLLOUT}.calculate_log_probs": ((True, False), ""),
    f"{_ROLLOUT}.val_kwargs.n": ((1,), "1"),
    f"{_ROLLOUT}.val_kwargs.top_p": ((1,), "ask for it in the agent's own client"),
    f"{_ROLLOUT}.val_kwargs.top_k": ((-1, 0), "ask for it in the agent's own client"),
    f"{_ACTOR}.ppo_epochs": ((1,), "1: each batch is learned from once"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": ((0, -1), f"{_ACTOR}.optim.lr_warmup_steps"),
    f"{_ACTOR}.optim.warmup_style": (("constant",), "'constant'"),
    f"{_ACTOR}.optim.lr_scheduler_type": (("constant",), "'constant'"),
    f"{_MODEL}.trust_remote_code": ((False,), "False: code of a model is never run"),
    "reward_model.enable": ((False,), "compute the reward in the agent and return it"),
    "custom_reward_function.path": ((), "compute the reward in the agent and return it"),
    "trainer.val_only": ((False,), "lightspan.Trainer.evaluate"),
}
"""Key → the values at which there is nothing to do, and what to use instead of others."""

_CLUSTER = "of a cluster: here one device, this process"
_CHAT = "the model's own chat template says how tools are called"
_DATA = "data is what fit() is given"
_CALLS = "calls are never cut: longer ones are rejected, and counted"
_NO_CRITIC = "there is no critic"
_HEAD = (
    "the critic is a head on the policy's own model, whose rate has another meaning: "
    "lightspan.Critic"
)
_PER_CALL = "algorithm.gamma and algorithm.lam are per call here, per token in verl"
_OF_GAE: Final[Mapping[str, str]] = {
    "algorithm.gamma": "lightspan.LightningRL(credit='discounted', gamma=…)",
    "algorithm.lam": "1: there is no critic, and no generalised advantage",
    "trainer.critic_warmup": "0: there is no critic",
}
"""Keys of `adv_estimator='gae'` → what to use instead with the others."""

WITHOUT_EFFECT: Final[Sequence[tuple[str, str]]] = (
    ("data.train_files", _DATA),
    ("data.val_files", _DATA),
    ("data.val_batch_size", _DATA),
    ("data.gen_batch_size", "a round samples as many tasks as groups are missing"),
    ("data.dataloader_num_workers", _DATA),
    ("data.truncation", _CALLS),
    ("data.filter_overlong_prompts*", _CALLS),
    ("data.trust_remote_code", "code of a model is never run"),
    ("algorithm.kl_ctrl.*", "no KL in the reward"),
    ("algorithm.kl_penalty", "no KL in the reward"),
    (f"{_ROLLOUT}.multi_turn.*", _CHAT),
    (f"{_ROLLOUT}.engine_kwargs.*tool*", _CHAT),
    (f"{_ROLLOUT}.engine_kwargs.*", _CLUSTER),
    (f"{_ROLLOUT}.val_kwargs.do_sample", "the temperature says it"),
    (f"{_ROLLOUT}.agent.*", _CLUSTER),
    (f"{_ROLLOUT}.prompt_length", "data.max_prompt_length says it"),
    (f"{_ROLLOUT}.response_length", "data.max_response_length says it"),
    *(
        (f"{_ROLLOUT}.{key}", _CLUSTER)
        for key in (
            *("name", "mode", "tensor_model_parallel_size", "data_parallel_size", "dtype"),
            *("gpu_memory_utilization", "log_prob_*", "max_num_batched_tokens", "max_num_seqs"),
            *("max_model_len", "enforce_eager", "free_cache_engine", "load_format"),
            *("layered_summon", "enable_chunked_prefill", "enable_prefix_caching"),
            *("disable_log_stats", "update_weights_bucket_megabytes", "trace.*", "profiler.*"),
        )
    ),
    *(
        (f"{_ACTOR}.{key}", _CLUSTER)
        for key in (
            *("strategy", "ppo_micro_batch_size*", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
            *("ulysses_sequence_parallel_size", "use_torch_compile", "fsdp_config.*"),
            *("entropy_from_logits_with_chunking", "entropy_checkpointing", "checkpoint.*"),
            *("optim.total_training_steps", "shuffle", "profiler.*", "profile.*"),
        )
    ),
    ("actor_rollout_ref.ref.*", _CLUSTER),
    ("actor_rollout_ref.hybrid_engine", _CLUSTER),
    *(
        (f"{_MODEL}.{key}", _CLUSTER)
        for key in (
            *("use_remove_padding", "enable_gradient_checkpointing", "use_shm", "use_liger"),
            *("enable_activation_offload", "use_fused_kernels", "fused_kernel_options.*"),
        )
    ),
    ("critic.*", _NO_CRITIC),
    ("reward_model.*", "the agent returns its reward"),
    ("custom_reward_function.name", "the agent returns its reward"),
    ("trainer.log_val_generations", "`lightspan inspect` shows them"),
    ("trainer.rollout_data_dir", "`lightspan inspect` shows them"),
    ("trainer.validation_data_dir", "`lightspan inspect` shows them"),
    ("trainer.val_before_train", "there is an evaluation before and after training"),
    ("trainer.n_gpus_per_node", _CLUSTER),
    ("trainer.nnodes", _CLUSTER),
    ("trainer.balance_batch", _CLUSTER),
    ("trainer.max_*_ckpt_to_keep", "checkpoints are kept as the run's folder says"),
    ("trainer.default_hdfs_dir", _CLUSTER),
    ("trainer.del_local_ckpt_after_load", _CLUSTER),
    ("trainer.esi_redundant_time", _CLUSTER),
    ("trainer.ray_wait_register_center_timeout", _CLUSTER),
    ("ray_init.*", _CLUSTER),
    ("ray_kwargs.*", _CLUSTER),
    ("global_profiler.*", _CLUSTER),
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration means here."""

    model: str
    algorithm: Mapping[str, Any]
    """Arguments of `LightningRL`, besides the model and the agents."""
    trainer: Mapping[str, Any]
    """Arguments of `lightspan.Trainer`."""
    loggers: Sequence[str]
    """Names of `lightspan.training.sinks.SINKS` that are asked for."""
    project: str
    experiment: str | None
    resume: bool
    sampling: Mapping[str, dict[str, Json]]
    """Mode → what `main_llm` says of sampling."""
    without_effect: Mapping[str, Sequence[str]]
    """Reason → `key=value`."""
    notes: Sequence[str] = ()
    """What means something else here."""

    def sinks(self) -> tuple[list[str | MetricSink], list[str]]:
        """The sinks, and what is asked for and not installed."""
        missing = [name for name in self.loggers if find_spec(name) is None]
        named: dict[str, str | MetricSink] = {
            "mlflow": MLflow(self.project),
            "tensorboard": "tensorboard",
            "trackio": Trackio(self.project, **self._run_name()),
            "wandb": WandB(self.project, **self._run_name()),
        }
        return [named[name] for name in self.loggers if name not in missing], missing

    def _run_name(self) -> dict[str, str]:
        return {} if self.experiment is None else {"name": self.experiment}

    def report(self) -> str:
        """The line that training starts with."""
        missing = [f"trainer.logger={name!r} (not installed)" for name in self.sinks()[1]]
        reasons = [f"{', '.join(keys)} ({why})" for why, keys in self.without_effect.items()]
        reasons += missing
        parts = ["VERL(config) trains with lightspan's own engine and learner"]
        if reasons:
            parts[0] += "; a verl cluster is not there yet"
            parts.append(f"Without effect here: {'; '.join(reasons)}")
        return ". ".join([*parts, *self.notes])


class VERL:
    """Reinforcement learning as a verl configuration describes it, by lightspan's own engine and
    learner in this process.

    Args:
        config: nested, as verl takes it.

    Raises:
        UnsupportedError: keys that would change what is learned and cannot be honoured, each with
            its value and what to use instead.
        ConfigError: a value that is not of its key's kind; no model.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.plan = make_plan(config)


def make_plan(config: Mapping[str, Any]) -> Plan:
    """See `VERL`."""
    given = dict(_leaves(config))
    refused, without_effect = _classify(given)
    values = {key: given.get(key, default) for key, default in DEFAULTS.items()}
    for name in _names(values["trainer.logger"]):
        if name not in (*SINKS, "console", "file"):
            why = f"metrics go to the run's folder, and to {', '.join(SINKS)}"
            without_effect.setdefault(why, []).append(f"trainer.logger={name!r}")
    has_critic = values["algorithm.adv_estimator"] == "gae"
    if has_critic and _NO_CRITIC in without_effect:
        without_effect[_HEAD] = without_effect.pop(_NO_CRITIC)
    for why, keys in _idle_values(values, given).items():
        without_effect.setdefault(why, []).extend(keys)
    refused += _refused_values(values, given) + _refused_together(values, given)
    if refused:
        raise UnsupportedError(
            "VERL(config) asks for what lightspan's own engine and learner do not do, and a verl "
            "cluster is not there yet:\n" + "\n".join(f"  {line}" for line in refused)
        )
    if values[f"{_MODEL}.path"] is None:
        raise ConfigError(f"VERL(config) names no model: set {_MODEL}.path")
    values = _parsed(values)
    try:
        return _plan(values, without_effect)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"VERL(config): {error}") from error


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key → value, without what is not set (null)."""
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"VERL(config): {prefix.rstrip('.') or 'config'} must be a mapping, not {config!r}"
        )
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            yield f"{prefix}{key}", list(value) if is_list else value


def _classify(given: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """What is refused, and what has no effect (by reason)."""
    refused: list[str] = []
    without_effect: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in DEFAULTS or AGREES.get(key) == value:
            continue
        if key in NEUTRAL:
            allowed, instead = NEUTRAL[key]
            if value not in allowed:
                refused.append(f"{key}={value!r}: use {instead}")
            continue
        why = next((why for pattern, why in WITHOUT_EFFECT if fnmatchcase(key, pattern)), None)
        if why is None:
            refused.append(f"{key}={value!r}: lightspan does not know it; leave it out")
        else:
            without_effect.setdefault(why, []).append(f"{key}={value!r}")
    return refused, without_effect


def _refused_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Values of used keys that have no counterpart here."""
    known: dict[str, tuple[Any, ...]] = {
        "algorithm.adv_estimator": tuple(ESTIMATORS),
        f"{_CORRECTION}.rollout_is": (None, *get_args(ImportanceLevel)),
        f"{_CORRECTION}.bypass_mode": (False, True),
        f"{_FILTER}.enable": (False, True),
        f"{_FILTER}.metric": FILTER_METRICS,
        f"{_OVERLONG}.enable": (False, True),
        _FORM: tuple(FORMS),
        f"{_ACTOR}.loss_agg_mode": tuple(WEIGHTS),
        f"{_ACTOR}.kl_loss_type": tuple(KL_ESTIMATORS),
        "trainer.resume_mode": ("auto", "disable"),
        "trainer.device": (None, "cpu", "cuda"),
    }
    refused = []
    for key, allowed in known.items():
        if values[key] not in allowed:
            unsaid = "" if key in given else " (verl's default)"
            use = ", ".join(repr(value) for value in allowed if value is not None)
            refused.append(f"{key}={values[key]!r}{unsaid}: use one of {use}")
    return refused


def _refused_together(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Values that do not go together, or not without another."""
    refused = []
    if values["algorithm.adv_estimator"] != "gae":
        refused += [
            f"{key}={values[key]!r}: use {instead}"
            for key, instead in _OF_GAE.items()
            if values[key] != DEFAULTS[key]
        ]
    level = f"{_CORRECTION}.rollout_is"
    if values[level] is not None:
        if values[f"{_CORRECTION}.bypass_mode"] is True:
            refused.append(
                f"{level}={values[level]!r} with bypass_mode=True: the ratio is to the recorded "
                "log-probabilities then, which corrects for both: use one of the two"
            )
        if f"{_ACTOR}.tis_imp_ratio_cap" in given:
            refused.append(
                f"{level}={values[level]!r} with {_ACTOR}.tis_imp_ratio_cap: use "
                f"{_CORRECTION}.rollout_is_threshold"
            )
    rounds = f"{_FILTER}.max_num_gen_batches"
    if values[f"{_FILTER}.enable"] is True and _as_float(values[rounds]) == 0:
        refused.append(
            f"{_FILTER}.enable=True without a bound: use {rounds}=10, say; a step that lacks "
            "groups after that is learned from as it is"
        )
    return refused


def _idle_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Used keys whose value says nothing beside the others' (by reason), as in verl."""
    form, mode = values[_FORM], values[f"{_ACTOR}.loss_agg_mode"]
    idle = {
        f"{_ACTOR}.clip_ratio_c": (form in ("gspo", "cispo"), f"loss_mode={form!r} has none"),
        f"{_ACTOR}.loss_agg_mode": (
            form == "gspo" and mode != "seq-mean-token-mean",
            "GSPO's loss is a mean over calls, as in verl",
        ),
        f"{_ACTOR}.loss_scale_factor": (
            mode != "seq-mean-token-sum-norm" or form == "gspo",
            "of loss_agg_mode='seq-mean-token-sum-norm'",
        ),
        f"{_CORRECTION}.rollout_is_threshold": (
            values[f"{_CORRECTION}.rollout_is"] is None,
            "of rollout_is",
        ),
    }
    found: dict[str, list[str]] = {}
    for key, (is_idle, why) in idle.items():
        if is_idle and key in given:
            found.setdefault(why, []).append(f"{key}={given[key]!r}")
    return found


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with numbers as numbers.

    Raises:
        ConfigError: all that are not what their keys take, each with its key.
    """
    parsed, wrong = dict(values), []
    for key in (*WHOLE, *NUMBERS, _BETAS):
        if values[key] is None:
            continue
        try:
            if key in WHOLE:
                parsed[key] = _whole(key, values[key], WHOLE[key])
            elif key == _BETAS:
                parsed[key] = _pair(key, values[key])
            else:
                parsed[key] = _number(key, values[key])
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(f"VERL(config): {'; '.join(wrong)}")
    return parsed


def _whole(key: str, value: Any, low: int) -> int:
    """A whole number of at least `low`; as text or with a zero fraction too, as YAML may have it.

    Raises:
        ConfigError: it is not.
    """
    number = _as_float(value)
    if not number.is_integer() or number < low:
        raise ConfigError(f"{key}={value!r} must be a whole number of at least {low}")
    return int(value) if isinstance(value, int) else int(number)


def _number(key: str, value: Any) -> float:
    number = _as_float(value)
    if not math.isfinite(number):
        raise ConfigError(f"{key}={value!r} must be a finite number")
    return number


def _pair(key: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{key}={value!r} must be two numbers")
    return _number(key, value[0]), _number(key, value[1])


def _as_float(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _plan(values: Mapping[str, Any], without_effect: Mapping[str, Sequence[str]]) -> Plan:
    folder = values["trainer.default_local_dir"]
    return Plan(
        model=str(values[f"{_MODEL}.path"]),
        algorithm=_algorithm(values),
        trainer=_trainer(values),
        loggers=tuple(name for name in _names(values["trainer.logger"]) if name in SINKS),
        project=str(values["trainer.project_name"]),
        experiment=values["trainer.experiment_name"],
        resume=folder is not None and values["trainer.resume_mode"] == "auto",
        sampling={
            "train": {"temperature": values[f"{_ROLLOUT}.temperature"]},
            "val": {"temperature": values[f"{_ROLLOUT}.val_kwargs.temperature"]},
        },
        without_effect=without_effect,
        notes=(_PER_CALL,) if _is_per_call(values) else (),
    )


def _is_per_call(values: Mapping[str, Any]) -> bool:
    """Whether a discount is asked for that verl would take per token."""
    return any(values[key] != DEFAULTS[key] for key in ("algorithm.gamma", "algorithm.lam"))


def _names(logger: Any) -> list[str]:
    return [logger] if isinstance(logger, str) else list(logger)


def _algorithm(values: Mapping[str, Any]) -> dict[str, Any]:
    estimator = ESTIMATORS[values["algorithm.adv_estimator"]]
    if estimator == "grpo" and not values["algorithm.norm_adv_by_std_in_grpo"]:
        estimator = "dr_grpo"
    tasks, response = values["data.train_batch_size"], values["data.max_response_length"]
    rank = values[f"{_MODEL}.lora_rank"]
    return {
        "estimator": estimator,
        **_critic(values),
        **_weight(values),
        **_resample(values),
        **_overlong(values),
        "group_size": values[f"{_ROLLOUT}.n"],
        "tasks_per_step": tasks,
        "minibatches": math.ceil(tasks / values[f"{_ACTOR}.ppo_mini_batch_size"]),
        "temperature": values[f"{_ROLLOUT}.temperature"],
        "max_tokens": response,
        "max_length": values["data.max_prompt_length"] + response,
        "lora": _lora(values, rank) if rank > 0 else None,
        "loss": _loss(values),
        "optimizer": _optimizer(values),
        "seed": values["data.seed"],
    }


def _critic(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of gae. verl's warmup leaves the policy alone; ours learns meanwhile, with lambda 1."""
    if values["algorithm.adv_estimator"] != "gae":
        return {}
    critic = Critic(lam=values["algorithm.lam"], warmup=values["trainer.critic_warmup"])
    return {"gamma": values["algorithm.gamma"], "critic": critic}


def _weight(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call's tokens in the loss. verl divides by sequences where lightspan divides by
    rollouts: the same where a rollout is one call."""
    mode = values[f"{_ACTOR}.loss_agg_mode"]
    if values[_FORM] == "gspo":
        mode = "seq-mean-token-mean"
    scale = values[f"{_ACTOR}.loss_scale_factor"] or values["data.max_response_length"]
    constants = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": float(scale)}
    constant = {"token_constant": constants[mode]} if mode in constants else {}
    return {"weight": WEIGHTS[mode], **constant}


def _resample(values: Mapping[str, Any]) -> dict[str, Any]:
    """verl counts batches that are generated, lightspan rounds beside the first."""
    if not values[f"{_FILTER}.enable"]:
        return {}
    return {"resample": values[f"{_FILTER}.max_num_gen_batches"] - 1}


def _overlong(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values[f"{_OVERLONG}.enable"]:
        return {}
    overlong = Overlong(
        max_tokens=values["data.max_response_length"],
        buffer=values[f"{_OVERLONG}.len"],
        penalty=values[f"{_OVERLONG}.penalty_factor"],
    )
    return {"overlong": overlong}


def _lora(values: Mapping[str, Any], rank: int) -> LoRA:
    modules = values[f"{_MODEL}.target_modules"]
    if modules != "all-linear":
        modules = (modules,) if isinstance(modules, str) else tuple(modules)
    return LoRA(rank=rank, alpha=values[f"{_MODEL}.lora_alpha"], target_modules=modules)


def _loss(values: Mapping[str, Any]) -> PolicyLoss:
    form = FORMS[values[_FORM]]
    clip = values[f"{_ACTOR}.clip_ratio"]
    low, high = (values[f"{_ACTOR}.clip_ratio_{end}"] for end in ("low", "high"))
    low = clip if low is None else low
    return PolicyLoss(
        form=form,  # type: ignore[arg-type]
        # a ratio is never below 0: 10, say, means no lower bound there, and so does 1
        clip_low=min(low, 1.0) if form == "cispo" else low,
        clip_high=clip if high is None else high,
        dual_clip=values[f"{_ACTOR}.clip_ratio_c"] if form == "clip" else None,
        kl=values[f"{_ACTOR}.kl_loss_coef"] if values[f"{_ACTOR}.use_kl_loss"] else 0.0,
        kl_estimator=KL_ESTIMATORS[values[f"{_ACTOR}.kl_loss_type"]],  # type: ignore[arg-type]
        entropy=values[f"{_ACTOR}.entropy_coeff"],
        **_importance(values),
    )


def _importance(values: Mapping[str, Any]) -> dict[str, Any]:
    level, cap = values[f"{_CORRECTION}.rollout_is"], values[f"{_ACTOR}.tis_imp_ratio_cap"]
    if level is not None:
        threshold = values[f"{_CORRECTION}.rollout_is_threshold"]
        return {"importance_cap": threshold, "importance_level": level}
    return {"importance_cap": cap if cap > 0 else None}


def _optimizer(values: Mapping[str, Any]) -> Optimizer:
    return Optimizer(
        learning_rate=values[f"{_ACTOR}.optim.lr"],
        betas=values[_BETAS],
        weight_decay=values[f"{_ACTOR}.optim.weight_decay"],
        max_grad_norm=values[f"{_ACTOR}.grad_clip"],
        warmup_steps=max(0, values[f"{_ACTOR}.optim.lr_warmup_steps"]),
    )


def _trainer(values: Mapping[str, Any]) -> dict[str, Any]:
    steps, test = values["trainer.total_training_steps"], values["trainer.test_freq"]
    save = values["trainer.save_freq"]
    options = {
        "steps": steps,
        "epochs": values["trainer.total_epochs"],
        "validate_every": test if test > 0 else None,
        "checkpoint_every": save if save > 0 else NEVER,
        "folder": values["trainer.default_local_dir"],
        "device": values["trainer.device"],
    }
    return {name: value for name, value in options.items() if value is not None}
