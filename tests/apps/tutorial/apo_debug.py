"""Three ways to debug the agent of `apo_custom_algorithm`: a runner, hooks, a trainer."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, cast

from apo_custom_algorithm import apo_rollout  # type: ignore[import-not-found]

from lightspan_agl import Trainer, configure_logger
from lightspan_agl.litagent import LitAgent
from lightspan_agl.runner import LitAgentRunner
from lightspan_agl.store import InMemoryLightningStore
from lightspan_agl.tracer import AgentOpsTracer, OtelTracer
from lightspan_agl.types import Dataset, Hook, PromptTemplate, Rollout

QUESTION = "Why is the sky blue?"


async def debug_with_runner() -> None:
    tracer = OtelTracer()
    runner = LitAgentRunner[str](tracer)
    store = InMemoryLightningStore()
    resource = PromptTemplate(template="Answer: {any_question}", engine="f-string")
    with runner.run_context(agent=apo_rollout, store=store):
        await runner.step(QUESTION, resources={"main_prompt": resource})


async def debug_with_hooks() -> None:
    tracer = AgentOpsTracer()
    runner = LitAgentRunner[str](tracer)
    store = InMemoryLightningStore()
    resource = PromptTemplate(template="Answer: {any_question}", engine="f-string")

    class DebugHook(Hook):
        async def on_trace_end(
            self,
            *,
            agent: LitAgent[str],
            runner: LitAgentRunner[str],
            tracer: AgentOpsTracer,
            rollout: Rollout,
        ) -> None:
            for span in tracer.get_last_trace():
                print(f"- {span.name} (status: {span.status}):\n  {span.attributes}")

    with runner.run_context(agent=apo_rollout, store=store, hooks=[DebugHook()]):
        await runner.step(QUESTION, resources={"main_prompt": resource})


def debug_with_trainer() -> None:
    dataset = cast(Dataset[str], [QUESTION, "What is the capital of France?"])
    resource = PromptTemplate(template="Answer: {any_question}", engine="f-string")
    trainer = Trainer(n_workers=1, initial_resources={"main_prompt": resource})
    trainer.dev(apo_rollout, dataset)


if __name__ == "__main__":
    configure_logger()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["runner", "hook", "trainer"], default="runner")
    args: Any = parser.parse_args()
    if args.mode == "runner":
        asyncio.run(debug_with_runner())
    elif args.mode == "hook":
        asyncio.run(debug_with_hooks())
    elif args.mode == "trainer":
        debug_with_trainer()
