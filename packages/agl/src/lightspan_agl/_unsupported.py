"""Public names of Agent Lightning 0.3.0 that are missing here, with hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_ALGORITHM: Final = (
    "implement lightspan.algorithms.protocol.Algorithm for lightspan.Trainer, or write a function "
    "under @algo; VERL and APO are the algorithms of lightspan_agl"
)
_CLIENT: Final = "use Trainer.fit; the client and server of 0.1 do not exist"
_ENVIRONMENT: Final = "use os.environ"
_EVENT: Final = "use threading.Event or multiprocessing.Event"
_HOOK: Final = "do the work in the agent's rollout, before and after the rest"
_LOGGING: Final = "use setup_logging(level, apply_to=[…], files=…)"
_ONE_PROGRAM: Final = (
    "use Trainer(algorithm=algo(…)).fit(agent), which runs algorithm and runners in one program; "
    "`lightspan serve --store URL` and lightspan.open_store(url) are for lightspan.Trainer"
)
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

_NAMES_BY_HINT: Final = {
    _TRIPLETS: ("Adapter OtelTraceAdapter TraceAdapter TraceToTripletBase Triplet"),
    _CLIENT: "AgentLightningClient AgentLightningServer",
    _ALGORITHM: "Algorithm FastAlgorithm",
    _TYPE: "AttemptStatus AttributeValue Attributes RolloutStatus SpanLike StatusCode TraceState",
    "call Trainer.dev(agent, tasks)": "Baseline",
    _RUNNERS: "ClientServerExecutionStrategy ExecutionStrategy SharedMemoryExecutionStrategy",
    _STORE: (
        "CollectionBasedLightningStore EnqueueRolloutRequest FilterField FilterOptions "
        "LightningStoreCapabilities LightningStoreStatistics LightningStoreThreaded "
        "PaginatedResult SortOptions"
    ),
    "give the tasks to Trainer.dev(agent, dev_dataset=[…])": "DevTaskLoader",
    _TRACER: "DummyTracer clear_active_tracer get_active_tracer set_active_tracer",
    _RECORD: "Event Link OtelResource SpanContext TraceStatus",
    _EVENT: "ExecutionEvent MultiprocessingEvent ThreadingEvent",
    "use the exceptions that methods raise": "GenericResponse",
    _HOOK: "ParallelWorkerBase",
    "leave llm_proxy= out; the gateway of lightspan serves main_llm": "LLMProxy",
    "use LitAgentRunner": "LegacyAgentRunner Runner",
    _ONE_PROGRAM: "LightningStoreClient LightningStoreServer",
    "use LLM or PromptTemplate": "Resource",
    "use LLM | PromptTemplate": "ResourceUnion",
    "use lightspan.LightningRL(timeout_s=…)": "RolloutConfig",
    "use Rollout": "RolloutLegacy Task",
    "use float | None": "RolloutRawResult RolloutRawResultLegacy",
    "use emit_reward, emit_annotation, emit_message or lightspan.operation": "SpanCoreFields",
    _SPANS: (
        "SpanAttributeNames SpanNames find_reward_spans get_message_value get_object_value "
        "get_reward_value get_rewards_from_span is_reward_span"
    ),
    "use lightspan.operation": "SpanRecordingContext operation",
    "use Rollout | None": "TaskIfAny",
    "use Any": "TaskInput",
    "use `lightspan inspect`": "Worker WorkerStatus",
    "call the class": "build_component",
    _LOGGING: "setup_module_logging",
    "read the options with argparse and hand them to Trainer": "lightning_cli",
    "use rollout": "llm_rollout prompt_rollout",
    _ENVIRONMENT: "resolve_int_env_var",
}
HINTS: Final = {name: hint for hint, names in _NAMES_BY_HINT.items() for name in names.split()}
"""Name → what to use instead."""


def refuse_names(module: str) -> Callable[[str], Any]:
    """Return a function `__getattr__` for the module named `module`.

    It raises `ImportError` with a hint for a name in `HINTS`, and `AttributeError` for other names.
    """

    def get(name: str) -> Any:
        # `from … import name` keeps the message of an ImportError only.
        if name in HINTS:
            raise ImportError(f"{module} has no {name!r}: {HINTS[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
