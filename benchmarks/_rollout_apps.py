"""The apps of `rollouts.py`; runner processes import them by name."""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Final

from store import make_call

from lightspan.capture.context import current_context
from lightspan.capture.emit import agent
from lightspan.stores import open_store
from lightspan.stores.protocol import Store

CALLS: Final = 8
TOKENS: Final = 64
"""Number of tokens of each answer of the gateway."""
QUESTION: Final = [{"role": "user", "content": "How many singers are there? " * 8}]
_stores: dict[str, Store] = {}


async def records(task: dict[str, Any]) -> float:
    """Write model calls to the store as the gateway does: one at a time, each acknowledged."""
    current = current_context()
    assert current is not None
    store = await _opened(task["store"])
    claim = await store.claim_of_token(current.scope.call_token)
    assert claim is not None
    for number in range(CALLS):
        await store.add_calls([make_call(claim.attempt, number)])
    return 1.0


async def _opened(url: str) -> Store:
    if url not in _stores:
        store = open_store(url)
        await store.open()
        _stores[url] = store
    return _stores[url]


def asks(task: Any, llm: Any) -> dict[str, float]:
    """Call the model through the OpenAI client; return also the CPU time of this thread."""
    begun = time.thread_time()
    with agent("writer"):
        for _ in range(CALLS):
            answer = _client(llm.base_url).chat.completions.create(
                model=llm.model, messages=QUESTION, max_tokens=TOKENS
            )
            assert answer.choices[0].message.content
    return {"reward": 1.0, "cpu_ms": 1000 * (time.thread_time() - begun)}


@cache
def _client(base_url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=base_url, api_key="none")
