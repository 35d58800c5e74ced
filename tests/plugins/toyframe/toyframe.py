"""A tiny agent framework: agents, tools and teams, asynchronous, synchronous and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai


class Tool:
    """A function that a model may call as a tool."""

    def __init__(self, function: Callable[[str], str]) -> None:
        self.name = function.__name__
        self.function = function

    def schema(self) -> dict[str, Any]:
        what = {"type": "object", "properties": {"what": {"type": "string"}}}
        return {"type": "function", "function": {"name": self.name, "parameters": what}}

    async def call(self, arguments: dict[str, str]) -> str:
        return await asyncio.to_thread(self.function, arguments["what"])


class AgentTool(Tool):
    """A tool that runs another agent."""

    def __init__(self, agent: Agent) -> None:
        self.name, self.agent = agent.name, agent

    async def call(self, arguments: dict[str, str]) -> str:
        return await self.agent.run(arguments["task"])


class Agent:
    """An agent: a name, instructions and tools, with a client of the OpenAI SDK."""

    def __init__(
        self,
        name: str,
        client: openai.AsyncOpenAI,
        *,
        model: str = "m",
        instructions: str = "",
        tools: Sequence[Tool] = (),
        stream: bool = False,
    ) -> None:
        self.name, self.client, self.model = name, client, model
        self.instructions, self.stream = instructions, stream
        self.tools = {tool.name: tool for tool in tools}

    async def run(self, text: str) -> str:
        messages: list[Any] = [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": text},
        ]
        while True:
            message = await self._ask(messages)
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            results = [self._call_tool(call) for call in message["tool_calls"]]
            messages += await asyncio.gather(*results)

    async def run_stream(self, text: str) -> AsyncIterator[str]:
        for word in (await self.run(text)).split():
            yield word

    async def _ask(self, messages: list[Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            options["tools"] = [tool.schema() for tool in self.tools.values()]
        create = self.client.chat.completions.create
        if self.stream and not self.tools:
            chunks = await create(**options, stream=True)
            texts = [choice.delta.content or "" async for c in chunks for choice in c.choices]
            return {"role": "assistant", "content": "".join(texts)}
        completion = await create(**options)
        return dict(completion.choices[0].message.model_dump(exclude_none=True))

    async def _call_tool(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        tool = self.tools[function["name"]]
        try:
            text = await tool.call(json.loads(function["arguments"]))
        except LookupError as error:
            text = f"Error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


class Team:
    """A team whose members speak one after the other, or concurrently."""

    def __init__(
        self, name: str, members: Sequence[Agent | Team], *, at_once: bool = False
    ) -> None:
        self.name, self.members, self.at_once = name, members, at_once

    async def run(self, text: str) -> str:
        if self.at_once:
            answers = await asyncio.gather(*(member.run(text) for member in self.members))
            return "\n".join([text, *answers])
        for member in self.members:
            text = f"{text}\n{await member.run(text)}"
        return text
