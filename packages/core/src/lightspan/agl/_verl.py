"""`VERL(config)`: what a verl configuration means here: for lightspan's own engine and learner, or,
where its environment is given, for verl's FSDP2 as the learner.

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
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Final, get_args

from lightspan.agl import _sharding
from lightspan.agl._verl_keys import (
    ACTOR,
    AGREES,
    BETAS,
    CORRECTION,
    DEFAULTS,
    ESTIMATORS,
    FILTER,
    FILTER_METRICS,
    FORM,
    FORMS,
    HEAD,
    KL_ESTIMATORS,
    MODEL,
    NEUTRAL,
    NEVER,
    NO_CRITIC,
    NUMBERS,
    OF_GAE,
    OVERLONG,
    PER_CALL,
    ROLLOUT,
    WEIGHTS,
    WHOLE,
    WITHOUT_EFFECT,
)
from lightspan.engines.vllm.description import VLLM
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.learners.protocol import Critic, ImportanceLevel, LoRA, Optimizer, PolicyLoss
from lightspan.learners.verl.description import Verl
from lightspan.lightning.overlong import Overlong
from lightspan.plugins import installed_plugins
from lightspan.reports.sinks import MLflow, Trackio, WandB
from lightspan.schema.records import Json
from lightspan.training.sinks import MetricSink

PYTHON: Final = "LIGHTSPAN_VERL_PYTHON"
"""The environment variable that names the interpreter that has verl."""


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
    learner: Verl | None = None
    """None: lightspan's own."""
    engine: VLLM | None = None
    """None: lightspan's own."""

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
        parts = [f"VERL(config) trains with {self._parts()}"]
        if reasons:
            parts.append(f"Without effect here: {'; '.join(reasons)}")
        return ". ".join([*parts, *self.notes])

    def _parts(self) -> str:
        """The learner and the engine, in words."""
        engine = "lightspan's own engine" if self.engine is None else "vLLM as the engine"
        if self.learner is None and self.engine is None:
            return "lightspan's own engine and learner"
        if self.learner is None:
            return f"lightspan's own learner and {engine}"
        ranks = "one rank" if self.learner.ranks == 1 else f"{self.learner.ranks} ranks"
        where = self.learner.where and f" {self.learner.where}"
        return f"verl's FSDP2 on {ranks}{where} ({self.learner.python}) and {engine}"


class VERL:
    """Reinforcement learning as a verl configuration describes it.

    Args:
        config: nested, as verl takes it.
        python: the interpreter of an environment that has verl (`docs/verl.md`): it is the learner
            then, on `trainer.n_gpus_per_node` ranks. None: what the environment variable
            `LIGHTSPAN_VERL_PYTHON` names; without either, lightspan's own learner in this process.
        ray: True for ranks in a Ray cluster that is started for them, or the address of one that is
            there; see `lightspan.Verl`.
        engine: None for lightspan's own; `VLLM(…)` for vLLM.

    Raises:
        UnsupportedError: keys that would change what is learned and cannot be honoured, each with
            its value and what to use instead.
        ConfigError: a value that is not of its key's kind; no model.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        python: str | None = None,
        ray: bool | str = False,
        engine: VLLM | None = None,
    ) -> None:
        self.config = config
        python = python or os.environ.get(PYTHON, "")
        self.plan = make_plan(config, python=python, ray=ray, engine=engine)


def make_plan(
    config: Mapping[str, Any],
    *,
    python: str = "",
    ray: bool | str = False,
    engine: VLLM | None = None,
) -> Plan:
    """See `VERL`; without `python` lightspan's own learner."""
    if ray and not python:
        raise ConfigError(
            f"VERL(ray={ray!r}) is about verl's ranks: name the interpreter that has verl and Ray "
            f"(python=…, or {PYTHON}), or leave ray= out"
        )
    if engine is not None and not isinstance(engine, VLLM):
        raise ConfigError(f"VERL(engine={engine!r:.80}): give VLLM(…), or leave it out")
    given = dict(_leaves(config))
    refused, without_effect = _classify(given, of_verl=bool(python))
    known = {**DEFAULTS, **(_sharding.DEFAULTS if python else {})}
    values = {key: given.get(key, default) for key, default in known.items()}
    for name in _names(values["trainer.logger"]):
        if name not in (*installed_plugins("sinks"), "console", "file"):
            why = f"metrics go to the run's folder, and to {', '.join(installed_plugins('sinks'))}"
            without_effect.setdefault(why, []).append(f"trainer.logger={name!r}")
    has_critic = values["algorithm.adv_estimator"] == "gae"
    if has_critic and NO_CRITIC in without_effect:
        without_effect[HEAD] = without_effect.pop(NO_CRITIC)
    for why, keys in _idle_values(values, given).items():
        without_effect.setdefault(why, []).extend(keys)
    refused += _refused_values(values, given) + _refused_together(values, given)
    refused += _sharding.refused(values, given) if python else []
    if refused:
        who = "verl as lightspan drives it does" if python else "lightspan's own learner does"
        raise UnsupportedError(
            f"VERL(config) asks for what {who} not do:\n"
            + "\n".join(f"  {line}" for line in refused)
        )
    if values[f"{MODEL}.path"] is None:
        raise ConfigError(f"VERL(config) names no model: set {MODEL}.path")
    values = _parsed(values, {**WHOLE, **(_sharding.WHOLE if python else {})})
    try:
        learner = _sharding.verl_of(values, python, ray=ray) if python else None
        return replace(_plan(values, without_effect), learner=learner, engine=engine)
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


def _classify(given: Mapping[str, Any], *, of_verl: bool) -> tuple[list[str], dict[str, list[str]]]:
    """What is refused, and what has no effect (by reason).

    Args:
        of_verl: whether verl's processes train.
    """
    refused: list[str] = []
    without_effect: dict[str, list[str]] = {}
    for key, value in given.items():
        if key in DEFAULTS or AGREES.get(key) == value:
            continue
        if of_verl and key in _sharding.DEFAULTS:
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
            why = _sharding.why_not(key, why) if of_verl else why
            without_effect.setdefault(why, []).append(f"{key}={value!r}")
    return refused, without_effect


def _refused_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Values of used keys that have no counterpart here."""
    known: dict[str, tuple[Any, ...]] = {
        "algorithm.adv_estimator": tuple(ESTIMATORS),
        f"{CORRECTION}.rollout_is": (None, *get_args(ImportanceLevel)),
        f"{CORRECTION}.bypass_mode": (False, True),
        f"{FILTER}.enable": (False, True),
        f"{FILTER}.metric": FILTER_METRICS,
        f"{OVERLONG}.enable": (False, True),
        FORM: tuple(FORMS),
        f"{ACTOR}.loss_agg_mode": tuple(WEIGHTS),
        f"{ACTOR}.kl_loss_type": tuple(KL_ESTIMATORS),
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
            for key, instead in OF_GAE.items()
            if values[key] != DEFAULTS[key]
        ]
    level = f"{CORRECTION}.rollout_is"
    if values[level] is not None:
        if values[f"{CORRECTION}.bypass_mode"] is True:
            refused.append(
                f"{level}={values[level]!r} with bypass_mode=True: the ratio is to the recorded "
                "log-probabilities then, which corrects for both: use one of the two"
            )
        if f"{ACTOR}.tis_imp_ratio_cap" in given:
            refused.append(
                f"{level}={values[level]!r} with {ACTOR}.tis_imp_ratio_cap: use "
                f"{CORRECTION}.rollout_is_threshold"
            )
    rounds = f"{FILTER}.max_num_gen_batches"
    if values[f"{FILTER}.enable"] is True and _as_float(values[rounds]) == 0:
        refused.append(
            f"{FILTER}.enable=True without a bound: use {rounds}=10, say; a step that lacks "
            "groups after that is learned from as it is"
        )
    return refused


def _idle_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, list[str]]:
    """Used keys whose value says nothing beside the others' (by reason), as in verl."""
    form, mode = values[FORM], values[f"{ACTOR}.loss_agg_mode"]
    idle = {
        f"{ACTOR}.clip_ratio_c": (form in ("gspo", "cispo"), f"loss_mode={form!r} has none"),
        f"{ACTOR}.loss_agg_mode": (
            form == "gspo" and mode != "seq-mean-token-mean",
            "GSPO's loss is a mean over calls, as in verl",
        ),
        f"{ACTOR}.loss_scale_factor": (
            mode != "seq-mean-token-sum-norm" or form == "gspo",
            "of loss_agg_mode='seq-mean-token-sum-norm'",
        ),
        f"{CORRECTION}.rollout_is_threshold": (
            values[f"{CORRECTION}.rollout_is"] is None,
            "of rollout_is",
        ),
    }
    found: dict[str, list[str]] = {}
    for key, (is_idle, why) in idle.items():
        if is_idle and key in given:
            found.setdefault(why, []).append(f"{key}={given[key]!r}")
    return found


def _parsed(values: Mapping[str, Any], whole: Mapping[str, int]) -> dict[str, Any]:
    """The values with numbers as numbers.

    Args:
        whole: keys of whole numbers → the least.

    Raises:
        ConfigError: all that are not what their keys take, each with its key.
    """
    parsed, wrong = dict(values), []
    for key in (*whole, *NUMBERS, BETAS):
        if values[key] is None:
            continue
        try:
            if key in whole:
                parsed[key] = _whole(key, values[key], whole[key])
            elif key == BETAS:
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
        model=str(values[f"{MODEL}.path"]),
        algorithm=_algorithm(values),
        trainer=_trainer(values),
        loggers=tuple(
            name for name in _names(values["trainer.logger"]) if name in installed_plugins("sinks")
        ),
        project=str(values["trainer.project_name"]),
        experiment=values["trainer.experiment_name"],
        resume=folder is not None and values["trainer.resume_mode"] == "auto",
        sampling={
            "train": {"temperature": values[f"{ROLLOUT}.temperature"]},
            "val": {"temperature": values[f"{ROLLOUT}.val_kwargs.temperature"]},
        },
        without_effect=without_effect,
        notes=(PER_CALL,) if _is_per_call(values) else (),
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
    rank = values[f"{MODEL}.lora_rank"]
    return {
        "estimator": estimator,
        **_critic(values),
        **_weight(values),
        **_resample(values),
        **_overlong(values),
        "group_size": values[f"{ROLLOUT}.n"],
        "tasks_per_step": tasks,
        "minibatches": math.ceil(tasks / values[f"{ACTOR}.ppo_mini_batch_size"]),
        "temperature": values[f"{ROLLOUT}.temperature"],
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
    mode = values[f"{ACTOR}.loss_agg_mode"]
    if values[FORM] == "gspo":
        mode = "seq-mean-token-mean"
    scale = values[f"{ACTOR}.loss_scale_factor"] or values["data.max_response_length"]
    constants = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": float(scale)}
    constant = {"token_constant": constants[mode]} if mode in constants else {}
    return {"weight": WEIGHTS[mode], **constant}


def _resample(values: Mapping[str, Any]) -> dict[str, Any]:
    """verl counts batches that are generated, lightspan rounds beside the first."""
    if not values[f"{FILTER}.enable"]:
        return {}
    return {"resample": values[f"{FILTER}.max_num_gen_batches"] - 1}


def _overlong(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values[f"{OVERLONG}.enable"]:
        return {}
    overlong = Overlong(
        max_tokens=values["data.max_response_length"],
        buffer=values[f"{OVERLONG}.len"],
        penalty=values[f"{OVERLONG}.penalty_factor"],
    )
    return {"overlong": overlong}


def _lora(values: Mapping[str, Any], rank: int) -> LoRA:
    modules = values[f"{MODEL}.target_modules"]
    if modules != "all-linear":
        modules = (modules,) if isinstance(modules, str) else tuple(modules)
    return LoRA(rank=rank, alpha=values[f"{MODEL}.lora_alpha"], target_modules=modules)


def _loss(values: Mapping[str, Any]) -> PolicyLoss:
    form = FORMS[values[FORM]]
    clip = values[f"{ACTOR}.clip_ratio"]
    low, high = (values[f"{ACTOR}.clip_ratio_{end}"] for end in ("low", "high"))
    low = clip if low is None else low
    return PolicyLoss(
        form=form,  # type: ignore[arg-type]
        # a ratio is never below 0: 10, say, means no lower bound there, and so does 1
        clip_low=min(low, 1.0) if form == "cispo" else low,
        clip_high=clip if high is None else high,
        dual_clip=values[f"{ACTOR}.clip_ratio_c"] if form == "clip" else None,
        kl=values[f"{ACTOR}.kl_loss_coef"] if values[f"{ACTOR}.use_kl_loss"] else 0.0,
        kl_estimator=KL_ESTIMATORS[values[f"{ACTOR}.kl_loss_type"]],  # type: ignore[arg-type]
        entropy=values[f"{ACTOR}.entropy_coeff"],
        **_importance(values),
    )


def _importance(values: Mapping[str, Any]) -> dict[str, Any]:
    level, cap = values[f"{CORRECTION}.rollout_is"], values[f"{ACTOR}.tis_imp_ratio_cap"]
    if level is not None:
        threshold = values[f"{CORRECTION}.rollout_is_threshold"]
        return {"importance_cap": threshold, "importance_level": level}
    return {"importance_cap": cap if cap > 0 else None}


def _optimizer(values: Mapping[str, Any]) -> Optimizer:
    return Optimizer(
        learning_rate=values[f"{ACTOR}.optim.lr"],
        betas=values[BETAS],
        weight_decay=values[f"{ACTOR}.optim.weight_decay"],
        max_grad_norm=values[f"{ACTOR}.grad_clip"],
        warmup_steps=max(0, values[f"{ACTOR}.optim.lr_warmup_steps"]),
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
