"""Learn the instructions of two agents in an unchanged app and the weights of one, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from alternate_toy import trainer  # type: ignore[import-not-found]

import lightspan

GUIDE = "Tell the writer how to write."
WRITER = "Write."
BOTH = ["guide", "writer"]

nobody = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def ask(told: str, text: str, at: openai.OpenAI) -> Any:
    messages: Any = [{"role": "system", "content": told}, {"role": "user", "content": text}]
    return at.chat.completions.create(model="any", max_tokens=4, messages=messages)


@lightspan.rollout
def guided(task: dict[str, Any]) -> float:
    """Call a guide with an endpoint of its own, then a writer whose model is trained.

    The reward grows with the length of both agents' instructions and with the lower-case letters of
    the writer's answer.
    """
    from toy_apps import letters  # type: ignore[import-not-found]

    with openai.OpenAI(api_key="own-key", max_retries=0) as own, lightspan.agent("guide"):
        advice = ask(GUIDE, task["q"], own).choices[0].message.content
    with lightspan.agent("writer"):
        reply = ask(WRITER, task["q"], nobody)
    said = reply.choices[0].message.content or ""
    told = min(60, reply.usage.prompt_tokens) / 100
    return float(0.1 * letters(said) + 0.2 * min(2, advice.count("softly")) + told)


def speaks(request: Any) -> str:
    """Return the guide's answer, which is its system message."""
    return str(request.messages[0]["content"])


def tasks(*numbers: int) -> list[dict[str, str]]:
    return [{"q": f"word {n}"} for n in numbers]


def algorithm(model: Path, reflection_url: str) -> Any:
    from lightspan import GEPA, LLM, Alternate, LightningRL

    prompts = GEPA(
        reflection=LLM(base_url=reflection_url, model="thinker"),
        optimize=BOTH,
        max_rollouts=80,
        max_reflections=8,
        minibatch=2,
        finalists=0,
        merge=False,
        significance=None,  # a verdict needs more tasks
    )
    weights = LightningRL(
        model, optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-3
    )
    return Alternate(prompts, weights, max_rollouts=80 + 3 * 8, cycles=2)


def fit(folder: Path, made: Any) -> Any:
    return trainer(folder, made).fit(guided, tasks(*range(8)), tasks(20, 21))
