"""Messages between agents of autogen-core: whoever sends one goes on acting where it is handled.

A runtime handles messages in tasks of its own, which may have been started in another attempt or
before any. So each message says who sent it, and its handling begins there: what was *sent*, whose
answer is waited for, inside the sender; what was *published*, for whoever hears it, where the
conversation began, beside the sender. A path would grow without end otherwise, where agents publish
for one another.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core._single_threaded_agent_runtime import (
    PublishMessageEnvelope,
    SendMessageEnvelope,
)
from autogen_core.tool_agent import ToolAgent

from lightspan.instrumentation import (
    AgentContext,
    AttemptHandle,
    current_agent,
    new_span_id,
    reset_agent,
    set_agent,
)
from lightspan_autogen._bypass import guarded

ENVELOPES: Final = (SendMessageEnvelope, PublishMessageEnvelope)
"""What a runtime keeps a message in."""
PROCESSING: Final = ("_process_send", "_process_publish")
"""The runtime's methods that handle one."""

NO_AGENTS: Final = (SequentialRoutedAgent, ToolAgent)
"""What handles messages for a team, and what calls tools for whoever asks."""

_NOTE: Final = "lightspan_autogen.conversation"
_POSTED: Final = "_lightspan_posted"


class Conversation:
    """Messages that follow from one another, and where the first was sent from."""

    def __init__(self, began: AgentContext) -> None:
        self.acting = began.noting(_NOTE, self)
        """In production, outside every attempt: in the one that its first agent began."""
        self._waiting: set[str] = set()
        """The messages that are not handled yet, while there is no attempt to tell."""
        self._is_counted = not began.scope.is_rollout
        """Whether its messages keep an attempt open: a rollout's ends with its app."""

    def begin(self, root: AttemptHandle) -> AgentContext:
        """An attempt has begun with it, which stays open until its messages are handled."""
        self.acting = root.acting.noting(_NOTE, self)
        for message in self._waiting:
            self._expect(message)
        return self.acting

    def wait_for(self, message: str) -> None:
        if self._is_counted:
            self._waiting.add(message)
            self._expect(message)

    def handled(self, message: str) -> None:
        if self._is_counted:
            self._waiting.discard(message)
            self.acting.scope.recorder.settle(message)

    def _expect(self, message: str) -> None:
        self.acting.scope.recorder.expect(message, _nothing)


def _nothing() -> None:
    """A message that is never handled leaves nothing to record."""


def conversation_of(acting: AgentContext) -> Conversation | None:
    """The conversation that somebody acts in, if it is one."""
    found: Conversation | None = acting.notes.get(_NOTE)
    return found


class Posted:
    """A message on its way, kept by its envelope alone: a runtime may drop that."""

    __slots__ = ("_conversation", "_id", "_sender")

    def __init__(self, sender: AgentContext, *, is_published: bool) -> None:
        self._id = new_span_id()
        self._conversation = conversation_of(sender) or Conversation(sender)
        self._sender = None if is_published else sender.noting(_NOTE, self._conversation)
        self._conversation.wait_for(self._id)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.handled()

    @property
    def acting(self) -> AgentContext:
        """Who acts for whoever handles it."""
        if self._sender is None or self._sender.scope.is_outside:
            return self._conversation.acting
        return self._sender

    def handled(self) -> None:
        """It was, or never will be; told twice counts once."""
        self._conversation.handled(self._id)


def envelope_init(original: Callable[..., None]) -> Callable[..., None]:
    """An envelope's: made in the context of whoever sends the message."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        sender = current_agent()
        setattr(self, _POSTED, None if sender is None else guarded(_posted, sender, sender, self))

    return init


def _posted(sender: AgentContext, envelope: Any) -> Posted:
    return Posted(sender, is_published=isinstance(envelope, PublishMessageEnvelope))


def processing(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The runtime's handling of an envelope, in a task of the runtime's."""

    @functools.wraps(original)
    async def process(self: Any, envelope: Any) -> None:
        bound = original.__get__(self, type(self))
        if not hasattr(envelope, _POSTED):  # from before `instrument()`
            await bound(envelope)
            return
        posted: Posted | None = getattr(envelope, _POSTED)
        token = set_agent(None if posted is None else posted.acting)
        try:
            await bound(envelope)
        finally:
            reset_agent(token)
            if posted is not None:
                posted.handled()

    return process
