"""Recordings for tests: a store of production and the folder of a run, made without a model.

Both are written by the functions that apps and trainers use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightspan.lightning.advantages import Explanation
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import (
    AttemptStatus,
    Json,
    Mode,
    Outcome,
    Report,
)
from lightspan.schema.resources import ROUTING
from lightspan.schema.reward import Reward
from lightspan.schema.routing import make_routing
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store, StoredCall
from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation
from lightspan_testing.store_suite.base import (
    LEASE_S,
    make_production,
    make_record,
    make_rollout,
    make_span,
    ref,
)

SECOND: Final = 1_000_000_000
RUN_ID: Final = "run-1"


def call_span(attempt: Any, number: int, agent: str, question: Any, answer: str) -> Span:
    """Return the span of a model call with its messages."""
    attributes = {
        c.CALL_ID: f"call-{attempt.attempt_id}-{number}",
        c.AGENT_PATH: agent,
        c.RESPONSE_ID: f"resp-{attempt.attempt_id}-{number}",
        c.INPUT_MESSAGES: genai_messages.dump(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        ),
        c.OUTPUT_MESSAGES: genai_messages.dump([{"role": "assistant", "content": answer}]),
        c.OUTPUT_TOKENS: len(answer),
        c.CALL_OUTCOME: "ok",
    }
    return make_span(
        attempt,
        100 + number,
        name=f"chat {agent}",
        kind=SpanKind.LLM,
        start_ns=number * SECOND,
        end_ns=(number + 1) * SECOND,
        sequence_start=2 * number,
        sequence_end=2 * number + 1,
        attributes=attributes,
    )


async def record(
    store: Store,
    name: str,
    *,
    question: Any = "How do I pay?",
    answer: str = "By card.",
    tools: Sequence[Json] = (),
    service: str = "support",
    token: str = "",
    more: dict[str, Any] | None = None,
    spans: Sequence[Span] = (),
    fails: str = "",
    reward: float | None = None,
) -> str:
    """Record an attempt of production with two agents' calls and a tool; return its id."""
    claim = make_production(name, token or f"token-{name}", run_id=service)
    attempt = claim.attempt
    await store.start([claim])
    tool = make_span(
        attempt,
        2,
        name="search",
        kind=SpanKind.TOOL,
        start_ns=SECOND,
        end_ns=2 * SECOND,
        attributes={c.TOOL_CALL_ARGUMENTS: '{"query": "pay"}', c.TOOL_CALL_RESULT: "cards, cash"},
    )
    root = make_span(
        attempt,
        1,
        name="attempt",
        kind=SpanKind.CHAIN,
        end_ns=4 * SECOND,
        attributes={"user.id": "ada", "session.id": "s-1", "tag.tags": ["billing"], **(more or {})},
        status=SpanStatus.ERROR if fails else SpanStatus.OK,
        status_message=fails,
    )
    calls = [
        call_span(attempt, 0, "router", question, "billing"),
        call_span(attempt, 2, "router/writer", question, answer),
    ]
    if tools:
        message = {"role": "assistant", "content": None, "tool_calls": list(tools)}
        output = {c.OUTPUT_MESSAGES: genai_messages.dump([message])}
        calls[1] = calls[1].replace(attributes={**calls[1].attributes, **output})
    emitted = [] if reward is None else [_reward_span(attempt, reward)]
    await store.add_spans(ref(attempt), [root, tool, *calls, *emitted, *spans])
    status = AttemptStatus.FAILED if fails else AttemptStatus.SUCCEEDED
    outcome = Outcome.APP_ERROR if fails else Outcome.OK
    await store.report([attempt.report(status, outcome, fails)])
    return attempt.attempt_id


def _reward_span(attempt: Any, value: float) -> Span:
    return make_span(
        attempt,
        90,
        name="reward",
        kind=SpanKind.REWARD,
        start_ns=3 * SECOND,
        end_ns=3 * SECOND,
        attributes={c.REWARD_VALUE: value},
    )


async def make_production_store(path: Path, count: int = 3) -> str:
    """Make a store with recorded attempts; return its URL."""
    url = f"sqlite:///{path}"
    async with open_store(url) as store:
        for number in range(count):
            await record(store, f"ro-{number}", question=f"Question {number}?")
    return url


async def make_run(
    path: Path,
    *,
    steps: int = 2,
    rewards: Sequence[float] = (0.0, 1.0),
    config: dict[str, Json] | None = None,
    is_complete: bool = True,
) -> RunFolder:
    """Make the folder of a run of two agents, of which `writer` learns.

    Each step has one group with a rollout for each of `rewards`, whose advantages are explained.
    """
    folder = RunFolder(path)
    folder.create()
    folder.release()
    settings = {
        "algorithm": "lightning_rl",
        "model": "tiny",
        "app": "app:answer",
        "optimize": "writer",
        "metric": "reward",
        "steps": steps,
        "store": None,
        "reward": None,
        "failure_reward": None,
        "loss": {"kl": 0.0},
        "run_id": RUN_ID,
        **(config or {}),
    }
    folder.write_config(settings)
    async with open_store(folder.store_url) as store:
        routing = make_routing({"writer": "main"}, None, "main", None)
        resources = await store.put_resources({ROUTING: routing})
        evaluate(folder, 0, 0.25)
        for step in range(1, steps + 1):
            explained = {}
            for place, reward in enumerate(rewards):
                key = await roll_out(store, resources, step, place, reward)
                explained[key] = explanation(step, place, reward, rewards)
            folder.write_explanations(step, explained.items())
            folder.add_metrics(metrics_line(step, rewards))
        evaluate(folder, steps, 0.75)
    if is_complete:
        folder.write_result({"steps": steps, "summary": "held-out reward: 0.25 -> 0.75"})
    return folder


def metrics_line(step: int, rewards: Sequence[float] = (0.0, 1.0)) -> dict[str, Json]:
    """Return the line of the metrics of a step."""
    return {
        "kind": "train",
        "step": step,
        "rollouts": len(rewards),
        "scored": len(rewards),
        "failed": 0,
        "reward": sum(rewards) / len(rewards),
        "reward_se": 0.1,
        "batch/groups": 1,
        "seconds": 2.0,
        "learner/entropy": 3.0,
    }


def explanation(
    step: int, place: int, reward: float, rewards: Sequence[float] = (0.0, 1.0)
) -> Explanation:
    """Return how the advantage of a rollout's call was computed."""
    return Explanation(
        rollout_id=f"ro-{step}-{place}",
        group_id=f"group-{step}",
        agent_path="writer",
        estimator="dr_grpo",
        unit="rollout",
        credit_rule="terminal",
        weighting="rollout",
        credit=reward,
        value=reward,
        baseline=sum(rewards) / len(rewards),
        scale=1.0,
        size=len(rewards),
        zero_reason=None,
        tokens=2,
        token_weight=0.5,
        share=1.0,
    )


async def roll_out(
    store: Store,
    resources: str,
    step: int,
    place: int,
    reward: float | None,
    *,
    mode: Mode = Mode.TRAIN,
    fails: str = "",
    agent: str = "writer",
    more: dict[str, Any] | None = None,
) -> str:
    """Record a rollout of a step; return the key of its first call.

    Args:
        store: the store of the run.
        resources: id of the resources with the routing.
        step: number of the step.
        place: place in the group.
        reward: what the app returned; None if nothing.
        mode: mode of the rollout.
        fails: message of the app's error; empty if it succeeded.
        agent: path of the agent of the first call.
        more: further attributes of the first call.
    """
    name = f"ro-{step}-{place}"
    rollout = make_rollout(
        name,
        task={"question": f"task {step}"},
        task_id=f"task-{step}",
        run_id=RUN_ID,
        group_id=f"group-{step}",
        step=step,
        mode=mode,
        resources_id=resources,
    )
    await store.enqueue([rollout])
    [claim] = await store.claim("runner", 1, LEASE_S, RUN_ID)
    attempt = claim.attempt
    calls = [
        call_span(attempt, 0, agent, f"task {step}", f"answer {place}"),
        call_span(attempt, 1, "checker", f"check {step}", "fine"),
    ]
    calls[0] = calls[0].replace(attributes={**calls[0].attributes, **(more or {})})
    for number, span in enumerate(calls):
        call_id = str(span.attributes[c.CALL_ID])
        fields = {"policy": "main", "agent_path": agent, "sequence_start": 0, "sequence_end": 1}
        records = [make_record(attempt, call_id, **fields)] if number == 0 else []
        await store.add_calls([StoredCall(span=span, records=records, epoch=attempt.epoch)])
    await store.report(
        [
            Report(
                attempt_id=attempt.attempt_id,
                epoch=attempt.epoch,
                status=AttemptStatus.FAILED if fails else AttemptStatus.SUCCEEDED,
                outcome=Outcome.APP_ERROR if fails else Outcome.OK,
                message=fails,
                reward=None if reward is None else Reward(reward, {"style": 0.5}),
            )
        ]
    )
    return f"{attempt.attempt_id}/{calls[0].attributes[c.CALL_ID]}/0"


def evaluate(folder: RunFolder, step: int, reward: float, tasks: int = 4) -> None:
    """Add an evaluation whose rewards are a little above `reward`."""
    rewards = {f"held-{number}": min(1.0, reward + 0.05 * (number % 4)) for number in range(tasks)}
    evaluation = Evaluation(step=step, rewards=rewards)
    folder.add_evaluation(evaluation, {"kind": "eval", "step": step, **evaluation.metrics()})
