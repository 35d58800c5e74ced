"""An app whose response format no grammar can enforce."""

from __future__ import annotations

from typing import Any

import openai

import lightspan

SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@lightspan.rollout
def tag(task: Any) -> float:
    """Ask for tags that must all differ."""
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
    with client, lightspan.agent("writer"):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": str(task)}],
            response_format=FORMAT,
        )
    return 1.0
