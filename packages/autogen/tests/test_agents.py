"""Test every way to invoke an agent, custom agents, and streams that are not read to the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import (
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
)
from autogen_agentchat.base import Response
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken

from lightspan.capture import context
from lightspan_autogen import agents, uninstrument
from packages.autogen.tests.autogen_apps import (
    WRITER,
    Before,
    Rig,
    answer,
    said,
)

pytestmark = pytest.mark.usefixtures("installed_autogen")


@pytest.mark.parametrize("way", ["run", "run_stream", "on_messages", "on_messages_stream"])
async def test_every_way_to_invoke_an_agent_is_one_invocation(rig: Rig, way: str) -> None:
    writer = rig.agent("writer", model_client_stream=True)

    async def run(text: str) -> None:
        if way.startswith("run"):
            work: Any = getattr(writer, way)(task=text)
        else:
            message = TextMessage(content=text, source="user")
            work = getattr(writer, way)([message], CancellationToken())
        if way.endswith("stream"):
            async for _ in work:
                assert context.current_context().frames == ()  # type: ignore[union-attr]
        else:
            await work
        assert context.current_context().frames == ()  # type: ignore[union-attr]

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == WRITER


async def test_a_filtered_agent_is_one_agent(rig: Rig) -> None:
    writer = rig.agent("writer")
    last = PerSourceFilter(source="user", position="last", count=1)
    same = MessageFilterAgent("writer", writer, MessageFilterConfig(per_source=[last]))
    await rig.record({"writer": ["W {task}."]}, lambda t: same.run(task=[said(t)]))
    assert rig.tree == ["invoke_agent writer @writer", "  chat @writer"]
    assert agents(same) == (("writer",), True)


async def test_agents_of_the_users_own(rig: Rig) -> None:
    class After(Before):
        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            return await answer(self, messages)

    for kind in (Before, After):
        agent = kind("writer", rig.client)

        async def run(text: str, agent: Before = agent) -> None:
            await agent.on_messages([said(text)], CancellationToken())

        await rig.record({"writer": ["W {task}."]}, run)
        assert rig.tree == WRITER
        assert agents(agent) == (("writer",), False)
    uninstrument()
    assert "__wrapped__" not in vars(After.on_messages)


# --- streams that are left ------------------------------------------------------------------
async def test_a_stream_that_is_left_early(rig: Rig) -> None:
    async def run(text: str) -> None:
        stream = rig.agent("writer", model_client_stream=True).run_stream(task=text)
        async for message in stream:
            if not isinstance(message, TextMessage):
                break
        await stream.aclose()

    await rig.record({"writer": ["one two three {task}."]}, run)
    assert rig.tree[0] == "invoke_agent writer @writer unset"


async def test_a_stream_that_is_held_when_the_attempt_ends(rig: Rig) -> None:
    held: list[AsyncGenerator[Any, None]] = []

    async def run(text: str) -> None:
        held.append(rig.agent("writer", model_client_stream=True).run_stream(task=text))
        async for message in held[0]:
            if not isinstance(message, TextMessage):
                break

    await rig.record({"writer": ["one two three {task}."]}, run)
    assert rig.tree[0] == "invoke_agent writer @writer unset"
    await held[0].aclose()
    assert rig.played is not None
    assert rig.played.scope.recorder.drain() == []


async def test_the_last_item_of_a_stream_is_its_end(rig: Rig) -> None:
    async def run(text: str) -> None:
        stream = rig.agent("writer").on_messages_stream([said(text)], CancellationToken())
        async for item in stream:
            if isinstance(item, Response):
                break
        await stream.aclose()

    await rig.record({"writer": ["W {task}."]}, run)
    assert rig.tree == WRITER
