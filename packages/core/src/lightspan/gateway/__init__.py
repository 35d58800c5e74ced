"""The gateway: an OpenAI-compatible endpoint that captures exact tokens.

`server` speaks HTTP, `sessions` knows who may call, `dialects` understands requests and words
answers, `calls` generates once per call id, `tools` finds tool calls in text, `capture` writes to
the store.
"""

from lightspan.gateway.server import Gateway

__all__ = ["Gateway"]
