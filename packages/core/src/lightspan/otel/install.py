"""`otel.instrument`: what is changed for it, and given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from opentelemetry.sdk.trace import TracerProvider

from lightspan.capture.adapter import Instrumentation
from lightspan.errors import ConfigError, short_tracebacks
from lightspan.otel import resolver
from lightspan.otel.frameworks import switch_on
from lightspan.otel.notes import NAME
from lightspan.otel.processor import AgentSpanProcessor, hear, hear_global, processors
from lightspan.production import record


@dataclass(slots=True)
class _State:
    """Of this process."""

    undo: dict[Any, Callable[[], None]] = field(default_factory=dict)
    """The name of a framework, or a processor → what undoes it."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


@short_tracebacks
def instrument(what: str | TracerProvider) -> Instrumentation:
    """Read who acts from OpenTelemetry's spans, in this process; twice is once.

    Their names, ids and kinds are read, and no prompt. Nothing is sent anywhere: exporters get
    the spans that they got before, unchanged. As a context manager (`with instrument(…):`) it
    is undone at the end of the block.

    Args:
        what: a framework, such as `"pydantic-ai"`, whose telemetry is then on for us alone, unless
            the app has switched it on; spans of its global provider are heard then, whenever it is
            set. Or the app's own TracerProvider, to which the spans of any framework go.

    Raises:
        ConfigError: no framework is known by that name, it is not installed, or the provider is
            none of OpenTelemetry's SDK.
    """
    with _state.lock:
        if isinstance(what, str):
            key: Any = what
            if key in _state.undo:
                return Instrumentation(None)
            resolver.switches[what] = switch = switch_on(what)
            _state.undo[key] = switch.undo
            hear_global()  # as long as it lasts, where the app tells it of the framework itself
        elif callable(getattr(what, "add_span_processor", None)):
            key = hear(what)
            if key in _state.undo:
                return Instrumentation(None)
            key.is_asked_for = True
            _state.undo[key] = partial(_hear_no_more, key)
        else:
            raise ConfigError(
                f"otel.instrument({what!r}): it takes the name of a framework, or a TracerProvider "
                "of OpenTelemetry's SDK, to which the spans of one go"
            )
        resolver.install()
        record.hold(NAME)
        return Instrumentation(partial(_undo, key))


def uninstrument() -> None:
    """Undo every `instrument`; frameworks are left as they were."""
    with _state.lock:
        for key in list(_state.undo):
            _undo(key)


def _hear_no_more(processor: AgentSpanProcessor) -> None:
    processor.on = processor.is_asked_for = False


def _undo(key: Any) -> None:
    with _state.lock:
        undo = _state.undo.pop(key, None)
        if undo is not None:
            resolver.switches.pop(key, None)
            undo()
        if _state.undo:
            return
        resolver.uninstall()
        for processor in processors():  # the global provider's, too
            _hear_no_more(processor)
    record.release(NAME)
