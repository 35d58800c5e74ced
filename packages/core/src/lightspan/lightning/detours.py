"""Detours: requests to models that went past the SDKs, and what to change for each."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from lightspan.schema.origins import Framework, Request

_RESPONSES: Final = "/responses"
_OPENAI: Final = ("/chat/completions", "/completions", _RESPONSES)
"""Ends of the paths of OpenAI's API, which other providers have, too."""
_OLLAMA: Final = ("/api/chat", "/api/generate")
_CLIENTS: Final = {
    "agent-framework": "OpenAIChatCompletionClient",
    "agent-framework-core": "OpenAIChatCompletionClient",
    "agno": "OpenAIChat",
    "autogen-agentchat": "OpenAIChatCompletionClient",
    "dspy": 'dspy.LM("openai/…", engine="litellm")',
    "google-adk": 'LiteLlm("openai/…")',
    "langgraph": "ChatOpenAI",
    "llama-index-core": "llama_index.llms.openai.OpenAI",
    "openai-agents": "OpenAIChatCompletionsModel",
    "pydantic-ai": "OpenAIChatModel",
    "pydantic-ai-slim": "OpenAIChatModel",
    "smolagents": "OpenAIModel",
    "strands-agents": "OpenAIModel",
}
"""Framework → its client that uses the OpenAI SDK."""


def asked(request: Request) -> str:
    """What was asked, where and by whom: `groq/llama-3 at api.groq.com by litellm`."""
    model = request.model or "a model"
    named = f"{request.provider}/{model}" if request.provider else model
    by = f"{request.client} in {request.caller}" if request.caller else request.client
    return f"{named} at {host_of(request)} by {by}"


def host_of(request: Request) -> str:
    """Host, and port if it is not the usual one."""
    return urlsplit(request.url).netloc


def fix_of(request: Request, framework: Framework | None = None) -> str:
    """What to change so that lightspan sees such a call.

    Args:
        request: one of them.
        framework: of the agent that asked, if it is known.
    """
    if request.client == "litellm":
        return (
            f"{_of_litellm(request)}, and its key as api_key=: LiteLLM then uses the OpenAI SDK, "
            "which lightspan sees"
        )
    client = _CLIENTS.get(framework.name) if framework is not None else None
    place = f"use {client}, which uses the OpenAI SDK," if client else "use the OpenAI SDK"
    base = _base(request)
    if base is None:
        return f"{place} in its place, at an endpoint that speaks OpenAI's API"
    return f'{place} in its place, with base_url="{base}"'


def _of_litellm(request: Request) -> str:
    base = _base(request)
    if base is None:
        return 'name its model "openai/…", with api_base= of an endpoint that speaks OpenAI\'s API'
    name = f'name its model "openai/{request.model or "…"}", with api_base="{base}"'
    if request.url.endswith(_RESPONSES):  # it asks that by a client of its own, whatever the prefix
        return f"ask by Chat Completions, not Responses: {name}"
    return name


def _base(request: Request) -> str | None:
    """The base URL of its provider's API that is OpenAI's; None where none is known."""
    for end in _OPENAI:
        if request.url.endswith(end):
            return request.url.removesuffix(end)
    for end in _OLLAMA:
        if request.url.endswith(end):
            return f"{request.url.removesuffix(end)}/v1"
    return None


__all__ = ["asked", "fix_of", "host_of"]
