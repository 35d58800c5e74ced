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
    from lightspan.emit import (
        agent,
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        operation,
        tool,
    )
    from lightspan.execution.local import LocalRunners
    from lightspan.learners import LoRA, Optimizer, PolicyLoss
    from lightspan.llm import LLM
    from lightspan.resources import PromptTemplate
    from lightspan.stores import open_store
    from lightspan.trainer import FitResult, Trainer

__version__ = "0.1.0"

_HOME = {
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
    "emit_annotation": "lightspan.emit",
    "emit_exception": "lightspan.emit",
    "emit_message": "lightspan.emit",
    "emit_object": "lightspan.emit",
    "emit_reward": "lightspan.emit",
    "open_store": "lightspan.stores",
    "operation": "lightspan.emit",
    "rollout": "lightspan.app",
    "tool": "lightspan.emit",
}

__all__ = [
    "LLM",
    "SFT",
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
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "open_store",
    "operation",
    "rollout",
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
