"""The runner: apps of every kind, and how each ending is classified."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan.capture import emit, threads, wire
from lightspan.capture.scope import acting
from lightspan.errors import StoreError
from lightspan.gateway import Gateway
from lightspan.runners.app import App
from lightspan.runners.outcome import _causes, classify
from lightspan.runners.runner import Runner, RunnerConfig, _pause_after
from lightspan.schema import conventions as c
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.texts import LONGEST_TEXT
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.testing.conditions import until
from lightspan.testing.gateway_suite import shared_tokenizer
from lightspan.testing.scripted import ScriptedServer
from lightspan.testing.scripted_engine import ScriptedEngine

_spec = importlib.util.spec_from_file_location(
    "runner_apps", Path(__file__).with_name("runner_apps.py")
)
assert _spec is not None
assert _spec.loader is not None
apps: Any = importlib.util.module_from_spec(_spec)
sys.modules["runner_apps"] = apps
_spec.loader.exec_module(apps)

WRITER = Rule("writer", Target(route=Route.POLICY, policy="policy"))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "")  # so that monkeypatch restores it
    monkeypatch.delenv("OPENAI_API_KEY")
    yield
    threads.stop_carrying()
    wire.uninstall()
    wire.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


async def enqueue(
    store: Store, tasks: list[Any], resources: dict[str, Any] | None = None, **fields: Any
) -> None:
    resources_id = await store.put_resources(resources) if resources else ""
    defaults = {"resources_id": resources_id, "mode": Mode.VAL}
    await store.enqueue(
        [
            Rollout(rollout_id=f"ro-{n}", task=task, task_id=f"t{n}", **{**defaults, **fields})
            for n, task in enumerate(tasks)
        ]
    )


@asynccontextmanager
async def running(store: Store, app: Any, **config: Any) -> AsyncIterator[Runner]:
    runner = Runner(store, app if isinstance(app, App) else App(app), RunnerConfig(**config))
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        runner.stop()
        await task


async def finished(store: Store) -> list[RolloutState]:
    cursor = 0
    while True:
        states = await store.rollouts()
        if all(state.status.final for state in states):
            return states
        cursor = (await store.watch(cursor, timeout_s=5)).cursor


async def reaches(store: Store, status: RolloutStatus, number: int = 1) -> None:
    while True:
        if (await store.count()).get(status, 0) >= number:
            return
        await asyncio.sleep(0.002)


async def run_one(store: Store, app: Any, task: Any, **config: Any) -> Attempt:
    """The attempt of one rollout."""
    await enqueue(store, [task])
    async with running(store, app, **config):
        await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    return attempt


async def spans_of(store: Store, attempt: Attempt) -> list[Span]:
    return (await store.spans([attempt.attempt_id]))[attempt.attempt_id]


# --- what the app returns -------------------------------------------------------------------
@pytest.mark.parametrize("app", ["returns", "returns_async", "hands_on"])
@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.25, Reward(0.25)),
        (1, Reward(1.0)),
        (True, Reward(1.0)),
        (False, Reward(0.0)),
        (None, None),
        ("nan", Reward(None)),
        ("inf", Reward(None)),
        ({"reward": 0.5, "length": 3}, Reward(0.5, {"reward": 0.5, "length": 3.0})),
    ],
)
async def test_rewards(store: Store, app: str, value: Any, reward: Reward | None) -> None:
    attempt = await run_one(store, getattr(apps, app), {"value": value})
    assert (attempt.status, attempt.outcome) == (AttemptStatus.SUCCEEDED, Outcome.OK)
    assert (attempt.reward, attempt.message, attempt.damage) == (reward, "", [])
    [root] = await spans_of(store, attempt)
    assert (root.name, root.kind, root.status) == ("attempt", SpanKind.CHAIN, SpanStatus.OK)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("good", "the app returned: a reward must be a number, not the text 'good'"),
        ([1.0], "the app returned: a reward must be a number, a bool, None or a mapping"),
        ("object", "the app returned: a reward must be a number, a bool, None or a mapping"),
        (
            "unreadable",
            "the app returned: a reward that cannot be read: RuntimeError: no repr",
        ),
        ({}, "the app returned: a reward with named dimensions needs at least one: got {}"),
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
        ("exits", {}, "SystemExit: 7"),
        ("raises_no_exception", {}, "Skipped: no Exception at all"),
        ("raises_no_exception_async", {}, "Skipped: no Exception at all"),
        ("exits_async", {}, "SystemExit: 7"),
        ("cancels_itself", {}, "CancelledError: "),
    ],
)
async def test_an_app_that_fails(store: Store, app: str, task: Any, message: str) -> None:
    attempt = await run_one(store, getattr(apps, app), task)
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert (attempt.message, attempt.reward) == (message, None)
    error, root = await spans_of(store, attempt)
    assert error.attributes[c.EXCEPTION_TYPE] == message.partition(":")[0]
    assert (error.parent_id, root.status) == (root.span_id, SpanStatus.ERROR)
    [state] = await store.rollouts()
    assert state.status is RolloutStatus.FAILED


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
    """A future takes no StopIteration, and GeneratorExit is how a coroutine is closed."""
    message = f"{kind}: by the app"
    if kind == "StopIteration" and app in ("raises_builtin_async", "raises_builtin_later"):
        message = "RuntimeError: coroutine raised StopIteration"  # Python's own (PEP 479)
    attempt = await run_one(store, getattr(apps, app), {"kind": kind})
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert (attempt.message, attempt.reward, attempt.damage) == (message, None, [])
    error, root = await spans_of(store, attempt)
    assert error.attributes[c.EXCEPTION_TYPE] == message.partition(":")[0]
    assert (error.parent_id, root.status) == (root.span_id, SpanStatus.ERROR)


async def test_texts_that_no_file_can_hold(store: Store) -> None:
    def app(task: Any) -> None:
        with lightspan.agent("writer\udc80"):
            raise OSError("no file named a\udc80")

    attempt = await run_one(store, app, "task")
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert (attempt.message, attempt.damage) == ("OSError: no file named a\ufffd", [])
    [spans] = (await store.spans([attempt.attempt_id])).values()
    [agent] = [span for span in spans if span.kind is SpanKind.AGENT]
    assert agent.name == "invoke_agent writer\ufffd"
    assert agent.attributes[c.AGENT_PATH] == "writer\ufffd"
    assert agent.status_message == "no file named a\ufffd"


HUGE = 50_000_000
LEFT_OUT = "characters left out…]"


async def test_an_error_text_of_fifty_million_characters(store: Store) -> None:
    def app(task: Any) -> None:
        with lightspan.agent("writer"):
            raise ValueError(f"begins {'x' * HUGE} ends")

    attempt = await run_one(store, app, "task")
    assert attempt.outcome is Outcome.APP_ERROR
    left_out = len(f"begins {'x' * HUGE} ends") - LONGEST_TEXT
    assert attempt.message.startswith("ValueError: begins xxx")
    assert f"x […{left_out} {LEFT_OUT} x" in attempt.message
    assert attempt.message.endswith("x ends")
    spans = await spans_of(store, attempt)
    assert sorted(span.name for span in spans) == [
        "attempt",
        "invoke_agent writer",
        "lightspan.exception",
    ]
    for span in spans:
        assert span.status is SpanStatus.ERROR
        texts = [span.status_message, *map(str, span.attributes.values())]
        assert max(map(len, texts)) < LONGEST_TEXT + 100
    error = next(span for span in spans if span.kind is SpanKind.EXCEPTION)
    stack = str(error.attributes[c.EXCEPTION_STACKTRACE])
    assert stack.startswith("Traceback (most recent call last):")
    assert 'raise ValueError(f"begins' in stack
    assert stack.endswith("x ends\n")


async def test_a_returned_text_of_fifty_million_characters(store: Store) -> None:
    attempt = await run_one(store, lambda task: "x" * HUGE, "task")
    assert attempt.outcome is Outcome.BAD_REWARD
    assert LEFT_OUT in attempt.message
    assert len(attempt.message) < LONGEST_TEXT + 100


async def test_a_dimension_with_a_name_that_no_file_can_hold(store: Store) -> None:
    attempt = await run_one(store, lambda task: {"a\udc80": 1.0}, "task")
    assert attempt.reward == Reward(1.0, {"a\ufffd": 1.0})


async def test_a_dimension_with_a_name_of_fifty_million_characters(store: Store) -> None:
    attempt = await run_one(store, lambda task: {"x" * HUGE: 1.0}, "task")
    assert attempt.outcome is Outcome.BAD_REWARD
    assert attempt.message == (
        "the app returned: the name of a reward's dimension has 50000000 characters, which are "
        f"more than 1024: {'x' * 40!r}…"
    )


async def test_damage_of_fifty_million_characters(store: Store) -> None:
    def app(task: Any) -> None:
        acting().scope.recorder.damage("x" * HUGE)  # type: ignore[union-attr]

    attempt = await run_one(store, app, "task")
    [damage] = attempt.damage
    assert LEFT_OUT in damage
    assert len(damage) < LONGEST_TEXT + 100


async def test_keys_in_errors_are_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process's environment, of an endpoint, of the attempt, and what follows Bearer."""
    monkeypatch.setenv("SEARCH_API_KEY", "search-5e8f1c")
    monkeypatch.setenv("UPSTREAM", "upstream-77ab")
    endpoint = LLM(base_url="http://127.0.0.1:9", model="m", api_key_env="UPSTREAM")

    def app(task: Any, llm: Any) -> None:
        with lightspan.agent("writer"):
            emit.emit_exception(ValueError(f"{llm.api_key()} search-5e8f1c"))
            raise ValueError(
                f"401: {endpoint.api_key()}, {llm.api_key()}, search-5e8f1c, "
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
    assert len(spans) == 4
    for key in (attempt.call_token, "5e8f1c", "upstream-77ab", "abc.def-123", "0123456789abcdef"):
        assert key not in repr(spans)


async def test_the_call_token_is_never_shown(store: Store) -> None:
    resources = {"routing": Routing(gateway_url="http://127.0.0.1:9", rules=[WRITER])}
    await enqueue(store, [{}], resources)
    async with running(store, apps.shows_its_llm):
        await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    spans = await spans_of(store, attempt)
    assert len(spans) == 6
    assert attempt.message.startswith("ValueError: cannot use AttemptLLM(")
    assert attempt.call_token
    assert attempt.call_token not in repr(spans) + attempt.message


async def test_an_async_app_that_takes_too_long(store: Store) -> None:
    await enqueue(store, [{"seconds": 60}], timeout_s=0.01)
    async with running(store, apps.sleeps_async) as runner:
        await finished(store)
        assert not runner.stuck
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.TIMEOUT, Outcome.TIMEOUT)
    assert attempt.message == "the app ran longer than 0.01 s"


async def test_a_sync_app_that_takes_too_long_ends_the_runner(store: Store) -> None:
    """Its thread cannot be ended: nothing more is claimed, the process is replaced."""
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


# --- model calls ----------------------------------------------------------------------------
@asynccontextmanager
async def gateway(store: Store, script: Any) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(shared_tokenizer(), script)
    async with Gateway(store, engine) as made:
        yield made.url, engine


@pytest.mark.parametrize("app", ["asks", "asks_async"])
async def test_calls_of_many_attempts_are_not_mixed_up(store: Store, app: str) -> None:
    def script(request: Any) -> str:
        said = shared_tokenizer().decode(request.prompt_ids).partition("user\n")[2]
        return said.split("\n")[0]

    async with gateway(store, script) as (url, _):
        routing = Routing(gateway_url=url, rules=[WRITER])
        tasks = [{"text": str(number)} for number in range(40)]
        await enqueue(store, tasks, {"routing": routing})
        async with running(store, getattr(apps, app), slots=8):
            states = await finished(store)
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    attempts = await store.attempts([f"ro-{number}" for number in range(40)])
    assert [attempt.reward for attempt in attempts] == [Reward(float(n)) for n in range(40)]
    records = await store.token_records([attempt.attempt_id for attempt in attempts])
    assert {len(found) for found in records.values()} == {1}
    for attempt in attempts:
        llm, agent, root = await spans_of(store, attempt)
        assert (llm.parent_id, agent.parent_id) == (agent.span_id, root.span_id)
        assert llm.trace_id == root.trace_id
        assert llm.attributes[c.AGENT_PATH] == "writer"


@pytest.mark.parametrize("form", ["async def", "returns its awaitable"])
async def test_a_client_that_the_app_keeps_stays_on_one_loop(store: Store, form: str) -> None:
    with ScriptedServer("fine") as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as kept:

            async def ask(task: Any) -> float:
                await kept.models.list()
                said = [{"role": "user", "content": "How are you?"}]
                answer = await kept.chat.completions.create(model="m", messages=said)  # type: ignore[arg-type]
                return float(answer.choices[0].message.content == "fine")

            await enqueue(store, [{}] * 6)
            async with running(store, ask if form == "async def" else lambda task: ask(task)):
                await finished(store)
    attempts = await store.attempts([f"ro-{number}" for number in range(6)])
    assert [(attempt.reward, attempt.message) for attempt in attempts] == [(Reward(1.0), "")] * 6


async def test_what_a_sync_app_sets_its_awaitable_sees(store: Store) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")

    async def reads() -> float:
        return float(tenant.get() == "ann")

    def app(task: Any) -> Any:
        tenant.set("ann")
        return reads()

    attempt = await run_one(store, app, {})
    assert attempt.reward == Reward(1.0)
    assert tenant.get() == "nobody"


async def test_an_awaitable_that_comes_too_late_is_not_left_alone(store: Store) -> None:
    """Python warns of a coroutine that nobody awaits, and a warning fails a test."""

    def app(task: Any) -> Any:
        time.sleep(0.5)
        return apps.returns_async({"value": 1})

    await enqueue(store, [{}], timeout_s=0.1)
    async with running(store, app) as runner:
        await finished(store)
        await until(lambda: not runner.stuck)
    gc.collect()
    [attempt] = await store.attempts(["ro-0"])
    assert attempt.outcome is Outcome.TIMEOUT


async def test_threads_and_executors_carry_the_scope(store: Store) -> None:
    async with gateway(store, "ok") as (url, _):
        await enqueue(store, [{}], {"routing": Routing(gateway_url=url, rules=[WRITER])})
        async with running(store, apps.asks_in_threads):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert attempt.reward == Reward(3.0)
    llm = [span for span in await spans_of(store, attempt) if span.kind is SpanKind.LLM]
    assert [span.attributes[c.AGENT_PATH] for span in llm] == ["writer"] * 3


async def test_a_prompt_that_is_too_long_is_an_outcome(store: Store) -> None:
    async with gateway(store, "ok") as (url, _):
        routing = Routing(gateway_url=url, default=WRITER.target)
        await enqueue(store, [{"text": "word " * 600}], {"routing": routing})
        async with running(store, apps.catches_and_hides):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.CONTEXT_OVERFLOW)
    assert attempt.message == "RuntimeError: the model does not answer"


@pytest.mark.parametrize("app", ["asks", "catches_and_hides"])
async def test_a_gateway_that_is_gone_is_infrastructure(
    store: Store, monkeypatch: pytest.MonkeyPatch, app: str
) -> None:
    monkeypatch.setattr("lightspan.runners.runner._PATIENCE_S", 0.1)
    routing = Routing(gateway_url="http://127.0.0.1:9", default=WRITER.target)
    await enqueue(store, [{"text": "1"}], {"routing": routing}, max_infrastructure_tries=2)
    async with running(store, getattr(apps, app)):
        [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.LOST, 2)
    attempts = await store.attempts(["ro-0"])
    assert [attempt.outcome for attempt in attempts] == [Outcome.INFRASTRUCTURE] * 2


async def test_without_its_gateway_a_runner_claims_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer was killed, and took the gateway with it: one rollout after another was lost to
    connection errors until the runner was gone too. The first one says enough."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    routing = Routing(gateway_url=f"http://127.0.0.1:{port}", default=WRITER.target)
    tasks = [{"text": str(number)} for number in range(6)]
    await enqueue(store, tasks, {"routing": routing})
    names = [f"ro-{number}" for number in range(6)]
    async with running(store, apps.asks, slots=1):

        def has_stopped() -> bool:
            return "nothing is claimed until it does" in caplog.text

        ended = asyncio.create_task(finished(store))
        watching = asyncio.create_task(until(has_stopped))
        await asyncio.wait([watching, ended], return_when=asyncio.FIRST_COMPLETED)
        assert has_stopped()
        [attempt] = await store.attempts(names)
        assert attempt.outcome is Outcome.INFRASTRUCTURE
        engine = ScriptedEngine(shared_tokenizer(), "7")
        async with Gateway(store, engine, port=port):
            states = await ended
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    assert len(await store.attempts(names)) == len(names) + 1


@pytest.mark.parametrize("app", ["asks", "asks_async"])
async def test_a_request_that_the_gateway_refuses_is_the_apps_failure(
    store: Store, app: str
) -> None:
    """The SDK raises its error over the HTTP client's, which knows the gateway's address too: taken
    for a gateway that is gone, the attempt was tried again and its rollout lost."""
    async with gateway(store, "ok") as (url, _):
        routing = Routing(gateway_url=url, default=WRITER.target)
        await enqueue(store, [{"text": [{"type": "image_url"}]}], {"routing": routing})
        async with running(store, getattr(apps, app)):
            [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.FAILED, 0)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert "messages[0].content" in attempt.message


async def test_another_server_that_is_gone_is_the_apps_failure(store: Store) -> None:
    with ScriptedServer("1") as server:
        routing = Routing(gateway_url=server.origin, rules=[])
        await enqueue(store, [{"text": "1"}], {"routing": routing})
        async with running(store, apps.asks_async):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)


def test_causes_are_found_in_groups_and_chains() -> None:
    inner = ValueError("inner")
    try:
        try:
            raise inner
        except ValueError as error:
            raise KeyError("outer") from error
    except KeyError as error:
        group = ExceptionGroup("several", [error])
    assert inner in _causes(group)
    assert classify(group, None).outcome is Outcome.APP_ERROR


class Odd(Exception):
    """It is equal to everything, and has attributes that raise."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = Exception.__hash__

    @property
    def code(self) -> str:
        raise RuntimeError("no code")


def test_an_exception_whose_attributes_raise_is_an_app_error() -> None:
    outer = KeyError("outer")
    outer.__cause__ = Odd("inner")
    assert classify(outer, "http://gateway").outcome is Outcome.APP_ERROR
    assert classify(Odd("alone"), None).message == "Odd: alone"


def test_what_is_in_a_group_is_told() -> None:
    """As a TaskGroup raises: its own text names nothing."""
    inner = ExceptionGroup("b", [KeyError("k"), OSError("o"), ValueError("left out")])
    group = BaseExceptionGroup("a", [inner, RuntimeError("r")])
    assert classify(group, None).message == (
        "ExceptionGroup: a (2 sub-exceptions): KeyError: 'k'; OSError: o; ValueError: left out; "
        "1 more"
    )


# --- claims, leases, the store --------------------------------------------------------------
async def test_injected_arguments(store: Store) -> None:
    resources = {"routing": Routing(), "hello": PromptTemplate(template="Hi {name}")}
    await enqueue(store, [{}], resources)
    async with running(store, apps.decorated):
        await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.message, attempt.reward) == ("", Reward(1.0))


async def test_only_this_runs_rollouts_are_claimed(store: Store) -> None:
    await enqueue(store, [{"value": 1}], run_id="mine")
    other = Rollout(rollout_id="other", task={}, task_id="t", run_id="other")
    await store.enqueue([other])
    async with running(store, apps.returns, run_id="mine"):
        await reaches(store, RolloutStatus.SUCCEEDED)
    assert await store.count("other") == {RolloutStatus.QUEUED: 1}


@pytest.mark.parametrize(
    ("idle_s", "pause_s"), [(0.0, 0.02), (1.0, 0.02), (5.0, 0.05), (60.0, 0.6), (3600.0, 1.0)]
)
def test_how_long_an_idle_runner_pauses(idle_s: float, pause_s: float) -> None:
    """1 % of the time for which nothing was queued: it is never late by more."""
    assert _pause_after(idle_s, 0.02) == pytest.approx(pause_s)


async def test_never_more_than_its_slots(store: Store) -> None:
    busy = most = 0

    async def app(task: Any) -> float:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.001)
        busy -= 1
        return 1.0

    await enqueue(store, [{}] * 30)
    async with running(store, app, slots=3):
        await finished(store)
    assert most == 3


async def test_a_cancelled_rollout_is_stopped(store: Store) -> None:
    await enqueue(store, [{"seconds": 60}])
    async with running(store, apps.sleeps_async, lease_s=0.03):
        await reaches(store, RolloutStatus.RUNNING)
        await store.cancel(["ro-0"])
    [attempt] = await store.attempts(["ro-0"])
    assert attempt.status is AttemptStatus.CANCELLED


async def test_aborting_queues_the_rollouts_again(store: Store) -> None:
    await enqueue(store, [{"seconds": 60}] * 2)
    runner = Runner(store, App(apps.sleeps_async), RunnerConfig())
    task = asyncio.create_task(runner.run())
    await reaches(store, RolloutStatus.RUNNING, 2)
    runner.abort()
    await task
    states = await store.rollouts()
    assert [(s.status, s.infrastructure_tries) for s in states] == [(RolloutStatus.QUEUED, 0)] * 2


async def test_a_runner_that_is_cancelled_leaves_nothing_running(store: Store) -> None:
    await enqueue(store, [{"seconds": 60}])
    task = asyncio.create_task(Runner(store, App(apps.sleeps_async)).run())
    await reaches(store, RolloutStatus.RUNNING)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [state] = await store.rollouts()
    assert state.status is RolloutStatus.QUEUED


async def test_a_store_that_fails_for_a_while(store: Store) -> None:
    """The runner goes on claiming, and reports again."""
    await enqueue(store, [{"value": 1}])
    report, claim, failures = store.report, store.claim, [0, 0]

    async def failing_report(reports: Any) -> Any:
        failures[0] += 1
        if failures[0] == 1:
            raise StoreError("busy")
        return await report(reports)

    async def failing_claim(*args: Any) -> Any:
        failures[1] += 1
        if failures[1] == 1:
            raise StoreError("busy")
        return await claim(*args)

    store.report = failing_report  # type: ignore[method-assign]
    store.claim = failing_claim  # type: ignore[method-assign,assignment]
    async with running(store, apps.returns):
        [state] = await finished(store)
    assert state.status is RolloutStatus.SUCCEEDED
    assert failures[0] == 2


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


async def cancels_itself(task: Any) -> float:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return 1.0


async def raises_what_cannot_be_read(task: Any) -> float:
    raise Unreadable


@pytest.mark.parametrize(
    ("app", "message"),
    [
        (cancels_itself, "CancelledError: "),
        (raises_what_cannot_be_read, "Unreadable: <Unreadable>"),
    ],
)
async def test_odd_ways_to_end_are_the_apps_own(store: Store, app: Any, message: str) -> None:
    """At once, and not taken for our own stop, which would run it again for ever."""
    await enqueue(store, [{}])
    async with running(store, app):
        [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.FAILED, 0)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.outcome, attempt.message) == (Outcome.APP_ERROR, message)
