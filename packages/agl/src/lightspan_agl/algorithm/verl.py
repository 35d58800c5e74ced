"""VERL: LightningRL configured by a verl configuration.

Each key is used, refused if it would change the result, or reported as without effect when training
starts. Unknown keys are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Final

from lightspan.errors import ConfigError, LightspanError, UnsupportedError
from lightspan.plugins import installed_plugins
from lightspan.protocols.learner import LoRA, Optimizer, PolicyLoss
from lightspan.schema.records import Json
from lightspan.schema.validation import check_number, check_whole
from lightspan.training.sinks import MetricSink
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.algorithm._verl_keys import (
    ACTOR,
    ALLOWED,
    CRITIC_HINT,
    CRITIC_OPTIONS,
    DEFAULTS,
    ESTIMATORS,
    KEYS_BY_OPTION,
    KL_ESTIMATORS,
    MODEL,
    NEVER,
    NO_EFFECT,
    NUMBERS,
    ROLLOUT,
    WEIGHTS,
    WHOLE,
)
from lightspan_tools.sinks import MLflow, Trackio, WandB

__all__ = ["VERL"]
__getattr__ = _refuse_names(__name__)


_ESTIMATOR: Final = "algorithm.adv_estimator"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A verl configuration, translated into options of lightspan."""

    model: str
    algorithm: Mapping[str, Any]
    """Arguments of `LightningRL`, without the model and the agents."""
    trainer: Mapping[str, Any]
    """Arguments of `lightspan.Trainer`, without the number of steps."""
    epochs: int
    max_steps: int | None
    loggers: Sequence[str]
    project: str
    experiment: str | None
    resume: bool
    sampling: Mapping[str, dict[str, Json]]
    """Mode → the sampling parameters of `main_llm`."""
    no_effect: Mapping[str, Sequence[str]]
    """Reason → the settings that have no effect for this reason, as `key=value`."""

    def steps(self, tasks: int) -> int:
        """Return the number of steps for a number of tasks, which verl computes in the same way.

        The rest of an epoch that is smaller than a batch does not count.
        """
        steps: int = tasks // self.algorithm["tasks_per_step"] * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def sinks(self) -> list[str | MetricSink]:
        """Return the metric sinks, such as MLflow, for the names in `loggers`.

        A name whose package is not installed is left out.
        """
        name = {} if self.experiment is None else {"name": self.experiment}
        by_logger: dict[str, str | MetricSink] = {
            "mlflow": MLflow(self.project),
            "tensorboard": "tensorboard",
            "trackio": Trackio(self.project, **name),
            "wandb": WandB(self.project, **name),
        }
        return [by_logger[logger] for logger in self.loggers if _is_sink(logger)]

    def report(self) -> str:
        """Return the report of keys without effect; empty if every key is used."""
        reasons = [f"{', '.join(keys)} ({why})" for why, keys in self.no_effect.items()]
        others = [name for name in self.loggers if name not in ("console", "file")]
        known = installed_plugins("sinks")
        reasons += [
            f"trainer.logger={name!r} ({'not installed' if name in known else 'unknown'})"
            for name in others
            if not _is_sink(name)
        ]
        return f"VERL(config): without effect: {'; '.join(reasons)}" if reasons else ""


def _is_sink(logger: str) -> bool:
    return logger in installed_plugins("sinks") and find_spec(logger) is not None


class VERL:
    """Reinforcement learning configured by a verl configuration.

    Args:
        config: nested verl configuration.
        learner: learner of `lightspan.Trainer`; None for a learner in this process.
        engine: engine of `lightspan.Trainer`; None for an engine in this process.
        options: other options of Agent Lightning, which are refused.

    Raises:
        UnsupportedError: there are other options; or some keys are unknown or would change the
            result, and the message has each with its value and a hint.
        ConfigError: a value has a wrong type, or the model is missing.
    """

    def __init__(
        self, config: Mapping[str, Any], *, learner: Any = None, engine: Any = None, **options: Any
    ) -> None:
        used = [f"{name}={value!r:.100}" for name, value in options.items() if value is not None]
        if used:
            raise UnsupportedError(
                f"VERL({', '.join(used)}): leave it out; lightspan trains in this process, or on "
                "several GPUs with VERL(config, learner=lightspan.Verl(…), engine=…)"
            )
        self.config = config
        self.learner = learner
        self.engine = engine
        self.plan = make_plan(config)


def make_plan(config: Mapping[str, Any]) -> Plan:
    """Translate a verl configuration into options of lightspan.

    Raises:
        UnsupportedError: some keys are unknown or would change the result.
        ConfigError: a value has a wrong type, or the model is missing.
    """
    settings = dict(_leaves(config))
    refused, no_effect = _classify(settings)
    values = {**DEFAULTS, **{k: v for k, v in settings.items() if k in DEFAULTS}}
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise UnsupportedError(f"VERL(config) has unsupported settings:\n{lines}")
    if values[f"{MODEL}.path"] is None:
        raise ConfigError(f"VERL(config) names no model: set {MODEL}.path")
    for key, low in WHOLE.items():
        if values[key] is not None:
            check_whole(key, values[key], low)
    for key in NUMBERS:
        if values[key] is not None:
            check_number(key, values[key])
    loggers, folder = values["trainer.logger"], values["trainer.default_local_dir"]
    try:
        return Plan(
            model=str(values[f"{MODEL}.path"]),
            algorithm=_algorithm(values),
            trainer=_trainer(values),
            epochs=values["trainer.total_epochs"],
            max_steps=values["trainer.total_training_steps"],
            loggers=[loggers] if isinstance(loggers, str) else list(loggers),
            project=str(values["trainer.project_name"]),
            experiment=values["trainer.experiment_name"],
            resume=folder is not None and values["trainer.resume_mode"] == "auto",
            sampling={
                "train": {"temperature": values[f"{ROLLOUT}.temperature"]},
                "val": {"temperature": values[f"{ROLLOUT}.val_kwargs.temperature"]},
            },
            no_effect=no_effect,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"VERL(config): {error}") from error


@contextmanager
def verl_words() -> Iterator[None]:
    """Add a note to errors of lightspan: the keys of verl for the options that a message names."""
    try:
        yield
    except LightspanError as error:
        words = re.findall(r"""(?<![\w.])[a-z_]+(?:\+\+)?(?=[=:"'])|another folder""", str(error))
        keys = [f"{word} is {key}" for word, key in KEYS_BY_OPTION.items() if word in words]
        if keys:
            error.add_note(f"In VERL(config): {', '.join(keys)}.")
        raise


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting that is not None.

    Raises:
        ConfigError: `config` is not a mapping.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"VERL(config): {prefix or 'config'} must be a mapping, not {config!r}")
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _classify(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Find the settings that are refused, and those that have no effect.

    Returns:
        An error message for each refused setting.
        A mapping: reason → settings that have no effect for this reason, as `key=value`.
    """
    refused: list[str] = []
    no_effect: dict[str, list[str]] = {}
    estimator = settings.get(_ESTIMATOR, DEFAULTS[_ESTIMATOR])
    for key, value in settings.items():
        if key in ALLOWED and value not in ALLOWED[key][0]:
            refused.append(f"{key}={value!r}: {ALLOWED[key][1]}")
        elif ESTIMATORS.get(estimator) == "ppo" and any(
            fnmatchcase(key, pattern) for pattern in CRITIC_OPTIONS
        ):
            refused.append(f"{key}={value!r}: leave it out, or {CRITIC_HINT}")
        elif key not in ALLOWED and key not in DEFAULTS:
            why = next((why for pattern, why in NO_EFFECT if fnmatchcase(key, pattern)), None)
            if why is None:
                refused.append(f"{key}={value!r}: unknown to lightspan; leave it out")
            elif (key, value) != ("trainer.val_before_train", True):
                no_effect.setdefault(why, []).append(f"{key}={value!r}")
    return refused, no_effect


def _algorithm(values: Mapping[str, Any]) -> dict[str, Any]:
    estimator = ESTIMATORS[values["algorithm.adv_estimator"]]
    if estimator == "grpo" and not values["algorithm.norm_adv_by_std_in_grpo"]:
        estimator = "dr_grpo"
    tasks, response = values["data.train_batch_size"], values["data.max_response_length"]
    minibatches = math.ceil(tasks / values[f"{ACTOR}.ppo_mini_batch_size"])
    return {
        "estimator": estimator,
        "weight": WEIGHTS[values[f"{ACTOR}.loss_agg_mode"]],
        "group_size": values[f"{ROLLOUT}.n"],
        "tasks_per_step": tasks,
        "minibatches": minibatches,
        "temperature": values[f"{ROLLOUT}.temperature"],
        "max_tokens": response,
        "max_length": values["data.max_prompt_length"] + response,
        "lora": _lora(values),
        "loss": _loss(values),
        "optimizer": Optimizer(
            learning_rate=values[f"{ACTOR}.optim.lr"],
            betas=tuple(values[f"{ACTOR}.optim.betas"]),
            weight_decay=values[f"{ACTOR}.optim.weight_decay"],
            max_grad_norm=values[f"{ACTOR}.grad_clip"],
            # verl counts training steps, and Optimizer its own
            warmup_steps=max(0, values[f"{ACTOR}.optim.lr_warmup_steps"]) * minibatches,
        ),
        "seed": values["data.seed"],
    }


def _lora(values: Mapping[str, Any]) -> LoRA | None:
    rank, modules = values[f"{MODEL}.lora_rank"], values[f"{MODEL}.target_modules"]
    if rank == 0:
        return None
    if modules != "all-linear":
        modules = (modules,) if isinstance(modules, str) else tuple(modules)
    return LoRA(rank=rank, alpha=values[f"{MODEL}.lora_alpha"], target_modules=modules)


def _loss(values: Mapping[str, Any]) -> PolicyLoss:
    clip = values[f"{ACTOR}.clip_ratio"]
    low, high = (values[f"{ACTOR}.clip_ratio_{end}"] for end in ("low", "high"))
    kl = values[f"{ACTOR}.kl_loss_coef"] if values[f"{ACTOR}.use_kl_loss"] else 0.0
    kind = values[f"{ACTOR}.kl_loss_type"]  # has a default, and no effect without a KL term
    return PolicyLoss(
        clip_low=clip if low is None else low,
        clip_high=clip if high is None else high,
        dual_clip=values[f"{ACTOR}.clip_ratio_c"],
        kl=kl,
        kl_estimator=KL_ESTIMATORS[kind] if kl else "k3",  # type: ignore[arg-type]
        entropy=values[f"{ACTOR}.entropy_coeff"],
    )


def _trainer(values: Mapping[str, Any]) -> dict[str, Any]:
    test, save = values["trainer.test_freq"], values["trainer.save_freq"]
    options = {
        "validate_every": test if test > 0 else None,
        "checkpoint_every": save if save > 0 else NEVER,
        "folder": values["trainer.default_local_dir"],
        "device": values["trainer.device"],
    }
    return {name: value for name, value in options.items() if value is not None}
