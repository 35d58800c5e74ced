"""An app of which it is known which of its model calls lost a rollout."""

from __future__ import annotations

import zlib
from typing import Any, Final

import openai

import lightspan

CARELESS: Final = 8
"""About one of this number of answers breaks the bridge."""

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def breaks(answer: str) -> bool:
    """Return whether an answer breaks the bridge for good."""
    return zlib.crc32(answer.encode()) % CARELESS == 0


@lightspan.rollout
def cross(task: dict[str, Any]) -> float:
    """Cross a bridge, a call for each plank; return 1 if no answer broke it, else 0.

    A prompt shows the number of the plank and the last answer, but not whether the bridge broke.
    """
    answer, is_whole = "", True
    for plank in range(task["planks"]):
        text = f"{task['name']}, plank {plank + 1}, last step {answer!r}"
        messages: Any = [{"role": "user", "content": text}]
        with lightspan.agent("walker"):
            reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
        answer = reply.choices[0].message.content or ""
        is_whole = is_whole and not breaks(answer)
    return float(is_whole)
