"""Build the apps that most frameworks express in the same way."""

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
    """Return a client that keeps no connection, so that several event loops can use it."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
    return openai.AsyncOpenAI(
        base_url=model.base_url,
        api_key=model.api_key,
        max_retries=model.max_retries,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits),
    )


class AppBuilder:
    """Build the apps of the suite's scenarios; a subclass makes its framework's agents and runs
    them.
    """

    stream: bool
    concurrent = True
    raises: type[BaseException] = Exception
    """Exception that a run raises if the model fails."""

    def agent(self, name: str, tools: Sequence[Any] = ()) -> Any:
        """Return an agent with the instructions for its name."""
        raise NotImplementedError

    async def run(self, agent: Any, text: str) -> Any:
        """Run an agent, streamed if the model settings have `stream`."""
        raise NotImplementedError

    def sync_of(self, agent: Any) -> Callable[[str], Any] | None:
        """Return the framework's synchronous function to run an agent; None if it has none."""
        return None

    def tool(self, function: Callable[..., Any]) -> Any:
        """Return a function as a tool."""
        return function

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        """Return an app that runs one agent, with all agents that it reaches."""
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
        """Return an app whose tool fails; the model gets the error and continues."""
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool broken @scout error
              chat @scout
        """
        return self.alone(self.agent("scout", [self.tool(broken)]), tree)

    def model_error(self) -> App:
        return self.alone(self.agent("writer"), FAILED, raises=self.raises)
