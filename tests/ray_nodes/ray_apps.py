"""Apps of trainings in a Ray cluster."""

from __future__ import annotations

import os
from typing import Any

import openai

import lightspan


@lightspan.rollout
def twice(task: dict[str, Any]) -> float:
    """Asks, and asks again; a longer answer is a better one. Nothing of Ray's is to be found."""
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "LIGHTSPAN_STORE_KEY"} & set(os.environ)
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=20) as client,
        lightspan.agent("writer"),
    ):
        return float(len(_say(client, task["q"] + " a") + _say(client, task["q"] + " b")))


def _say(client: openai.OpenAI, text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model="any", messages=messages)
    return reply.choices[0].message.content or ""
