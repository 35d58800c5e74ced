"""Tracers without function: lightspan records every agent itself."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["AgentOpsTracer", "OtelTracer", "Tracer"]
__getattr__ = _refuse_names(__name__)

log = logging.getLogger(__name__)


class Tracer:
    """The class of `LitAgent.tracer`. It records nothing, because lightspan records by itself."""

    def get_langchain_handler(self, tags: list[str] | None = None) -> Any | None:
        """Return a LangChain callback handler; None if `lightspan-langgraph` is not installed.

        Args:
            tags: ignored; agents are named by the nodes of the graph.
        """
        if importlib.util.find_spec("lightspan_langgraph") is None:
            log.warning(
                "lightspan-langgraph is not installed: model calls of LangGraph nodes have no "
                "agent name for agent_match"
            )
            return None
        return importlib.import_module("lightspan_langgraph").LightspanCallback()


class OtelTracer(Tracer):
    """`Tracer` under another name."""


class AgentOpsTracer(Tracer):
    """`Tracer` under another name; nothing of AgentOps is used."""
