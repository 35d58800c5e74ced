"""lightspan: train the AI agents you already have with reinforcement learning.

Importing this package loads neither torch nor a web server nor an agent framework; names that need
them are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightspan.algorithms.lightning_rl import LightningRL
    from lightspan.algorithms.protocol import Policy
    from lightspan.capture.emit import (
        agent,
        current_attempt_id,
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        operation,
        tool,
    )
    from lightspan.capture.prompt_overrides import prompt
    from lightspan.lightning.air import AIR
    from lightspan.lightning.length_penalty import Overlong
    from lightspan.production.apply_prompts import apply_prompts
    from lightspan.production.connect import connect
    from lightspan.production.feedback import feedback
    from lightspan.production.record import record
    from lightspan.production.redact import map_text
    from lightspan.protocols.learner import Critic, LoRA, Optimizer, PolicyLoss
    from lightspan.runners.app import rollout
    from lightspan.runners.command.command import Command
    from lightspan.runners.local import LocalRunners
    from lightspan.schema.llm import LLM
    from lightspan.schema.pricing import Price
    from lightspan.schema.prompts import PromptTemplate
    from lightspan.stores import open_store
    from lightspan.trainer import FitResult, Trainer
    from lightspan.training.data import tasks_from_store
    from lightspan_cluster.external_runners import ExternalRunners
    from lightspan_cluster.ray_runners import RayRunners
    from lightspan_prompts.alternate import Alternate
    from lightspan_prompts.apo import APO
    from lightspan_prompts.gepa import GEPA
    from lightspan_prompts.judge import Judge
    from lightspan_tools.dry_run import DevReport
    from lightspan_torch.engine.config import Transformers
    from lightspan_torch.learner.config import Torch
    from lightspan_torch.sft.algorithm import SFT
    from lightspan_verl.config import Verl
    from lightspan_vllm.config import VLLM

__version__ = "0.1.0"

_HOME = {
    "AIR": "lightspan.lightning.air",
    "Command": "lightspan.runners.command.command",
    "Critic": "lightspan.protocols.learner",
    "FitResult": "lightspan.trainer",
    "LLM": "lightspan.schema.llm",
    "LightningRL": "lightspan.algorithms.lightning_rl",
    "LoRA": "lightspan.protocols.learner",
    "LocalRunners": "lightspan.runners.local",
    "Optimizer": "lightspan.protocols.learner",
    "Overlong": "lightspan.lightning.length_penalty",
    "Policy": "lightspan.algorithms.protocol",
    "PolicyLoss": "lightspan.protocols.learner",
    "Price": "lightspan.schema.pricing",
    "PromptTemplate": "lightspan.schema.prompts",
    "Trainer": "lightspan.trainer",
    "agent": "lightspan.capture.emit",
    "apply_prompts": "lightspan.production.apply_prompts",
    "connect": "lightspan.production.connect",
    "current_attempt_id": "lightspan.capture.emit",
    "emit_annotation": "lightspan.capture.emit",
    "emit_exception": "lightspan.capture.emit",
    "emit_message": "lightspan.capture.emit",
    "emit_object": "lightspan.capture.emit",
    "emit_reward": "lightspan.capture.emit",
    "feedback": "lightspan.production.feedback",
    "map_text": "lightspan.production.redact",
    "open_store": "lightspan.stores",
    "operation": "lightspan.capture.emit",
    "prompt": "lightspan.capture.prompt_overrides",
    "record": "lightspan.production.record",
    "rollout": "lightspan.runners.app",
    "tasks_from_store": "lightspan.training.data",
    "tool": "lightspan.capture.emit",
}

__all__ = [
    "AIR",
    "APO",
    "GEPA",
    "LLM",
    "SFT",
    "VLLM",
    "Alternate",
    "Command",
    "Critic",
    "DevReport",
    "ExternalRunners",
    "FitResult",
    "Judge",
    "LightningRL",
    "LoRA",
    "LocalRunners",
    "Optimizer",
    "Overlong",
    "Policy",
    "PolicyLoss",
    "Price",
    "PromptTemplate",
    "RayRunners",
    "Torch",
    "Trainer",
    "Transformers",
    "Verl",
    "__version__",
    "agent",
    "apply_prompts",
    "connect",
    "current_attempt_id",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "feedback",
    "map_text",
    "open_store",
    "operation",
    "prompt",
    "record",
    "rollout",
    "tasks_from_store",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'lightspan' has no attribute {name!r}")
    try:
        value = _find(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "lightspan":
            raise
        from lightspan.errors import how_to_install
        from lightspan.plugins import extra_of

        remedy = how_to_install(extra_of("api", name) or "train")
        raise ModuleNotFoundError(
            f"lightspan.{name} needs {error.name!r}: {remedy}",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def _find(name: str) -> Any:
    """Import a name of the core, or a plugin's from an entry point of `lightspan.api`."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    from lightspan.plugins import extra_of, installed_plugins

    point = installed_plugins("api").get(name)
    if point is not None:
        return point.load()
    if extra := extra_of("api", name):
        from lightspan.errors import how_to_install

        # No AttributeError: `from lightspan import GEPA` would drop its message.
        raise ModuleNotFoundError(
            f"lightspan.{name} is not installed: {how_to_install(extra)}",
            name=f"lightspan.{name}",
        )
    raise AttributeError(f"module 'lightspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
