"""Advice for requests to models that no SDK made."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from lightspan.schema.provenance import Request

_OPENAI: Final = ("/chat/completions", "/completions", "/responses")
"""Ends of the paths of OpenAI's API, which other providers serve too."""
_OLLAMA: Final = ("/api/chat", "/api/generate")


def asked(request: Request) -> str:
    """Describe the request: `llama-3 at api.groq.com by litellm`."""
    return f"{request.model or 'a model'} at {host_of(request)} by {request.client}"


def host_of(request: Request) -> str:
    """Return the host, and the port if it is not the usual one."""
    return urlsplit(request.url).netloc


def fix_of(request: Request) -> str:
    """Return what to change so that lightspan captures such a call."""
    base = _base(request)
    if request.client == "litellm":
        at = " of an endpoint that speaks OpenAI's API" if base is None else f'"{base}"'
        name = f"openai/{request.model or '…'}"
        return (
            f'name its model "{name}", with api_base={at} and its key as api_key=, and ask by Chat '
            "Completions: LiteLLM then uses the OpenAI SDK, which lightspan sees"
        )
    if base is None:
        return "use the OpenAI SDK in its place, at an endpoint that speaks OpenAI's API"
    return f'use the OpenAI SDK in its place, with base_url="{base}"'


def _base(request: Request) -> str | None:
    """Return the base URL of the provider's OpenAI API; None where none is known."""
    for end in _OPENAI:
        if request.url.endswith(end):
            return request.url.removesuffix(end)
    for end in _OLLAMA:
        if request.url.endswith(end):
            return f"{request.url.removesuffix(end)}/v1"
    return None


__all__ = ["asked", "fix_of", "host_of"]
