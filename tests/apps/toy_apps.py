"""Small apps that call a real model, as their tasks say."""

from __future__ import annotations

import math
import time
import zlib
from pathlib import Path
from typing import Any

import openai

import lightspan

# Nobody is there: a call that is not redirected fails at once, not after seconds of retries.
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def say(text: str, max_tokens: int = 4, at: openai.OpenAI = client) -> str:
    """Call the model, and return its answer."""
    messages: Any = [{"role": "user", "content": text}]
    reply = at.chat.completions.create(model="any", max_tokens=max_tokens, messages=messages)
    return reply.choices[0].message.content or ""


def letters(text: str) -> float:
    """Return the share of lower-case letters, a reward that varies even with a random model."""
    return sum(c.isascii() and c.islower() for c in text) / max(1, len(text))


@lightspan.rollout
def spell(task: dict[str, Any]) -> float:
    """Call the writer once."""
    with lightspan.agent("writer"):
        return letters(say(task["q"]))


@lightspan.rollout
def look(task: dict[str, Any]) -> float:
    """Call the writer and the checker with an image each, of equal size."""
    from lightspan_testing.tiny_vision import image_chat, picture

    reward = 0.0
    for name, colour in (("writer", "red"), ("checker", "blue")):
        height = 10 + zlib.crc32(task["q"].encode()) % 40
        messages: Any = image_chat(task["q"], picture(colour, bars=(height, 20)))
        with lightspan.agent(name):
            reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
        reward += letters(reply.choices[0].message.content or "")
    return reward


@lightspan.rollout
def says(task: dict[str, Any]) -> None:
    """Call the writer once, and give no reward."""
    with lightspan.agent("writer"):
        say(task["q"])


@lightspan.rollout
def sometimes(task: dict[str, Any]) -> float | None:
    """Call the writer, whose answer is rewarded if the task is not bare, and a checker."""
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("checker"):
        say("fine?", max_tokens=2)
    return None if task["bare"] else letters(text)


ANSWERS: dict[str, str] = {}
"""The cache of `remembers`."""


@lightspan.rollout
def remembers(task: dict[str, Any]) -> float:
    """Call the writer once per question; the app's own cache answers it the next time."""
    if task["q"] not in ANSWERS:
        with lightspan.agent("writer"):
            ANSWERS[task["q"]] = say(task["q"])
    return letters(ANSWERS[task["q"]])


@lightspan.rollout
def spell_so_long(task: dict[str, Any]) -> float:
    """Call the writer once, with at most as many tokens as the task says."""
    with lightspan.agent("writer"):
        return letters(say(task["q"], task["tokens"]))


@lightspan.rollout
def two(task: dict[str, Any]) -> float:
    """Call the writer, whose answer is rewarded, and a checker."""
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("checker"):
        say("fine?", max_tokens=2)
    return letters(text)


@lightspan.rollout
def either(task: dict[str, Any]) -> float:
    """Call the agent `task["who"]`; the reviewer's reward is always 0.5."""
    with lightspan.agent(task["who"]):
        text = say(task["q"])
    return letters(text) if task["who"] == "writer" else 0.5


@lightspan.rollout
def asks_again(task: dict[str, Any]) -> float:
    """Call the writer twice; with `task["waits"]`, the second time after a step was trained."""
    with lightspan.agent("writer"):
        text = say(task["q"])
        while task["waits"] and '"train"' not in Path(task["metrics"]).read_text():
            time.sleep(0.02)
        return letters(text + say("again " + task["q"]))


@lightspan.rollout
def asks_elsewhere(task: dict[str, Any]) -> float:
    """Call the writer, and a helper at the app's own endpoint."""
    elsewhere = openai.OpenAI(base_url=task["url"], api_key="own-key", max_retries=0)
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("helper"):
        assert say("help", at=elsewhere) == "scripted help"
    return letters(text)


@lightspan.rollout
def asks_between(task: dict[str, Any]) -> float:
    """Call the writer, a helper at the app's own endpoint, and the writer again."""
    elsewhere = openai.OpenAI(base_url=task["own"], api_key="own-key", max_retries=0)
    with lightspan.agent("writer"):
        text = say(task["q"])
    with lightspan.agent("helper"):
        text += say("help", at=elsewhere)
    with lightspan.agent("writer"):
        return letters(say(text))


REWARDS: dict[str, Any] = {
    "nan": math.nan,
    "infinity": math.inf,
    "none": None,
    "true": True,
    "text": "0.5",
    "list": [1.0],
    "named": {"style": 0.25, "reward": 0.75},
    "number": 0.5,
    "low": -3.0,
}


@lightspan.rollout
def odd(task: dict[str, Any]) -> Any:
    """Return the reward that `task["give"]` names, some of which are invalid."""
    with lightspan.agent("writer"):
        say(task["q"], max_tokens=1)
    if "emit" in task:
        lightspan.emit_reward(task["emit"])
    return REWARDS[task["give"]]


@lightspan.rollout
def breaks(task: dict[str, Any]) -> float:
    """Raise, or send more tokens than the model's context holds, as the task says."""
    with lightspan.agent("writer"):
        text = say("long " * task.get("long", 1) + task["q"])
    if task.get("raise"):
        raise ValueError(f"no such column: {task['raise']}")
    return letters(text)


async def quiet(task: dict[str, Any]) -> float:
    """Call the model asynchronously, without the decorator and without an agent's name."""
    asynchronous = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")
    messages: Any = [{"role": "user", "content": task["q"]}]
    reply = await asynchronous.chat.completions.create(model="any", max_tokens=4, messages=messages)
    return letters(reply.choices[0].message.content or "")


@lightspan.rollout
def converses(task: dict[str, Any]) -> float:
    """Call the writer three times with the whole conversation, and a checker at the end.

    With `task["clock"]`, the second request has the time in it; with `task["words"]`, the words of
    a set. The checker's endpoint is `task["own"]`, if given.
    """
    own = openai.OpenAI(base_url=task["own"], api_key="x") if "own" in task else client
    messages: Any = [{"role": "user", "content": task["q"]}]
    for turn in range(3):
        with lightspan.agent("writer"):
            reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
        said = {"role": "assistant", "content": reply.choices[0].message.content or ""}
        clock = (
            f" at {time.strftime('%H:%M')}:{time.time() % 60:09.6f}" if task.get("clock") else ""
        )
        words = ", ".join({"red", "green", "blue", "grey"} if task.get("words") else ())
        messages = [*messages, said, {"role": "user", "content": f"go on {turn}{clock} {words}"}]
    with lightspan.agent("checker"):
        say(str(messages), max_tokens=2, at=own)
    return letters(str(messages[1:]))


def is_careless(answer: str) -> bool:
    """Return whether an answer of `crosses` breaks the bridge: one of about eight does."""
    return zlib.crc32(answer.encode()) % 8 == 0


@lightspan.rollout
def crosses(task: dict[str, Any]) -> float:
    """Call the walker six times; return 1 unless an answer broke the bridge, which nothing mends.

    Each answer is followed by a tool. With `task["clock"]`, each prompt has the time in it.
    """
    answer, is_whole = "", True
    for plank in range(6):
        clock = f" at {time.time()}" if task.get("clock") else ""
        with lightspan.agent("walker"):
            answer = say(f"{task['q']} {plank} {answer!r}{clock}")
        with lightspan.tool("tread"):
            is_whole = is_whole and not is_careless(answer)
    return float(is_whole)


@lightspan.rollout
def counts(task: dict[str, Any]) -> float:
    """Call the writer once; the reward is the number of rollouts so far, kept in a file."""
    path = Path(task["count"])
    with lightspan.agent("writer"):
        say(task["q"])
    with path.open("a") as file:
        file.write("1")
    return float(len(path.read_text()))
