"""Build the engine and the learner of a training run, and check their capabilities."""

from __future__ import annotations

from typing import Any, cast

from lightspan.algorithms.protocol import Algorithm
from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import EngineRequest, TokenEngine
from lightspan.protocols.learner import Learner, LearnerRequest
from lightspan.schema.routing import BASE_POLICY, Route, Routing
from lightspan.training.settings import TrainerSettings


def make_learner(settings: TrainerSettings) -> Learner:
    """Return the learner in the settings; without one, build one for the algorithm's policies."""
    spec = settings.learner_spec
    if spec is None:
        return cast("Learner", settings.learner)
    algorithm = settings.algorithm
    policies = algorithm.policies()
    request = LearnerRequest(
        models={name: policy.model for name, policy in policies.items()},
        lora={name: policy.lora for name, policy in policies.items()},
        optimizer=algorithm.optimizer,
        critic=algorithm.critic,
        seed=algorithm.seed,
        device=settings.device,
    )
    return spec.build(request)


def make_engine(settings: TrainerSettings, *, seed: int) -> TokenEngine:
    """Return the engine in the settings; without one, build one for the algorithm's policies."""
    spec = settings.engine_spec
    if spec is None:
        return cast("TokenEngine", settings.engine)
    return spec.build(engine_request(settings, seed=seed))


def engine_request(settings: TrainerSettings, *, seed: int = 0) -> EngineRequest:
    """Return the request by which an engine for the algorithm's policies is built.

    If an agent has `frozen="base"`, the request includes the starting weights, as the policy
    `BASE_POLICY`.
    """
    algorithm = settings.algorithm
    specs = algorithm.policies()
    models: dict[str, Any] = {name: spec.model for name, spec in specs.items()}
    lora = {name: spec.lora.rank for name, spec in specs.items() if spec.lora is not None}
    request = EngineRequest(
        models=models, lora=lora, device=settings.device, seed=seed, folder=settings.run_folder.path
    )
    if uses_base(algorithm.routing()):
        models[BASE_POLICY] = algorithm.base_model
        if request.shares_model(BASE_POLICY):
            lora[BASE_POLICY] = 0
    return request


def check_parts(algorithm: Algorithm, engine: TokenEngine, learner: Learner) -> None:
    """Check that engine and learner have the policies and capabilities that the algorithm needs.

    Raises:
        UnsupportedError: a policy or a capability is missing; or the engine serves a policy as a
            LoRA adapter, but the algorithm trains all of its weights.
        ConfigError: the algorithm needs a critic, and the learner was made without a critic.
    """
    needed = set(algorithm.policies())
    missing = sorted(needed - set(learner.policies()))
    if missing:
        raise UnsupportedError(f"the learner has no policy {missing}; it has {learner.policies()}")
    if uses_base(algorithm.routing()):
        needed.add(BASE_POLICY)
    missing = sorted(needed - engine.policies().keys())
    if missing:
        raise UnsupportedError(
            f"the engine serves no policy {missing}; it serves {sorted(engine.policies())}"
        )
    full = {name for name, spec in algorithm.policies().items() if spec.lora is None}
    only_lora = sorted(full & set(engine.capabilities.lora))
    if only_lora:
        raise UnsupportedError(
            f"the engine serves {only_lora} as LoRA, and the algorithm trains all weights of it: "
            "give it lora=LoRA(…), or make the engine without lora= for it"
        )
    policies = sorted(needed & set(engine.capabilities.images))
    if policies and not learner.capabilities.images:
        raise UnsupportedError(
            f"the engine takes images for {', '.join(policies)}, which the learner cannot train "
            "on: use the embedded learner, or an engine that takes no images"
        )
    algorithm.check(engine.capabilities, learner.capabilities)
    if algorithm.critic is not None:
        learner.values([])


def check_chat_templates(engine: TokenEngine) -> None:
    """Raise `ModelError` if a policy's tokenizer cannot render a chat."""
    for policy in engine.policies():
        engine.tokenizer(policy).render([{"role": "user", "content": "Hello"}])


def uses_base(routing: Routing) -> bool:
    """Return whether the calls of any agent are answered by the starting weights."""
    return any(target.route is Route.BASE for target in routing.targets)
