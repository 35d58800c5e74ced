"""Test the outcomes and rewards of what apps return and raise."""

from __future__ import annotations

import re
from typing import Any

import pytest

import lightspan
from lightspan.capture import emit
from lightspan.runners.app import App
from lightspan.runners.outcome import classify
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import AttemptStatus, Outcome, Rollout, RolloutStatus
from lightspan.schema.redaction import MAX_TEXT_LENGTH
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan.stores.protocol import Store
from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.wait import until
from packages.core.tests.runners.runs import (
    WRITER,
    apps,
    enqueue,
    finished,
    run_one,
    running,
    spans_of,
)

pytestmark = pytest.mark.usefixtures("clean")


# --- what the app returns -------------------------------------------------------------------
@pytest.mark.parametrize("app", ["returns", "returns_async", "hands_on"])
@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, Reward(1.0)),
        (None, None),
        ("nan", Reward(None)),
        ("two", Reward(0.5, {"reward": 0.5, "a\ufffd": 3.0})),
    ],
)
async def test_rewards(store: Store, app: str, value: Any, reward: Reward | None) -> None:
    attempt = await run_one(store, getattr(apps, app), {"value": value})
    assert (attempt.status, attempt.outcome) == (AttemptStatus.SUCCEEDED, Outcome.OK)
    assert (attempt.reward, attempt.message, attempt.capture_errors) == (reward, "", [])
    [root] = await spans_of(store, attempt)
    assert (root.name, root.kind, root.status) == ("attempt", SpanKind.CHAIN, SpanStatus.OK)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("good", "the app returned: a reward must be a number, not the text 'good'"),
        ([1.0], "the app returned: a reward must be a number or a bool, or None or a mapping"),
        ("unreadable", "the app returned: a reward that cannot be read: RuntimeError: no repr"),
    ],
)
async def test_what_is_no_reward(store: Store, value: Any, message: str) -> None:
    attempt = await run_one(store, apps.returns, {"value": value})
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.BAD_REWARD)
    assert attempt.reward is None
    assert attempt.message.startswith(message)


async def test_what_the_app_emits_is_kept(store: Store) -> None:
    attempt = await run_one(store, apps.emits, {})
    reward, message, tool, planner, root = await spans_of(store, attempt)
    assert (reward.kind, reward.attributes[c.REWARD_VALUE]) == (SpanKind.REWARD, 0.5)
    assert reward.attributes[c.AGENT_PATH] == "planner"
    assert message.attributes[c.MESSAGE_BODY] == "hello \N{REPLACEMENT CHARACTER}"
    parents = [span.parent_id for span in (reward, message, tool, planner, root)]
    assert parents == [tool.span_id, tool.span_id, planner.span_id, root.span_id, None]
    assert len({span.trace_id for span in (reward, message, tool, planner, root)}) == 1


# --- how it fails ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("app", "task", "message"),
    [
        ("raises", {"text": "no such table"}, "ValueError: no such table"),
        ("raises", {}, "KeyError: 'text'"),
        ("cancels_itself", {}, "CancelledError: "),
    ],
)
async def test_an_app_that_fails(store: Store, app: str, task: Any, message: str) -> None:
    attempt = await run_one(store, getattr(apps, app), task)
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert (attempt.message, attempt.reward) == (message, None)
    assert attempt.capture_errors == []
    error, root = await spans_of(store, attempt)
    assert error.attributes[c.EXCEPTION_TYPE] == message.partition(":")[0]
    assert (error.parent_id, root.status) == (root.span_id, SpanStatus.ERROR)
    [state] = await store.rollouts()
    assert state.status is RolloutStatus.FAILED


async def test_a_wrong_reward_names_the_apps_line(store: Store) -> None:
    """Check the message of an error that is raised inside lightspan."""
    attempt = await run_one(store, apps.emits_a_text, {})
    assert attempt.message.startswith(
        "RewardError: a reward must be a number, not the text 'good'; convert it first "
        '(`emit.emit_reward("good")'
    )
    assert re.search(r" at runner_apps\.py:\d+ in emits_a_text\)$", attempt.message)


@pytest.mark.parametrize("kind", sorted(apps.BUILTIN))
@pytest.mark.parametrize(
    "app",
    [
        "raises_builtin",
        "raises_builtin_async",
        "raises_builtin_later",
        "raises_builtin_in_a_thread",
    ],
)
async def test_exceptions_that_futures_treat_apart(store: Store, app: str, kind: str) -> None:
    """Check StopIteration, which futures refuse, GeneratorExit, which closes coroutines, and
    others.
    """
    message = f"{kind}: by the app"
    if kind == "StopIteration" and app in ("raises_builtin_async", "raises_builtin_later"):
        message = "RuntimeError: coroutine raised StopIteration"  # Python's own (PEP 479)
    await test_an_app_that_fails(store, app, {"kind": kind}, message)


async def test_texts_that_no_file_can_hold(store: Store) -> None:
    def app(task: Any) -> None:
        with lightspan.agent("writer\udc80"):
            raise OSError("no file named a\udc80")

    attempt = await run_one(store, app, "task")
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert (attempt.message, attempt.capture_errors) == ("OSError: no file named a\ufffd", [])
    [spans] = (await store.spans([attempt.attempt_id])).values()
    [agent] = [span for span in spans if span.kind is SpanKind.AGENT]
    assert agent.name == "invoke_agent writer\ufffd"
    assert agent.attributes[c.AGENT_PATH] == "writer\ufffd"
    assert agent.status_message == "no file named a\ufffd"


HUGE = 5_000_000
LEFT_OUT = "characters left out…]"


async def test_an_error_text_of_five_million_characters(store: Store) -> None:
    """Check that the beginning and the end of the text are kept, in the message and in every
    span.
    """

    def app(task: Any) -> None:
        with lightspan.agent("writer"):
            raise ValueError(f"begins {'x' * HUGE} ends")

    attempt = await run_one(store, app, "task")
    assert attempt.outcome is Outcome.APP_ERROR
    assert attempt.message.startswith("ValueError: begins xxx")
    assert LEFT_OUT in attempt.message
    assert attempt.message.endswith("x ends")
    spans = await spans_of(store, attempt)
    assert [span.status for span in spans] == [SpanStatus.ERROR] * 3
    texts = [text for span in spans for text in (span.status_message, *span.attributes.values())]
    assert max(len(str(text)) for text in texts) < MAX_TEXT_LENGTH + 100
    stacks = [str(text) for text in texts if str(text).startswith("Traceback (most recent")]
    assert {stack[-7:] for stack in stacks} == {"x ends\n"}


async def test_a_returned_text_of_five_million_characters(store: Store) -> None:
    attempt = await run_one(store, lambda task: "x" * HUGE, "task")
    assert attempt.outcome is Outcome.BAD_REWARD
    assert LEFT_OUT in attempt.message
    assert len(attempt.message) < MAX_TEXT_LENGTH + 100


async def test_keys_in_errors_are_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check keys of the environment, an endpoint and the attempt, and tokens after `Bearer`."""
    monkeypatch.setenv("SEARCH_API_KEY", "search-5e8f1c")
    monkeypatch.setenv("UPSTREAM", "upstream-77ab")
    endpoint = LLM(base_url="http://127.0.0.1:9", model="m", api_key_env="UPSTREAM")

    def app(task: Any, llm: Any) -> None:
        emit.emit_object({"llm": llm})
        emit.emit_message(f"{llm} {llm!r}")
        emit.emit_annotation({"llm": llm})
        with lightspan.agent("writer"):
            emit.emit_exception(ValueError(f"{llm.api_key} search-5e8f1c"))
            raise ValueError(
                f"401: {endpoint.api_key}, {llm.api_key}, search-5e8f1c, "
                "{'Authorization': 'Bearer abc.def-123'}, "
                f"{'sk'}-proj-0123456789abcdefXYZ"
            )

    resources = {"routing": Routing(gateway_url="http://127.0.0.1:9", rules=[WRITER])}
    await enqueue(store, ["task"], resources)
    async with running(store, app):
        await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert attempt.message == (
        "ValueError: 401: <key>, <key>, <key>, {'Authorization': 'Bearer <key>'}, <key>"
    )
    spans = await spans_of(store, attempt)
    assert len(spans) == 7
    for key in (attempt.call_token, "5e8f1c", "upstream-77ab", "abc.def-123", "0123456789abcdef"):
        assert key not in repr(spans)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (None, Outcome.INFRASTRUCTURE),  # nothing listens
        (401, Outcome.INFRASTRUCTURE),
        (429, Outcome.INFRASTRUCTURE),
        (503, Outcome.INFRASTRUCTURE),
        (400, Outcome.APP_ERROR),  # a policy's words may be too long for another model
        (404, Outcome.APP_ERROR),
    ],
)
def test_only_what_words_can_cause_is_a_failure_of_the_app(
    status: int | None, outcome: Outcome
) -> None:
    import httpx
    import openai

    request = httpx.Request("POST", "https://frozen.example/v1/chat/completions")
    error: Exception = openai.APIConnectionError(request=request)
    if status is not None:
        response = httpx.Response(status, request=request)
        error = openai.APIStatusError("no", response=response, body=None)
    for gateway in (None, "http://127.0.0.1:9"):
        assert classify(error, gateway).outcome is outcome
    tool = httpx.ConnectError("no such host", request=request)  # of an address that a policy wrote
    assert classify(tool, None).outcome is Outcome.APP_ERROR


@pytest.mark.parametrize("is_gateway", [False, True])
async def test_a_lost_attempt_names_the_endpoint_and_the_agent(
    store: Store, is_gateway: bool
) -> None:
    def app(task: Any) -> None:
        import openai

        with lightspan.agent("desk"), lightspan.agent("writer"):
            client = openai.OpenAI(
                base_url="http://user:secret-word@127.0.0.1:9/v1",
                default_query={"key": "secret-word"},
                api_key="x",
                max_retries=0,
            )
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1"}])

    with ScriptedServer([Reply(drop=True)]) as gateway:
        target = WRITER.target if is_gateway else Target(route=Route.APP)
        resources = {"routing": Routing(gateway_url=gateway.origin, default=target)}
        await enqueue(store, ["task"], resources, max_infrastructure_tries=1)
        async with running(store, app):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    where = (
        f"the training's gateway, {gateway.origin}/v1/chat/completions"
        if is_gateway
        else "the app's endpoint, http://127.0.0.1:9/v1/chat/completions"
    )
    assert (attempt.status, attempt.outcome) == (AttemptStatus.LOST, Outcome.INFRASTRUCTURE)
    assert attempt.message.endswith(f" ({where}, called by desk/writer)")
    assert "secret-word" not in attempt.message


async def test_an_async_app_that_takes_too_long(store: Store) -> None:
    await enqueue(store, [{"seconds": 60}], timeout_s=0.01)
    async with running(store, apps.sleeps_async) as runner:
        await finished(store)
        assert not runner.stuck
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.TIMEOUT, Outcome.TIMEOUT)
    assert attempt.message == "the app ran longer than 0.01 s"


async def test_a_sync_app_that_takes_too_long_ends_the_runner(store: Store) -> None:
    """Check that the runner claims nothing more, because the app's thread cannot be ended."""
    await enqueue(store, [{"seconds": 0.3}, {"seconds": 0.3}], timeout_s=0.01)
    runner = Runner(store, App(apps.sleeps), RunnerConfig(slots=1))
    await runner.run()
    assert runner.stuck
    statuses = [state.status for state in await store.rollouts()]
    assert statuses == [RolloutStatus.FAILED, RolloutStatus.QUEUED]
    await until(lambda: not runner.stuck)


async def test_missing_resources_are_infrastructure(store: Store) -> None:
    rollout = Rollout(
        rollout_id="ro-0", task={}, task_id="t", resources_id="re-gone", max_infrastructure_tries=2
    )
    await store.enqueue([rollout])
    async with running(store, apps.returns):
        [state] = await finished(store)
    assert state.status is RolloutStatus.LOST
    attempts = await store.attempts(["ro-0"])
    assert [(a.status, a.outcome) for a in attempts] == [
        (AttemptStatus.LOST, Outcome.INFRASTRUCTURE)
    ] * 2
    assert "re-gone" in attempts[0].message


@pytest.mark.parametrize(
    ("replies", "times", "status"),
    [
        ([Reply(drop=True)], 1, AttemptStatus.LOST),
        ([Reply(text="busy", status=503)], 1, AttemptStatus.LOST),
        ([Reply(drop=True), Reply(text="busy", status=503)], 2, AttemptStatus.LOST),
        ([Reply(drop=True), Reply(text="busy", status=502), "fine"], 3, AttemptStatus.SUCCEEDED),
        ([Reply(text="too long", status=400)], 1, AttemptStatus.SUCCEEDED),  # the app's own request
    ],
)
async def test_an_app_that_goes_on_without_the_answer_of_a_gateway_that_failed(
    store: Store, replies: list[Any], times: int, status: AttemptStatus
) -> None:
    with ScriptedServer(replies) as gateway:
        resources = {"routing": Routing(gateway_url=gateway.origin, default=WRITER.target)}
        task = {"text": "1", "times": times}
        await enqueue(store, [task], resources, max_infrastructure_tries=1)
        async with running(store, apps.catches_and_goes_on):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert attempt.status is status
    if status is AttemptStatus.LOST:
        assert attempt.outcome is Outcome.INFRASTRUCTURE
        assert attempt.reward is None
        assert attempt.message.startswith(
            f"the app went on without the answer to a model call of app to the gateway "
            f"{gateway.origin}: "
        )
