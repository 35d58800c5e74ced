"""A model call of an app."""

from __future__ import annotations

from typing import Any

import openai

USER: Any = [{"role": "user", "content": "hello"}]


def say(client: openai.OpenAI, text: str = "hello", **more: Any) -> Any:
    asked: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=asked, **more)
