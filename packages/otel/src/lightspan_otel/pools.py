"""Let work that is submitted to a pool belong to the agent that OpenTelemetry's spans name.

OpenTelemetry's current span is not current in a pool's thread, unless the app runs the work in a
copy of its context. Even a copy lacks the span of an agent that streams, if its items are taken in
another thread than the first (`open_spans.open_span_in`). So the submitting span is stored in a
variable of the work's context. It counts where no other span is current.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial, wraps
from typing import Any, Final

from lightspan.capture.patch import Patch
from lightspan_otel.agent_names import Role
from lightspan_otel.open_spans import OpenSpan, open_here, submitted_in

_patches: Final[list[Patch]] = []


def install() -> None:
    """Patch `ThreadPoolExecutor.submit`. Idempotent."""
    if not _patches:
        original = ThreadPoolExecutor.submit
        _patches.append(Patch(ThreadPoolExecutor, "submit", partial(_submit, original)))


def uninstall() -> None:
    """Undo `install`."""
    while _patches:
        _patches.pop().undo()


def _submit(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    @wraps(original)
    def submit(self: Any, *args: Any, **kwargs: Any) -> Any:
        spans = open_here() if patch.on and args else ()
        if any(each.is_node or each.role is Role.WORKFLOW for each in spans):
            args = (_inside_of(spans[0], args[0]), *args[1:])
        return original(self, *args, **kwargs)

    return submit


def _inside_of(open_span: OpenSpan, func: Any) -> Any:
    """Return a function that calls `func` inside a span, in any thread.

    Args:
        open_span: state of the span.
        func: the function. If it is the `run` of a context that the app has copied, or a partial
            of it, the span is stored in that context, which replaces the context of the thread.
    """
    own = _context_of(func)
    if own is None:
        return partial(_run, open_span, func)
    try:
        own.run(submitted_in.set, open_span)
    except RuntimeError:  # the context is entered: it is no copy for this work
        return partial(_run, open_span, func)
    return func


def _context_of(func: Any) -> Context | None:
    parts = [func]
    for part in parts:
        if isinstance(part, partial):
            parts += [part.func, *part.args]
        elif isinstance(own := getattr(part, "__self__", None), Context):
            return own
    return None


def _run(open_span: OpenSpan, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = submitted_in.set(open_span)
    try:
        return func(*args, **kwargs)
    finally:
        submitted_in.reset(token)
