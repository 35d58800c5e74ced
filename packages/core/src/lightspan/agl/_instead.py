"""What to use in place of the original's names that are not here."""

from __future__ import annotations

from typing import Final

_OLD_CLIENT: Final = "the client and server of 0.1 are not there; use Trainer.fit"
_OLD_RECORD: Final = "the records of 0.1 are not there; use {}"
_ONE_WAY: Final = (
    "leave strategy= out: runners are threads of a process of their own, and LocalRunners of "
    "lightspan.Trainer says how many"
)
_NO_SERVER: Final = (
    "processes share the store's file: LightningStoreClient('sqlite:///path/store.db') in each"
)

INSTEAD: Final = {
    "AgentLightningClient": _OLD_CLIENT,
    "AgentLightningServer": _OLD_CLIENT,
    "ClientServerExecutionStrategy": _ONE_WAY,
    "CollectionBasedLightningStore": (
        "use InMemoryLightningStore, or LightningStore(lightspan.stores.open_store(url)); a store "
        "of your own passes lightspan.testing.StoreSuite"
    ),
    "DevTaskLoader": "give the tasks to Trainer.dev(agent, dev_dataset=[…])",
    "ExecutionStrategy": _ONE_WAY,
    "GenericResponse": _OLD_RECORD.format("the exceptions that methods raise"),
    "LLMProxy": "leave llm_proxy= out: lightspan's gateway serves main_llm",
    "LegacyAgentRunner": "use LitAgentRunner",
    "LightningStoreServer": _NO_SERVER,
    "LightningStoreThreaded": "leave it out: every store may be used from any thread",
    "LlmProxyTraceToTriplet": (
        "use TracerTraceToTriplet(agent_match=…): tokens are recorded with their agents"
    ),
    "RolloutLegacy": _OLD_RECORD.format("Rollout"),
    "RolloutRawResultLegacy": _OLD_RECORD.format("RolloutRawResult"),
    "SharedMemoryExecutionStrategy": _ONE_WAY,
    "Task": _OLD_RECORD.format("Rollout"),
    "TaskIfAny": _OLD_RECORD.format("LightningStore.dequeue_rollout, which may return None"),
    "TripletExporter": "use adapter={'agent_match': …}",
    "lightning_cli": "write the options with argparse, and hand them to Trainer",
}
"""Name → what to use."""
