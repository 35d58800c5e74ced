"""An ordinary app on the OpenAI Agents SDK that answers questions from documents.

Its one agent, the researcher, has one tool, which searches the documents. The agent searches step
by step, at most `max_searches` times, and then answers.
"""

from __future__ import annotations

import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    RunContextWrapper,
    RunErrorHandlerInput,
    RunErrorHandlerResult,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from rag_example.library import Library
from rag_example.prompts import RESEARCH, SEARCH

MAX_SEARCHES = 5
MODEL_VARIABLE = "RAG_MODEL"
DEFAULT_MODEL = "gpt-5-mini"


@function_tool(description_override=SEARCH)
def search(context: RunContextWrapper[Library], query: str) -> str:
    """Return the passages that a search finds; the agent's only tool."""
    return context.context.search(query)


researcher = Agent[Library](
    name="researcher",
    instructions=RESEARCH,
    tools=[search],
    model_settings=ModelSettings(),
)
"""The agent; `run_config` sets its model and endpoint."""


def run_config(
    model: str | None = None,
    *,
    client: AsyncOpenAI | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> RunConfig:
    """Return the settings of a run with an OpenAI-compatible endpoint.

    None for `model` takes the variable RAG_MODEL; without `client`, OPENAI_BASE_URL and
    OPENAI_API_KEY are used. No traces are sent to OpenAI.

    Args:
        client: client of the endpoint, which the caller closes in the event loop that uses it.
    """
    return RunConfig(
        model=model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        model_provider=OpenAIProvider(openai_client=client, use_responses=False),
        model_settings=ModelSettings(temperature=temperature, max_tokens=max_tokens),
        tracing_disabled=True,
    )


async def ask(
    question: str,
    library: Library,
    *,
    config: RunConfig | None = None,
    max_searches: int = MAX_SEARCHES,
) -> str:
    """Return the agent's answer; empty if the agent still searches after `max_searches`.

    Raises:
        ValueError: `max_searches` is below 1.
        openai.OpenAIError: the endpoint does not answer.
        agents.ModelBehaviorError: the model calls a tool that does not exist.
    """
    if max_searches < 1:
        raise ValueError(f"max_searches is {max_searches}; at least one search has to be allowed")
    result = await Runner.run(
        researcher,
        question,
        context=library,
        max_turns=max_searches + 1,
        run_config=config or run_config(),
        error_handlers={"max_turns": _say_nothing},
    )
    return str(result.final_output)


def _say_nothing(_: RunErrorHandlerInput[Library]) -> RunErrorHandlerResult:
    return RunErrorHandlerResult(final_output="", include_in_history=False)
