"""Call the methods of the user's hooks around rollouts in this process."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightspan.capture.context import current_context, set_agent
from lightspan.capture.context_types import AgentContext, AttemptContext, Place
from lightspan.capture.recorder import NullRecorder
from lightspan.errors import UnsupportedError
from lightspan.schema.spans import Span
from lightspan_agl.tracer import Tracer
from lightspan_agl.types import AttemptedRollout, Hook

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HookCalls:
    """Calls the user's hooks before and after rollouts that run in this process."""

    hooks: Sequence[Hook] = ()
    tracer: Tracer = field(default_factory=Tracer)
    runner: Any = None
    """The `LitAgentRunner`; None in a `Trainer`."""

    async def before(self, agent: Any, rollout: AttemptedRollout) -> None:
        """Set the agent's `tracer`, and its `runner` if there is one.

        Then call `on_rollout_start` and `on_trace_start` of each hook.
        """
        agent.tracer = self.tracer
        if self.runner is not None:
            agent.runner = self.runner
        with _outside_trace("on_rollout_start", ()):
            await self._call("on_rollout_start", agent=agent, rollout=rollout)
        await self._call("on_trace_start", agent=agent, rollout=rollout, tracer=self.tracer)

    async def end_trace(self, agent: Any, rollout: AttemptedRollout) -> None:
        """Call `on_trace_end` of each hook, after the agent has returned."""
        await self._call("on_trace_end", agent=agent, rollout=rollout, tracer=self.tracer)

    async def after(self, agent: Any, rollout: AttemptedRollout) -> None:
        """Call `on_rollout_end` of each hook, also after a rollout that failed."""
        spans = self.tracer.get_last_trace()
        self.tracer._last_trace = spans
        with _outside_trace("on_rollout_end", spans):
            await self._call("on_rollout_end", agent=agent, rollout=rollout, spans=spans)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, in the thread of an agent whose methods are not async.

        Args:
            work: a call of another method of this class.
        """
        if self.hooks:
            asyncio.run(work)
            return
        # `asyncio.run` would take the event loop away that the agent may have set for its thread.
        with suppress(StopIteration):
            work.send(None)

    async def _call(self, name: str, **arguments: Any) -> None:
        for hook in self.hooks:
            try:
                result = getattr(hook, name)(runner=self.runner, **arguments)
                if inspect.isawaitable(result):  # methods that are not async are called too
                    await result
            except Exception:
                log.exception("%s.%s failed", type(hook).__qualname__, name)


class _OutsideTrace(NullRecorder):
    """A recorder that discards the spans of a hook outside the trace, and warns of them.

    Args:
        hook: name of the hook's method.
        spans: spans of the trace, which the hook may read.
    """

    def __init__(self, hook: str, spans: Sequence[Span]) -> None:
        super().__init__()
        self._hook = hook
        self._spans = list(spans)

    def add(self, span: Span) -> None:
        """Log a warning with the name of the span."""
        log.warning(
            "%s in %s of a hook is outside the trace, so it is not recorded: move it to "
            "on_trace_start or on_trace_end",
            *(span.name, self._hook),
        )


@contextmanager
def _outside_trace(hook: str, spans: Sequence[Span]) -> Iterator[None]:
    """Record nothing in the `with` block, as in Agent Lightning; the arguments are those above."""
    current = current_context() or AgentContext(AttemptContext())
    scope = replace(current.scope, recorder=_OutsideTrace(hook, spans))
    leave = set_agent(Place.of(current).within(scope))
    try:
        yield
    finally:
        leave()


def check_hooks(hooks: Any, owner: str) -> list[Hook]:
    """Return the hooks as a list.

    Args:
        hooks: one hook, several hooks, or None for no hooks.
        owner: name of the class or function that takes the hooks, for the error message.

    Raises:
        UnsupportedError: one of them is no `Hook`.
    """
    several = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
    for hook in several:
        if not isinstance(hook, Hook):
            raise UnsupportedError(
                f"{owner}(hooks=[{hook!r:.100}]): use instances of subclasses of lightspan_agl.Hook"
            )
    return several
