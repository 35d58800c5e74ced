"""The names of Agent Lightning 0.3.0 in its tutorials and examples, implemented by lightspan.

    import lightspan_agl as agl               # was: import agentlightning as agl

Modules have the same paths: `lightspan_agl.adapter` was `agentlightning.adapter`. Other public
names of Agent Lightning raise an ImportError with a hint (`_unsupported`). See
`docs/guides/agent-lightning.md`.
"""

from __future__ import annotations

from lightspan_agl._modules import install as _install
from lightspan_agl._unsupported import refuse_names as _refuse_names
from lightspan_agl.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages
from lightspan_agl.algorithm import APO, VERL, algo
from lightspan_agl.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
)
from lightspan_agl.env_var import LightningEnvVar, resolve_bool_env_var, resolve_str_env_var
from lightspan_agl.litagent import LitAgent, rollout
from lightspan_agl.logging import configure_logger, setup_logging
from lightspan_agl.reward import find_final_reward
from lightspan_agl.runner import LitAgentRunner
from lightspan_agl.store import InMemoryLightningStore, LightningStore
from lightspan_agl.tracer import AgentOpsTracer, OtelTracer, Tracer
from lightspan_agl.trainer import Trainer
from lightspan_agl.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    Dataset,
    Hook,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    RolloutMode,
    Span,
)

__all__ = [
    "APO",
    "LLM",
    "VERL",
    "AgentOpsTracer",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "Hook",
    "InMemoryLightningStore",
    "LightningEnvVar",
    "LightningStore",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelTracer",
    "PromptTemplate",
    "ProxyLLM",
    "ResourcesUpdate",
    "Rollout",
    "RolloutMode",
    "Span",
    "TraceToMessages",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "algo",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "operation",
    "resolve_bool_env_var",
    "resolve_str_env_var",
    "rollout",
    "setup_logging",
]
__getattr__ = _refuse_names(__name__, __version__="use importlib.metadata.version('lightspan-agl')")
_install()
