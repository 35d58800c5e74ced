"""Who acts, by OpenTelemetry's current span: the first of all resolvers.

A frame is put in for each open agent's span around the caller, at the depth at which frames were
pushed when it began: agents of `lightspan.agent` and of adapters that push come out in the order in
which they were entered. Those that are resolved (LangGraph's) follow by themselves: they are asked
next, and given what this one says. It has to be the first: what an adapter notes when something of
its begins is what was said before it.
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
from lightspan.capture.adapter import add_capture_error, is_claimed
from lightspan.capture.context import AgentContext, Frame
from lightspan.capture.recorder import Recorder
from lightspan.schema.routing import AgentPaths
from lightspan_otel.frameworks import Switch
from lightspan_otel.open_spans import NAME, OpenSpan, note_of, open_agents, open_here
from lightspan_otel.processor import (
    can_be_heard,
    global_provider,
    hear_global,
    is_of_a_heard_provider,
    processors,
)

DISABLED: Final = "OTEL_SDK_DISABLED"
"""OpenTelemetry's variable; `true` switches its SDK off."""

switches: Final[dict[str, Switch]] = {}
"""The frameworks that were instrumented by name."""

_told: Final[weakref.WeakSet[Recorder]] = weakref.WeakSet()
"""The attempts that are damaged already."""


_seen: Final[dict[str, None]] = {}
"""The paths at which agents asked a model that spans told of, in the order in which they first did.
"""
_MAX_SEEN: Final = 1_000
"""An app that makes up names would have no end of them."""


# --- who acts -------------------------------------------------------------------------------
def resolve(acting: AgentContext) -> AgentContext | None:
    """Who really acts, by the open spans around; None where there are none (`scope.Resolver`)."""
    try:
        _listen()
        notes = open_here()
        if not notes:
            return None
        return _with_agents(acting, notes)
    except Exception as error:
        add_capture_error(acting.scope.recorder, NAME, error)
        return None


def _listen() -> None:
    """Hear the app's global provider, whenever it was set: a framework's spans may go there."""
    if switches:
        hear_global()


def _with_agents(pushed: AgentContext, notes: Sequence[OpenSpan]) -> AgentContext:
    acting = _in_attempt(pushed, notes) if pushed.scope.is_outside else pushed
    own, parent = acting.frames, acting.parent_span_id
    known = {frame.span_id: place for place, frame in enumerate(own)}
    frames: list[Frame] = []
    taken = 0
    for note in reversed(notes):
        if frames and note.began_outside and not acting.scope.is_outside:
            note.rebase(replace(acting, frames=tuple(frames), parent_span_id=parent))
        if not note.began_in(acting):
            continue
        note.settle(may_guess=True)
        if not note.is_node:
            continue
        upto = known.get(note.span_id, note.depth - 1) + 1
        frames += own[taken:upto]
        taken = max(taken, upto)
        if note.frame is not None and note.span_id not in known:
            frames.append(note.frame)
        if (note.depth, note.beneath) == (len(pushed.frames), pushed.parent_span_id):
            parent = note.span_id  # nothing was pushed since
    frames += own[taken:]
    return replace(acting, frames=tuple(frames), parent_span_id=parent)


def _in_attempt(acting: AgentContext, notes: Sequence[OpenSpan]) -> AgentContext:
    """In production: in the attempt that the outermost of the spans is in, or is."""
    for note in reversed(notes):
        note.settle(may_guess=True)
        note.open()
        if note.around is not None and not note.around.scope.is_outside:
            inside = note.around.scope
            return replace(acting, scope=inside, parent_span_id=inside.root_span_id)
    return acting


# --- where that cannot be known -------------------------------------------------------------
def note_call(acting: AgentContext) -> None:
    """Somebody asks a model (`scope.CallListener`): see whether it could be known who.

    If not, the attempt is damaged, which the coverage shows with the reason: its calls would be
    taken for calls of `app`, or of whoever is around.
    """
    if len(_seen) < _MAX_SEEN and acting.path not in _seen and open_here():
        _seen[acting.path] = None
    recorder = acting.scope.recorder
    if not recorder.keeps or recorder in _told:
        return
    reason = _unknown(trace.get_current_span(), acting)
    if reason is not None:
        _told.add(recorder)
        recorder.add_capture_error(
            f"{NAME}: it is not known which agent made a model call: {reason}"
        )


def _unknown(span: Any, acting: AgentContext) -> str | None:
    span_context = span.get_span_context()
    if note_of(span) is not None or span_context.is_remote or _is_covered(span):
        return None
    library = _library_of(span)
    goes_elsewhere = any(
        not switch.is_ours() or (library and switch.library == library)
        for switch in list(switches.values())
    )
    is_asked_for = any(p.on and p.is_asked_for for p in processors())
    foreign = global_provider() if goes_elsewhere and not is_asked_for else None
    if foreign is not None and not can_be_heard(foreign):
        return (
            f"the global TracerProvider, a {type(foreign).__qualname__}, is none of "
            "OpenTelemetry's SDK, and cannot be heard; its framework's spans go there"
        )
    may_hide = any(note.began_in(acting) for note in list(open_agents))
    if not span_context.is_valid:
        return _without_ids(may_hide or goes_elsewhere, goes_elsewhere or is_asked_for)
    if not (goes_elsewhere or is_asked_for or may_hide):
        return None  # agents are told of by ours alone, and there is none that it could hide
    if not span.is_recording():
        return (
            "the app's sampler leaves its spans out: keep all of them while agents are trained "
            "(OTEL_TRACES_SAMPLER=always_on), and sample where they are exported"
        )
    if is_of_a_heard_provider(span) and not goes_elsewhere:
        return None  # it began before
    return (
        f"the current span, {getattr(span, 'name', '')!r}, is of a TracerProvider that "
        "lightspan does not hear: otel.instrument(provider), with that one"
    )


def _without_ids(may_hide: bool, is_told: bool) -> str | None:
    """Where the current span is none, or one that says nothing."""
    if is_told and os.environ.get(DISABLED, "").strip().lower() == "true":
        return f"{DISABLED}=true switches OpenTelemetry off; unset it while agents are trained"
    if may_hide and _is_set():
        return "a library's span without ids is the current one, and hides the agent around it"
    return None


def _is_covered(span: Any) -> bool:
    """Whether an adapter tells of what this span tells of."""
    return is_claimed(_library_of(span))


def _library_of(span: Any) -> str:
    return getattr(getattr(span, "instrumentation_scope", None), "name", "")


def _is_set() -> bool:
    """Whether somebody made a span the current one, if only one that says nothing."""
    return any(isinstance(value, trace.Span) for value in get_current().values())


def agents() -> AgentPaths:
    """The agents that OpenTelemetry's spans told of and that asked a model in this process, since
    `instrument`: what `optimize=` may name. It is never complete: what a framework may run is known
    when it does. Run the app once, recorded (`lightspan.record()`) or in `Trainer.dev`."""
    return AgentPaths(tuple(_seen), complete=False)


# --- installing -----------------------------------------------------------------------------
def install() -> None:
    """Ask it, and have it told of model calls. Twice is once."""
    context.register_resolver(resolve, first=True)
    context.add_call_listener(note_call)
    if _listen not in state.entry_listeners:
        state.entry_listeners.append(_listen)


def uninstall() -> None:
    """Undo `install`."""
    _seen.clear()
    context.unregister_resolver(resolve)
    context.remove_call_listener(note_call)
    if _listen in state.entry_listeners:
        state.entry_listeners.remove(_listen)
