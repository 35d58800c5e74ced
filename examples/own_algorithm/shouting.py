"""A toy app: one agent that should answer in capital letters."""

from __future__ import annotations

from typing import Any

import openai

import lightspan

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


@lightspan.rollout
def shout(task: dict[str, Any]) -> float:
    """Run the app on a task; return the share of capital letters in the answer."""
    with lightspan.agent("writer"):
        reply = client.chat.completions.create(
            model="any", max_tokens=6, messages=[{"role": "user", "content": task["question"]}]
        )
    text = reply.choices[0].message.content or ""
    return sum(letter.isascii() and letter.isupper() for letter in text) / max(1, len(text))
