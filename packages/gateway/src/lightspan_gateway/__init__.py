"""The gateway: an OpenAI- and Anthropic-compatible endpoint that records exact tokens.

It answers model calls of apps, and writes a span and token records of each call to the store.

A request passes through `http_server`, `server` (routes), `request_handler` (authentication,
routing, the prompt), `calls` with `generated_call` and `proxied_call` (the life of a call),
`call_recorder` (the store) and `response_writer`. These use other modules:

- `access_policy` authenticates and routes callers; `training_access` does so for a training.
- `request_body` reads bodies.
- `chat_engine` is the protocol of OpenAI-compatible endpoints, `openai_engine` their client.
- `dialects` parses requests and formats answers.
- `grammars` compiles structured output; `tools` parses tool calls.
- `api_errors` holds the error responses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_gateway.training_access import Gateway as Gateway

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Gateway": "lightspan_gateway.training_access",
    },
)
