"""Small AutoGen apps, a `Rig` that records one attempt, and a context manager for the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import ChatAgent, Response
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.models import SystemMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema.spans import Span
from lightspan_autogen import _hook, instrument, uninstrument
from lightspan_testing.adapter_harness import Part, Played, Says, Stage
from lightspan_testing.adapter_suite import instructions, tree

ABLE = ("function_calling", "json_output", "structured_output", "multiple_system_messages")
INFO: Any = {"vision": False, "family": "unknown", **dict.fromkeys(ABLE, True)}


class Rig:
    """Create AutoGen agents, and record one attempt with them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = OpenAIChatCompletionClient(
            model="m", base_url=stage.url, api_key="key", model_info=INFO, max_retries=0
        )
        self.played: Played | None = None

    def agent(self, name: str, *tools: Any, **more: Any) -> AssistantAgent:
        return AssistantAgent(
            name, self.client, tools=list(tools), system_message=instructions(name), **more
        )

    async def record(self, says: Says, run: Any, **marks: str) -> Any:
        """Await `run(text)` in an attempt through the gateway, and return its result.

        Args:
            says: agent → its answers, turn by turn.
            run: function of the task's text.
            marks: agent → text that marks its prompts.
        """
        part = Part(says, {mark: name for name, mark in marks.items()})
        self.played = self.stage.open(part, through_gateway=True)
        with open_scope(self.played.scope):
            value = await run(self.played.text)
        await sdk_instrumentation.aclose()
        self.stage.close(self.played)
        return value

    @property
    def spans(self) -> Sequence[Span]:
        assert self.played is not None
        return self.played.spans

    @property
    def tree(self) -> list[str]:
        return tree(self.spans)

    def one(self, name: str) -> Span:
        assert self.played is not None
        return self.played.one(name)


def lines(text: str) -> list[str]:
    return [line[8:] for line in text.splitlines() if line.strip()]


WRITER = ["invoke_agent writer @writer", "  chat @writer"]
TEAM = """
        invoke_agent team @team
          invoke_agent writer @team/writer
            chat @team/writer
          invoke_agent checker @team/checker
            chat @team/checker
"""
SAYS: Says = {"writer": ["W {task}."], "checker": ["C {task}."]}


def two(rig: Rig, **more: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        [rig.agent("writer"), rig.agent("checker")], name="team", max_turns=2, **more
    )


def said(text: str) -> TextMessage:
    return TextMessage(content=text, source="user")


async def answer(agent: Any, messages: Any) -> Response:
    """Ask the model client of `agent`, and return the text as the agent's response."""
    asked: list[Any] = [SystemMessage(content=instructions(agent.name))]
    asked += [message.to_model_message() for message in messages]
    result = await agent._model_client.create(asked)
    return Response(chat_message=TextMessage(content=result.content, source=agent.name))


class Before(BaseChatAgent):
    """A custom agent whose class is defined before `instrument` is called."""

    def __init__(self, name: str, client: Any) -> None:
        super().__init__(name, "own")
        self._model_client = client

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
        return await answer(self, messages)

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Do nothing, because the agent has no state."""


@contextmanager
def installed() -> Iterator[None]:
    """Install the adapter in a block; check afterwards that it is removed without a trace."""
    instrument()
    yield
    uninstrument()
    assert _hook._state.patches == []
    assert "__init_subclass__" not in vars(ChatAgent)
    assert _hook._state.open == {}
    assert _hook._state.runs == {}
