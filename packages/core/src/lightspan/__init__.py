"""lightspan: train the AI agents you already have with reinforcement learning.

Importing this package loads neither torch nor a web server nor an agent framework; names that need
them are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightspan.algorithms.lightning_rl import LightningRL as LightningRL
    from lightspan.algorithms.protocol import Policy as Policy
    from lightspan.algorithms.replay import Replay as Replay
    from lightspan.capture.emit import (
        agent as agent,
        current_attempt_id as current_attempt_id,
        emit_annotation as emit_annotation,
        emit_exception as emit_exception,
        emit_message as emit_message,
        emit_object as emit_object,
        emit_reward as emit_reward,
        operation as operation,
        tool as tool,
    )
    from lightspan.capture.prompt_overrides import prompt as prompt
    from lightspan.lightning.air import AIR as AIR
    from lightspan.lightning.families import Forks as Forks
    from lightspan.lightning.length_penalty import Overlong as Overlong
    from lightspan.production.apply_prompts import apply_prompts as apply_prompts
    from lightspan.production.connect import connect as connect
    from lightspan.production.feedback import feedback as feedback
    from lightspan.production.record import flush as flush, lifespan as lifespan, record as record
    from lightspan.production.redact import map_text as map_text, without_content as without_content
    from lightspan.protocols.learner import (
        Critic as Critic,
        LoRA as LoRA,
        Optimizer as Optimizer,
        PolicyLoss as PolicyLoss,
    )
    from lightspan.runners.app import rollout as rollout
    from lightspan.runners.local import LocalRunners as LocalRunners
    from lightspan.schema.llm import LLM as LLM
    from lightspan.schema.prompts import PromptTemplate as PromptTemplate
    from lightspan.stores import open_store as open_store
    from lightspan.trainer import FitResult as FitResult, Trainer as Trainer
    from lightspan_cluster import ExternalRunners as ExternalRunners, Hosts as Hosts
    from lightspan_cluster.ray_runners import RayRunners as RayRunners
    from lightspan_programs import CodingAgent as CodingAgent, Command as Command
    from lightspan_prompts import APO as APO, GEPA as GEPA, Alternate as Alternate, Judge as Judge
    from lightspan_prompts.pricing import Price as Price
    from lightspan_tools.dry_run import DevReport as DevReport
    from lightspan_tools.recorded_tasks import tasks_from_store as tasks_from_store
    from lightspan_torch import SFT as SFT, Torch as Torch, Transformers as Transformers
    from lightspan_torch.distill import TeacherModel as TeacherModel, TeacherServer as TeacherServer
    from lightspan_torch.distill.algorithm import Distill as Distill
    from lightspan_torch.preferences import Preferences as Preferences
    from lightspan_torch.rejection_sampling import RejectionSampling as RejectionSampling
    from lightspan_verl.config import Verl as Verl
    from lightspan_vllm.config import VLLM as VLLM

__version__ = "0.1.0"

_NAMES = {
    "lightspan.lightning.air": ("AIR",),
    "lightspan.lightning.families": ("Forks",),
    "lightspan.protocols.learner": ("Critic", "LoRA", "Optimizer", "PolicyLoss"),
    "lightspan.trainer": ("FitResult", "Trainer"),
    "lightspan.schema.llm": ("LLM",),
    "lightspan.algorithms.lightning_rl": ("LightningRL",),
    "lightspan.runners.local": ("LocalRunners",),
    "lightspan.lightning.length_penalty": ("Overlong",),
    "lightspan.algorithms.protocol": ("Policy",),
    "lightspan.algorithms.replay": ("Replay",),
    "lightspan.schema.prompts": ("PromptTemplate",),
    "lightspan.capture.emit": (
        *("agent", "current_attempt_id", "emit_annotation", "emit_exception"),
        *("emit_message", "emit_object", "emit_reward", "operation", "tool"),
    ),
    "lightspan.production.apply_prompts": ("apply_prompts",),
    "lightspan.production.connect": ("connect",),
    "lightspan.production.feedback": ("feedback",),
    "lightspan.production.redact": ("map_text", "without_content"),
    "lightspan.stores": ("open_store",),
    "lightspan.capture.prompt_overrides": ("prompt",),
    "lightspan.production.record": ("flush", "lifespan", "record"),
    "lightspan.runners.app": ("rollout",),
}
"""Module → names that `lightspan` exports from it."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    value = globals()[name] = _load(name)
    return value


def _load(name: str) -> Any:
    """Import and return the public object `lightspan.<name>`, from the core or from a plugin.

    Raises:
        AttributeError: there is no such object.
        ModuleNotFoundError: the plugin, or a package that it needs, is not installed.
    """
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    from lightspan.errors import ConfigError
    from lightspan.plugins import extra_of, installed_plugins, load_plugin

    if name not in installed_plugins("api") and extra_of("api", name) is None:
        raise AttributeError(f"module 'lightspan' has no attribute {name!r}")
    try:
        return load_plugin("api", name)
    except ConfigError as error:
        # No AttributeError: `from lightspan import GEPA` would drop its message.
        raise ModuleNotFoundError(f"lightspan.{error}", name=f"lightspan.{name}") from error


def __dir__() -> list[str]:
    """Return the names of `from lightspan import *`: without those of plugins not installed."""
    from lightspan.plugins import extra_of, installed_plugins

    return ["__version__", *_HOME, *(n for n in installed_plugins("api") if extra_of("api", n))]
