"""Keep rollouts out of the SDK's default processor, which uploads traces to OpenAI.

The app's own processors still get everything, and outside rollouts nothing changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agents.tracing import Span, Trace, TraceProvider, TracingProcessor, processors

from lightspan.instrumentation import current_context


class _OutsideRollouts(TracingProcessor):
    """A wrapper of the SDK's uploading processor that ignores traces and spans of rollouts.

    Other traces are passed on, such as those of an app in production.
    """

    def __init__(self, default: TracingProcessor) -> None:
        self.default = default

    def on_trace_start(self, trace: Trace) -> None:
        if not _in_rollout():
            self.default.on_trace_start(trace)

    def on_trace_end(self, trace: Trace) -> None:
        if not _in_rollout():
            self.default.on_trace_end(trace)

    def on_span_start(self, span: Span[Any]) -> None:
        if not _in_rollout():
            self.default.on_span_start(span)

    def on_span_end(self, span: Span[Any]) -> None:
        if not _in_rollout():
            self.default.on_span_end(span)

    def shutdown(self, timeout: float | None = None) -> None:
        if "timeout" in inspect.signature(self.default.shutdown).parameters:
            self.default.shutdown(timeout=timeout)  # type: ignore[call-arg]
        else:
            self.default.shutdown()

    def force_flush(self) -> None:
        self.default.force_flush()


def _in_rollout() -> bool:
    current = current_context()
    return current is not None and current.scope.is_rollout


def without_upload(processor: TracingProcessor) -> TracingProcessor:
    """Wrap the SDK's default processor, so that it uploads no rollouts.

    Any other processor is returned unchanged.
    """
    default = getattr(processors, "_global_processor", None)
    return _OutsideRollouts(processor) if processor is default else processor


def with_upload(processor: TracingProcessor) -> TracingProcessor:
    """Undo `without_upload`, and return the wrapped processor.

    A processor that is not wrapped is returned unchanged.
    """
    return processor.default if isinstance(processor, _OutsideRollouts) else processor


def exchange_default(
    provider: TraceProvider | None, change: Callable[[TracingProcessor], TracingProcessor]
) -> None:
    """Apply `change` to every processor of the SDK's own provider; replace those that it changes.

    For any other provider, and for None, nothing is done: they have no default processor.
    """
    current = getattr(getattr(provider, "_multi_processor", None), "_processors", None)
    if provider is None or current is None:
        return
    changed = [change(processor) for processor in current]
    if any(new is not old for new, old in zip(changed, current, strict=True)):
        provider.set_processors(changed)
