"""Build the engine and the learner of a training from their specs, and check what they can do."""

from __future__ import annotations

from typing import Any

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import EngineRequest, TokenEngine
from lightspan.protocols.learner import Learner, LearnerRequest
from lightspan.schema.routing import BASE_POLICY, Route, Routing
from lightspan.training.settings import TrainerSettings


def make_learner(settings: TrainerSettings) -> Learner:
    """Return the learner that was given, or build one with the algorithm's policies."""
    spec = settings.learner_spec
    return settings.own_learner if spec is None else spec.build(learner_request(settings))


def make_engine(settings: TrainerSettings, *, seed: int) -> TokenEngine:
    """Return the engine that was given, or build one with the algorithm's policies."""
    spec = settings.engine_spec
    return settings.own_engine if spec is None else spec.build(engine_request(settings, seed=seed))


def learner_request(settings: TrainerSettings) -> LearnerRequest:
    """Return what a learner has to train for these settings."""
    algorithm = settings.algorithm
    specs = algorithm.policies()
    return LearnerRequest(
        models={name: spec.model for name, spec in specs.items()},
        lora={name: spec.lora for name, spec in specs.items()},
        optimizer=algorithm.optimizer,
        critic=algorithm.critic,
        seed=algorithm.seed,
        device=settings.device,
    )


def engine_request(settings: TrainerSettings, *, seed: int = 0) -> EngineRequest:
    """Return what an engine has to serve for these settings: the policies, and the starting weights
    where an agent is answered with them."""
    algorithm = settings.algorithm
    specs = algorithm.policies()
    models: dict[str, Any] = {name: spec.model for name, spec in specs.items()}
    lora = {name: spec.lora.rank for name, spec in specs.items() if spec.lora is not None}
    request = EngineRequest(
        models=models,
        lora=lora,
        device=settings.device,
        seed=seed,
        folder=settings.run_folder.path,
    )
    if uses_base(algorithm.routing()):
        models[BASE_POLICY] = algorithm.base_model
        if request.shares_model(BASE_POLICY):
            lora[BASE_POLICY] = 0
    return request


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
