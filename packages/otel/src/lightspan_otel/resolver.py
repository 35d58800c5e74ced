"""Determine the current agent from OpenTelemetry's open spans.

A frame is one entered agent. `lightspan.agent` and adapters add frames; the resolver adds a frame
for every open span of an agent. All frames are in the order in which their agents were entered.

Adapters (such as LangGraph's) have resolvers too. They take the result of this one, so it must run
first.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import get_current

from lightspan.capture import context
from lightspan.capture._globals import state
from lightspan.capture.adapter import add_capture_error
from lightspan.capture.context import AgentContext, Frame
from lightspan.capture.recorder import Recorder
from lightspan.schema.routing import AgentPaths
from lightspan_otel import pools
from lightspan_otel.frameworks import Switch
from lightspan_otel.open_spans import (
    NAME,
    OpenSpan,
    is_claimed,
    open_agents,
    open_here,
    open_span_of,
)
from lightspan_otel.processor import (
    accepts_processors,
    global_provider,
    is_from_observed_provider,
    observe_global,
    processors,
)

DISABLED: Final = "OTEL_SDK_DISABLED"
"""OpenTelemetry's variable; `true` disables its SDK."""

switches: Final[dict[str, Switch]] = {}
"""Framework name → switch, for each framework that is instrumented by name."""

_reported: Final[weakref.WeakSet[Recorder]] = weakref.WeakSet()
"""Recorders to which `note_call` has added its capture error."""


_paths: Final[dict[str, None]] = {}
"""Paths of agents that called a model, in order of the first call."""
_MAX_PATHS: Final = 1_000
"""Maximum number of paths: some apps generate names."""


# --- the current agent ----------------------------------------------------------------------
def resolve(acting: AgentContext) -> AgentContext | None:
    """Return the context `acting`, with the agents of the open spans around the caller.

    The result is None if there are no open spans, or if an error occurred.
    """
    try:
        _observe()
        spans = open_here()
        if not spans:
            return None
        return _with_agents(acting, spans)
    except Exception as error:
        add_capture_error(acting.scope.recorder, NAME, error)
        return None


def _observe() -> None:
    """Read the spans of the app's global provider once it is set, if a framework was named.

    The framework may send its spans to that provider.
    """
    if switches:
        observe_global()


def _with_agents(pushed: AgentContext, spans: Sequence[OpenSpan]) -> AgentContext:
    acting = _in_attempt(pushed, spans) if pushed.scope.is_outside else pushed
    own, parent = acting.frames, acting.parent_span_id
    places = {frame.span_id: place for place, frame in enumerate(own)}
    frames: list[Frame] = []
    consumed = 0
    for open_span in reversed(spans):
        if frames and open_span.began_outside and not acting.scope.is_outside:
            open_span.rebase(replace(acting, frames=tuple(frames), parent_span_id=parent))
        if not open_span.began_in(acting):
            continue
        open_span.settle(may_guess=True)
        if not open_span.is_node:
            continue
        upto = places.get(open_span.span_id, open_span.depth - 1) + 1
        frames += own[consumed:upto]
        consumed = max(consumed, upto)
        if open_span.frame is not None and open_span.span_id not in places:
            frames.append(open_span.frame)
        if (open_span.depth, open_span.pushed_span_id) == (
            len(pushed.frames),
            pushed.parent_span_id,
        ):
            parent = open_span.span_id  # nothing was pushed since
    frames += own[consumed:]
    return replace(acting, frames=tuple(frames), parent_span_id=parent)


def _in_attempt(acting: AgentContext, spans: Sequence[OpenSpan]) -> AgentContext:
    """Return the context `acting`, moved into the attempt of the open spans.

    The outermost span that belongs to an attempt, or may start one, determines the attempt. If
    there is no such span, `acting` is returned unchanged. Called only in production.

    Args:
        acting: context outside of attempts.
        spans: the open spans around the caller, innermost first.
    """
    for open_span in reversed(spans):
        open_span.settle(may_guess=True)
        open_span.open()
        inside = None if open_span.agent is None else open_span.agent.scope
        if inside is not None and not inside.is_outside and not inside.is_over:
            return replace(acting, scope=inside, parent_span_id=inside.root_span_id)
    return acting


# --- calls without a known agent ------------------------------------------------------------
def note_call(acting: AgentContext) -> None:
    """Add a capture error if the agent of a beginning model call is unknown.

    Otherwise the call would count as one of an enclosing agent, or of `app` (the name of calls
    without an agent), and the user would not notice. This is a `CallListener`.
    """
    if len(_paths) < _MAX_PATHS and acting.path not in _paths and open_here():
        _paths[acting.path] = None
    recorder = acting.scope.recorder
    if not recorder.keeps or recorder in _reported:
        return
    reason = _reason_unknown(trace.get_current_span(), acting)
    if reason is not None:
        _reported.add(recorder)
        recorder.add_capture_error(f"{NAME}: cannot tell which agent made a model call: {reason}")


def _reason_unknown(span: Any, acting: AgentContext) -> str | None:
    span_context = span.get_span_context()
    library = _library_of(span)
    if open_span_of(span) is not None or span_context.is_remote or is_claimed(library):
        return None
    goes_elsewhere = any(
        not switch.is_ours() or (library and switch.library == library)
        for switch in list(switches.values())
    )
    is_requested = any(p.on and p.is_requested for p in processors())
    foreign = global_provider() if goes_elsewhere and not is_requested else None
    if foreign is not None and not accepts_processors(foreign):
        return (
            f"the framework's spans go to the global TracerProvider, a "
            f"{type(foreign).__qualname__}, which is not one of OpenTelemetry's SDK"
        )
    may_hide = any(open_span.began_in(acting) for open_span in list(open_agents))
    if not span_context.is_valid:
        return _without_ids(may_hide or goes_elsewhere, goes_elsewhere or is_requested)
    if not (goes_elsewhere or is_requested or may_hide):
        return None  # all agents come from spans of ours, and none is hidden
    if not span.is_recording():
        return (
            "the app's sampler drops spans: set OTEL_TRACES_SAMPLER=always_on while agents are "
            "trained, and sample in the exporter"
        )
    if is_from_observed_provider(span) and not goes_elsewhere:
        return None  # it began before
    return (
        f"the current span, {getattr(span, 'name', '')!r}, belongs to a TracerProvider that is not "
        "instrumented: call otel.instrument(provider) with it"
    )


def _without_ids(may_hide: bool, is_on: bool) -> str | None:
    """Return a message if an open agent's span may be invisible to lightspan; else None.

    This is so if OpenTelemetry is disabled, or if the current span has no ids.

    Args:
        may_hide: whether a current span without ids would hide an agent.
        is_on: whether spans are read in this process.
    """
    if is_on and os.environ.get(DISABLED, "").strip().lower() == "true":
        return f"{DISABLED}=true disables OpenTelemetry; unset it while agents are trained"
    if may_hide and _is_set():
        return "a library made a span without ids the current one, which hides the agent around it"
    return None


def _library_of(span: Any) -> str:
    return getattr(getattr(span, "instrumentation_scope", None), "name", "")


def _is_set() -> bool:
    """Return whether any span is current; it may have no ids."""
    return any(isinstance(value, trace.Span) for value in get_current().values())


def agents() -> AgentPaths:
    """Return the agents that called a model in this process since `instrument`, for `optimize=`.

    Only agents known from OpenTelemetry's spans are listed, and only after they have run. So run
    the app before, in `lightspan.record()` or in `Trainer.dev`. The list is never marked as
    complete.
    """
    return AgentPaths(tuple(_paths), complete=False)


# --- installing -----------------------------------------------------------------------------
def install() -> None:
    """Register the resolver and the call listener, and patch pools; idempotent."""
    pools.install()
    context.register_resolver(resolve, first=True)
    context.add_call_listener(note_call)
    if _observe not in state.entry_listeners:
        state.entry_listeners.append(_observe)


def uninstall() -> None:
    """Undo `install`."""
    pools.uninstall()
    _paths.clear()
    context.unregister_resolver(resolve)
    context.remove_call_listener(note_call)
    if _observe in state.entry_listeners:
        state.entry_listeners.remove(_observe)
