"""Test calls that bypass the OpenAI SDK: their spans, and the reason for not being trained."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightspan.capture.adapter import FrameworkCall, SpanEnd
from lightspan.capture.context import AgentContext, AttemptContext, Frame
from lightspan.capture.other_clients import client_of, record_call
from lightspan.lightning import Rejection, build_episode, classify_calls
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Rollout
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import Span, SpanKind, SpanStatus, clean_attributes
from lightspan.stores.memory import MemoryStore
from lightspan.training.call_budget import endpoint_calls
from lightspan_prompts.search.feedback import evidence_of
from lightspan_testing.store_suite.base import ref
from lightspan_testing.strategies import make_attempt, make_rollout

ACTING = AgentContext(
    AttemptContext(rollout_id="r", attempt_id="a", trace_id="0" * 32),
    (Frame("writer", "1" * 16),),
    "1" * 16,
)
REQUEST = {"model": "mine", "messages": [{"role": "user", "content": "go"}]}
ANSWER = {
    "choices": [{"message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2},
}


def call(end: SpanEnd | None = None) -> Span:
    record_call(ACTING, REQUEST, ANSWER, end or SpanEnd(), start_ns=1)
    (span,) = ACTING.scope.recorder.drain()
    return span


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


@pytest.mark.parametrize("is_cached", [False, True])
async def test_an_answer_of_a_cache_costs_nothing(is_cached: bool) -> None:
    record_call(ACTING, REQUEST, ANSWER, start_ns=1, is_cached=is_cached)
    [span] = ACTING.scope.recorder.drain()
    assert span.attributes.get(c.CACHED) is (True if is_cached else None)
    assert c.usage_of(span.attributes) == ((None, None) if is_cached else (5, 2))
    rollout, attempt = make_rollout(), make_attempt()
    span = replace(span, attempt_id=attempt.attempt_id)
    evidence = evidence_of(build_episode(attempt, rollout, [span], []), None)
    assert evidence.usage == ({} if is_cached else {"mine": (5, 2)})
    assert evidence.estimated == 0
    async with MemoryStore() as store:
        await store.enqueue([rollout])
        [claim] = await store.claim("runner", 1, lease_s=60)
        stored = replace(span, attempt_id=claim.attempt.attempt_id)
        await store.add_spans(ref(claim.attempt), [stored])
        assert await endpoint_calls(store, [rollout.rollout_id]) == (not is_cached)


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (SpanStatus.ERROR, "Down", "error"),
        (SpanStatus.UNSET, "Down", "cancelled"),
        (SpanStatus.ERROR, "CancelledError", "cancelled"),
    ],
)
def test_how_it_ended(status: SpanStatus, error: str, outcome: str) -> None:
    span = call(SpanEnd(status, "no", {c.ERROR_TYPE: error, "more": 1}))
    assert (span.status, span.status_message) == (status, "no")
    assert (span.attributes[c.CALL_OUTCOME], span.attributes[c.ERROR_TYPE]) == (outcome, error)
    assert "more" not in span.attributes


def test_the_coverage_says_that_it_is_not_trainable() -> None:
    ended = Attempt(
        rollout_id="r", attempt_id="a", number=1, epoch=1, status=AttemptStatus.SUCCEEDED
    )
    episode = build_episode(ended, Rollout(rollout_id="r", task={}, task_id="t"), [call()], [])
    trained = Routing(default=Target(route=Route.POLICY, policy="policy"))
    (entry,) = classify_calls(episode, trained).entries
    assert entry.rejection is Rejection.NO_TOKENS
    assert entry.reason == "no tokens: not trainable; the call did not go through the gateway"


@pytest.mark.parametrize(
    ("mode", "path", "gateway", "routed"),
    [
        (Mode.TRAIN, "writer", "http://gateway", True),
        (Mode.VAL, "writer", "http://gateway", True),
        (Mode.PRODUCTION, "writer", "http://gateway", True),  # one that serves an app
        (Mode.PRODUCTION, "writer", None, False),
        (Mode.TRAIN, "writer", None, False),
        (Mode.TRAIN, "checker", "http://gateway", False),
    ],
)
def test_calls_that_the_gateway_answers(
    mode: Mode, path: str, gateway: str | None, routed: bool
) -> None:
    routing = Routing(rules=[Rule("writer", Target(route=Route.POLICY, policy="main"))])
    scope = AttemptContext(
        rollout_id="r", attempt_id="a", mode=mode, gateway_url=gateway, routing=routing
    )
    assert AgentContext(scope, (Frame(path, "1" * 16),)).is_routed is routed


# --- clients --------------------------------------------------------------------------------
class Plain:
    """A client that takes no arguments and has no attributes."""


class LiteLLMChat:
    def __init__(self, api_base: str) -> None:
        self.api_base = api_base


class Hostile:
    def __init__(self, api_base: str, openai_api_key: str) -> None:
        self._create_args = {"base_url": api_base, "api_key": openai_api_key}

    @property
    def base_url(self) -> str:
        raise RuntimeError("a property of the app's")


REPLACED = "use the.Native in its place"
LITELLM = 'name its model "openai/…": LiteLLM then uses the OpenAI SDK, which lightspan sees'
HERE = "tests.capture.test_other_clients"


@pytest.mark.parametrize(
    ("client", "known"),
    [
        (Plain(), {c.CLIENT: f"{HERE}.Plain", c.CLIENT_FIX: REPLACED}),
        (
            LiteLLMChat("http://user:secret@models.test/v1?key=secret"),
            {
                c.CLIENT: f"{HERE}.LiteLLMChat",
                c.CLIENT_FIX: LITELLM,
                c.SERVER_ADDRESS: "models.test",
            },
        ),
        (
            Hostile("http://[::1]:8000/v1", "secret"),
            {
                c.CLIENT: f"{HERE}.Hostile",
                c.CLIENT_FIX: REPLACED,
                c.SERVER_ADDRESS: "::1",
                c.SERVER_PORT: 8000,
            },
        ),
    ],
)
def test_what_is_said_of_a_client(client: object, known: dict[str, object]) -> None:
    found = client_of(client, "the.Native").attributes()
    assert clean_attributes(found) == known


@pytest.mark.parametrize(
    ("client", "gateway", "spans"),
    [
        (LiteLLMChat("http://127.0.0.1:80/v1"), "http://127.0.0.1:80", 0),
        (LiteLLMChat("http://127.0.0.1:80/v1"), "http://127.0.0.1:8", 1),
        (None, "http://127.0.0.1:80", 1),
    ],
)
def test_a_client_at_the_attempts_endpoint(client: object, gateway: str | None, spans: int) -> None:
    scope = AttemptContext(rollout_id="r", attempt_id="a", gateway_url=gateway)
    record_call(AgentContext(scope), REQUEST, ANSWER, start_ns=1, client=client, native="it")
    assert len(scope.recorder.drain()) == spans


ENDS: dict[str, tuple[list[bool | None], bool, bool]] = {
    # how the calls inside ended (None: not yet) → whether the one around them is recorded
    "none, well": ([], True, True),
    "none, badly": ([], False, True),
    "one failed, and another way was found": ([False], True, True),
    "one failed, and no other way was found": ([False], False, False),
    "one brought the answer": ([True], True, False),
    "one is under way": ([None], True, False),
    "one failed and was tried again": ([False, True], True, False),
    "both failed": ([False, False], True, True),
    "two at once, one of which won": ([True, False], True, False),
    "one failed, another is under way": ([False, None], True, False),
}


@pytest.mark.parametrize("case", ENDS)
def test_who_records_a_call_inside_which_others_were_made(case: str) -> None:
    ended, is_ok, expected = ENDS[case]
    calls = FrameworkCall(ACTING)
    told = [calls.start_inner() for _ in ended]
    for end, is_answered in zip(told, ended, strict=True):
        if is_answered is not None:
            end(is_answered)
            end(not is_answered)  # only the first time counts
    assert calls.needs_record(is_ok=is_ok) is expected
