"""Apps of trainings in a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import openai

import lightspan
from lightspan.runners.protocol import TOKEN_VARIABLE


@lightspan.rollout
def twice(task: dict[str, Any]) -> float:
    """Call the model twice; longer answers have a higher reward.

    Fails if the environment has Ray's token or the store's key.
    """
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "LIGHTSPAN_STORE_KEY"} & set(os.environ)
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=20) as client,
        lightspan.agent("writer"),
    ):
        return float(len(_say(client, task["q"] + " a") + _say(client, task["q"] + " b")))


async def meets(task: dict[str, Any]) -> dict[str, float]:
    """Wait for another attempt, and return facts about the process of this attempt."""
    here = Path(task["folder"])
    (here / task["name"]).touch()
    while len([*here.iterdir()]) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return {
        "reward": 1.0,
        "process": float(os.getpid()),
        "interpreter": float(sys.prefix == task["prefix"]),
        "token": float(TOKEN_VARIABLE in os.environ),
        "ray": float("ray" in sys.modules),
    }


def _say(client: openai.OpenAI, text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model="any", messages=messages)
    return reply.choices[0].message.content or ""
