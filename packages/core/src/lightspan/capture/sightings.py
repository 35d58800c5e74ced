"""Sightings: what was seen in an attempt of frameworks, and of model calls that no SDK made.

They stand on the attempt's root span, as JSON, for `lightspan dev` to tell of. Nothing is guessed:
a framework is there because an agent of it acted, by an adapter or by a span of its
instrumentation; a request because it was sent.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from lightspan.schema import conventions as c
from lightspan.schema.origins import Framework, Request
from lightspan.schema.spans import Attributes, Span, SpanKind

MOST: Final = 200
"""Different ones that are kept of an attempt: an app that makes up names would have no end."""


class Sightings:
    """Of one attempt; thread-safe."""

    def __init__(self) -> None:
        self._agents: dict[tuple[Framework, str], None] = {}
        self._requests: Counter[Request] = Counter()
        self._lock = threading.Lock()

    def agent(self, framework: Framework, path: str) -> None:
        """An agent of that framework acts."""
        with self._lock:
            if len(self._agents) < MOST:
                self._agents[framework, path] = None

    def span(self, framework: Framework, span: Span) -> None:
        """A span of that framework was recorded: whose agent it is, if it is one's."""
        if span.kind is SpanKind.AGENT:
            self.agent(framework, str(span.attributes.get(c.AGENT_PATH, "")))

    def request(self, request: Request) -> None:
        """A request was sent past the SDKs."""
        with self._lock:
            if len(self._requests) < MOST or request in self._requests:
                self._requests[request] += 1

    def attributes(self) -> Attributes:
        """What the attempt's root span says of them; nothing where nothing was seen."""
        with self._lock:
            agents = [(*framework, path) for framework, path in self._agents]
            requests = [(*request, count) for request, count in self._requests.items()]
        found: Attributes = {}
        if agents:
            found[c.FRAMEWORKS] = json.dumps(agents)
        if requests:
            found[c.REQUESTS_PAST] = json.dumps(requests)
        return found


# --- which framework ------------------------------------------------------------------------
_INSTRUMENTATIONS: Final = ("openinference.instrumentation.", "opentelemetry.instrumentation.")
_DISTRIBUTIONS: Final = {
    "agent_framework": ("agent-framework-core", "agent-framework"),
    "autogen_agentchat": ("autogen-agentchat",),
    "gcp.vertex.agent": ("google-adk",),
    "google_adk": ("google-adk",),
    "langchain": ("langgraph", "langchain-core"),
    "llama_index": ("llama-index-core",),
    "pydantic-ai": ("pydantic-ai", "pydantic-ai-slim"),
    "pydantic_ai": ("pydantic-ai", "pydantic-ai-slim"),
    "strands.telemetry.tracer": ("strands-agents",),
    "strands_agents": ("strands-agents",),
}
"""Instrumentation scope, or the end of its name → the distributions that it may be of."""


_HOOKED: Final = {"dspy": "dspy", "llama_index": "llama-index"}
"""Tracer of ours that a hook tells → what `otel.instrument` calls the framework."""


@lru_cache(maxsize=256)
def framework_of(library: str) -> Framework:
    """The framework whose spans have this instrumentation scope."""
    hooked = _HOOKED.get(library)
    told_by = f"spans of {library}" if hooked is None else f'otel.instrument("{hooked}")'
    short = library
    for prefix in _INSTRUMENTATIONS:
        short = short.removeprefix(prefix)
    for name in _DISTRIBUTIONS.get(short, (short.replace("_", "-"),)):
        found = _version(name)
        if found:
            return Framework(name, found, told_by)
    return Framework(library, "", told_by)


@lru_cache(maxsize=64)
def adapted(framework: str, adapter: str) -> Framework:
    """A framework that an adapter tells of.

    Args:
        framework: the name of its distribution.
        adapter: the adapter's.
    """
    return Framework(framework, _version(framework), adapter)


def _version(name: str) -> str:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # ValueError: a name that none can have
        return ""


__all__ = ["Sightings", "adapted", "framework_of"]
