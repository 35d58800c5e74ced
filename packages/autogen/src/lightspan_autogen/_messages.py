"""Handle messages between agents of autogen-core in the context of their sender.

A runtime handles messages in its own tasks. Such a task may have been started in another attempt,
or outside attempts. So each message stores the context in which it is to be handled. A message that
was *sent* is handled inside its sender, which waits for the answer. A message that was *published*
is handled where the conversation began, next to the sender. Otherwise the agent path would become
longer with every message where agents publish for one another.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core._single_threaded_agent_runtime import (
    PublishMessageEnvelope,
    SendMessageEnvelope,
)
from autogen_core.tool_agent import ToolAgent

from lightspan.instrumentation import AgentContext, AttemptHandle, current_agent, set_agent
from lightspan_autogen._bypass import guarded

ENVELOPES: Final = (SendMessageEnvelope, PublishMessageEnvelope)
"""AutoGen's classes of envelopes: objects in which a runtime queues a message."""
PROCESSING: Final = ("_process_send", "_process_publish")
"""Methods of the runtime that handle a message."""

NO_AGENTS: Final = (SequentialRoutedAgent, ToolAgent)
"""Classes whose message handlers belong to a team or run tools, so they are not agents."""

_NOTE: Final = "lightspan_autogen.conversation"
_MESSAGE: Final = "_lightspan_message"


class Conversation:
    """A message that is sent outside of any conversation, and all messages that result from it."""

    def __init__(self, start: AgentContext) -> None:
        self.context = start.with_note(_NOTE, self)
        """Context in which published messages are handled; `begin` moves it into the attempt."""
        self._unhandled: set[str] = set()
        """Ids of the messages that are not handled yet."""
        self._is_tracked = not start.scope.is_rollout
        """Whether unhandled messages keep the attempt open; False in rollouts, which end with
        the app.
        """

    def begin(self, attempt: AttemptHandle) -> AgentContext:
        """Make the messages of the conversation part of `attempt`.

        The attempt stays open until all messages are handled.

        Returns:
            The context in which published messages are handled from now on.
        """
        self.context = attempt.context.with_note(_NOTE, self)
        for message in self._unhandled:
            self._register(message)
        return self.context

    def add(self, message: str) -> None:
        """Add the id of a message that was sent."""
        if self._is_tracked:
            self._unhandled.add(message)
            self._register(message)

    def remove(self, message: str) -> None:
        """Remove the id of a message that was handled or dropped. Idempotent."""
        if self._is_tracked:
            self._unhandled.discard(message)
            self.context.scope.recorder.resolve_pending(message)

    def _register(self, message: str) -> None:
        self.context.scope.recorder.register_pending(message, lambda: None)


def conversation_of(context: AgentContext) -> Conversation | None:
    """Return the conversation of the code that runs in `context`; None if there is none."""
    conversation: Conversation | None = context.notes.get(_NOTE)
    return conversation


class Message:
    """A message in a runtime's queue.

    The runtime wraps each message in an envelope. Only the envelope refers to this object. When the
    runtime drops the envelope, Python deletes this object, and the message counts as handled.
    """

    __slots__ = ("_conversation", "_id", "_sender")

    def __init__(self, sender: AgentContext, *, is_published: bool) -> None:
        self._id = secrets.token_hex(8)
        self._conversation = conversation_of(sender) or Conversation(sender)
        self._sender = None if is_published else sender.with_note(_NOTE, self._conversation)
        self._conversation.add(self._id)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.handled()

    @property
    def context(self) -> AgentContext:
        """Context in which the message is handled: that of its sender or of its conversation."""
        if self._sender is None or self._sender.scope.is_outside:
            return self._conversation.context
        return self._sender

    def handled(self) -> None:
        """Remove the message from its conversation. Idempotent."""
        self._conversation.remove(self._id)


def envelope_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` of an envelope, which runs in the context of the sender."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        sender = current_agent()
        message = None if sender is None else guarded(_message_in, sender, sender, self)
        setattr(self, _MESSAGE, message)

    return init


def _message_in(sender: AgentContext, envelope: Any) -> Message:
    return Message(sender, is_published=isinstance(envelope, PublishMessageEnvelope))


def processing(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap the runtime's handling of an envelope, which runs in a task of the runtime."""

    @functools.wraps(original)
    async def process(self: Any, envelope: Any) -> None:
        bound = original.__get__(self, type(self))
        if not hasattr(envelope, _MESSAGE):  # created before `instrument()`
            await bound(envelope)
            return
        message: Message | None = getattr(envelope, _MESSAGE)
        leave = set_agent(None if message is None else message.context)
        try:
            await bound(envelope)
        finally:
            leave()
            if message is not None:
                message.handled()

    return process
