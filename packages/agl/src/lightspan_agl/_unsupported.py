"""The public names of Agent Lightning 0.3.0 that are not here, each with what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ALGORITHM: Final = (
    "implement lightspan.algorithms.protocol.Algorithm for lightspan.Trainer; VERL and APO are "
    "the algorithms of lightspan_agl"
)
_CLIENT: Final = "use Trainer.fit; the client and server of 0.1 are not there"
_ENVIRONMENT: Final = "use os.environ"
_EVENT: Final = "use threading.Event or multiprocessing.Event"
_HOOK: Final = "do the work in the agent's rollout, before and after the rest"
_LOGGING: Final = "use setup_logging(level, apply_to=[…], files=…)"
_RECORD: Final = (
    "use the spans of lightspan: InMemoryLightningStore.query_spans, `lightspan export`"
)
_RUNNERS: Final = (
    "leave strategy= out and say Trainer(n_runners=…); lightspan.LocalRunners and RayRunners are "
    "for lightspan.Trainer"
)
_SPANS: Final = "use span.name, span.attributes and find_final_reward"
_STORE: Final = "use lightspan.open_store(url)"
_TRACER: Final = "leave tracer= out; lightspan records by itself"
_TRIPLETS: Final = "use Trainer(adapter={'agent_match': …}); tokens are recorded with their agents"
_TYPE: Final = "use dict, or a type of your own"

INSTEAD: Final = {
    "Adapter": _TRIPLETS,
    "AgentLightningClient": _CLIENT,
    "AgentLightningServer": _CLIENT,
    "Algorithm": _ALGORITHM,
    "AttemptStatus": _TYPE,
    "AttributeValue": _TYPE,
    "Attributes": _TYPE,
    "Baseline": "call Trainer.dev(agent, tasks)",
    "ClientServerExecutionStrategy": _RUNNERS,
    "CollectionBasedLightningStore": _STORE,
    "DevTaskLoader": "give the tasks to Trainer.dev(agent, dev_dataset=[…])",
    "DummyTracer": _TRACER,
    "EnqueueRolloutRequest": _STORE,
    "Event": _RECORD,
    "ExecutionEvent": _EVENT,
    "ExecutionStrategy": _RUNNERS,
    "FastAlgorithm": _ALGORITHM,
    "FilterField": _STORE,
    "FilterOptions": _STORE,
    "GenericResponse": "use the exceptions that methods raise",
    "Hook": _HOOK,
    "LLMProxy": "leave llm_proxy= out; the gateway of lightspan serves main_llm",
    "LegacyAgentRunner": "use LitAgentRunner",
    "LightningStore": _STORE,
    "LightningStoreCapabilities": _STORE,
    "LightningStoreClient": _STORE,
    "LightningStoreServer": "use `lightspan serve --store URL` and lightspan.open_store(url)",
    "LightningStoreStatistics": _STORE,
    "LightningStoreThreaded": _STORE,
    "Link": _RECORD,
    "LlmProxyTraceToTriplet": _TRIPLETS,
    "MultiprocessingEvent": _EVENT,
    "OtelResource": _RECORD,
    "OtelTraceAdapter": _TRIPLETS,
    "PaginatedResult": _STORE,
    "ParallelWorkerBase": _HOOK,
    "Resource": "use LLM or PromptTemplate",
    "ResourceUnion": "use LLM | PromptTemplate",
    "ResourcesUpdate": _STORE,
    "RolloutConfig": "use lightspan.LightningRL(timeout_s=…)",
    "RolloutLegacy": "use Rollout",
    "RolloutRawResult": "use float | None",
    "RolloutRawResultLegacy": "use float | None",
    "RolloutStatus": _TYPE,
    "Runner": "use LitAgentRunner",
    "SharedMemoryExecutionStrategy": _RUNNERS,
    "SortOptions": _STORE,
    "Span": "use emit_reward, emit_annotation, emit_message or lightspan.operation",
    "SpanAttributeNames": _SPANS,
    "SpanContext": _RECORD,
    "SpanCoreFields": "use emit_reward, emit_annotation, emit_message or lightspan.operation",
    "SpanLike": _TYPE,
    "SpanNames": _SPANS,
    "SpanRecordingContext": "use lightspan.operation",
    "StatusCode": _TYPE,
    "Task": "use Rollout",
    "TaskIfAny": "use Rollout | None",
    "TaskInput": "use Any",
    "ThreadingEvent": _EVENT,
    "TraceAdapter": _TRIPLETS,
    "TraceState": _TYPE,
    "TraceStatus": _RECORD,
    "TraceToTripletBase": _TRIPLETS,
    "Triplet": _TRIPLETS,
    "Worker": "use `lightspan inspect`",
    "WorkerStatus": "use `lightspan inspect`",
    "algo": _ALGORITHM,
    "build_component": "call the class",
    "clear_active_tracer": _TRACER,
    "configure_logger": _LOGGING,
    "find_reward_spans": _SPANS,
    "get_active_tracer": _TRACER,
    "get_message_value": _SPANS,
    "get_object_value": _SPANS,
    "get_reward_value": _SPANS,
    "get_rewards_from_span": _SPANS,
    "is_reward_span": _SPANS,
    "lightning_cli": "read the options with argparse and hand them to Trainer",
    "llm_rollout": "use rollout",
    "operation": "use lightspan.operation",
    "prompt_rollout": "use rollout",
    "resolve_int_env_var": _ENVIRONMENT,
    "set_active_tracer": _TRACER,
    "setup_module_logging": _LOGGING,
}
"""Name → what to use."""


def refuse_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that names what to use instead."""

    def get(name: str) -> Any:
        # Only an ImportError's text survives `from … import name`.
        if name in INSTEAD:
            raise ImportError(f"{module} has no {name!r}: {INSTEAD[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
