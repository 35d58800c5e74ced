"""lightspan: make the AI agents you already have learn from what they do.

Importing this package loads neither torch nor a web server nor an agent framework; what needs them
is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightspan.algorithms.alternate import Alternate
    from lightspan.algorithms.apo import APO
    from lightspan.algorithms.gepa import GEPA
    from lightspan.algorithms.lightning_rl import LightningRL
    from lightspan.algorithms.protocol import Policy
    from lightspan.algorithms.sft import SFT
    from lightspan.capture.candidates import prompt
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
    from lightspan.engines.vllm.description import VLLM
    from lightspan.learners.description import Torch
    from lightspan.learners.protocol import Critic, LoRA, Optimizer, PolicyLoss
    from lightspan.learners.verl.description import Verl
    from lightspan.lightning.air import AIR
    from lightspan.lightning.overlong import Overlong
    from lightspan.production.connect import connect
    from lightspan.production.feedback import feedback
    from lightspan.production.record import record
    from lightspan.production.redact import map_text
    from lightspan.production.use import use
    from lightspan.runners.app import rollout
    from lightspan.runners.cluster import RayRunners
    from lightspan.runners.command.command import Command
    from lightspan.runners.external import ExternalRunners
    from lightspan.runners.local import LocalRunners
    from lightspan.schema.llm import LLM
    from lightspan.schema.prompts import PromptTemplate
    from lightspan.stores import open_store
    from lightspan.trainer import DevReport, FitResult, Trainer
    from lightspan.training.data import tasks_from_store
    from lightspan.training.judge import Judge

__version__ = "0.1.0"

_HOME = {
    "AIR": "lightspan.lightning.air",
    "APO": "lightspan.algorithms.apo",
    "Alternate": "lightspan.algorithms.alternate",
    "Command": "lightspan.runners.command.command",
    "Critic": "lightspan.learners.protocol",
    "DevReport": "lightspan.trainer",
    "GEPA": "lightspan.algorithms.gepa",
    "ExternalRunners": "lightspan.runners.external",
    "FitResult": "lightspan.trainer",
    "Judge": "lightspan.training.judge",
    "LLM": "lightspan.schema.llm",
    "LightningRL": "lightspan.algorithms.lightning_rl",
    "LoRA": "lightspan.learners.protocol",
    "LocalRunners": "lightspan.runners.local",
    "Optimizer": "lightspan.learners.protocol",
    "Overlong": "lightspan.lightning.overlong",
    "Policy": "lightspan.algorithms.protocol",
    "PolicyLoss": "lightspan.learners.protocol",
    "PromptTemplate": "lightspan.schema.prompts",
    "RayRunners": "lightspan.runners.cluster",
    "SFT": "lightspan.algorithms.sft",
    "Torch": "lightspan.learners.description",
    "Verl": "lightspan.learners.verl.description",
    "Trainer": "lightspan.trainer",
    "VLLM": "lightspan.engines.vllm.description",
    "agent": "lightspan.capture.emit",
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
    "prompt": "lightspan.capture.candidates",
    "record": "lightspan.production.record",
    "rollout": "lightspan.runners.app",
    "tasks_from_store": "lightspan.training.data",
    "tool": "lightspan.capture.emit",
    "use": "lightspan.production.use",
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
    "PromptTemplate",
    "RayRunners",
    "Torch",
    "Trainer",
    "Verl",
    "__version__",
    "agent",
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
    "use",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'lightspan' has no attribute {name!r}") from None
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lightspan"):
            raise
        from lightspan.errors import how_to_install

        raise ModuleNotFoundError(
            f"lightspan.{name} needs {error.name!r}: {how_to_install('train')}",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
