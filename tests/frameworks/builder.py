"""Apps that most of the frameworks express in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import openai

from lightspan_testing.adapter_suite.scenarios import (
    FAILED,
    WRITER,
    App,
    Model,
    broken,
    count,
    look,
)


def client(model: Model) -> openai.AsyncOpenAI:
    """Return a client that keeps no connection, so that it can go from loop to loop."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    return openai.AsyncOpenAI(
        base_url=model.base_url,
        api_key=model.api_key,
        max_retries=model.max_retries,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits),
    )


class AppBuilder:
    """Builds the apps of the table; a subclass makes its framework's agents and runs them."""

    stream: bool
    concurrent = True
    raises: type[BaseException] = Exception
    """What a failing model raises."""

    def agent(self, name: str, tools: Sequence[Any] = ()) -> Any:
        """Return an agent with the instructions of its name."""
        raise NotImplementedError

    async def run(self, agent: Any, text: str) -> Any:
        """Run an agent, streamed if `stream` says so."""
        raise NotImplementedError

    def sync_of(self, agent: Any) -> Callable[[str], Any] | None:
        """Return the framework's synchronous way to run an agent, if it has one."""
        return None

    def tool(self, function: Callable[..., Any]) -> Any:
        """Return a function as a tool."""
        return function

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        """Return an app that runs one agent, and whatever that one reaches."""
        return App(
            run=lambda text: self.run(agent, text),
            run_sync=self.sync_of(agent),
            tree=tree,
            concurrent=self.concurrent,
            **more,
        )

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        return self.alone(self.agent("writer"), WRITER)

    def parallel(self) -> App:
        names = ("planner", "left", "right", "joiner")
        planner, left, right, joiner = (self.agent(name) for name in names)

        async def run(text: str) -> Any:
            await self.run(planner, text)
            await asyncio.gather(self.run(left, text), self.run(right, text))
            return await self.run(joiner, text)

        tree = "\n".join(f"invoke_agent {name} @{name}\n  chat @{name}" for name in names)
        return App(run=run, tree=tree, concurrent=self.concurrent)

    def parallel_tools(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
        """
        return self.alone(self.agent("scout", [self.tool(look), self.tool(count)]), tree)

    def unicode(self) -> App:
        name = "Prüferin日本"
        return self.alone(self.agent(name), WRITER.replace("writer", name))

    def tool_error(self) -> App:
        """The error is told the model, which goes on."""
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool broken @scout error
              chat @scout
        """
        return self.alone(self.agent("scout", [self.tool(broken)]), tree)

    def model_error(self) -> App:
        return self.alone(self.agent("writer"), FAILED, raises=self.raises)
