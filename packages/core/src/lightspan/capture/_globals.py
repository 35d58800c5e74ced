"""What capturing changes in the process as a whole: all of it is here.

What holds in a context alone is a ContextVar where it is used: who acts (`scope`), and the thread
that opened the scope (`strays`). The rest of this folder is immutable, or
belongs to one attempt.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from lightspan.capture.context_types import AgentContext, AttemptFactory, CallListener, Resolver
from lightspan.capture.generator_context import GeneratorSteps
from lightspan.capture.import_hooks import Awaited
from lightspan.capture.patch import Patch
from lightspan.schema.system_prompts import Instructions


@dataclass(slots=True, eq=False)
class ActivePrompts:
    """Learned prompts that apply outside rollouts."""

    instructions: Instructions
    calls: int = 0
    """Model calls that were looked at."""
    asked: set[str] = field(default_factory=set)
    """Agents and prompts that were asked."""
    warned: set[str] = field(default_factory=set)
    """What was said already."""


@dataclass(slots=True)
class State:
    """Of one process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of the shims and the clients."""
    shims: dict[str, list[Patch]] = field(default_factory=dict)
    """SDK → its wrapped requests."""
    awaited: dict[str, Awaited] = field(default_factory=dict)
    """The SDKs that are wrapped once they are imported."""
    http_patches: list[Patch] = field(default_factory=list)
    """Of HTTP clients, in a dry run."""
    starters: list[Patch] = field(default_factory=list)
    """The wrapped starts of threads, and what else carries scopes."""
    forks_seen: bool = False
    """Forked processes are left alone: that is asked for once, for ever."""
    strays: int = 0
    """Model calls for no attempt under way, so far."""
    stray: str = ""
    """What is to be said of the last one."""
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)
    """SDK and origin → our clean client."""
    async_clients: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Event loop → SDK and origin → our clean client."""
    resolvers: list[Resolver] = field(default_factory=list)
    claims: dict[str, frozenset[str]] = field(default_factory=dict)
    """Adapter in force → OpenTelemetry's instrumentation scopes whose spans are ignored."""
    entry_listeners: list[Callable[[], object]] = field(default_factory=list)
    """Called before an attempt is entered."""
    call_listeners: list[CallListener] = field(default_factory=list)
    steps: dict[FrameType, GeneratorSteps] = field(default_factory=dict)
    """Generator → its open blocks, until the last of them ends (an abandoned one ends them)."""
    connections: list[AgentContext] = field(default_factory=list)
    """The servers that the process is connected to; the last one answers."""
    opener: AttemptFactory | None = None
    """Makes attempts of what begins where no scope is open."""
    active_prompts: list[ActivePrompts] = field(default_factory=list)
    """Of `lightspan.apply_prompts`; the last one counts."""
    outside: AgentContext | None = None
    """Who acts where no scope is open; None unless it is connected or records."""


state: Final = State()
