"""Tests of forks: attempts that repeat a recorded one up to a call, and sample from there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import anthropic
import msgspec
import openai
import pytest

from lightspan.lightning import build_episode, classify_calls
from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import fork_points
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Attempt, AttemptStatus, Fork, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_gateway.forks import likely_cause
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.gateway_suite import POLICY, TOOLS, Rig, make_rig
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from lightspan_testing.scripted_engine import Gate, Say
from lightspan_testing.wait import until

App = Callable[["Client"], Awaitable[Any]]
ROUTING = Routing(default=POLICY)


class Client:
    """What an app calls in these tests: OpenAI's client, whose requests carry new call ids."""

    def __init__(self, rig: Rig, client: openai.AsyncOpenAI, name: str) -> None:
        self.rig, self.sdk, self.name = rig, client, name
        self.count = 0

    async def ask(self, *texts: Any, agent: str = "app", **body: Any) -> Any:
        """Ask a model; return the answer's message, or the whole text of a stream."""
        self.count += 1
        call_id = f"{self.name}-{self.count}"
        messages = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in texts]
        answer = await self.sdk.chat.completions.create(
            **{
                "model": "m",
                "messages": messages,
                "extra_headers": self.rig.headers(call_id, agent),
                **body,
            }
        )
        if body.get("stream"):
            async with answer:
                chunks = [chunk async for chunk in answer]
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
            )
        if body.get("n"):
            return [choice.message.content for choice in answer.choices]
        return answer.choices[0].message.model_dump(exclude_none=True)


async def run(
    rig: Rig, app: App, fork: Fork | None = None, *, routing: Routing = ROUTING, name: str = ""
) -> Episode:
    """Run an app as a rollout, and return its episode; an exception of the app fails it."""
    resources = await rig.store.put_resources({"routing": routing})
    number = len(await rig.store.rollouts())
    rollout = Rollout(
        rollout_id=f"ro-{number}",
        task={},
        task_id="t",
        resources_id=resources,
        mode=Mode.TRAIN,
        fork=fork,
    )
    await rig.store.enqueue([rollout])
    [claim] = await rig.store.claim("runner", 1, 600)
    rig.attempt = claim.attempt
    status, outcome, message = AttemptStatus.SUCCEEDED, Outcome.OK, ""
    async with rig.client(timeout=30) as client:
        try:
            await app(Client(rig, client, name or f"c{number}"))
        except (openai.OpenAIError, AssertionError) as error:
            status, outcome = AttemptStatus.FAILED, Outcome.APP_ERROR
            message = f"{type(error).__name__}: {error}"
    await rig.gateway.access.log.drain()
    report = claim.attempt.report(status, outcome, message, reward=Reward(1.0))
    await rig.store.report([report])
    return await read(rig.store, claim.attempt, rollout)


async def read(store: Store, attempt: Attempt, rollout: Rollout) -> Episode:
    attempt_id = attempt.attempt_id
    spans = (await store.spans([attempt_id])).get(attempt_id, [])
    records = (await store.token_records([attempt_id])).get(attempt_id, [])
    return build_episode(await store.attempt(attempt_id), rollout, spans, records)


def answers() -> Callable[[Any], str]:
    """Return a script in which no answer is like another one."""
    numbers = iter(range(1_000))
    return lambda request: f"answer {next(numbers)}"


async def chain(client: Client, calls: int = 4) -> list[Any]:
    """Ask again and again, each time with the whole conversation."""
    messages: list[Any] = ["begin"]
    for _ in range(calls):
        messages += [await client.ask(*messages), "and then?"]
    return messages


def outcomes(episode: Episode) -> list[str]:
    return [str(call.outcome) for call in episode.calls]


# --- whole replays and forks ------------------------------------------------------------------
async def test_a_whole_replay_samples_nothing(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            said.append(await chain(client))

        parent = await run(rig, app)
        sampled = len(rig.engine.requests)
        child = await run(rig, app, Fork(attempt_id=parent.attempt_id))
        assert len(rig.engine.requests) == sampled == 4
        assert said[0] == said[1]
        assert outcomes(child) == ["replayed"] * 4
        assert [call.call_id for call in child.calls] == [call.call_id for call in parent.calls]
        assert not child.departed
        assert all(call.record is None for call in child.calls)


@pytest.mark.parametrize("place", [0, 1, 3])
async def test_a_fork_repeats_the_calls_before_its_own(store: Store, place: int) -> None:
    async with make_rig(store, answers()) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            said.append(await chain(client))

        parent = await run(rig, app)
        points = fork_points(parent)
        assert [point.refusal for point in points] == [""] * 5
        assert points[place].prefix == tuple(call.call_id for call in parent.calls[:place])
        child = await run(rig, app, points[place].fork)
        assert outcomes(child) == ["replayed"] * place + ["ok"] * (4 - place)
        assert len(rig.engine.requests) == 4 + 4 - place
        assert said[0][: 2 * place + 1] == said[1][: 2 * place + 1]
        assert said[0][2 * place + 1] != said[1][2 * place + 1]
        coverage = classify_calls(child, ROUTING)
        expected = {"trained": 4 - place, "rejected:replayed": place}
        assert coverage.counts() == {key: n for key, n in expected.items() if n}
        assert [call.key for call in coverage.turns.calls] == [c.key for c in child.calls[place:]]
        assert coverage.turns.depths == list(range(place, 4))
        assert [entry.call for entry in coverage.selected] == list(child.calls[place:])


async def test_a_replayed_call_is_a_reference(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        parent = await run(rig, chain)
        await run(rig, chain, fork_points(parent)[2].fork)
        spans = await rig.spans()
        replayed = [span for span in spans if span.attributes[c.CALL_OUTCOME] == "replayed"]
        assert len(replayed) == 2
        for span in replayed:
            assert span.attributes[c.REPLAYED_FROM] == parent.attempt_id
            assert str(span.attributes[c.REPLAY_REQUEST]).startswith("c2-")
            assert not {c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS} & {
                *span.attributes
            }
            assert c.INPUT_TOKENS not in span.attributes
        assert [bool(span.attributes.get(c.REPLAY_FORK)) for span in spans] == [0, 0, 1, 0]
        assert len(await rig.records()) == 2


@pytest.mark.parametrize("options", [{"stream": True}, {"n": 3}, {"tools": TOOLS}])
async def test_answers_of_every_form_are_repeated(store: Store, options: dict[str, Any]) -> None:
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    text = answers()

    def script(request: Any) -> str:
        return text(request) + call * ("tools" in options)

    async with make_rig(store, script) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            first = await client.ask("begin", **options)
            said.append(first)
            again = [first] if isinstance(first, dict) else [str(first)]
            said.append(await client.ask("begin", *again, "go on", **options))

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[1].fork)
        assert said[0] == said[2]
        assert said[1] != said[3]
        choices = options.get("n", 1)
        assert outcomes(child) == ["replayed"] * choices + ["ok"] * choices


async def test_a_fork_of_a_fork(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        first = await run(rig, chain)
        second = await run(rig, chain, fork_points(first)[2].fork)
        points = fork_points(second)
        assert [point.refusal for point in points] == [""] * 5
        third = await run(rig, chain, points[3].fork)
        assert outcomes(third) == ["replayed"] * 3 + ["ok"]
        origins = [call.span.attributes.get(c.REPLAYED_FROM) for call in third.calls if call.span]
        ids = [first.attempt_id, first.attempt_id, second.attempt_id, None]
        assert origins == ids


async def test_responses_continue_replayed_responses(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            previous, texts = None, []
            for number in range(3):
                headers = rig.headers(f"{client.name}-{number}")
                create: Any = client.sdk.responses.create
                answer = await create(
                    model="m",
                    input=f"question {number}",
                    extra_headers=headers,
                    **({"previous_response_id": previous} if previous else {}),
                )
                previous = answer.id
                texts.append((answer.id, answer.output_text))
            said.append(texts)

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert outcomes(child) == ["replayed", "replayed", "ok"]
        assert said[0][:2] == said[1][:2]
        assert said[0][2] != said[1][2]


# --- calls at the same time ------------------------------------------------------------------
async def branches(client: Client) -> list[Any]:
    """Run three chains at the same time, and join them."""

    async def branch(number: int) -> list[Any]:
        messages: list[Any] = [f"branch {number}"]
        for _ in range(3):
            messages += [await client.ask(*messages, agent=f"branch/{number}"), "go on"]
        return messages

    texts = await asyncio.gather(*map(branch, range(3)))
    return [texts, await client.ask(str(texts))]


async def test_branches_beside_one_another(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        parent = await run(rig, branches)
        whole = await run(rig, branches, Fork(attempt_id=parent.attempt_id))
        assert not whole.departed
        assert outcomes(whole) == ["replayed"] * 10
        for point in fork_points(parent)[:-1]:
            child = await run(rig, branches, point.fork)
            assert not child.departed
            replayed = {x.call_id for x in child.calls if x.outcome is CallOutcome.REPLAYED}
            assert replayed == set(point.prefix)
            assert outcomes(child).count("ok") == 10 - len(replayed)
            again = await run(rig, branches, fork_points(child)[-2].fork)
            assert not again.departed


async def test_answers_come_in_the_recorded_order(store: Store) -> None:
    """An app that reads the first of several answers gets the same one first."""
    gates = [Gate() for _ in range(3)]
    numbers = iter(range(100))

    def script(request: Any) -> Say:
        number = next(numbers)
        return Say(text=f"answer {number}", gates={0: gates[number]} if number < 3 else {})

    async with make_rig(store, script) as rig:
        orders: list[Any] = []

        async def app(client: Client) -> None:
            order: list[Any] = []

            async def ask(number: int) -> None:
                order.append(await client.ask(f"question {number}", agent=f"a{number}"))

            async def open_gates() -> None:
                for gate in (gates[2], gates[0], gates[1]):
                    await gate.reached.wait()
                for gate in (gates[2], gates[0], gates[1]):
                    expected = len(order) + 1
                    gate.open()
                    await until(partial(has, expected))

            def has(count: int) -> bool:
                return len(order) == count

            tasks = [ask(number) for number in range(3)]
            if not orders:
                tasks.append(open_gates())
            await asyncio.gather(*tasks)
            orders.append(order)
            await client.ask(str(order))

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[-2].fork)
        assert not child.departed
        assert orders[0] == orders[1]
        assert outcomes(child) == ["replayed"] * 3 + ["ok"]


# --- departures -------------------------------------------------------------------------------
def clock(texts: list[str]) -> App:
    """Return an app whose prompts have the next of `texts` in them."""
    remaining = iter(texts)

    async def app(client: Client) -> None:
        answer = await client.ask("begin")
        await client.ask("begin", answer, f"It is {next(remaining)}. Go on.")
        await client.ask("end")

    return app


@pytest.mark.parametrize(
    ("before", "after", "is_order"),
    [
        ("tools: add, mul. Go on", "tools: mul, add. Go on", True),
        ("{'b', 'a'}", "{'a', 'b'}", True),
        ("{'a': 'x', 'b': 'y'}", "{'b': 'y', 'a': 'x'}", True),
        ("- a big cat\n- a dog", "- a dog\n- a big cat", True),
        ("x > y", "x < y", False),
        ("is x above y?", "is y above x?", False),
        ("yes, not no", "no, not yes", False),
        ("{'a': 'x', 'b': 'y'}", "{'a': 'y', 'b': 'x'}", False),
        ("add, mul", "add mul", False),
        ("add, mul", "add; mul", False),
    ],
)
def test_an_order_is_named_only_where_the_sorted_parts_are_equal(
    before: str, after: str, is_order: bool
) -> None:
    assert likely_cause(before, after).startswith("an order") is is_order


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        (["14:03:11", "14:07:12"], "a time of day"),
        (["2026-11-29", "2026-11-30"], "a date"),
        (["2026-11-29T10:00:01.25", "2026-11-30T10:00:02.5"], "a date or time of day"),
        (
            ["1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed", "6ec0bd7f-11c0-43da-975e-2a8ad9ebae0b"],
            "a UUID",
        ),
        (["/tmp/tmpab12", "/tmp/tmpxyz9"], "a temporary path"),
        (["row 12", "row 13"], "a number, such as a time, a row's number or a random one"),
        (["add, mul, sub", "sub, add, mul"], "an order, such as that of a set, or of results"),
        (["sunny", "rainy"], ""),
    ],
)
async def test_a_departure_is_told(store: Store, texts: list[str], cause: str) -> None:
    async with make_rig(store, answers()) as rig:
        app = clock(texts)
        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert len(rig.engine.requests) == 3  # nothing was sampled
        assert "departed" in child.departed
        assert "after 1 of 2 calls: call 2, of 'app': messages[2] (user)" in child.departed
        assert f"({cause}" in child.departed
        if not cause:
            assert "'It is sunny. Go on.' became 'It is rainy. Go on.'" in child.departed
        assert child.reward is None
        assert not child.finished
        attempt = await store.attempt(child.attempt_id)
        assert attempt.capture_errors == [child.departed]
        assert set(classify_calls(child, ROUTING).counts()) == {"rejected:departed"}


async def test_every_call_after_a_departure_is_refused(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        errors: list[openai.APIStatusError] = []

        async def app(client: Client) -> None:
            for text in ("one", f"two {len(rig.engine.requests)}", "three"):
                try:
                    await client.ask(text)
                except openai.APIStatusError as error:
                    errors.append(error)

        parent = await run(rig, app)
        child = await run(rig, app, Fork(attempt_id=parent.attempt_id))
        assert [error.status_code for error in errors] == [400, 400]
        assert {error.code for error in errors} == {"replay_departed"}
        assert outcomes(child) == ["replayed", "error", "error"]
        assert child.departed  # although the app went on and returned a reward
        assert child.reward is None


async def test_a_cache_of_answers_departs_and_does_not_hang(store: Store) -> None:
    limits = GatewayLimits(replay_wait_s=0.2)
    async with make_rig(store, answers(), limits=limits) as rig:
        cache: dict[str, Any] = {}

        async def ask(client: Client, text: str) -> Any:
            if text not in cache:
                cache[text] = await client.ask(text, agent=text)
            return cache[text]

        async def app(client: Client) -> None:
            await asyncio.gather(ask(client, "one"), ask(client, "two"))
            await client.ask("three")

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert "waited" in child.departed
        assert "did not come: does the app keep answers" in child.departed


async def test_an_app_that_makes_more_calls_than_recorded(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        parent = await run(rig, lambda client: chain(client, 2))
        child = await run(rig, lambda client: chain(client, 3), Fork(attempt_id=parent.attempt_id))
        assert "a call of 'app' more than were recorded" in child.departed
        assert len(rig.engine.requests) == 2


async def test_an_app_that_ends_before_the_fork(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        parent = await run(rig, chain)
        child = await run(rig, lambda client: chain(client, 2), fork_points(parent)[3].fork)
        assert child.departed == "the app ended before the call at which the rollout forks"
        assert child.reward is None


async def test_calls_in_another_order_depart_at_once(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        orders = iter([["red", "green", "blue"], ["red", "blue", "green"]])

        async def app(client: Client) -> None:
            for text in next(orders):
                await client.ask(text)

        parent = await run(rig, app)
        child = await run(rig, app, Fork(attempt_id=parent.attempt_id))
        assert (
            "call 3 came where call 2 was: the app left calls out, or made them in another order"
            in child.departed
        )


async def test_another_agent_departs(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        agents = iter(["writer", "reader"])

        async def app(client: Client) -> None:
            await client.ask("begin", agent=next(agents))

        parent = await run(rig, app)
        child = await run(rig, app, Fork(attempt_id=parent.attempt_id))
        assert "call 1 was of 'writer', and is of 'reader'" in child.departed


async def test_a_pruned_parent(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        child = await run(rig, chain, Fork(attempt_id="at-gone", call_id="call-gone"))
        assert "has no call 'call-gone' in the store" in child.departed


# --- retries, restarts ------------------------------------------------------------------------
async def test_a_retry_of_a_replayed_call(store: Store) -> None:
    async with make_rig(store, answers()) as rig:

        async def app(client: Client) -> None:
            first = await client.ask("begin")
            client.count -= 1  # the same call id again
            assert await client.ask("begin") == first
            await client.ask("begin", first, "go on")

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[1].fork)
        assert outcomes(child) == ["replayed", "ok"]
        assert not child.departed


@pytest.mark.parametrize("place", [1, 2, 3, 4])
async def test_a_gateway_that_is_started_again(store: Store, place: int) -> None:
    """The first calls are made at one gateway, the others and a retry at its successor."""
    async with make_rig(store, answers()) as rig:
        restarts: list[int] = []

        async def app(client: Client) -> None:
            messages: list[Any] = ["begin"]
            for number in range(4):
                before = list(messages)
                messages += [await client.ask(*messages), "and then?"]
                if restarts and restarts[0] == number + 1:
                    restarts.clear()
                    await rig.restart()
                    client.sdk = client.sdk.with_options(base_url=f"{rig.gateway.url}/v1")
                    client.count -= 1
                    assert await client.ask(*before) == messages[-2]

        parent = await run(rig, app)
        restarts.append(place)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert not child.departed
        assert outcomes(child) == ["replayed", "replayed", "ok", "ok"]
        assert len(rig.engine.requests) == 6


async def test_a_departure_outlives_the_gateway(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        clocks = iter(range(10))

        async def app(client: Client) -> None:
            try:
                await client.ask(f"at {next(clocks)}")
            except openai.BadRequestError:
                await rig.restart()
                client.sdk = client.sdk.with_options(base_url=f"{rig.gateway.url}/v1")
                await client.ask("at 0")

        parent = await run(rig, app)
        child = await run(rig, app, Fork(attempt_id=parent.attempt_id))
        assert outcomes(child) == ["error", "error"]


# --- endpoints, refusals ----------------------------------------------------------------------
async def test_answers_of_an_endpoint_are_repeated(store: Store) -> None:
    """Check an agent that is frozen to an endpoint, whose answers are in spans only."""
    numbers = iter(range(100))

    def script(request: Any) -> Reply:
        call = ToolCall(name="look", arguments='{"n": 1}', call_id=f"id-{next(numbers)}")
        return Reply(text="thinking", tool_calls=[call])

    with ScriptedServer(script) as server:
        llm = LLM(base_url=server.url, model="frozen")
        target = Target(route=Route.ENDPOINT, endpoint=llm)
        routing = msgspec.structs.replace(ROUTING, default=target)
        async with make_rig(store, answers()) as rig:
            said: list[Any] = []

            async def app(client: Client) -> None:
                said.append(await chain(client, 2))

            parent = await run(rig, app, routing=routing)
            child = await run(rig, app, fork_points(parent)[1].fork, routing=routing)
            assert said[0][:2] == said[1][:2]
            assert outcomes(child) == ["replayed", "ok"]
            assert len(server.requests) == 3


async def test_points_behind_a_failed_call_are_refused(store: Store) -> None:
    texts: Any = iter(["one", Say(text="two", errors={0: RuntimeError("broken")}), "three"])
    async with make_rig(store, lambda request: next(texts)) as rig:

        async def app(client: Client) -> None:
            for _ in range(3):
                try:
                    await client.ask("begin")
                except openai.InternalServerError:
                    continue

        parent = await run(rig, app)
        points = fork_points(parent)
        assert [bool(point.refusal) for point in points] == [False, False, True, True]
        assert points[2].refusal == "call 2, of 'app', has no answer that reached the app (error)"


# --- programs without the SDK patch -----------------------------------------------------------
def calls_of(rig: Rig) -> list[Any]:
    """Return the latest call of the newest attempt."""
    sessions = {each.attempt_id: each for each in rig.gateway.access.sessions()}
    return [*sessions[rig.attempt.attempt_id].calls.values()][-1:]


async def test_plain_http(store: Store) -> None:
    """Check a program that sends no header of lightspan, and repeats a request as SDKs do."""
    async with make_rig(store, answers()) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            messages: list[Any] = [{"role": "user", "content": "begin"}]
            headers = {"Authorization": f"Bearer {rig.attempt.call_token}"}
            url = f"{rig.gateway.url}/agents/writer/v1/chat/completions"
            async with aiohttp.ClientSession(headers=headers) as session:
                for _ in range(3):
                    for retry in ("0", "1"):
                        more = {"x-stainless-retry-count": retry}
                        body = {"model": "m", "messages": messages}
                        async with session.post(url, json=body, headers=more) as response:
                            answer = await response.json()
                            assert response.status == 200, answer
                        for call in calls_of(rig) if retry == "0" else ():
                            call.delivered = False  # as if the answer had been lost
                    message = answer["choices"][0]["message"]
                    messages += [message, {"role": "user", "content": "go on"}]
            said.append(messages)

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert not child.departed
        assert outcomes(child) == ["replayed", "replayed", "ok"]
        assert said[0][:5] == said[1][:5]
        assert said[0][5] != said[1][5]


async def test_anthropic_messages(store: Store) -> None:
    async with make_rig(store, answers()) as rig:
        said: list[Any] = []

        async def app(client: Client) -> None:
            key, url = rig.attempt.call_token, rig.gateway.url
            async with anthropic.AsyncAnthropic(api_key=key, base_url=url) as sdk:
                messages: list[Any] = [{"role": "user", "content": "begin"}]
                for number in range(3):
                    answer = await sdk.messages.create(
                        model="policy",
                        max_tokens=50,
                        messages=messages,
                        extra_headers=rig.headers(f"{client.name}-{number}"),
                    )
                    said.append(answer.to_dict())
                    messages += [
                        {"role": "assistant", "content": said[-1]["content"]},
                        {"role": "user", "content": "go on"},
                    ]

        parent = await run(rig, app)
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert outcomes(child) == ["replayed", "replayed", "ok"]
        assert [m["content"] for m in said[:2]] == [m["content"] for m in said[3:5]]
        assert [m["id"] for m in said[:2]] == [m["id"] for m in said[3:5]]
        assert said[2]["content"] != said[5]["content"]


def waiting(rig: Rig) -> bool:
    """Return whether a request of an attempt waits for its turn."""
    sessions = rig.gateway.access.sessions()
    return any(session.replay and session.replay.waiting for session in sessions)


async def test_a_client_that_leaves_while_it_waits(store: Store) -> None:
    """Check a request that waits for its turn, is given up and comes again."""
    async with make_rig(store, answers()) as rig:
        is_parent = True

        async def app(client: Client) -> None:
            async def ask(text: str) -> Any:
                return await client.ask(text, agent=text)

            if is_parent:
                await asyncio.gather(ask("one"), ask("two"))
                await ask("three")
                return
            late = asyncio.create_task(ask("three"))
            await until(lambda: waiting(rig))
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            await until(lambda: not waiting(rig))
            await asyncio.gather(ask("one"), ask("two"))
            await ask("three")

        parent = await run(rig, app)
        is_parent = False
        child = await run(rig, app, fork_points(parent)[2].fork)
        assert not child.departed
        assert sorted(outcomes(child)) == ["cancelled", "ok", "replayed", "replayed"]


async def test_recorded_answers_that_are_gone(store: Store) -> None:
    """Check a fork of an attempt whose tokens the store does not have."""
    async with make_rig(store, answers()) as rig:
        parent = await run(rig, chain)
        read = store.token_records
        store.token_records = AsyncMock(return_value={})  # type: ignore[method-assign]
        child = await run(rig, chain, fork_points(parent)[2].fork)
        store.token_records = read  # type: ignore[method-assign]
        assert "call 1, of 'app', cannot be answered: its answer is not complete" in child.departed
        assert len(rig.engine.requests) == 4
