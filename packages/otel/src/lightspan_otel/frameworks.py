"""Frameworks that `otel.instrument` supports by name, and how their telemetry is switched on.

Their spans go to our private provider (`identity_tracer`), so the app's exporters get no additional
spans. If the app has switched a framework's telemetry on, the framework is left unchanged. Its
spans are then read in the app's provider.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracer, ProxyTracer, ProxyTracerProvider, Span, Tracer

from lightspan.capture.adapter import require_framework
from lightspan.capture.patch import Patch
from lightspan.errors import ConfigError
from lightspan_otel import framework_patches
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_otel.processor import global_provider


class Switch(NamedTuple):
    """The change that `instrument` has made to a framework."""

    is_ours: Callable[[], bool]
    """Return whether the framework's spans go to our provider rather than the app's."""
    undo: Callable[[], None]
    """Restore the framework."""
    library: str = ""
    """Instrumentation scope of the framework's spans if some of them may go to the app's provider
    while `is_ours()` is true; empty otherwise."""


class Framework(NamedTuple):
    """A framework that is supported by name."""

    modules: tuple[str, ...]
    """Modules to import."""
    floors: Mapping[str, str]
    """Distribution of the modules → oldest version that is supported."""
    switch_on: Callable[..., Switch]
    """Switch the framework's telemetry on; called with the imported modules."""


def switch_on(name: str) -> Switch:
    """Switch on a framework's telemetry for lightspan.

    Raises:
        ConfigError: the name is unknown, or the framework is not installed or too old.
    """
    framework = FRAMEWORKS.get(name)
    if framework is None:
        raise ConfigError(
            f"otel.instrument({name!r}): the supported names are "
            f"{', '.join(map(repr, FRAMEWORKS))}; for another framework whose spans name its "
            "agents, give the TracerProvider to which they go: otel.instrument(provider)"
        )
    installed: dict[str, str] = {}
    for distribution, floor in framework.floors.items():
        # without metadata, it is missing or a source tree in `sys.path`: the import shows which
        with contextlib.suppress(PackageNotFoundError):
            installed[distribution] = version(distribution)
            with require_framework("lightspan-otel", distribution, floor):
                pass
    try:
        modules = [importlib.import_module(module) for module in framework.modules]
    except ImportError as error:
        floors = framework.floors.items()
        missing = [f"'{key}>={floor}'" for key, floor in floors if key not in installed]
        if not missing:
            names = ", ".join(f"{key} {number}" for key, number in installed.items())
            raise ConfigError(
                f"otel.instrument({name!r}) does not support {names} ({error}): upgrade "
                f"lightspan-otel, or install older ones"
            ) from error
        raise ConfigError(
            f"otel.instrument({name!r}) needs {error.name or str(error)!r}: "
            f"pip install {' '.join(missing)}"
        ) from error
    return framework.switch_on(*modules)


_LEFT_ALONE: Final = Switch(lambda: False, lambda: None)
"""`Switch` of a framework that is not changed: its spans already go to the app's provider."""


class _Following(Tracer):
    """A tracer that passes calls to our provider's tracer until the app sets a global provider.

    From then on it passes calls to the original tracer.
    """

    def __init__(self, original: Tracer, name: str) -> None:
        self._original, self._ours = original, PROVIDER.get_tracer(name)

    def _now(self) -> Tracer:
        return self._ours if global_provider() is None else self._original

    def start_span(self, *args: Any, **more: Any) -> Span:
        return self._now().start_span(*args, **more)

    def start_as_current_span(self, *args: Any, **more: Any) -> Any:
        return self._now().start_as_current_span(*args, **more)


def _is_unset(tracer: object) -> bool:
    """Return whether spans of `tracer` go nowhere, because no global provider is set.

    This is the case if the app has switched its framework's telemetry on, and has not set the
    provider yet.
    """
    return global_provider() is None and isinstance(tracer, ProxyTracer | NoOpTracer)


def _following(owner: Any, name: str, library: str) -> Switch:
    """Replace a framework's tracer by one that uses our provider until the app sets a global one.

    Args:
        owner: object that holds the framework's tracer.
        name: attribute of `owner` with the tracer.
        library: instrumentation scope of the tracer.
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
    follows = global_provider() is None if before is True else before and _is_unset(before.tracer)
    if not before:
        ours = make(
            tracer_provider=PROVIDER, meter_provider=NoOpMeterProvider(), include_content=False
        )
    elif not follows:
        return _LEFT_ALONE
    else:  # keep the app's settings, replace the provider
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


def _openinference(framework: str, instrumentor: str, floors: Mapping[str, str]) -> Framework:
    """Build the entry of a framework that OpenInference instruments.

    Args:
        framework: last part of the instrumentation's module name.
        instrumentor: name of the instrumentor class in that module.
        floors: oldest supported version of the framework and of its instrumentation.
    """
    module = f"openinference.instrumentation.{framework}"

    def switch_on(instrumentation: Any, openinference: Any) -> Switch:
        instance = getattr(instrumentation, instrumentor)()
        if instance.is_instrumented_by_opentelemetry:
            tracer = getattr(instance, "_tracer", None)  # a proxy of the tracer
            is_unset = _is_unset(getattr(tracer, "__wrapped__", None))
            return _following(tracer, "__wrapped__", module) if is_unset else _LEFT_ALONE
        names = [field.name for field in fields(openinference.TraceConfig)]
        hidden = {name: True for name in names if name.startswith("hide_")}
        instance.instrument(tracer_provider=PROVIDER, config=openinference.TraceConfig(**hidden))
        ours = getattr(instance, "_tracer", None)

        def is_ours() -> bool:
            """Return whether the framework still has our instrumentation.

            The app may have removed or replaced it.
            """
            is_on = instance.is_instrumented_by_opentelemetry
            return bool(is_on) and getattr(instance, "_tracer", None) is ours

        return Switch(is_ours, lambda: instance.uninstrument() if is_ours() else None)

    return Framework((module, "openinference.instrumentation"), floors, switch_on)


def _strands(telemetry: Any) -> Switch:
    """Switch on telemetry of Strands.

    Strands has one tracer, which keeps the provider that was global when the tracer was created. If
    the app has set a global provider, nothing is changed.
    """
    tracer = telemetry.get_tracer()
    if global_provider() is not None:
        return _LEFT_ALONE
    return _following(tracer, "tracer", tracer.service_name)


def _agent_framework(observability: Any) -> Switch:
    """Switch on telemetry of Agent Framework.

    For each span, Agent Framework gets a tracer of the provider that is global at that time.
    """

    def ours(original: Any, patch: Patch) -> Any:
        def get_tracer(*names: Any, **more: Any) -> Any:
            if not patch.on or global_provider() is not None:
                return original(*names, **more)
            return PROVIDER.get_tracer("agent_framework")

        return get_tracer

    patch = Patch(observability, "get_tracer", partial(ours, observability.get_tracer))
    return Switch(lambda: global_provider() is None, patch.undo)


def _google_adk(*modules: Any) -> Switch:
    """Switch on Google ADK. Each module in `modules` holds a tracer of the global provider."""
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


def _patched_by(hook: Callable[..., Callable[[], None]]) -> Callable[..., Switch]:
    """Return a function `switch_on` for a framework that is patched by `hook`.

    `hook` takes the framework's modules, and returns a function that removes the patches.
    """

    def switch_on(*modules: Any) -> Switch:
        return Switch(lambda: True, hook(*modules))

    return switch_on


FRAMEWORKS: Final[Mapping[str, Framework]] = {
    "pydantic-ai": Framework(
        ("pydantic_ai", "pydantic_ai.models.instrumented"),
        {"pydantic-ai-slim": "2.0.0"},
        _pydantic_ai,
    ),
    "smolagents": _openinference(
        "smolagents",
        "SmolagentsInstrumentor",
        {"smolagents": "1.24.0", "openinference-instrumentation-smolagents": "0.1.43"},
    ),
    "agno": _openinference(
        "agno",
        "AgnoInstrumentor",
        {"agno": "3.0.0", "openinference-instrumentation-agno": "1.0.15"},
    ),
    "strands-agents": Framework(
        ("strands.telemetry.tracer",), {"strands-agents": "1.36.0"}, _strands
    ),
    "google-adk": Framework(
        ("google.adk.telemetry.tracing", "google.adk.telemetry.node_tracing"),
        {"google-adk": "2.13.0"},
        _google_adk,
    ),
    "agent-framework": Framework(
        ("agent_framework.observability",), {"agent-framework-core": "1.9.0"}, _agent_framework
    ),
    "llama-index": Framework(
        ("llama_index.core.agent.workflow", "workflows.workflow", "llama_index_instrumentation"),
        {"llama-index-core": "0.14.22"},
        _patched_by(framework_patches.llama_index),
    ),
    "dspy": Framework(("dspy",), {"dspy": "3.4.0"}, _patched_by(framework_patches.dspy)),
}
