"""What a verl configuration says of verl's own processes, where their environment is given.

Without it these keys have no effect, as `agl._verl_keys` has them; with it each is an argument of
`lightspan.Verl`, or is named with the reason, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from lightspan.agl._verl_keys import ACTOR, CLUSTER, ESTIMATORS, MODEL, ROLLOUT
from lightspan.learners.verl.description import Verl

_FSDP: Final = f"{ACTOR}.fsdp_config"
_RANKS: Final = "trainer.n_gpus_per_node"
_TOKENS: Final = f"{ACTOR}.ppo_max_token_len_per_gpu"
_CHECKPOINTING: Final = f"{MODEL}.enable_gradient_checkpointing"
_OFFLOADS: Final = ("param_offload", "optimizer_offload")
_DTYPES: Final = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16"}
_DTYPES_OF_PASSES: Final[Mapping[str, str]] = {**_DTYPES, "bf16": "bfloat16"}

DEFAULTS: Final[Mapping[str, Any]] = {
    _RANKS: 8,
    "trainer.nnodes": 1,
    f"{ACTOR}.strategy": "fsdp",
    _TOKENS: None,
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{_FSDP}.param_offload": False,
    f"{_FSDP}.optimizer_offload": False,
    f"{_FSDP}.offload_policy": False,
    f"{_FSDP}.fsdp_size": -1,
    f"{_FSDP}.model_dtype": "fp32",
    f"{_FSDP}.dtype": None,
    f"{_FSDP}.mixed_precision.param_dtype": None,
    _CHECKPOINTING: True,
}
"""Every key that is used → verl's default; None for the device's (`Verl`)."""

WHOLE: Final[Mapping[str, int]] = {_RANKS: 1, _TOKENS: 1}
"""Those of whole numbers → the least that makes sense."""

_OTHERWISE: Final = (
    (f"{ROLLOUT}.*", "the engine is lightspan's: VERL(config, engine=VLLM(…)) for vLLM"),
    (f"{ACTOR}.ppo_micro_batch_size*", f"passes are balanced by their tokens: {_TOKENS}"),
    (f"{ACTOR}.use_dynamic_bsz", f"passes are balanced by their tokens: {_TOKENS}"),
    ("actor_rollout_ref.ref.*", "the starting weights are held as the actor's are"),
    ("ray_*", "whether ranks are in Ray is VERL(config, ray=…)"),
    ("trainer.ray_*", "whether ranks are in Ray is VERL(config, ray=…)"),
    ("*", "verl's processes are set up by lightspan"),
)
"""Patterns of keys without effect that are about a cluster → why, beside verl's processes."""


def why_not(key: str, why: str) -> str:
    """Why a key has no effect where verl trains, if it is one of those that are about a cluster.

    Args:
        why: the reason where lightspan's own learner trains.
    """
    if why != CLUSTER:
        return why
    return next(reason for pattern, reason in _OTHERWISE if fnmatchcase(key, pattern))


def refused(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Values that verl's processes cannot have here, each with what to use instead.

    Args:
        values: of all keys, with defaults.
        given: what the configuration says.
    """
    ranks = values[_RANKS]
    allowed: dict[str, tuple[tuple[Any, ...], str]] = {
        "trainer.nnodes": ((1, "1"), "1: ranks are processes of one machine"),
        f"{ACTOR}.strategy": (("fsdp", "fsdp2"), "'fsdp2'"),
        f"{ACTOR}.ulysses_sequence_parallel_size": ((1, "1"), "1: a row is computed by one rank"),
        f"{_FSDP}.param_offload": ((False, True), "True or False"),
        f"{_FSDP}.optimizer_offload": ((False, True), "True or False"),
        f"{_FSDP}.offload_policy": ((False,), "param_offload=True and optimizer_offload=True"),
        f"{_FSDP}.fsdp_size": ((-1, ranks), "-1: weights are sharded over all ranks"),
        f"{_FSDP}.model_dtype": (
            ("fp32", "float32"),
            "'fp32': weights are float32; fsdp_config.dtype says what passes are computed in",
        ),
        f"{_FSDP}.dtype": ((None, *_DTYPES), "'float32' or 'bfloat16'"),
        f"{_FSDP}.mixed_precision.param_dtype": ((None, *_DTYPES_OF_PASSES), "'fp32' or 'bf16'"),
        _CHECKPOINTING: ((False, True), "True or False"),
    }
    found = [
        f"{key}={values[key]!r}: use {instead}"
        for key, (fine, instead) in allowed.items()
        if values[key] not in fine
    ]
    if values["algorithm.adv_estimator"] == "gae":
        unsaid = "" if "algorithm.adv_estimator" in given else " (verl's default)"
        others = ", ".join(repr(name) for name in ESTIMATORS if name != "gae")
        found.append(
            f"algorithm.adv_estimator='gae'{unsaid}: lightspan's part of verl has no critic: use "
            f"one of {others}, or lightspan's own learner (leave python= out)"
        )
    return found


def verl_of(values: Mapping[str, Any], python: str, *, ray: bool | str = False) -> Verl:
    """The learner as the configuration has it.

    Args:
        values: of all keys, with defaults; none that `refused` names, those of `WHOLE` as numbers.
        python: the interpreter that has verl.
        ray: whether ranks are in a Ray cluster, or in which.
    """
    dtype = values[f"{_FSDP}.dtype"] or values[f"{_FSDP}.mixed_precision.param_dtype"]
    return Verl(
        python=python,
        ranks=values[_RANKS],
        ray=ray,
        token_budget=values[_TOKENS],
        dtype=None if dtype is None else _DTYPES_OF_PASSES[dtype],  # type: ignore[arg-type]
        gradient_checkpointing=values[_CHECKPOINTING],
        **{name: values[f"{_FSDP}.{name}"] for name in _OFFLOADS},
    )
