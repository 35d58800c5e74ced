"""An app to train while faults are injected."""

from __future__ import annotations

from typing import Any

import openai

import lightspan


@lightspan.rollout
def twice(task: dict[str, Any]) -> float:
    """Call the model twice; longer answers have a higher reward."""
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=1000) as client,
        lightspan.agent("writer"),
    ):
        return float(len(_say(client, task["q"] + " a") + _say(client, task["q"] + " b")))


def _say(client: openai.OpenAI, text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    reply = client.chat.completions.create(model="any", messages=messages)
    return reply.choices[0].message.content or ""
