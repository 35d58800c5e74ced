"""The gateway: an endpoint like OpenAI's and Anthropic's that captures exact tokens.

In come requests of apps, out go answers in their words, and a span and token records of every call
to the store. A request goes `connections` (how many, how long) → `http_server` → `server` (what is
answered where) → `intake` (from a request to a call) → `calls` (the life of a call, in its two
kinds `generations` by our engine and `forwards` to an endpoint) → `delivery` (to the last byte). On
the way `terms` say who may call and what is kept of it, those of training in `attempts`; `bodies`
are read at a cost that is known, `dialects` understand requests and word answers, `grammars` writes
down what an answer may be in `schemas` that were checked, `preparation` has prompts and grammars
made in the threads of `workers`, `tools` finds tool calls in text, `token_records` gathers the
exact tokens, `store_log` writes to the store; `refusal` is what a client is told that gets no
answer. `pauses` keeps the garbage collector from holding up all of it, and `heap` gives back what
is free.
"""

from lightspan.gateway.attempts import Gateway

__all__ = ["Gateway"]
