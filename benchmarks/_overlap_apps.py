"""The app of `overlap.py`; runner processes import it by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightspan

TURNS = ((1, 8), (2, 4), (4, 2), (8, 2))
"""(turns, how many of sixteen tasks have so many turns): most conversations are short."""
TOKENS = 8
"""Maximum number of tokens of an answer."""


def tasks(count: int, name: str) -> list[dict[str, Any]]:
    """Return `count` conversations, with numbers of turns distributed as in `TURNS`."""
    turns = [turns for turns, share in TURNS for _ in range(share)]
    return [
        {"id": f"{name} {number}", "turns": turns[number % len(turns)]} for number in range(count)
    ]


@lightspan.rollout
async def talk(task: dict[str, Any]) -> float:
    """Call the model once per turn; return the mean share of lower-case letters as the reward."""
    letters = 0.0
    with lightspan.agent("talker"):
        for turn in range(task["turns"]):
            reply = await _client().chat.completions.create(
                model="any",
                max_tokens=TOKENS,
                messages=[{"role": "user", "content": f"{task['id']}, {turn}"}],
            )
            text = reply.choices[0].message.content or ""
            letters += sum(c.isascii() and c.islower() for c in text) / max(1, len(text))
    return letters / task["turns"]


@cache
def _client() -> Any:
    import openai

    # nobody is there: the calls go to the gateway
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
