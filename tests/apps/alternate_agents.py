"""Learns the instructions of two agents that nobody edits and the weights of one, in turns, in a
process that may be killed.

python alternate_agents.py FOLDER MODEL APP_URL REFLECTION_URL BATCHES: it is killed before its
N-th batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import alternate_toy  # type: ignore[import-not-found]
import openai

import lightspan

GUIDE = "Tell the writer how to write."
WRITER = "Write."
BOTH = ["guide", "writer"]

reflects, tasks, trainer = alternate_toy.reflects, alternate_toy.tasks, alternate_toy.trainer
nobody = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def ask(told: str, text: str, at: openai.OpenAI) -> Any:
    messages: Any = [{"role": "system", "content": told}, {"role": "user", "content": text}]
    return at.chat.completions.create(model="any", max_tokens=4, messages=messages)


@lightspan.rollout
def guided(task: dict[str, Any]) -> float:
    """The guide has an endpoint of its own, which says what it was told; the writer's model is the
    one that is trained. The reward is what the guide was told, how much the writer was, and what
    its model writes."""
    from toy_apps import letters  # type: ignore[import-not-found]

    with openai.OpenAI(api_key="own-key", max_retries=0) as own, lightspan.agent("guide"):
        advice = ask(GUIDE, task["q"], own).choices[0].message.content
    with lightspan.agent("writer"):
        reply = ask(WRITER, task["q"], nobody)
    said = reply.choices[0].message.content or ""
    told = min(60, reply.usage.prompt_tokens) / 100
    return float(0.1 * letters(said) + 0.2 * min(2, advice.count("softly")) + told)


def speaks(request: Any) -> str:
    """The guide's model."""
    return str(request.messages[0]["content"])


def algorithm(model: Path, reflection_url: str, *, kind: str = "GEPA", **options: Any) -> Any:
    from lightspan import APO, GEPA, LLM, Alternate

    llm = LLM(base_url=reflection_url, model="thinker")
    prompts: Any = (
        GEPA(
            reflection=llm,
            optimize=BOTH,
            max_rollouts=80,
            max_reflections=8,
            minibatch=2,
            finalists=0,
            merge=False,
        )
        if kind == "GEPA"
        else APO(
            reflection=llm,
            optimize=BOTH,
            beam_width=1,
            branch_factor=2,
            beam_rounds=2,
            gradient_batch_size=2,
            val_batch_size=4,
            max_rollouts=96,
        )
    )
    given = {"max_rollouts": prompts.max_rollouts + 3 * 8, "cycles": 2, **options}
    return Alternate(prompts, alternate_toy.weights(model), **given)


def fit(folder: Path, made: Any) -> Any:
    return alternate_toy.fit(folder, made, guided)


def main(folder: Path, model: Path, reflection_url: str, batches: int) -> None:
    alternate_toy.kill_at(batches)
    fit(folder, algorithm(model, reflection_url))


if __name__ == "__main__":
    os.environ["OPENAI_BASE_URL"] = sys.argv[3]
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4], int(sys.argv[5]))
