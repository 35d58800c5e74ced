"""Frameworks that `otel.instrument` knows by name: how each is made to tell who acts.

What they tell goes to a provider of ours (`tracer`), so that no exporter of the app's gets a span
more than before. A framework whose telemetry is on already is left as it is: its spans are heard
where they go.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import Span, Tracer

from lightspan.capture.patch import Patch
from lightspan.errors import ConfigError
from lightspan.otel.processor import hear_global
from lightspan.otel.tracer import PROVIDER


class Switch(NamedTuple):
    """What was done to a framework."""

    is_ours: Callable[[], bool]
    """Whether it tells ours now, and not a provider of the app's."""
    undo: Callable[[], None]
    """Leaves it as it was."""


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


def _pydantic_ai(framework: Any, instrumented: Any) -> Switch:
    agents = framework.Agent
    before = agents._instrument_default
    if before:
        return _LEFT_ALONE
    ours = instrumented.InstrumentationSettings(
        tracer_provider=PROVIDER, meter_provider=NoOpMeterProvider(), include_content=False
    )
    agents.instrument_all(ours)

    def is_ours() -> bool:
        return agents._instrument_default is ours

    return Switch(is_ours, lambda: agents.instrument_all(before) if is_ours() else None)


def _openinference(framework: str, instrumentor: str, needs: str) -> Framework:
    """One that OpenInference instruments.

    Args:
        framework: the last part of the name of its instrumentation's module.
        instrumentor: the name of its class.
        needs: what pip is told to install.
    """

    def switch_on(instrumentation: Any, openinference: Any) -> Switch:
        found = getattr(instrumentation, instrumentor)()
        if found.is_instrumented_by_opentelemetry:
            return _LEFT_ALONE
        names = [field.name for field in fields(openinference.TraceConfig)]
        hidden = {name: True for name in names if name.startswith("hide_")}
        found.instrument(tracer_provider=PROVIDER, config=openinference.TraceConfig(**hidden))
        return Switch(lambda: True, found.uninstrument)

    module = f"openinference.instrumentation.{framework}"
    return Framework((module, "openinference.instrumentation"), needs, switch_on)


def _strands(telemetry: Any) -> Switch:
    """Its one tracer keeps the provider that was the global one when it was made, if any."""
    tracer = telemetry.get_tracer()
    if hear_global() is not None:
        return _LEFT_ALONE
    before, ours = tracer.tracer, PROVIDER.get_tracer(tracer.service_name)
    tracer.tracer = ours

    def is_ours() -> bool:
        return tracer.tracer is ours

    return Switch(is_ours, lambda: setattr(tracer, "tracer", before) if is_ours() else None)


def _agent_framework(observability: Any) -> Switch:
    """It asks for the global provider's tracer at each span: the app's, whenever that is set."""

    def ours(original: Any, patch: Patch) -> Any:
        def get_tracer(*names: Any, **more: Any) -> Any:
            if not patch.on or hear_global() is not None:
                return original(*names, **more)
            return PROVIDER.get_tracer("agent_framework")

        return get_tracer

    patch = Patch(observability, "get_tracer", partial(ours, observability.get_tracer))
    return Switch(lambda: hear_global() is None, patch.undo)


class _Following(Tracer):
    """A tracer of the app's global provider, whenever that is set; of ours until then."""

    def __init__(self, original: Tracer, name: str) -> None:
        self._original, self._ours = original, PROVIDER.get_tracer(name)

    def _now(self) -> Tracer:
        return self._ours if hear_global() is None else self._original

    def start_span(self, *args: Any, **more: Any) -> Span:
        return self._now().start_span(*args, **more)

    def start_as_current_span(self, *args: Any, **more: Any) -> Any:
        return self._now().start_as_current_span(*args, **more)


def _google_adk(*modules: Any) -> Switch:
    """Its modules have a tracer of the global provider each."""
    patches = []
    for module in modules:
        following = _Following(module.tracer, "gcp.vertex.agent")
        patches.append(Patch(module, "tracer", partial(_in_place, following)))

    def undo() -> None:
        for patch in patches:
            patch.undo()

    return Switch(lambda: hear_global() is None, undo)


def _in_place(ours: Any, patch: Patch) -> Any:
    return ours


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
}
