"""`otel.instrument`: what is changed for it, and given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

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
    can_be_heard,
    hear,
    hear_what_is_asked_for,
    processors,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Undo:
    """One `instrument`."""

    key: Any
    """The name of a framework, a processor, or a processor whose spans' content is read."""
    off: Callable[[], None]


@dataclass(slots=True)
class _State:
    """Of this process."""

    undo: dict[Any, _Undo] = field(default_factory=dict)
    """By their keys."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


def instrument(what: str | TracerProvider, *, content: bool = False) -> Instrumentation:
    """Read who acts from OpenTelemetry's spans, in this process; twice is once.

    Their names, ids and kinds are read, and no prompt. Nothing is sent anywhere: exporters get
    the spans that they got before, and no other. By a framework's name, what the app writes on the
    *current* span inside an agent is lost where that is a span of ours (`docs/otel.md`, Limits).
    As a context manager (`with instrument(…):`) it is undone at the end of the block.

    Args:
        what: a framework, such as `"pydantic-ai"`, whose telemetry is then on for us alone, unless
            the app has switched it on; spans of its global provider are heard, whenever it is
            set. Or the app's own TracerProvider, to which the spans of any framework go.
        content: of a provider: in production (`lightspan.record`), keep what its spans say, too:
            model calls that nobody else records, with their messages, and what tools and agents
            were given and gave back.

    Raises:
        ConfigError: no framework is known by that name, it is not installed, the provider is none
            of OpenTelemetry's SDK, or content is wanted of a framework.
    """
    if content and isinstance(what, str):
        raise ConfigError(
            f"otel.instrument({what!r}, content=True): by its name a framework's telemetry is on "
            "without content; give the TracerProvider to which its spans go"
        )
    with _state.lock:
        made = [_by_name(what)] if isinstance(what, str) else _by_provider(what, content=content)
        undos = [undo for undo in made if undo is not None]
        if not undos:
            return Instrumentation(None)
        for undo in undos:
            _state.undo[undo.key] = undo
        resolver.install()
        record.hold(NAME)
        return Instrumentation(partial(_undo_all, undos))


def _by_name(name: str) -> _Undo | None:
    if name in _state.undo:
        return None
    switch = switch_on(name)
    resolver.switches[name] = switch

    def off() -> None:
        resolver.switches.pop(name, None)
        switch.undo()

    try:
        # as long as it lasts, where the app tells it of the framework itself
        hear_what_is_asked_for(and_global=True)
    except Exception:  # it takes no processor
        off()
        hear_what_is_asked_for(and_global=bool(resolver.switches))
        raise
    return _Undo(name, off)


def _by_provider(provider: Any, *, content: bool) -> list[_Undo | None]:
    if not can_be_heard(provider):
        raise ConfigError(
            f"otel.instrument({provider!r}): it takes the name of a framework, or a TracerProvider "
            "of OpenTelemetry's SDK, to which the spans of one go"
        )
    processor = hear(provider)
    processor.is_asked_for = True
    read = _with_content(processor) if content else None
    if processor in _state.undo:
        return [read]

    def off() -> None:
        processor.is_asked_for = (processor, llm_spans) in _state.undo

    return [read, _Undo(processor, off)]


def _with_content(processor: AgentSpanProcessor) -> _Undo | None:
    if (processor, llm_spans) in _state.undo:
        return None
    processor.reader = llm_spans
    context.add_call_listener(llm_spans.note_call)

    def off() -> None:
        processor.is_asked_for = processor in _state.undo
        processor.reader = None
        if all(each.reader is None for each in processors()):
            context.remove_call_listener(llm_spans.note_call)

    return _Undo((processor, llm_spans), off)


def uninstrument() -> None:
    """Undo every `instrument`; frameworks are left as they were."""
    with _state.lock:
        _undo_all(list(_state.undo.values()))


def _undo_all(undos: Sequence[_Undo]) -> None:
    for undo in undos:
        _undo(undo)


def _undo(undo: _Undo) -> None:
    with _state.lock:
        if _state.undo.get(undo.key) is not undo:
            return  # it was undone, and may have been done again by somebody else
        del _state.undo[undo.key]
        try:
            undo.off()
        finally:
            hear_what_is_asked_for(and_global=bool(resolver.switches))
        if _state.undo:
            return
        resolver.uninstall()
    record.release(NAME)
