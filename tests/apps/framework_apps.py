"""An app for dry runs with model requests that bypass the SDKs."""

from __future__ import annotations

from typing import Any

import httpx
import openai

import lightspan

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


def _ask(text: str) -> str:
    messages: Any = [{"role": "user", "content": text}]
    return (
        client.chat.completions.create(model="any", messages=messages).choices[0].message.content
        or ""
    )


@lightspan.rollout
def past(task: dict[str, Any]) -> float:
    """Call the writer by the SDK and by httpx, and a frozen reviewer by httpx."""
    body = {"model": "mine", "messages": [{"role": "user", "content": task["q"]}]}
    with lightspan.agent("writer"):
        said = _ask(task["q"])
        httpx.post(f"{task['url']}/chat/completions", json=body).raise_for_status()
    with lightspan.agent("reviewer"):
        httpx.post(f"{task['url']}/chat/completions", json=body).raise_for_status()
    return float(said)
