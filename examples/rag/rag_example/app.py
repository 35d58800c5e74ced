"""An ordinary app on the OpenAI Agents SDK that answers questions from documents.

One agent, the researcher, has one tool: a search of the documents. It searches as often as it
needs to, at most `max_searches` times, each search with what the ones before it found, and answers.
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
    """The agent's tool."""
    return context.context.search(query)


researcher = Agent[Library](
    name="researcher",
    instructions=RESEARCH,
    tools=[search],
    model_settings=ModelSettings(),
)
"""The agent; which model it asks, and where, is a matter of the run."""


def run_config(
    model: str | None = None,
    *,
    client: AsyncOpenAI | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> RunConfig:
    """Runs with any OpenAI-compatible endpoint.

    What is left out comes from the environment: RAG_MODEL, OPENAI_BASE_URL, OPENAI_API_KEY. Traces
    are not sent to OpenAI.

    Args:
        client: stays open; close it in the event loop that it was used in.
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
    """What the agent says last; nothing if it still searches after `max_searches`.

    Raises:
        ValueError: no search at all is allowed.
        openai.OpenAIError: the endpoint does not answer.
        agents.ModelBehaviorError: the model calls a tool that there is not.
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
