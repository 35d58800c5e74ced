"""Test the runner: model calls of all kinds of apps, claims, leases, the store."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from lightspan.errors import StoreError
from lightspan.runners.app import App
from lightspan.runners.gateway_probe import GatewayEndpoint
from lightspan.runners.outcome import _causes, classify
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.runners.timings import RunnerTimings
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import (
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutStatus,
)
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Routing
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_testing.gateway_suite import shared_tokenizer
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.scripted_engine import ScriptedEngine
from lightspan_testing.wait import until
from packages.core.tests.runners.runs import (
    WRITER,
    apps,
    enqueue,
    finished,
    reaches,
    running,
    spans_of,
)

pytestmark = pytest.mark.usefixtures("clean")


# --- model calls ----------------------------------------------------------------------------
@asynccontextmanager
async def gateway(store: Store, script: Any) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(shared_tokenizer(), script)
    async with Gateway(store, engine) as served:
        yield served.url, engine


@pytest.mark.parametrize("app", ["asks", "asks_async"])
async def test_calls_of_many_attempts_are_not_mixed_up(store: Store, app: str) -> None:
    def script(request: Any) -> str:
        prompt = shared_tokenizer().decode(request.prompt_ids).partition("user\n")[2]
        return prompt.split("\n")[0]

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
    assert {len(calls) for calls in records.values()} == {1}
    for attempt in attempts:
        llm, agent, root = await spans_of(store, attempt)
        assert (llm.parent_id, agent.parent_id) == (agent.span_id, root.span_id)
        assert llm.trace_id == root.trace_id
        assert llm.attributes[c.AGENT_PATH] == "writer"


async def test_a_client_that_the_app_keeps_stays_on_one_loop(store: Store) -> None:
    with ScriptedServer("fine") as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as client:

            async def ask(task: Any) -> float:
                await client.models.list()
                messages_ = [{"role": "user", "content": "How are you?"}]
                answer = await client.chat.completions.create(model="m", messages=messages_)  # type: ignore[arg-type]
                return float(answer.choices[0].message.content == "fine")

            await enqueue(store, [{}] * 6)
            async with running(store, ask):
                await finished(store)
    attempts = await store.attempts([f"ro-{number}" for number in range(6)])
    assert [(attempt.reward, attempt.message) for attempt in attempts] == [(Reward(1.0), "")] * 6


async def test_images_of_calls_to_the_apps_own_endpoint(store: Store) -> None:
    image = Image.of(b"\x89PNG a picture", "image/png")
    data = base64.b64encode(image.data).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    with ScriptedServer("fine") as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0) as client:

            async def ask(task: Any) -> float:
                messages: Any = [{"role": "user", "content": [part]}]
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=messages)
                return 1.0

            await enqueue(store, [{}])
            async with running(store, ask):
                await finished(store)
    assert await store.images([image.digest]) == {image.digest: image}
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.reward, attempt.capture_errors) == (Reward(1.0), [])
    first, second, _ = await spans_of(store, attempt)
    assert first.attributes[c.INPUT_MESSAGES] == second.attributes[c.INPUT_MESSAGES]
    assert image.digest in str(first.attributes[c.INPUT_MESSAGES])


async def test_a_prompt_that_is_too_long_is_an_outcome(store: Store) -> None:
    async with gateway(store, "ok") as (url, _):
        routing = Routing(gateway_url=url, default=WRITER.target)
        await enqueue(store, [{"text": "word " * 600}], {"routing": routing})
        async with running(store, apps.catches_and_hides):
            await finished(store)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.CONTEXT_OVERFLOW)
    assert attempt.message == "RuntimeError: the model does not answer"


@pytest.mark.parametrize("app", ["catches_and_hides", "catches_and_goes_on"])
async def test_a_gateway_that_is_gone_is_infrastructure(store: Store, app: str) -> None:
    timings = RunnerTimings(gateway_retry_s=0.1)
    routing = Routing(gateway_url="http://127.0.0.1:9", default=WRITER.target)
    task = {"text": "1", "times": 1}
    await enqueue(store, [task], {"routing": routing}, max_infrastructure_tries=2)
    async with running(store, getattr(apps, app), timings=timings):
        [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.LOST, 2)
    attempts = await store.attempts(["ro-0"])
    assert [attempt.outcome for attempt in attempts] == [Outcome.INFRASTRUCTURE] * 2


async def test_without_its_gateway_a_runner_claims_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that only one attempt is lost while the gateway is away, and that all rollouts
    succeed.
    """
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


async def test_a_gateway_that_is_gone_concerns_its_own_run_only(store: Store) -> None:
    """Check that the run of another gateway ends while the first gateway is still awaited."""

    async def enqueue_run(run_id: str, url: str, count: int) -> list[str]:
        routing = Routing(gateway_url=url, default=WRITER.target)
        resources_id = await store.put_resources({"routing": routing})
        rollouts = [
            Rollout(
                rollout_id=f"{run_id}-{number}",
                run_id=run_id,
                task={"text": "7"},
                task_id=f"t{number}",
                mode=Mode.VAL,
                resources_id=resources_id,
            )
            for number in range(count)
        ]
        await store.enqueue(rollouts)
        return [rollout.rollout_id for rollout in rollouts]

    gone = await enqueue_run("gone", "http://127.0.0.1:9", 4)
    async with gateway(store, "7") as (url, _), running(store, apps.asks, slots=1) as runner:
        runner.work_for(["gone", "live"])

        async def is_lost() -> bool:
            return any(attempt.outcome for attempt in await store.attempts(gone))

        while not await is_lost():  # noqa: ASYNC110 - in a store
            await asyncio.sleep(0.01)
        live = await enqueue_run("live", url, 12)
        for rollout_id in live:
            while not (await store.rollouts([rollout_id]))[0].status.final:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert {s.status for s in await store.rollouts(live)} == {RolloutStatus.SUCCEEDED}
        attempts = await store.attempts(gone)
        assert [attempt.outcome for attempt in attempts] == [Outcome.INFRASTRUCTURE]
        assert len(await store.attempts(live)) == len(live)


async def test_whether_a_gateway_answers_is_checked_for_each_run(store: Store) -> None:
    """Check that a run's gateway is asked only after an attempt of that run could not reach it."""
    gone = GatewayEndpoint("http://127.0.0.1:9", "token")
    async with gateway(store, "7") as (url, _), running(store, apps.asks) as runner:
        live = GatewayEndpoint(url, "token")
        runner.work_for(["gone", "live"])
        runner.await_gateway("gone", gone)
        assert not await runner.can_reach("gone", gone)
        # asked, this address would not answer
        assert await runner.can_reach("live", gone)
        runner.await_gateway("live", live)
        assert await runner.can_reach("live", live)
        assert not await runner.can_reach("gone", gone)
        assert await runner.can_reach("live", gone)
        runner.work_for(["live"])
        assert await runner.can_reach("gone", gone)


async def test_a_gateway_that_stays_away_fails_attempts_without_the_app(store: Store) -> None:
    """Check that only the first attempt of a run occupies its slot for the app's timeouts."""
    calls = []

    async def app(task: Any, llm: Any) -> float:
        calls.append(task)
        return float(await apps.asks_async(task, llm))

    timings = RunnerTimings(gateway_retry_s=0.05, probe_interval_s=0.01)
    routing = Routing(gateway_url="http://127.0.0.1:9", default=WRITER.target)
    await enqueue(store, [{"text": "1"}], {"routing": routing}, max_infrastructure_tries=3)
    async with running(store, app, timings=timings):
        [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.LOST, 3)
    assert len(calls) == 1
    last = (await store.attempts(["ro-0"]))[-1]
    assert last.message == "the gateway http://127.0.0.1:9 of the training does not answer"


async def test_a_request_that_the_gateway_refuses_is_the_apps_failure(store: Store) -> None:
    """Check that an error of the SDK is not taken for a connection error.

    Its cause is an error of the HTTP client, which has the gateway's address too.
    """
    async with gateway(store, "ok") as (url, _):
        routing = Routing(gateway_url=url, default=WRITER.target)
        await enqueue(store, [{"text": [{"type": "image_url"}]}], {"routing": routing})
        async with running(store, apps.asks):
            [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.FAILED, 0)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.FAILED, Outcome.APP_ERROR)
    assert "messages[0].content" in attempt.message


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


# --- claims, leases, the store --------------------------------------------------------------


@pytest.mark.parametrize(("new", "shares"), [(9, (4, 4)), (2, (6, 2)), (0, (8, 0))])
async def test_every_training_has_its_share_and_no_slot_waits(
    store: Store, new: int, shares: tuple[int, int]
) -> None:
    """Check that a run with much work does not starve others, and that free slots go to other
    runs.
    """
    gate = asyncio.Event()

    async def app(task: Any) -> float:
        await gate.wait()
        return 1.0

    names = [("old", number) for number in range(20)] + [("new", number) for number in range(new)]
    await store.enqueue(
        [
            Rollout(rollout_id=f"{run}-{number}", task={}, task_id="t", run_id=run)
            for run, number in names
        ]
    )
    async with running(store, app, slots=8) as runner:
        runner.work_for(["old", "new"])
        await reaches(store, RolloutStatus.RUNNING, 8)
        under_way = [
            (await store.count(run)).get(RolloutStatus.RUNNING, 0) for run in ("old", "new")
        ]
        gate.set()
        await finished(store)
    assert tuple(under_way) == shares


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
    """Check that the runner continues to claim, and repeats the report."""
    await enqueue(store, [{"value": 1}])
    report, claim, failures = store.report, store.claim, [0, 0]

    async def failing_report(reports: Any) -> Any:
        failures[0] += 1
        if failures[0] == 1:
            raise StoreError("busy")
        return await report(reports)

    async def failing_claim(*args: Any, **named: Any) -> Any:
        failures[1] += 1
        if failures[1] == 1:
            raise StoreError("busy")
        return await claim(*args, **named)

    store.report = failing_report  # type: ignore[method-assign]
    store.claim = failing_claim  # type: ignore[method-assign,assignment]
    async with running(store, apps.returns):
        [state] = await finished(store)
    assert state.status is RolloutStatus.SUCCEEDED
    assert failures[0] == 2


async def test_a_claim_whose_answer_is_lost_strands_nothing(store: Store) -> None:
    """Check that the runner repeats the claim with the same id, without waiting for a lease to
    end.
    """
    await enqueue(store, [{"value": 1}] * 3)
    claim, request_ids = store.claim, list[str]()

    async def unanswered(*args: Any, **named: Any) -> Any:
        claims = await claim(*args, **named)
        request_ids.append(named["request_id"])
        if len(request_ids) == 1:
            assert len(claims) == 2
            raise StoreError("the answer is lost")
        return claims

    store.claim = unanswered  # type: ignore[method-assign,assignment]
    async with running(store, apps.returns, slots=2):
        states = await finished(store)
    assert request_ids[0] == request_ids[1] != request_ids[2]
    attempts = await store.attempts([state.rollout.rollout_id for state in states])
    assert [attempt.number for attempt in attempts] == [1, 1, 1]


async def cancels_itself(task: Any) -> float:
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return 1.0


async def test_an_app_that_cancels_itself_fails(store: Store) -> None:
    """Check that the app's own cancellation is a failure, not a stop of the runner."""
    await enqueue(store, [{}])
    async with running(store, cancels_itself):
        [state] = await finished(store)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.FAILED, 0)
    [attempt] = await store.attempts(["ro-0"])
    assert (attempt.outcome, attempt.message) == (Outcome.APP_ERROR, "CancelledError: ")
