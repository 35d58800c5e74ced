"""The app as a CrewAI crew of two agents: a searcher finds the passage, an answerer reads it.

The searcher has the tool that searches the documents. Its last message is passed to the answerer
with the question.
"""

from __future__ import annotations

import os
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.crews import CrewOutput
from crewai.tools import BaseTool, tool

from rag_example.library import Library
from rag_example.prompts import ANSWERER, SEARCH, SEARCHER, Part

MAX_SEARCHES = 5
MODEL_VARIABLE = "RAG_MODEL"
DEFAULT_MODEL = "gpt-5-mini"


def chat_model(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> LLM:
    """Return a client of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; None for the environment variable RAG_MODEL, or else the default.
        base_url: URL of the endpoint; None for OPENAI_BASE_URL.
        api_key: key of the endpoint; None for OPENAI_API_KEY.
        temperature: sampling temperature; None for the endpoint's default.
        max_tokens: maximum tokens of an answer; None for the endpoint's default.
    """
    options: dict[str, Any] = {
        "base_url": base_url,
        "api_key": api_key,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    name = model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL
    return LLM(name, provider="openai", **given)


def build_crew(library: Library, llm: LLM, *, max_searches: int = MAX_SEARCHES) -> Crew:
    """Return a crew that answers from the documents of `library`, one question at a time."""
    searcher = _agent(SEARCHER, llm, [search_tool(library)], max_iter=max_searches + 1)
    answerer = _agent(ANSWERER, llm, [])
    search = Task(
        description="{question}", expected_output=SEARCHER.expected, agent=searcher, name="search"
    )
    answer = Task(
        description="{question}",
        expected_output=ANSWERER.expected,
        agent=answerer,
        context=[search],
        name="answer",
    )
    return Crew(agents=[searcher, answerer], tasks=[search, answer])


def ask(question: str, crew: Crew) -> str:
    """Return the answerer's last message.

    Raises:
        openai.OpenAIError: the endpoint does not answer.
        ValueError: the model's answer is empty.
    """
    said = crew.kickoff(inputs={"question": question})
    assert isinstance(said, CrewOutput)  # another class only for a crew that streams
    return str(said.raw)


def search_tool(library: Library) -> BaseTool:
    """Return the tool that searches the documents of `library`."""

    @tool("search")
    def search(query: str) -> str:
        """Search."""
        return library.search(query)

    search.description = SEARCH
    return search


def _agent(part: Part, llm: LLM, tools: list[BaseTool], **more: Any) -> Agent:
    return Agent(
        role=part.role,
        goal=part.goal,
        backstory=part.backstory,
        llm=llm,
        tools=tools,
        max_retry_limit=0,
        **more,
    )
