"""Model requests that lightspan does not capture, because no SDK made them, with advice.

`uncaptured_http` records each request as a span, in a dry run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from lightspan.schema import semconv as c
from lightspan.schema.spans import Attributes, Span

_OPENAI: Final = ("/chat/completions", "/completions", "/responses")
"""Ends of the URL paths of OpenAI's API, which other providers serve too."""
_OLLAMA: Final = ("/api/chat", "/api/generate")


class Request(NamedTuple):
    """A request to a model, sent by a client whose requests lightspan does not record."""

    agent: str
    """Path of the agent that sent the request."""
    client: str
    """Package that called the HTTP client, such as `litellm` or the app's own."""
    model: str
    """Name of the model; empty if the body of the request does not name it."""
    url: str
    """URL without query and credentials."""

    def attributes(self) -> Attributes:
        """Return the attributes of the request's span."""
        agent, *others = self
        return {c.AGENT_PATH: agent, c.REQUEST_PAST: json.dumps(others)}


def requests_of(spans: Iterable[Span]) -> Counter[Request]:
    """Return how often each request was sent, from the spans of attempts."""
    sent = (span.attributes for span in spans if c.REQUEST_PAST in span.attributes)
    return Counter(
        Request(str(each[c.AGENT_PATH]), *json.loads(str(each[c.REQUEST_PAST]))) for each in sent
    )


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
