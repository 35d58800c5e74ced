"""Process-wide mutable state of the capture package.

State that depends on the current context is in a ContextVar of `context` or `misattributed_calls`.
Everything else in this package is immutable or belongs to one attempt.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from lightspan.capture.context_types import AgentContext, AttemptFactory, CallListener, Resolver
from lightspan.capture.generator_context import GeneratorSteps
from lightspan.capture.import_hooks import ImportHook
from lightspan.capture.patch import Patch
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.system_prompts import Instructions


@dataclass(slots=True, eq=False)
class ActivePrompts:
    """Learned prompts that `lightspan.apply_prompts` applies outside rollouts."""

    instructions: Instructions
    is_strict: bool = False
    """Whether it is an error in the app if a learned text cannot be used."""
    calls: int = 0
    """Number of model calls that were checked for a learned prompt."""
    source: str = ""
    """The run or file that they come from."""
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Agent or prompt → reason why the learned text was not used → requests. The reason is empty
    where it was used."""

    @property
    def targets(self) -> dict[tuple[str, str], LearnedPrompt]:
        """Path of an agent and "", or "" and the name of another prompt → learned prompt."""
        prompts = self.instructions.prompts.items()
        return {(each.agent, "" if each.agent else name): each for name, each in prompts}


@dataclass(slots=True)
class State:
    """The capture state of a process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `sdk_patches`, `clients` and the counts of `active_prompts`."""
    sdk_patches: dict[str, list[Patch]] = field(default_factory=dict)
    """Name of an SDK → patches of the `request` methods of its clients."""
    import_hooks: dict[str, ImportHook] = field(default_factory=dict)
    """Name of an SDK or HTTP client → hook that patches it once it is imported."""
    http_patches: dict[str, list[Patch]] = field(default_factory=dict)
    """Name of an HTTP client → patches of its classes, in a dry run."""
    thread_patches: list[Patch] = field(default_factory=list)
    """Patches that copy the context into threads and pools."""
    carriers: set[str] = field(default_factory=set)
    """Who needs `thread_patches`: `"runner"` in a runner's process, and in production `"recording"`
    and `"prompts"`."""
    has_fork_hook: bool = False
    """Whether the fork hook is registered, which cannot be undone."""
    misattributed_count: int = 0
    """Number of model calls so far that were made in no open attempt."""
    misattributed_reason: str = ""
    """Message about the last model call that was made in no open attempt."""
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)
    """(Name of an SDK, origin of the gateway) → client that sends calls to the gateway."""
    async_clients: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Event loop → (name of an SDK, origin) → asynchronous client, and generator that closes it."""
    resolvers: list[Resolver] = field(default_factory=list)
    claims: dict[str, frozenset[str]] = field(default_factory=dict)
    """Name of an enabled adapter → instrumentation scopes of OpenTelemetry whose spans are
    ignored."""
    entry_listeners: list[Callable[[], object]] = field(default_factory=list)
    """Callbacks that run before an attempt is opened."""
    call_listeners: list[CallListener] = field(default_factory=list)
    steps: dict[FrameType, GeneratorSteps] = field(default_factory=dict)
    """Stack frame of a generator → its open blocks. An entry is removed when the last block ends,
    also when the generator is abandoned."""
    connections: list[AgentContext] = field(default_factory=list)
    """Contexts of the servers to which the process is connected (`lightspan.connect`). The last one
    applies."""
    attempt_factory: AttemptFactory | None = None
    """Function that opens an attempt when an agent, function or model call begins outside every
    attempt. None if no such attempts are opened."""
    active_prompts: list[ActivePrompts] = field(default_factory=list)
    """Prompts of `lightspan.apply_prompts`. Of two with the same name the last one applies."""
    ambient: AgentContext | None = None
    """Context that applies outside every attempt. None unless the process is connected to a server,
    records or applies prompts."""


state: Final = State()
