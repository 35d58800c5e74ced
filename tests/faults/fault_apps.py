"""An app for the fault tests with two model calls, one of them streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

import lightspan.capture.emit as emit

RETRIES = 1000
"""Retries of the SDK, enough until a killed gateway is replaced on a busy machine."""


def expected(question: str) -> str:
    """Return the scripted engine's answer to a question."""
    return f"The answer to {question} is long, so that a kill hits it in the middle."


async def answers(task: dict[str, Any]) -> float:
    """Call the model once, and once streamed with a pause."""
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", max_retries=RETRIES) as client:
        create: Any = client.chat.completions.create
        with emit.agent("writer"):
            whole = await create(model="m", messages=_messages(f"{task['q']}a"))
        await asyncio.sleep(0.05)
        with emit.agent("writer"):
            stream = await create(model="m", messages=_messages(f"{task['q']}b"), stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    right = whole.choices[0].message.content == expected(f"{task['q']}a")
    return float(right and "".join(parts) == expected(f"{task['q']}b"))


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
