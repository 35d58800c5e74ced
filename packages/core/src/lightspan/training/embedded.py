"""The learner and the engine of a training: those that share the trainer's process, or others."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any

from lightspan.algorithms.protocol import Algorithm
from lightspan.engines.protocol import TokenEngine
from lightspan.engines.vllm.description import VLLM
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.learners.description import Torch
from lightspan.learners.protocol import Learner
from lightspan.learners.verl.description import Verl
from lightspan.schema.routing import BASE_POLICY, Route, Routing
from lightspan.training.settings import TrainerSettings


def make_learner(settings: TrainerSettings) -> Learner:
    """The learner that was given, or one that was described, or a torch learner: with the
    algorithm's policies."""
    given = settings.learner
    if given is not None and not isinstance(given, Torch | Verl):
        return given
    algorithm = settings.algorithm
    specs = algorithm.policies()
    models = {name: spec.model for name, spec in specs.items()}
    options: dict[str, Any] = {
        "optimizer": algorithm.optimizer,
        "lora": {name: spec.lora for name, spec in specs.items()},
        "seed": algorithm.seed,
        "critic": algorithm.critic,
    }
    if isinstance(given, Verl):
        from lightspan.learners.verl.learner import described as of_verl

        return of_verl(given, models, device=settings.device, **options)
    from lightspan.learners.torch import TorchLearner

    if given is not None:
        import torch

        return TorchLearner(
            models,
            device=given.device or settings.device,
            dtype=None if given.dtype is None else getattr(torch, given.dtype),
            token_budget=given.token_budget,
            share_prefixes=given.share_prefixes,
            **options,
        )
    own = settings.learner_options or {}
    _check_options("learner_options", own, TorchLearner, beside={*options, "device"})
    return TorchLearner(models, device=settings.device, **options, **own)


def _check_options(
    name: str, options: Mapping[str, Any], part: type, *, beside: Collection[str]
) -> None:
    """Raise `ConfigError` for an option that an embedded part does not take, or that the trainer
    sets itself.

    Args:
        beside: what that is.
    """
    _, *known = inspect.signature(part).parameters  # the first are the policies
    known = [option for option in known if option not in beside]
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(
            f"{name}={dict(options)!r:.80}: the embedded {name.partition('_')[0]} takes no "
            f"{unknown[0]!r} there; it takes {', '.join(known)}"
        )


def close_learner(learner: Learner) -> None:
    """End the processes of a learner that `make_learner` started."""
    from lightspan.learners.verl.learner import VerlLearner

    if isinstance(learner, VerlLearner):
        learner.close()


def make_engine(settings: TrainerSettings, *, seed: int) -> TokenEngine:
    """The engine that was given, or one that was described, or a transformers engine: with the
    algorithm's policies, and the starting weights if needed."""
    given = settings.engine
    if given is not None and not isinstance(given, VLLM):
        return given
    models = _models(settings.algorithm)
    if given is not None:
        from lightspan.engines.vllm.engine import VLLMEngine

        lora = {} if given.merge else _ranks(settings.algorithm, models)
        return VLLMEngine(given, models, lora=lora, logs=settings.run_folder.path, seed=seed)
    from lightspan.engines.transformers import TransformersEngine

    beside, options = embedded_lora(settings), settings.engine_options or {}
    _check_options("engine_options", options, TransformersEngine, beside={"device"})
    return TransformersEngine(
        models, device=settings.device, **{"seed": seed, **options, "lora": beside}
    )


def embedded_lora(settings: TrainerSettings) -> dict[str, int]:
    """Policy → rank, of the policies that the embedded engine serves as LoRA beside weights that
    several have: merged, a single one computes less for a token and takes no more memory."""
    options = settings.engine_options or {}
    if "lora" in options:
        return dict(options["lora"] or {})
    models = _models(settings.algorithm)
    ranks = _ranks(settings.algorithm, models)
    return {policy: rank for policy, rank in ranks.items() if _sharing(ranks, models, policy)}


def server_groups(settings: TrainerSettings) -> dict[tuple[str, ...], int]:
    """Policies by the vLLM servers that they share → the highest rank of their LoRA; 0 for those of
    whole weights. The starting weights are among them where the engine serves them."""
    given, models = settings.engine, _models(settings.algorithm)
    merged = isinstance(given, VLLM) and given.merge
    ranks = {} if merged else _ranks(settings.algorithm, models)
    groups: dict[tuple[bool, str], list[str]] = {}
    for policy, model in models.items():
        key = (True, str(_name(model))) if policy in ranks else (False, policy)
        groups.setdefault(key, []).append(policy)
    return {tuple(each): max(ranks.get(p, 0) for p in each) for each in groups.values()}


def _models(algorithm: Algorithm) -> dict[str, Any]:
    """Policy → model, of all that the engine serves."""
    models: dict[str, Any] = {name: spec.model for name, spec in algorithm.policies().items()}
    if uses_base(algorithm.routing()):
        models[BASE_POLICY] = algorithm.base_model
    return models


def _ranks(algorithm: Algorithm, models: Mapping[str, Any]) -> dict[str, int]:
    """Policy → rank of its LoRA; 0 for the starting weights, where a LoRA is beside them."""
    specs = algorithm.policies()
    ranks = {name: spec.lora.rank for name, spec in specs.items() if spec.lora is not None}
    if BASE_POLICY in models and _sharing(ranks, models, BASE_POLICY):
        ranks[BASE_POLICY] = 0
    return ranks


def _sharing(ranks: Mapping[str, int], models: Mapping[str, Any], policy: str) -> bool:
    """Whether another of these policies starts from the same model."""
    others = [models[other] for other in ranks if other != policy]
    own = models[policy]
    named = _name(own)
    return any(other is own or (named is not None and _name(other) == named) for other in others)


def _name(model: Any) -> str | None:
    """Of a model that is loaded by its name; None for a loaded one, which is itself alone."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else None


def check_parts(algorithm: Algorithm, engine: TokenEngine, learner: Learner) -> None:
    """Raise for what engine or learner do not have or honour.

    Raises:
        UnsupportedError: a policy, or what they do not declare.
        ConfigError: the algorithm asks a critic, and the learner could have one but was made
            without.
    """
    wanted = set(algorithm.policies())
    lacking = sorted(wanted - set(learner.policies()))
    if lacking:
        raise UnsupportedError(f"the learner has no policy {lacking}; it has {learner.policies()}")
    if uses_base(algorithm.routing()):
        wanted.add(BASE_POLICY)
    lacking = sorted(wanted - engine.policies().keys())
    if lacking:
        raise UnsupportedError(
            f"the engine serves no policy {lacking}; it serves {sorted(engine.policies())}"
        )
    whole = {name for name, spec in algorithm.policies().items() if spec.lora is None}
    unfit = sorted(whole & set(engine.capabilities.lora))
    if unfit:
        raise UnsupportedError(
            f"the engine serves {unfit} as LoRA, and the algorithm trains all weights of it: give "
            "it lora=LoRA(…), or make the engine without lora= for it"
        )
    algorithm.check(engine.capabilities, learner.capabilities)
    if algorithm.critic is not None:
        learner.values([])


def check_chat_templates(engine: TokenEngine) -> None:
    """Raise `ModelError` if a policy's tokenizer cannot render a chat."""
    for policy in engine.policies():
        engine.tokenizer(policy).render([{"role": "user", "content": "Hello"}])


def uses_base(routing: Routing) -> bool:
    """Whether an agent is served with the starting weights."""
    targets = [routing.default, *(rule.target for rule in routing.rules)]
    return any(target.route is Route.BASE for target in targets)
