"""An app that only its own environment can import: `only_here` is installed nowhere else.

This folder is not on the tests' path. Functions that call no model import no client, because that
import takes most of the start of a runner process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from importlib.util import find_spec
from typing import Any

import only_here  # type: ignore[import-not-found]

import lightspan


@lightspan.rollout
def answer(task: dict[str, Any]) -> dict[str, float]:
    """Call the model; the reward is the share of lower-case letters in its answer."""
    import openai

    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    with client, lightspan.agent("writer"):
        messages: Any = [{"role": "user", "content": task["q"]}]
        reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
    text = reply.choices[0].message.content or ""
    seen = [name for name in ("torch", "transformers", "aiohttp", "pytest") if find_spec(name)]
    return {
        "reward": sum(c.isascii() and c.islower() for c in text) / max(1, len(text)),
        "heavy": float(len(seen)),
        "apart": float(only_here.VALUE == "installed"),
        "foreign_paths": float(sum(sys.prefix not in p for p in sys.path if "site-packages" in p)),
    }


def naps(task: dict[str, Any]) -> float:
    """Sleep for a while, and wait for a file, without calling a model."""
    time.sleep(task.get("seconds", 0.0))
    while "until" in task and not os.path.exists(task["until"]):
        time.sleep(0.02)
    return 1.0


async def goes_on(task: dict[str, Any]) -> float:
    """Wait until the attempt is stopped, and return the task's reward all the same, if any."""
    try:
        await asyncio.sleep(100.0)
    except asyncio.CancelledError:
        if "reward" not in task:
            raise
    return float(task["reward"])


def other(task: Any) -> float:
    """Return a fixed reward without calling a model."""
    return 2.0
