"""An app with two agents: `writer` is trained, `checker` is frozen.

The reward is 1 if one of the writer's answers contains an `o`, else 0.
"""

from __future__ import annotations

import openai

import lightspan

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


@lightspan.rollout
def answer(task: dict[str, str]) -> float:
    """Call the writer twice in one conversation, and the checker."""
    messages = [{"role": "user", "content": task["question"]}]
    with lightspan.agent("writer"):
        first = _ask(messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
        second = _ask(messages)
    with lightspan.agent("checker"):
        _ask([{"role": "user", "content": second}])
    return float("o" in first + second)


def _ask(messages: list[dict[str, str]]) -> str:
    reply = client.chat.completions.create(
        model="any",
        max_tokens=5,
        temperature=0.3,
        messages=messages,  # type: ignore[arg-type]
    )
    return reply.choices[0].message.content or ""
