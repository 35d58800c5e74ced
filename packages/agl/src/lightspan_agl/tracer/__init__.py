"""Tracers. They record nothing, because lightspan records every agent itself."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, Final

from lightspan.capture.context import current_context
from lightspan.errors import UnsupportedError
from lightspan.progress import print_line
from lightspan.schema.spans import Span
from lightspan_agl._unsupported import TRACER, refuse_names as _refuse_names

__all__ = ["AgentOpsTracer", "OtelTracer", "Tracer"]
__getattr__ = _refuse_names(__name__)

log = logging.getLogger(__name__)


class Tracer:
    """The class of `LitAgent.tracer`. It records nothing, because lightspan records by itself."""

    _last_trace: Sequence[Span] = ()

    def get_last_trace(self) -> list[Span]:
        """Return the spans that the current rollout has recorded so far.

        In `Hook.on_trace_end` they are all spans of the agent. Outside a rollout, return the spans
        of the last rollout with this tracer that has ended; empty if there is none.
        """
        current = current_context()
        return list(self._last_trace) if current is None else current.scope.recorder.spans

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
    """A `Tracer`, under another name of Agent Lightning."""


class AgentOpsTracer(Tracer):
    """A `Tracer`, under another name of Agent Lightning. Nothing of AgentOps is used.

    Args:
        options: options of Agent Lightning, such as `agentops_managed`; without effect, and named
            in a line.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if options:
            names = ", ".join(f"{name}={value!r}" for name, value in options.items())
            print_line(f"AgentOpsTracer: without effect: {names} (nothing of AgentOps is used)")


_METHODS: Final = (
    *("create_span", "init", "init_worker", "lifespan", "operation_context", "teardown"),
    *("teardown_worker", "trace_context", "trace_run", "trace_run_async"),
)
"""Methods of Agent Lightning's tracers that lightspan never calls."""


def check_tracer(tracer: Any, owner: str) -> Tracer:
    """Return `tracer`, or a new `Tracer` for None.

    Args:
        tracer: a `Tracer`, an instance of a subclass, or None.
        owner: name of the class that takes the tracer, for the error message.

    Raises:
        UnsupportedError: `tracer` is no `Tracer`, or its class overrides a method that lightspan
            never calls.
    """
    if tracer is None:
        return Tracer()
    if not isinstance(tracer, Tracer):
        raise UnsupportedError(
            f"{owner}(tracer={tracer!r:.100}): use an instance of a subclass of "
            f"lightspan_agl.Tracer, or {TRACER}"
        )
    methods = [name for name in _METHODS if hasattr(tracer, name)]
    if methods:
        raise UnsupportedError(
            f"{owner}(tracer={type(tracer).__qualname__}(…)): {', '.join(methods)} would "
            "never be called, because lightspan records by itself. Read spans by get_last_trace() "
            "in Hook.on_trace_end, or with InMemoryLightningStore.query_spans"
        )
    return tracer
