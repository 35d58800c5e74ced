"""Our side of `gateway.py`: a gateway in a process of its own, recording to SQLite.

It prints its address and the call token as JSON. A line on the standard input asks how many calls
are recorded; its end ends the process. The policy's engine is in process and has every token ready;
the frozen agent is answered by the endpoint that is named on the command line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any

from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    TokenChunk,
)
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode, Rollout
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanKind
from lightspan.schema.token_records import FinishReason
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import tiny_chat_tokenizer

POLICY, FROZEN = "writer", "planner"
"""Names of the two agents: one is answered by the policy's engine, one by the endpoint."""
DEFAULT_TOKENS = 16


class ReadyEngine:
    """A TokenEngine that samples nothing: it returns the same token `max_tokens` times."""

    def __init__(self) -> None:
        self.capabilities = EngineCapabilities(exact_tokens=True)
        self._tokenizer = tiny_chat_tokenizer(context_length=4096)
        self._word = self._tokenizer.encode("the")[0]

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def policies(self) -> dict[str, int]:
        return {"policy": 1}

    def tokenizer(self, policy: str) -> ChatTokenizer:
        """Return a real tokenizer, with a chat template."""
        return self._tokenizer

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        """Do nothing: there are no weights."""

    def usage(self) -> dict[str, float]:
        return {"tokens": 0.0, "requests": 0.0, "cpu_s": 0.0}

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        """Yield one chunk, or when streaming a chunk for each token.

        Before each chunk, other tasks of the event loop may run.
        """
        remaining = request.sampling.max_tokens or DEFAULT_TOKENS
        while remaining:
            await asyncio.sleep(0)
            size = 1 if stream else remaining
            remaining -= size
            yield TokenChunk(
                ids=[self._word] * size,
                logprobs=[-0.5] * size,
                version=1,
                finish_reason=None if remaining else FinishReason.STOP,
            )


async def serve(upstream: str, folder: str) -> None:
    """Serve until standard input ends; at each line, print how many calls are recorded."""
    async with (
        open_store(f"sqlite:///{folder}/run.db") as store,
        Gateway(store, ReadyEngine()) as gateway,
    ):
        token, attempt_id = await _attempt(store, upstream)
        print(json.dumps({"url": gateway.url, "token": token}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            spans = (await store.spans([attempt_id]))[attempt_id]
            calls = [span for span in spans if span.kind is SpanKind.LLM]
            print(json.dumps({"recorded": len(calls)}), flush=True)


async def _attempt(store: Store, upstream: str) -> tuple[str, str]:
    """Create a running attempt; return its call token and its id."""
    endpoint = LLM(base_url=upstream, model="model")
    rules = [
        Rule(POLICY, Target(route=Route.POLICY, policy="policy")),
        Rule(FROZEN, Target(route=Route.ENDPOINT, endpoint=endpoint)),
    ]
    resources = await store.put_resources({"routing": Routing(rules=rules)})
    rollout = Rollout(rollout_id="ro", task={}, task_id="t", resources_id=resources, mode=Mode.VAL)
    await store.enqueue([rollout])
    [claim] = await store.claim("bench", 1, 3600)
    return claim.attempt.call_token, claim.attempt.attempt_id


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(serve(sys.argv[1], place))
