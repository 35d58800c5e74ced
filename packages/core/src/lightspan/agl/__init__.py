"""The names of Agent Lightning 0.3.0 that its tutorials and examples use, over those of lightspan.

import lightspan.agl as agl               # was: import agentlightning as agl

The modules have their paths there: `lightspan.agl.adapter` was `agentlightning.adapter`. Other
public names are an ImportError that says what to use (`_unsupported`). See
`docs/from-agent-lightning.md`.
"""

from __future__ import annotations

from lightspan.agl._unsupported import refuse_names
from lightspan.agl.adapter import TracerTraceToTriplet, TraceToMessages
from lightspan.agl.algorithm import APO, VERL
from lightspan.agl.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
)
from lightspan.agl.env_var import LightningEnvVar, resolve_bool_env_var, resolve_str_env_var
from lightspan.agl.litagent import LitAgent, rollout
from lightspan.agl.logging import setup_logging
from lightspan.agl.reward import find_final_reward
from lightspan.agl.runner import LitAgentRunner
from lightspan.agl.store import InMemoryLightningStore
from lightspan.agl.tracer import AgentOpsTracer, OtelTracer, Tracer
from lightspan.agl.trainer import Trainer
from lightspan.agl.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    Dataset,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Rollout,
    RolloutMode,
)

__all__ = [
    "APO",
    "LLM",
    "VERL",
    "AgentOpsTracer",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "InMemoryLightningStore",
    "LightningEnvVar",
    "LitAgent",
    "LitAgentRunner",
    "NamedResources",
    "OtelTracer",
    "PromptTemplate",
    "ProxyLLM",
    "Rollout",
    "RolloutMode",
    "TraceToMessages",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "resolve_bool_env_var",
    "resolve_str_env_var",
    "rollout",
    "setup_logging",
]
__getattr__ = refuse_names(__name__)
