"""A gateway as a process of its own: `python fault_gateway.py <store url> <port>`."""

from __future__ import annotations

import asyncio
import sys

from fault_apps import expected  # type: ignore[import-not-found]

from lightspan.protocols.engine import GenerationRequest
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()


def script(request: GenerationRequest) -> str:
    """Answers the question that the prompt asks."""
    said = TOKENIZER.decode(request.prompt_ids).partition("user\n")[2]
    return str(expected(said.split("\n")[0]))


async def main(url: str, port: int) -> None:
    """Serve until killed."""
    engine = ScriptedEngine(TOKENIZER, script, pace_s=0.002)
    async with open_store(url) as store, Gateway(store, engine, port=port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
