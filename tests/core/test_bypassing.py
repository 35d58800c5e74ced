"""Calls past the OpenAI SDK: a span with their structure, and a coverage that says why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightspan import LightningRL
from lightspan import conventions as c
from lightspan.bypassing import bypassing_call
from lightspan.folders import RunFolder
from lightspan.inspection import inspect_run
from lightspan.lightning import Rejection, build_episode, cover
from lightspan.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    CallOutcome,
    Report,
    Rollout,
)
from lightspan.resources import ROUTING
from lightspan.routing import Route, Routing, Target
from lightspan.scope import Acting, Frame, Scope
from lightspan.spans import Span, SpanKind, SpanStatus
from lightspan.stores import open_store
from lightspan.testing.strategies import make_rollout

ACTING = Acting(
    Scope(rollout_id="r", attempt_id="a", trace_id="0" * 32), (Frame("writer", "1" * 16),), "1" * 16
)
REQUEST = {"model": "mine", "messages": [{"role": "user", "content": "go"}]}
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}


def call(**fields: object) -> Span:
    return bypassing_call(ACTING, REQUEST, ANSWER, start_ns=1, **fields)  # type: ignore[arg-type]


def test_its_span() -> None:
    span = call()
    assert (span.name, span.kind, span.status) == ("chat mine", SpanKind.LLM, SpanStatus.OK)
    assert (span.parent_id, span.start_ns) == ("1" * 16, 1)
    assert span.end_ns > 1
    known = dict(span.attributes)
    assert str(known.pop(c.CALL_ID)).startswith("call")
    assert known == {
        c.AGENT_PATH: "writer",
        c.ROUTE: "app",
        c.CALL_OUTCOME: "ok",
        c.OPERATION_NAME: "chat",
        c.REQUEST_MODEL: "mine",
        c.OPENINFERENCE_KIND: "LLM",
        c.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"go"}]}]',
        c.OUTPUT_MESSAGES: '[{"role":"assistant","parts":[{"type":"text","content":"fine"}],'
        '"finish_reason":"stop"}]',
        c.FINISH_REASONS: ["stop"],
        c.INPUT_TOKENS: 5,
        c.OUTPUT_TOKENS: 2,
    }


@pytest.mark.parametrize(
    ("status", "outcome", "told"),
    [
        (SpanStatus.ERROR, None, "error"),
        (SpanStatus.UNSET, None, "cancelled"),
        (SpanStatus.ERROR, CallOutcome.CANCELLED, "cancelled"),
    ],
)
def test_how_it_ended(status: SpanStatus, outcome: CallOutcome | None, told: str) -> None:
    span = call(status=status, outcome=outcome, message="no", attributes={c.ERROR_TYPE: "Down"})
    assert (span.status, span.status_message) == (status, "no")
    assert (span.attributes[c.CALL_OUTCOME], span.attributes[c.ERROR_TYPE]) == (told, "Down")


def test_two_calls_are_two() -> None:
    assert call().attributes[c.CALL_ID] != call().attributes[c.CALL_ID]


async def _run_with(span: Span, folder: RunFolder) -> str:
    """A run of one attempt with one call; the rollout's id."""
    folder.write_config({**LightningRL("a/model", optimize="writer").config(), "run_id": "run"})
    async with open_store(folder.store_url) as store:
        routing = LightningRL("a/model", optimize="writer").routing()
        resources_id = await store.put_resources({ROUTING: routing})
        rollout = make_rollout(resources_id=resources_id, run_id="run")
        await store.enqueue([rollout])
        [claim] = await store.claim("runner", 1, 60.0)
        ref = AttemptRef(claim.attempt.attempt_id, claim.attempt.epoch)
        ids = {"attempt_id": ref.attempt_id, "rollout_id": rollout.rollout_id}
        await store.add_spans(ref, [span.replace(**ids)])
        done = Report(attempt_id=ref.attempt_id, epoch=ref.epoch, status=AttemptStatus.SUCCEEDED)
        await store.report([done])
    return rollout.rollout_id


def test_inspect_says_that_it_is_not_trainable(tmp_path: Path) -> None:
    rollout_id = asyncio.run(_run_with(call(), RunFolder(tmp_path)))
    assert "coverage of calls: rejected:no_tokens 1\n" in inspect_run(tmp_path)
    told = "/0 writer: rejected no tokens: not trainable; the call did not go through the gateway"
    assert told in inspect_run(tmp_path, rollout_id)


def test_the_coverage_says_that_it_is_not_trainable() -> None:
    ended = Attempt(
        rollout_id="r", attempt_id="a", number=1, epoch=1, status=AttemptStatus.SUCCEEDED
    )
    episode = build_episode(ended, Rollout(rollout_id="r", task={}, task_id="t"), [call()], [])
    trained = Routing(default=Target(route=Route.POLICY, policy="policy"))
    (entry,) = cover(episode, trained).entries
    assert entry.rejection is Rejection.NO_TOKENS
    assert entry.reason == "no tokens: not trainable; the call did not go through the gateway"
