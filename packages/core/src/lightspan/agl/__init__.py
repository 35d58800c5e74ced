"""The names of the original tutorial: its listing runs here with the import changed.

import lightspan.agl as agl               # was: import agentlightning as agl

`agl.LitAgent`, `agl.Trainer` with `fit` and `dev`, `agl.VERL(config)`, `agl.LLM`, the resource
`main_llm` and `emit_*` mean what they meant there. `agent_match` is a regular expression, here and
nowhere else in lightspan. What maps to what, and what is missing: `docs/from-agent-lightning.md`.

What is said: `_spans`, `_rollouts` and `_resources` are the original's records, on `_models`;
`_attributes` and `_rewards` read what spans say, `_translation` makes them of lightspan's. What an
agent's code sees: `_agents`, `_emit`, `_tracers`, `_logs`, `_environment`. Training: `_trainer`,
where `_verl` says what a configuration means here by `_verl_keys`, and `_sharding` what it means
for verl's own processes, `_matched` is LightningRL for an `agent_match`,
`_travel` brings an agent to the runners, and `_dev` tries one out with resources of its own.
Algorithms of one's own, and `_apo`: `_algorithms` over a `_store`, run by `_own` with `_runners`;
the store shows what lightspan's holds by `_views`, in the words of `_records`, knows by `_liveness`
who is silent, and finds it by `_queries`; `_adapters` and `_triplets` make data of spans;
`_components` and `_events` help.
`_instead` says what to use for names that are not there.
"""

from __future__ import annotations

import dis
import sys
from typing import Any

from lightspan.agl._adapters import (
    Adapter,
    OtelTraceAdapter,
    TraceAdapter,
    TraceToMessages,
    TraceToTripletBase,
)
from lightspan.agl._agents import (
    FunctionalLitAgent,
    LitAgent,
    RolloutResult,
    llm_rollout,
    prompt_rollout,
    rollout,
)
from lightspan.agl._algorithms import (
    Algorithm,
    Baseline,
    FastAlgorithm,
    algo,
)
from lightspan.agl._apo import (
    APO,
)
from lightspan.agl._components import (
    build_component,
)
from lightspan.agl._emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    operation,
    reward,
)
from lightspan.agl._environment import (
    LightningEnvVar,
    resolve_bool_env_var,
    resolve_int_env_var,
    resolve_str_env_var,
)
from lightspan.agl._events import (
    ExecutionEvent,
    MultiprocessingEvent,
    ThreadingEvent,
)
from lightspan.agl._instead import INSTEAD
from lightspan.agl._logs import (
    configure_logger,
    setup_logging,
    setup_module_logging,
)
from lightspan.agl._resources import (
    LLM,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    ResourceUnion,
)
from lightspan.agl._rewards import (
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from lightspan.agl._rollouts import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Dataset,
    EnqueueRolloutRequest,
    FilterField,
    FilterOptions,
    Hook,
    PaginatedResult,
    ParallelWorkerBase,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutRawResult,
    RolloutStatus,
    SortOptions,
    TaskInput,
    Triplet,
    Worker,
    WorkerStatus,
)
from lightspan.agl._runners import (
    LitAgentRunner,
    Runner,
)
from lightspan.agl._spans import (
    Event,
    Link,
    OtelResource,
    Span,
    SpanAttributeNames,
    SpanContext,
    SpanCoreFields,
    SpanLike,
    SpanNames,
    SpanRecordingContext,
    StatusCode,
    TraceState,
    TraceStatus,
)
from lightspan.agl._store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreClient,
    LightningStoreStatistics,
)
from lightspan.agl._tracers import (
    AgentOpsTracer,
    DummyTracer,
    OtelTracer,
    Tracer,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from lightspan.agl._trainer import (
    Trainer,
)
from lightspan.agl._triplets import (
    TracerTraceToTriplet,
)
from lightspan.agl._verl import (
    VERL,
)
from lightspan.schema.spans import Attributes, AttributeValue

__all__ = [
    "APO",
    "LLM",
    "VERL",
    "Adapter",
    "AgentOpsTracer",
    "Algorithm",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Baseline",
    "Dataset",
    "DummyTracer",
    "EnqueueRolloutRequest",
    "Event",
    "ExecutionEvent",
    "FastAlgorithm",
    "FilterField",
    "FilterOptions",
    "FunctionalLitAgent",
    "Hook",
    "InMemoryLightningStore",
    "LightningEnvVar",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreStatistics",
    "Link",
    "LitAgent",
    "LitAgentRunner",
    "MultiprocessingEvent",
    "NamedResources",
    "OtelResource",
    "OtelTraceAdapter",
    "OtelTracer",
    "PaginatedResult",
    "ParallelWorkerBase",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutResult",
    "RolloutStatus",
    "Runner",
    "SortOptions",
    "Span",
    "SpanAttributeNames",
    "SpanContext",
    "SpanCoreFields",
    "SpanLike",
    "SpanNames",
    "SpanRecordingContext",
    "StatusCode",
    "TaskInput",
    "ThreadingEvent",
    "TraceAdapter",
    "TraceState",
    "TraceStatus",
    "TraceToMessages",
    "TraceToTripletBase",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "algo",
    "build_component",
    "clear_active_tracer",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_active_tracer",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "resolve_bool_env_var",
    "resolve_int_env_var",
    "resolve_str_env_var",
    "reward",
    "rollout",
    "set_active_tracer",
    "setup_logging",
    "setup_module_logging",
]


def __getattr__(name: str) -> Any:
    why = f": {INSTEAD[name]}" if name in INSTEAD else ""
    asked_by = sys._getframe(1)
    # `from lightspan.agl import name` shows no AttributeError's message
    if asked_by.f_code.co_code[asked_by.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise ImportError(f"lightspan.agl has no {name!r}{why}", name=name)
    raise AttributeError(f"module 'lightspan.agl' has no attribute {name!r}{why}")
