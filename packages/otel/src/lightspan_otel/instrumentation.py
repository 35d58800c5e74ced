"""`otel.instrument`, and `otel.uninstrument`, which undoes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.trace import TracerProvider

from lightspan.capture import context
from lightspan.capture.adapter import Instrumentation
from lightspan.errors import ConfigError
from lightspan.production import record
from lightspan_otel import llm_spans, resolver
from lightspan_otel.frameworks import switch_on
from lightspan_otel.open_spans import NAME
from lightspan_otel.processor import (
    AgentSpanProcessor,
    accepts_processors,
    observe,
    observe_requested,
    processors,
)


class _Undo(NamedTuple):
    """A function that undoes one change made by `instrument`."""

    key: Any
    """Framework name, processor, or (processor, `llm_spans`) where content is recorded."""
    off: Callable[[], None]


_undos: Final[dict[Any, _Undo]] = {}
"""Key → undo."""
_lock: Final = threading.RLock()


def instrument(what: str | TracerProvider, *, content: bool = False) -> Instrumentation:
    """Identify the current agent by OpenTelemetry's spans, in this process. Idempotent.

    Only names, ids and kinds are read from spans, unless `content` is set. Nothing is sent:
    exporters get the same spans as before. If `what` is a framework's name, the current span inside
    an agent may be lightspan's own. Anything that the app writes to it is lost
    (`docs/explain/telemetry.md`, Limits). As a context manager (`with instrument(…):`) it
    is undone at the end of the block.

    Args:
        what: name of a framework, such as `"pydantic-ai"`, or the TracerProvider to which the app's
            framework sends its spans. The telemetry of a named framework is switched on for
            lightspan alone, unless the app has switched it on. For a named framework, the global
            provider's spans are read too, as soon as the app sets that provider.
        content: whether to record also the content of spans, in production (`lightspan.record`):
            the inputs and outputs of tools and agents, and the messages of model calls that
            lightspan does not record otherwise. Only valid with a TracerProvider.

    Raises:
        ConfigError: the framework's name is unknown, it is not installed, the provider is not one
            of OpenTelemetry's SDK, or `content` is given with a framework's name.
    """
    if content and isinstance(what, str):
        raise ConfigError(
            f"otel.instrument({what!r}, content=True): content needs the TracerProvider to which "
            f"the framework's spans go, not its name: otel.instrument(provider, content=True)"
        )
    with _lock:
        new = [_by_name(what)] if isinstance(what, str) else _by_provider(what, content=content)
        undos = [undo for undo in new if undo is not None]
        if not undos:
            return Instrumentation(None)
        for undo in undos:
            _undos[undo.key] = undo
        resolver.install()
        record.hold(NAME)
        return Instrumentation(partial(_undo_all, undos))


def _by_name(name: str) -> _Undo | None:
    if name in _undos:
        return None
    switch = switch_on(name)
    resolver.switches[name] = switch

    def off() -> None:
        resolver.switches.pop(name, None)
        switch.undo()

    try:
        # the app may switch the framework on itself later: read the global provider's spans too
        observe_requested(with_global=True)
    except Exception:  # the global provider rejects processors
        off()
        observe_requested(with_global=bool(resolver.switches))
        raise
    return _Undo(name, off)


def _by_provider(provider: Any, *, content: bool) -> list[_Undo | None]:
    if not accepts_processors(provider):
        raise ConfigError(
            f"otel.instrument({provider!r}): give the name of a framework or a TracerProvider of "
            "OpenTelemetry's SDK"
        )
    processor = observe(provider)
    processor.is_requested = True
    read = _with_content(processor) if content else None
    if processor in _undos:
        return [read]

    def off() -> None:
        processor.is_requested = (processor, llm_spans) in _undos

    return [read, _Undo(processor, off)]


def _with_content(processor: AgentSpanProcessor) -> _Undo | None:
    if (processor, llm_spans) in _undos:
        return None
    processor.records_content = True
    context.add_call_listener(llm_spans.note_call)

    def off() -> None:
        processor.is_requested = processor in _undos
        processor.records_content = False
        if not any(one.records_content for one in processors()):
            context.remove_call_listener(llm_spans.note_call)

    return _Undo((processor, llm_spans), off)


def uninstrument() -> None:
    """Undo every `instrument` and restore the frameworks."""
    with _lock:
        _undo_all(list(_undos.values()))


def _undo_all(undos: Sequence[_Undo]) -> None:
    for undo in undos:
        _undo(undo)


def _undo(undo: _Undo) -> None:
    with _lock:
        if _undos.get(undo.key) is not undo:
            return  # undone already, and possibly redone by another caller
        del _undos[undo.key]
        try:
            undo.off()
        finally:
            observe_requested(with_global=bool(resolver.switches))
        if _undos:
            return
        resolver.uninstall()
    record.release(NAME)
