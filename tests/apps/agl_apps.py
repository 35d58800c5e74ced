"""Agents of the original agentlightning API that call a real model, as their tasks say."""

from __future__ import annotations

from typing import Any

import openai

import lightspan
import lightspan_agl as agl


def letters(text: str) -> float:
    """Return the share of lower-case letters, a reward that varies even with a random model."""
    return sum(c.isascii() and c.islower() for c in text) / max(1, len(text))


class Writer(agl.LitAgent[dict[str, Any]]):
    """An agent that writes, calls a checker, and calls its own judge if the task names one."""

    def __init__(self, max_tokens: int = 4) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    def rollout(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        llm = resources["main_llm"]
        assert isinstance(llm, agl.LLM)
        assert isinstance(rollout, agl.AttemptedRollout)
        url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        with openai.OpenAI(base_url=url, api_key="dummy", max_retries=0) as client:
            with lightspan.agent("write_query"):
                text = self.say(client, llm, task["q"])
            with lightspan.agent("check_query"):
                self.say(client, llm, "fine?")
        if "judge" in task:
            with openai.OpenAI(base_url=task["judge"], api_key="own", max_retries=0) as judge:
                assert self.say(judge, llm, text) == "judged"
        return letters(text)

    def say(self, client: openai.OpenAI, llm: agl.LLM, text: str) -> str:
        """Call the model, and return its answer."""
        reply = client.chat.completions.create(
            model=llm.model,
            max_tokens=self.max_tokens,
            messages=[{"role": "user", "content": text}],
            **llm.sampling_parameters,
        )
        return reply.choices[0].message.content or ""


@agl.rollout
async def spell(task: Any, llm: agl.LLM) -> float:
    """An asynchronous agent function."""
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model, max_tokens=4, messages=[{"role": "user", "content": task["q"]}]
        )
    return letters(reply.choices[0].message.content or "")
