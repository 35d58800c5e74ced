"""lightspan: make the AI agents you already have learn from what they do.

Importing this package loads neither torch nor a web server nor an agent framework; what needs them
is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightspan.algorithms import Policy
    from lightspan.algorithms.lightning_rl import LightningRL
    from lightspan.algorithms.sft import SFT
    from lightspan.app import rollout
    from lightspan.command import Command
    from lightspan.connecting import connect
    from lightspan.emit import (
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
    from lightspan.execution.external import ExternalRunners
    from lightspan.execution.local import LocalRunners
    from lightspan.learners import LoRA, Optimizer, PolicyLoss
    from lightspan.lightning.air import AIR
    from lightspan.llm import LLM
    from lightspan.recorded import tasks_from_store
    from lightspan.recording import record
    from lightspan.redaction import map_text
    from lightspan.resources import PromptTemplate
    from lightspan.scoring import feedback
    from lightspan.stores import open_store
    from lightspan.trainer import DevReport, FitResult, Trainer

__version__ = "0.1.0"

_HOME = {
    "AIR": "lightspan.lightning.air",
    "Command": "lightspan.command",
    "DevReport": "lightspan.trainer",
    "ExternalRunners": "lightspan.execution.external",
    "FitResult": "lightspan.trainer",
    "LLM": "lightspan.llm",
    "LightningRL": "lightspan.algorithms.lightning_rl",
    "LoRA": "lightspan.learners",
    "LocalRunners": "lightspan.execution.local",
    "Optimizer": "lightspan.learners",
    "Policy": "lightspan.algorithms",
    "PolicyLoss": "lightspan.learners",
    "PromptTemplate": "lightspan.resources",
    "SFT": "lightspan.algorithms.sft",
    "Trainer": "lightspan.trainer",
    "agent": "lightspan.emit",
    "connect": "lightspan.connecting",
    "current_attempt_id": "lightspan.emit",
    "emit_annotation": "lightspan.emit",
    "emit_exception": "lightspan.emit",
    "emit_message": "lightspan.emit",
    "emit_object": "lightspan.emit",
    "emit_reward": "lightspan.emit",
    "feedback": "lightspan.scoring",
    "map_text": "lightspan.redaction",
    "open_store": "lightspan.stores",
    "operation": "lightspan.emit",
    "record": "lightspan.recording",
    "rollout": "lightspan.app",
    "tasks_from_store": "lightspan.recorded",
    "tool": "lightspan.emit",
}

__all__ = [
    "AIR",
    "LLM",
    "SFT",
    "Command",
    "DevReport",
    "ExternalRunners",
    "FitResult",
    "LightningRL",
    "LoRA",
    "LocalRunners",
    "Optimizer",
    "Policy",
    "PolicyLoss",
    "PromptTemplate",
    "Trainer",
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
    "record",
    "rollout",
    "tasks_from_store",
    "tool",
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
        raise ModuleNotFoundError(
            f"lightspan.{name} needs {error.name!r}: pip install 'lightspan[train]'",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
