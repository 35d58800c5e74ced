"""Small apps that call a real model: what they do is in their tasks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import openai

import lightspan

# Nobody is there: a call that is not redirected fails at once, not after seconds of retries.
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def say(text: str, max_tokens: int = 4, at: openai.OpenAI = client) -> str:
    """What the model answers."""
    messages: Any = [{"role": "user", "content": text}]
    reply = at.chat.completions.create(model="any", max_tokens=max_tokens, messages=messages)
    return reply.choices[0].message.content or ""


def letters(text: str) -> float:
    """The share of lower-case letters: a reward that even a random model varies in."""
    return sum(c.isascii() and c.islower() for c in text) / max(1, len(text))


@lightspan.rollout
def spell(task: dict[str, Any]) -> float:
    """One agent."""
    with lightspan.agent("writer"):
        return letters(say(task["q"]))


@lightspan.rollout
def spell_so_long(task: dict[str, Any]) -> float:
    """One agent, with as many tokens as the task allows."""
    with lightspan.agent("writer"):
        return letters(say(task["q"], task["tokens"]))


@lightspan.rollout
def two(task: dict[str, Any]) -> float:
    """The writer earns the reward, the checker looks on."""
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("checker"):
        say("fine?", max_tokens=2)
    return letters(text)


@lightspan.rollout
def either(task: dict[str, Any]) -> float:
    """`who` acts; what the reviewer does earns the same each time."""
    with lightspan.agent(task["who"]):
        text = say(task["q"])
    return letters(text) if task["who"] == "writer" else 0.5


@lightspan.rollout
def asks_again(task: dict[str, Any]) -> float:
    """Asks twice; of a task that says so the second time when a step of the run was trained."""
    with lightspan.agent("writer"):
        text = say(task["q"])
        while task["waits"] and '"train"' not in Path(task["metrics"]).read_text():
            time.sleep(0.02)
        return letters(text + say("again " + task["q"]))


@lightspan.rollout
def asks_elsewhere(task: dict[str, Any]) -> float:
    """The helper asks an endpoint of the app's own."""
    elsewhere = openai.OpenAI(base_url=task["url"], api_key="own-key", max_retries=0)
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("helper"):
        assert say("help", at=elsewhere) == "scripted help"
    return letters(text)


REWARDS: dict[str, Any] = {
    "nan": math.nan,
    "infinity": math.inf,
    "none": None,
    "true": True,
    "text": "0.5",
    "list": [1.0],
    "named": {"style": 0.25, "reward": 0.75},
    "number": 0.5,
}


@lightspan.rollout
def odd(task: dict[str, Any]) -> Any:
    """Returns the named reward."""
    with lightspan.agent("writer"):
        say(task["q"], max_tokens=1)
    return REWARDS[task["give"]]


@lightspan.rollout
def breaks(task: dict[str, Any]) -> float:
    """Raises, or asks more than the model's context holds."""
    with lightspan.agent("writer"):
        text = say("long " * task.get("long", 1) + task["q"])
    if task.get("raise"):
        raise ValueError(f"no such column: {task['raise']}")
    return letters(text)


async def quiet(task: dict[str, Any]) -> float:
    """No decorator, async, and no agent's name."""
    asynchronous = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    messages: Any = [{"role": "user", "content": task["q"]}]
    reply = await asynchronous.chat.completions.create(model="any", max_tokens=4, messages=messages)
    return letters(reply.choices[0].message.content or "")
