"""The names of the original tutorial: its listing runs here with the import changed.

import lightspan.agl as agl               # was: import agentlightning as agl

`agl.LitAgent`, `agl.Trainer` with `fit` and `dev`, `agl.VERL(config)`, `agl.LLM`, the resource
`main_llm` and `emit_*` mean what they meant there. `agent_match` is a regular expression, here and
nowhere else in lightspan. What maps to what, and what is missing: `docs/from-agent-lightning.md`.

`_agents` and `_resources` are what an agent's code sees, with `_emit` and `_logs`. `_trainer` runs
it: `_verl` says what a configuration means here, `_algorithm` is LightningRL for an `agent_match`,
`_travel` brings an agent to the runners, and `_dev` tries one out with resources of its own.
"""

from __future__ import annotations

import dis
import sys
from typing import Any, Final

from lightspan.agl._agents import (
    FunctionalLitAgent,
    LitAgent,
    RolloutResult,
    Tracer,
    llm_rollout,
    prompt_rollout,
    rollout,
)
from lightspan.agl._emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
)
from lightspan.agl._logs import configure_logger, setup_logging
from lightspan.agl._resources import (
    LLM,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Resource,
    Rollout,
)
from lightspan.agl._trainer import Dataset, TracerTraceToTriplet, Trainer
from lightspan.agl._verl import VERL

__all__ = [
    "LLM",
    "VERL",
    "Attempt",
    "AttemptedRollout",
    "Dataset",
    "FunctionalLitAgent",
    "LitAgent",
    "NamedResources",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "Rollout",
    "RolloutResult",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "configure_logger",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
    "setup_logging",
]

_MISSING: Final = {
    "APO": "prompt optimisation is not there yet",
    "Algorithm": "write one against lightspan.algorithms.Algorithm",
    "AgentLightningClient": "the client of 0.1 is not there",
    "AgentLightningServer": "the server of 0.1 is not there",
    "AgentOpsTracer": "leave tracer= out: lightspan records calls itself",
    "Baseline": "call Trainer.dev without an algorithm",
    "Hook": "do it in the agent's rollout, before and after the work",
    "InMemoryLightningStore": "leave store= out: it is a SQLite file in the run's folder",
    "LLMProxy": "leave llm_proxy= out: lightspan's gateway serves main_llm",
    "LightningStore": "leave store= out: it is a SQLite file in the run's folder",
    "LitAgentRunner": "use Trainer.dev to run an agent without training",
    "LlmProxyTraceToTriplet": "use adapter={'agent_match': …}",
    "OtelTracer": "leave tracer= out: lightspan records calls itself",
    "TraceToMessages": "`lightspan export` writes chat messages",
    "TripletExporter": "use adapter={'agent_match': …}",
    "algo": "write an algorithm against lightspan.algorithms.Algorithm",
    "find_final_reward": "`lightspan inspect` shows rewards",
    "operation": "use lightspan.operation",
}


def __getattr__(name: str) -> Any:
    why = f": {_MISSING[name]}" if name in _MISSING else ""
    asked_by = sys._getframe(1)
    # `from lightspan.agl import name` shows no AttributeError's message
    if asked_by.f_code.co_code[asked_by.f_lasti] == dis.opmap["IMPORT_FROM"]:
        raise ImportError(f"lightspan.agl has no {name!r}{why}", name=name)
    raise AttributeError(f"module 'lightspan.agl' has no attribute {name!r}{why}")
