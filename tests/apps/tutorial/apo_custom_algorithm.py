"""An algorithm of one's own that compares prompts, like that of the original's prompt example.

`python apo_custom_algorithm.py` runs the algorithm and its runner in one process.
"""

from __future__ import annotations

import asyncio
from typing import Any, Optional, Sequence  # noqa: UP035 - as scripts of then have it

from openai import AsyncOpenAI

import lightspan_agl as agl
from lightspan_agl import Trainer, setup_logging
from lightspan_agl.algorithm import algo

CANDIDATES = ["Answer: {any_question}", "Answer briefly: {any_question}", "{any_question}"]


async def apo_algorithm(*, store: agl.LightningStore) -> None:
    """Queue one rollout per prompt, and print the prompt with the best reward."""
    prompts_and_rewards: list[tuple[str, float]] = []
    for prompt in CANDIDATES:
        resources: agl.NamedResources = {
            "main_prompt": agl.PromptTemplate(template=prompt, engine="f-string")
        }
        await store.add_resources(resources)
        rollout = await store.enqueue_rollout(input="Why is the sky blue?", mode="train")
        for _ in range(3000):
            rollouts = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0.01)
            if rollouts:
                break
            await asyncio.sleep(0.02)
        else:
            raise RuntimeError("no rollout ended")
        if rollouts[0].status != "succeeded":
            raise RuntimeError(f"{rollout.rollout_id}: {rollouts[0].status}")
        spans = await store.query_spans(rollout.rollout_id)
        log_llm_span(spans)
        final_reward = agl.find_final_reward(spans)
        assert final_reward is not None
        prompts_and_rewards.append((prompt, final_reward))
    print("best:", max(prompts_and_rewards, key=lambda pair: pair[1]))


def log_llm_span(spans: Sequence[agl.Span]) -> None:
    """Print the spans of model calls."""
    for span in spans:
        if "gen_ai.output.messages" in span.attributes:
            print("call:", span.span_id, span.name, span.status)


@agl.rollout
async def apo_rollout(task: str, prompt_template: agl.PromptTemplate) -> float:
    client = AsyncOpenAI()
    result = await client.chat.completions.create(
        model="gpt-4.1-nano",
        messages=[{"role": "user", "content": prompt_template.format(any_question=task)}],
    )
    return await llm_judge(task, result.choices[0].message.content)


async def llm_judge(task: str, output: Optional[str]) -> float:  # noqa: UP045
    client = AsyncOpenAI()
    result: Any = await client.chat.completions.create(
        model="gpt-4.1-nano",
        messages=[{"role": "user", "content": f"Grade from 0 to 1.\n{task}\n{output}"}],
        temperature=0.0,
    )
    return float(result.choices[0].message.content)


@algo
async def apo_algorithm_usable_in_trainer(*, store: agl.LightningStore) -> None:
    return await apo_algorithm(store=store)


if __name__ == "__main__":
    setup_logging()
    trainer = Trainer(n_runners=1, algorithm=apo_algorithm_usable_in_trainer)
    trainer.fit(apo_rollout)
