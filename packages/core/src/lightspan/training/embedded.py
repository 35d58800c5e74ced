"""The learner and the engine of a training: those that share the trainer's process, or others."""

from __future__ import annotations

from typing import Any

from lightspan.algorithms.protocol import Algorithm
from lightspan.engines.protocol import TokenEngine
from lightspan.engines.vllm.description import VLLM
from lightspan.errors import UnsupportedError
from lightspan.learners.description import Torch
from lightspan.learners.protocol import Learner
from lightspan.schema.routing import BASE_POLICY, Route, Routing
from lightspan.training.settings import TrainerSettings


def make_learner(settings: TrainerSettings) -> Learner:
    """The learner that was given, or one that was described, or a torch learner: with the
    algorithm's policies."""
    given = settings.learner
    if given is not None and not isinstance(given, Torch):
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
    if given is not None:
        from lightspan.learners.ranks.learner import described

        return described(given, models, device=settings.device, **options)
    from lightspan.learners.torch import TorchLearner

    own = settings.learner_options or {}
    return TorchLearner(models, device=settings.device, **options, **own)


def close_learner(learner: Learner) -> None:
    """End the processes of a learner that `make_learner` described."""
    from lightspan.learners.ranks.learner import RanksLearner

    if isinstance(learner, RanksLearner):
        learner.close()


def make_engine(settings: TrainerSettings, *, seed: int) -> TokenEngine:
    """The engine that was given, or one that was described, or a transformers engine: with the
    algorithm's policies, and the starting weights if needed."""
    given = settings.engine
    if given is not None and not isinstance(given, VLLM):
        return given
    algorithm, options = settings.algorithm, settings.engine_options or {}
    models = {name: spec.model for name, spec in algorithm.policies().items()}
    if uses_base(algorithm.routing()):
        models[BASE_POLICY] = algorithm.base_model
    if given is not None:
        from lightspan.engines.vllm.engine import VLLMEngine

        return VLLMEngine(given, models, logs=settings.run_folder.path, seed=seed)
    from lightspan.engines.transformers import TransformersEngine

    return TransformersEngine(models, device=settings.device, **{"seed": seed, **options})


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
