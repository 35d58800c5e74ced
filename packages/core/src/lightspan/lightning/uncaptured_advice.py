"""Advice for model requests that lightspan does not capture, because no SDK made them."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from lightspan.schema.provenance import Request

_OPENAI: Final = ("/chat/completions", "/completions", "/responses")
"""Ends of the URL paths of OpenAI's API, which other providers serve too."""
_OLLAMA: Final = ("/api/chat", "/api/generate")


def describe_request(request: Request) -> str:
    """Describe the request, such as `llama-3 at api.groq.com by litellm`."""
    return f"{request.model or 'a model'} at {host_of(request)} by {request.client}"


def host_of(request: Request) -> str:
    """Return the host of the request's URL, with the port if the URL has one."""
    return urlsplit(request.url).netloc


def fix_of(request: Request) -> str:
    """Return advice on how to change the app so that lightspan captures `request`."""
    base = _base(request)
    if request.client == "litellm":
        at = " of an endpoint with OpenAI's API" if base is None else f'"{base}"'
        name = f"openai/{request.model or '…'}"
        return (
            f'name its model "{name}", with api_base={at} and its key as api_key=, and call Chat '
            "Completions: LiteLLM then uses the OpenAI SDK, which lightspan sees"
        )
    if base is None:
        return "use the OpenAI SDK in its place, at an endpoint with OpenAI's API"
    return f'use the OpenAI SDK in its place, with base_url="{base}"'


def _base(request: Request) -> str | None:
    """Return the base URL of the OpenAI-compatible API that `request` uses; None if unknown."""
    for ending in (*_OPENAI, *_OLLAMA):
        if request.url.endswith(ending):
            base = request.url.removesuffix(ending)
            return f"{base}/v1" if ending in _OLLAMA else base
    return None
