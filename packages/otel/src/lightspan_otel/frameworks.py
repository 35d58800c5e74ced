"""Frameworks that `otel.instrument` knows by name: how each is made to tell who acts.

What they tell goes to a provider of ours (`tracer`), so that no exporter of the app's gets a span
more than before. A framework whose telemetry is on already is left as it is: its spans are heard
where they go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracer, ProxyTracer, ProxyTracerProvider, Span, Tracer

from lightspan.capture.patch import Patch
from lightspan.errors import ConfigError
from lightspan_otel import framework_patches
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_otel.processor import global_provider


class Switch(NamedTuple):
    """What was done to a framework."""

    is_ours: Callable[[], bool]
    """Whether it tells ours now, and not a provider of the app's."""
    undo: Callable[[], None]
    """Leaves it as it was."""
    library: str = ""
    """The scope of its spans, where some may go elsewhere though `is_ours`."""


class Framework(NamedTuple):
    """One that is known by name."""

    modules: tuple[str, ...]
    """What has to be there."""
    install: str
    """What pip is told for that."""
    switch_on: Callable[..., Switch]
    """Given the modules, has it tell ours."""


def switch_on(name: str) -> Switch:
    """Have a framework tell who acts.

    Raises:
        ConfigError: it is not known by name, or not installed.
    """
    known = FRAMEWORKS.get(name)
    if known is None:
        raise ConfigError(
            f"otel.instrument({name!r}): known by name are {', '.join(map(repr, FRAMEWORKS))}; of "
            "any other framework whose spans name its agents, give the TracerProvider that they go "
            "to: otel.instrument(provider)"
        )
    try:
        modules = [importlib.import_module(module) for module in known.modules]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otel.instrument({name!r}) needs {error.name!r}: pip install {known.install}"
        ) from error
    return known.switch_on(*modules)


_LEFT_ALONE: Final = Switch(lambda: False, lambda: None)
"""Of one that tells a provider of the app's already."""


class _Following(Tracer):
    """A tracer of the app's global provider, whenever that is set; of ours until then."""

    def __init__(self, original: Tracer, name: str) -> None:
        self._original, self._ours = original, PROVIDER.get_tracer(name)

    def _now(self) -> Tracer:
        return self._ours if global_provider() is None else self._original

    def start_span(self, *args: Any, **more: Any) -> Span:
        return self._now().start_span(*args, **more)

    def start_as_current_span(self, *args: Any, **more: Any) -> Any:
        return self._now().start_as_current_span(*args, **more)


def _tells_nobody(tracer: object) -> bool:
    """Whether it is one of the global provider's, while that is not set: the app switched its
    framework on, and nobody hears of it."""
    return global_provider() is None and isinstance(tracer, ProxyTracer | NoOpTracer)


def _following(owner: Any, name: str, library: str) -> Switch:
    """Have a framework tell ours until the app sets the global provider.

    Args:
        owner: what has its tracer.
        name: the attribute of it.
        library: the name of the tracer.
    """
    before = getattr(owner, name)
    ours = _Following(before, library)
    setattr(owner, name, ours)

    def is_in_place() -> bool:
        return getattr(owner, name) is ours

    return Switch(
        lambda: is_in_place() and global_provider() is None,
        lambda: setattr(owner, name, before) if is_in_place() else None,
    )


def _pydantic_ai(framework: Any, instrumented: Any) -> Switch:
    agents, make = framework.Agent, instrumented.InstrumentationSettings
    before = agents._instrument_default
    follows = (
        global_provider() is None if before is True else before and _tells_nobody(before.tracer)
    )
    if not before:
        ours = make(
            tracer_provider=PROVIDER, meter_provider=NoOpMeterProvider(), include_content=False
        )
    elif not follows:
        return _LEFT_ALONE
    else:  # what the app chose, but for whom it tells
        ours = make(tracer_provider=ProxyTracerProvider()) if before is True else copy(before)
        ours.tracer = _Following(ours.tracer, "pydantic-ai")
    agents.instrument_all(ours)

    def is_in_place() -> bool:
        return agents._instrument_default is ours

    return Switch(
        lambda: is_in_place() and (not follows or global_provider() is None),
        lambda: agents.instrument_all(before) if is_in_place() else None,
        "pydantic-ai",  # an agent may have settings of its own
    )


def _openinference(framework: str, instrumentor: str, needs: str) -> Framework:
    """One that OpenInference instruments.

    Args:
        framework: the last part of the name of its instrumentation's module.
        instrumentor: the name of its class.
        needs: what pip is told to install.
    """
    module = f"openinference.instrumentation.{framework}"

    def switch_on(instrumentation: Any, openinference: Any) -> Switch:
        found = getattr(instrumentation, instrumentor)()
        if found.is_instrumented_by_opentelemetry:
            its = getattr(found, "_tracer", None)  # a proxy of the tracer
            tells_nobody = _tells_nobody(getattr(its, "__wrapped__", None))
            return _following(its, "__wrapped__", module) if tells_nobody else _LEFT_ALONE
        names = [field.name for field in fields(openinference.TraceConfig)]
        hidden = {name: True for name in names if name.startswith("hide_")}
        found.instrument(tracer_provider=PROVIDER, config=openinference.TraceConfig(**hidden))
        ours = getattr(found, "_tracer", None)

        def is_ours() -> bool:
            """Not where the app took it off, nor where it put it on itself since."""
            is_on = found.is_instrumented_by_opentelemetry
            return bool(is_on) and getattr(found, "_tracer", None) is ours

        return Switch(is_ours, lambda: found.uninstrument() if is_ours() else None)

    return Framework((module, "openinference.instrumentation"), needs, switch_on)


def _strands(telemetry: Any) -> Switch:
    """Its one tracer keeps the provider that was the global one when it was made, if any."""
    tracer = telemetry.get_tracer()
    if global_provider() is not None:
        return _LEFT_ALONE
    return _following(tracer, "tracer", tracer.service_name)


def _agent_framework(observability: Any) -> Switch:
    """It asks for the global provider's tracer at each span: the app's, whenever that is set."""

    def ours(original: Any, patch: Patch) -> Any:
        def get_tracer(*names: Any, **more: Any) -> Any:
            if not patch.on or global_provider() is not None:
                return original(*names, **more)
            return PROVIDER.get_tracer("agent_framework")

        return get_tracer

    patch = Patch(observability, "get_tracer", partial(ours, observability.get_tracer))
    return Switch(lambda: global_provider() is None, patch.undo)


def _google_adk(*modules: Any) -> Switch:
    """Its modules have a tracer of the global provider each."""
    patches = []
    for module in modules:
        following = _Following(module.tracer, "gcp.vertex.agent")
        patches.append(Patch(module, "tracer", partial(_in_place, following)))

    def undo() -> None:
        for patch in patches:
            patch.undo()

    return Switch(lambda: global_provider() is None, undo)


def _in_place(ours: Any, patch: Patch) -> Any:
    return ours


def _told_by(hook: Callable[..., Callable[[], None]]) -> Callable[..., Switch]:
    """One whose spans name no agent: its calls are heard, and told ours."""

    def switch_on(*modules: Any) -> Switch:
        return Switch(lambda: True, hook(*modules))

    return switch_on


FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "pydantic-ai": Framework(
        ("pydantic_ai", "pydantic_ai.models.instrumented"), "pydantic-ai", _pydantic_ai
    ),
    "smolagents": _openinference(
        "smolagents",
        "SmolagentsInstrumentor",
        "smolagents openinference-instrumentation-smolagents",
    ),
    "agno": _openinference("agno", "AgnoInstrumentor", "agno openinference-instrumentation-agno"),
    "strands-agents": Framework(("strands.telemetry.tracer",), "strands-agents", _strands),
    "google-adk": Framework(
        ("google.adk.telemetry.tracing", "google.adk.telemetry.node_tracing"),
        "google-adk",
        _google_adk,
    ),
    "agent-framework": Framework(
        ("agent_framework.observability",), "agent-framework", _agent_framework
    ),
    "llama-index": Framework(
        ("llama_index.core.agent.workflow", "workflows.workflow", "llama_index_instrumentation"),
        "llama-index-core",
        _told_by(framework_patches.llama_index),
    ),
    "dspy": Framework(("dspy",), "dspy", _told_by(framework_patches.dspy)),
}
