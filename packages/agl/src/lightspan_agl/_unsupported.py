"""Public names of Agent Lightning 0.3.0 that are missing here, with hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

_ALGORITHM: Final = (
    "implement lightspan.algorithms.protocol.Algorithm for lightspan.Trainer, or write a function "
    "under @algo; VERL and APO are the algorithms of lightspan_agl"
)
_CLIENT: Final = "use Trainer.fit; the client and server of 0.1 do not exist"
ENVIRONMENT: Final = "use os.environ"
_EVENT: Final = "use threading.Event or multiprocessing.Event"
_HOOK: Final = "do the work in the agent's rollout, before and after the rest"
_LOGGING: Final = "use setup_logging(level, apply_to=[…], files=…)"
ONE_PROGRAM: Final = (
    "use Trainer(algorithm=algo(…)).fit(agent), which runs algorithm and runners in one program; "
    "`lightspan serve --store URL` and lightspan.open_store(url) are for lightspan.Trainer"
)
_RECORD: Final = (
    "use the spans of lightspan: InMemoryLightningStore.query_spans, `lightspan export`"
)
RUNNERS: Final = (
    "leave strategy= out and say Trainer(n_runners=…); lightspan.LocalRunners and RayRunners are "
    "for lightspan.Trainer"
)
SPANS: Final = (
    "use find_final_reward(spans), and span.attributes with the keys 'lightspan.reward.value', "
    "'lightspan.message.body' and 'lightspan.object.json'"
)
_STORE: Final = "use lightspan.open_store(url)"
TRACER: Final = "leave tracer= out; lightspan records by itself"
TRIPLETS: Final = "use Trainer(adapter={'agent_match': …}); tokens are recorded with their agents"
_TYPE: Final = "use dict, or a type of your own"

_NAMES_BY_HINT: Final = {
    TRIPLETS: ("Adapter OtelTraceAdapter TraceAdapter TraceToTripletBase Triplet"),
    _CLIENT: "AgentLightningClient AgentLightningServer",
    _ALGORITHM: "Algorithm FastAlgorithm",
    _TYPE: "AttemptStatus AttributeValue Attributes RolloutStatus SpanLike StatusCode TraceState",
    "call Trainer.dev(agent, tasks)": "Baseline",
    RUNNERS: "ClientServerExecutionStrategy ExecutionStrategy SharedMemoryExecutionStrategy",
    _STORE: (
        "CollectionBasedLightningStore EnqueueRolloutRequest FilterField FilterOptions "
        "LightningStoreCapabilities LightningStoreStatistics LightningStoreThreaded "
        "PaginatedResult SortOptions"
    ),
    "give the tasks to Trainer.dev(agent, dev_dataset=[…])": "DevTaskLoader",
    TRACER: "DummyTracer clear_active_tracer get_active_tracer set_active_tracer",
    _RECORD: "Event Link OtelResource SpanContext TraceStatus",
    _EVENT: "ExecutionEvent MultiprocessingEvent ThreadingEvent",
    "use the exceptions that methods raise": "GenericResponse",
    _HOOK: "ParallelWorkerBase",
    "leave llm_proxy= out; the gateway of lightspan serves main_llm": "LLMProxy",
    "use LitAgentRunner": "LegacyAgentRunner Runner",
    ONE_PROGRAM: "LightningStoreClient LightningStoreServer",
    "use LLM or PromptTemplate": "Resource",
    "use LLM | PromptTemplate": "ResourceUnion",
    "use lightspan.LightningRL(timeout_s=…)": "RolloutConfig",
    "use Rollout": "RolloutLegacy Task",
    "use float | None": "RolloutRawResult RolloutRawResultLegacy",
    "use emit_reward, emit_annotation, emit_message or operation": "SpanCoreFields",
    SPANS: (
        "SpanAttributeNames SpanNames find_reward_spans get_message_value get_object_value "
        "get_reward_value get_rewards_from_span is_reward_span"
    ),
    "use operation": "SpanRecordingContext",
    "use Rollout | None": "TaskIfAny",
    "use Any": "TaskInput",
    "use `lightspan inspect`": "Worker WorkerStatus",
    "call the class": "build_component",
    _LOGGING: "setup_module_logging",
    "read the options with argparse and hand them to Trainer": "lightning_cli",
    "use rollout": "llm_rollout prompt_rollout",
    ENVIRONMENT: "resolve_int_env_var",
}
HINTS: Final = {name: hint for hint, names in _NAMES_BY_HINT.items() for name in names.split()}
"""Name → what to use instead."""


_RETRIES: Final = "rollouts are not retried; lightspan.LightningRL(timeout_s=…) limits their time"
_RUNNER: Final = "runners are threads of one process, without ids and heartbeats"
_AGENT_ATTRIBUTE: Final = "use the argument `rollout`; agents do not see the Trainer that runs them"
_WRITES: Final = "only Trainer and LitAgentRunner run rollouts and store spans"

ATTRIBUTE_HINTS: Final = {
    "AttemptedRollout": {"config": _RETRIES},
    "Rollout": {
        "attempt": "it has not begun; InMemoryLightningStore.get_rollout_by_id returns it anew",
        "config": _RETRIES,
    },
    "Attempt": {"worker_id": _RUNNER, "last_heartbeat_time": _RUNNER},
    "LitAgent": dict.fromkeys(
        ("get_trainer", "runner", "set_runner", "set_trainer", "trainer"),
        _AGENT_ATTRIBUTE,
    ),
    "Trainer": {
        "fit_v0": "use fit(agent, train_dataset); the client and server of 0.1 do not exist"
    },
    "LightningStore": {
        **dict.fromkeys(
            (
                *("add_many_spans", "add_otel_span", "add_span", "dequeue_many_rollouts"),
                *("dequeue_rollout", "get_many_span_sequence_ids", "get_next_span_sequence_id"),
                *("start_attempt", "update_attempt", "update_rollout"),
            ),
            _WRITES,
        ),
        "enqueue_many_rollouts": "call enqueue_rollout for each",
        "statistics": "count the rollouts of query_rollouts()",
        "capabilities": "the store is in this process",
        "otlp_traces_endpoint": "the store is in this process; read query_spans",
        **dict.fromkeys(("get_worker_by_id", "query_workers", "update_worker"), _RUNNER),
    },
}
"""Class → attribute of Agent Lightning's class → what to use instead."""


class RefusesNames:
    """A class whose missing attributes have hints in `ATTRIBUTE_HINTS`."""

    if not TYPE_CHECKING:  # type checkers report attributes that a class does not have

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            for base in kind.__mro__:
                hint = ATTRIBUTE_HINTS.get(base.__name__, {}).get(name)
                if hint is not None:
                    raise AttributeError(f"{kind.__name__} has no {name!r}: {hint}")
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


class RefusedName(AttributeError):
    """A name of Agent Lightning that is missing here; the message has a hint."""


def refuse_names(module: str, **hints: str) -> Callable[[str], Any]:
    """Return a function `__getattr__` for the module named `module`.

    It raises `AttributeError`, with a hint for a name in `HINTS` or `hints`. In a statement `from …
    import name`, the finder in `_modules` raises an `ImportError` with the same message.

    Args:
        module: name of the module.
        hints: hints for further names of the module, by name.
    """
    all_hints = {**HINTS, **hints}

    def get(name: str) -> Any:
        if name in all_hints:
            raise RefusedName(f"{module} has no {name!r}: {all_hints[name]}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


REWARD_DECORATOR: Final = "call emit_reward(value) in place of the decorator @reward"
