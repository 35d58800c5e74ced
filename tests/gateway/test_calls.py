"""Tests of the life of calls: retries, cancellations, errors and failures of the store."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from lightspan.errors import EngineError, StoreError
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import SpanStatus
from lightspan.schema.token_records import CallOutcome, FinishReason
from lightspan.stores.memory import MemoryStore
from lightspan.stores.protocol import Store, StoredCall
from lightspan_gateway import Gateway
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.gateway_suite import MESSAGES, POLICY, Rig, make_rig
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from lightspan_testing.scripted_engine import Gate, Say
from lightspan_testing.wait import until


async def wait_for_damage(rig: Rig) -> list[str]:
    while True:
        if errors := (await rig.store.attempt(rig.attempt.attempt_id)).capture_errors:
            return errors
        await asyncio.sleep(0.002)


async def wait_for_outcome(rig: Rig, outcome: CallOutcome) -> None:
    """Wait for less than `GatewayLimits.relayed_s`, which a call without a client must not last."""
    async with asyncio.timeout(20):
        while True:
            spans = await rig.spans()
            if spans and spans[-1].attributes[c.CALL_OUTCOME] == outcome:
                return
            await asyncio.sleep(0.002)


# --- many calls -----------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_64_calls_at_once(store: Store, stream: bool) -> None:
    """Check that sequence numbers are 1 to 2n without gaps, and that no answer goes to another
    call.
    """

    def script(request: Any) -> str:
        return f"answer of {request.request_id.rsplit('-', 2)[0]}"

    async with make_rig(store, script) as rig:
        names = [f"call-{number:02}" for number in range(64)]
        readings = await asyncio.gather(*(rig.ask(name, stream=stream) for name in names))
        contents = [reading.choices[0].content for reading in readings]
        assert contents == [f"answer of {name}" for name in names]
        spans = await rig.spans()
        starts, ends = [s.sequence_start for s in spans], [s.sequence_end for s in spans]
        assert sorted([*starts, *ends]) == list(range(1, 129))  # type: ignore[type-var]
        assert all(start < end for start, end in zip(starts, ends, strict=True))  # type: ignore[operator]
        assert sorted(record.call_id for record in await rig.records()) == names


async def test_finished_attempts_are_forgotten(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        access = rig.gateway.access
        for _ in range(20):
            rig.attempt = await rig.claim(Routing(default=POLICY))
            await rig.ask()
        assert len(list(access.sessions())) == 20
        for session in access.sessions():
            session.checked_at -= 61
        rig.attempt = await rig.claim(Routing(default=POLICY))
        await rig.ask()
        assert len(list(access.sessions())) == 1


async def test_an_attempt_with_a_call_under_way_is_not_forgotten(store: Store) -> None:
    gate = Gate()
    async with make_rig(store, [Say(text="slow", gates={1: gate}), "ok"]) as rig:
        first, calling = rig.attempt, asyncio.create_task(rig.ask())
        await gate.reached.wait()
        rig.session().checked_at -= 61
        rig.attempt = await rig.claim(Routing(default=POLICY))
        await rig.ask()
        sessions = {session.attempt_id for session in rig.gateway.access.sessions()}
        assert sessions == {first.attempt_id, rig.attempt.attempt_id}
        gate.open()
        assert (await calling).choices[0].content == "slow"


# --- versions, stop strings, tools ----------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_a_new_version_in_mid_call(store: Store, stream: bool) -> None:
    gate = Gate()
    async with make_rig(store, [Say(text="The answer is 33.", gates={2: gate})]) as rig:
        task = asyncio.create_task(rig.ask(stream=stream))
        await gate.reached.wait()
        await rig.engine.update("policy", {}, 2)
        gate.open()
        await task
        [record] = await rig.records()
        assert record.versions == [(1, 2), (2, len(rig.engine.ids("The answer is 33.")) - 2)]


async def test_a_stop_string_that_began_before_the_client_left(store: Store) -> None:
    """Check a stop string that spans two tries: the token ids end at its last token."""
    text = "xyABCDEFGH more words"
    gate = Gate()
    async with make_rig(store, lambda request: Say(text=text, gates={4: gate})) as rig:
        ids = rig.engine.ids(text)
        assert rig.tokenizer.decode(ids[:4]) == "xyAB"
        body: dict[str, Any] = {"stream": True, "stop": ["BC"]}
        task = asyncio.create_task(rig.ask(**body))
        await gate.reached.wait()
        task.cancel()
        await wait_for_outcome(rig, CallOutcome.CANCELLED)
        gate.open()
        reading = await rig.ask(**body)
        assert (reading.choices[0].content, reading.choices[0].reason) == ("xyA", "stop")
        [record] = await rig.records()
        assert record.response_ids == ids[:5]
        assert record.versions == [(1, 5)]
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_left_of_the_length_when_the_client_comes_again(store: Store) -> None:
    gate = Gate()
    async with make_rig(store, lambda request: Say(text="abcdef", gates={3: gate})) as rig:
        task = asyncio.create_task(rig.ask(stream=True, max_tokens=4))
        await gate.reached.wait()
        task.cancel()
        await wait_for_outcome(rig, CallOutcome.CANCELLED)
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
        reading = await rig.ask(stream=True, max_tokens=4)
        assert reading.choices[0].reason == "length"
        assert rig.engine.requests[1].sampling.max_tokens == 1


# --- engines that fail ----------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails(store: Store, stream: bool) -> None:
    failing = Say(text="abcdef", errors={0: EngineError("out of memory")})
    async with make_rig(store, [failing]) as rig:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await rig.ask(stream=stream)
        [span] = await rig.spans()
        assert (span.status, span.status_message) == (SpanStatus.ERROR, "out of memory")
        assert span.attributes[c.CALL_OUTCOME] == "error"
        assert await rig.records() == []


async def test_an_engine_that_fails_in_mid_stream(store: Store) -> None:
    failing = Say(text="abcdef", errors={2: ValueError("bad kernel")})
    async with make_rig(store, [failing, "abcdef"]) as rig:
        with pytest.raises(openai.APIError, match="the engine failed: ValueError: bad kernel"):
            await rig.ask(stream=True)
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "error"


async def test_a_retry_after_an_engine_error_goes_on(store: Store) -> None:
    says = [Say(text="abcdef", errors={0: EngineError("once")}) for _ in range(3)]
    async with make_rig(store, [*says, *["abcdef"] * 3]) as rig:
        with pytest.raises(openai.InternalServerError, match="once"):
            await rig.ask(n=3)
        answer = await rig.ask(n=3)
        assert [choice.content for choice in answer.choices.values()] == ["abcdef"] * 3
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "resampled"
        assert len(await rig.records()) == 3


async def test_token_records_that_cannot_be(store: Store) -> None:
    """Check that NaN log-probabilities damage the attempt, while the app gets its answer."""
    async with make_rig(store, "ok") as rig:
        rig.engine.logprobs = lambda ids: [float("nan")] * len(ids)  # type: ignore[method-assign]
        assert (await rig.ask()).choices[0].content == "ok"
        [reason] = await wait_for_damage(rig)
        assert reason == (
            "call call-a has unusable tokens: log-probabilities must be finite and at most 0"
        )
        assert (len(await rig.spans()), await rig.records()) == (1, [])


# --- delivery -------------------------------------------------------------------------------
class HeldStore(MemoryStore):
    """A store that writes calls only after an event is set, or fails to write them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.error: Exception | None = None

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().add_calls(calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_got_is_undelivered_until_a_retry_gets_it(
    stream: bool,
) -> None:
    async with HeldStore() as store, make_rig(store, ["ok"]) as rig:
        task = asyncio.create_task(rig.ask(stream=stream))
        await store.gate.reached.wait()  # sampled, but not acknowledged
        task.cancel()
        session = rig.session()
        await until(lambda: session.calls["call-a"].is_abandoned)
        store.gate.open()
        await wait_for_outcome(rig, CallOutcome.UNDELIVERED)
        [record] = await rig.records()
        assert (record.outcome, record.finish_reason) == (
            CallOutcome.UNDELIVERED,
            FinishReason.STOP,
        )
        if stream:
            await rig.restart()
        assert (await rig.ask(stream=stream)).choices[0].content == "ok"
        await wait_for_outcome(rig, CallOutcome.OK)
        assert len(rig.engine.requests) == 1
        await asyncio.gather(task, return_exceptions=True)


def relayed(rig: Rig) -> dict[str, str]:
    return {**rig.headers("call-a"), c.HEADER_RELAYED: "1"}


async def leave_in_the_middle(rig: Rig, client: openai.AsyncOpenAI, gate: Gate) -> None:
    """Close the connection of a relayed call, as if the relaying server was killed."""
    create = client.chat.completions.create
    task = asyncio.create_task(create(model="m", messages=MESSAGES, extra_headers=relayed(rig)))
    await gate.reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    call = rig.session().calls["call-a"]
    await until(lambda: call.is_abandoned)
    assert call.active


async def test_a_relayed_call_is_worked_on_when_its_connection_is_lost(store: Store) -> None:
    """Check that a retry gets the answer without sampling any token again, and the call is
    trained.
    """
    gate = Gate()
    async with make_rig(store, [Say(text="abc", gates={1: gate})]) as rig, rig.client() as client:
        await leave_in_the_middle(rig, client, gate)
        gate.open()
        await wait_for_outcome(rig, CallOutcome.UNDELIVERED)
        answer = await client.chat.completions.create(
            model="m", messages=MESSAGES, extra_headers=relayed(rig)
        )
        assert answer.choices[0].message.content == "abc"
        await wait_for_outcome(rig, CallOutcome.OK)
        assert (len(rig.engine.requests), rig.engine.cancelled) == (1, [])


async def test_a_relayed_call_that_nobody_comes_back_for_is_cancelled(
    store: Store,
) -> None:
    gate, limits = Gate(), GatewayLimits(relayed_s=0.05)
    script = [Say(text="abc", gates={1: gate})]
    async with make_rig(store, script, limits=limits) as rig, rig.client() as client:
        await leave_in_the_middle(rig, client, gate)
        await wait_for_outcome(rig, CallOutcome.CANCELLED)
        assert len(rig.engine.cancelled) == 1


async def test_a_relayed_call_holds_up_no_end(store: Store) -> None:
    """Check that a relayed call without a client does not delay the close of the gateway."""
    gate = Gate()
    async with make_rig(store, [Say(text="abc", gates={1: gate})]) as rig, rig.client() as client:
        await leave_in_the_middle(rig, client, gate)
        await rig.gateway.close()
        assert len(rig.engine.cancelled) == 1
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == "cancelled"


async def test_the_last_chunk_waits_for_the_store() -> None:
    async with HeldStore() as store, make_rig(store, ["ok"]) as rig, rig.client() as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = [await anext(stream) for _ in range(3)]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "o", "k"]
        pending = asyncio.ensure_future(anext(stream))
        await store.gate.reached.wait()
        assert not pending.done()
        store.gate.open()
        assert (await pending).choices[0].finish_reason == "stop"
        await stream.close()


async def test_a_slow_or_failing_store_damages_the_attempt_and_not_the_app() -> None:
    async with HeldStore() as store, make_rig(store, "ok") as rig:
        await rig.gateway.close()
        rig.gateway = Gateway(store, rig.engine, limits=GatewayLimits(store_timeout_s=0.01))
        await rig.gateway.start()
        assert (await rig.ask()).choices[0].content == "ok"
        assert await wait_for_damage(rig) == ["the store took over 0.01 s for a call"]
        store.gate.open()
    async with HeldStore() as store, make_rig(store, "ok") as rig:
        store.gate.open()
        store.error = StoreError("disk full")
        assert (await rig.ask()).choices[0].content == "ok"
        assert await wait_for_damage(rig) == ["the store refused a call: disk full"]


async def test_a_store_that_cannot_look_tokens_up(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        await rig.ask("call-a")
        rig.session().checked_at -= 2
        await store.close()
        assert (await rig.ask("call-b")).choices[0].content == "ok"  # a session in memory
        rig.attempt = rig.attempt.__class__(
            attempt_id="x", rollout_id="x", number=1, epoch=1, call_token="unknown"
        )
        with pytest.raises(openai.InternalServerError, match="cannot look the call token up"):
            await rig.ask("call-c")
        await store.open()


async def test_a_store_that_looks_no_token_up_in_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = GatewayLimits(store_timeout_s=0.01)
    async with make_rig(store, "ok", limits=limits) as rig:
        monkeypatch.setattr(store, "claim_of_token", lambda token: asyncio.sleep(60))
        with pytest.raises(openai.InternalServerError, match=r"no answer within 0\.01 s"):
            await rig.ask()
        monkeypatch.undo()


async def test_late_calls_are_kept_and_marked(store: Store) -> None:
    gate = Gate()
    async with make_rig(store, [Say(text="ok", gates={1: gate})]) as rig:
        task = asyncio.create_task(rig.ask())
        await gate.reached.wait()
        attempt = rig.attempt
        await store.report([attempt.report(AttemptStatus.TIMEOUT, Outcome.TIMEOUT)])
        gate.open()
        await task
        assert [record.late for record in await rig.records()] == [True]


async def test_closing_cancels_what_is_under_way(store: Store) -> None:
    gate = Gate()
    async with make_rig(store, [Say(text="abcdef", gates={2: gate})]) as rig:
        task = asyncio.create_task(rig.ask(stream=True))
        await gate.reached.wait()
        await rig.gateway.close()
        await rig.gateway.close()
        with pytest.raises(Exception):  # noqa: B017 - the SDK's or httpx's
            await task
        [record] = await rig.records()
        assert record.response_ids == rig.engine.ids("abcdef")[:2]
        assert record.outcome is CallOutcome.CANCELLED


# --- endpoints ------------------------------------------------------------------------------
def endpoint(server: ScriptedServer, **fields: Any) -> Routing:
    llm = LLM(base_url=server.url, model="frozen-model", **fields)
    return Routing(default=Target(route=Route.ENDPOINT, endpoint=llm))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_answers(
    store: Store, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROZEN_KEY", "the-endpoint's-key")
    reply = Reply(text="hello there", tool_calls=[ToolCall(name="f", arguments='{"a": 1}')])
    with ScriptedServer([reply]) as server:
        routing = endpoint(server, api_key_env="FROZEN_KEY", sampling={"temperature": 0.5})
        async with make_rig(store, [], routing=routing) as rig:
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
            reading = await rig.ask(stream=stream, temperature=0.9, **options)
            [choice] = reading.choices.values()
            assert (choice.content, choice.calls) == ("hello there", [("f", '{"a": 1}')])
            assert choice.reason == "tool_calls"
            assert reading.usage[1] == 2
            [span] = await rig.spans()
            attributes = span.attributes
            assert (attributes[c.ROUTE], attributes[c.SELECTED]) == ("endpoint", False)
            assert attributes[c.RESPONSE_MODEL] == "frozen-model"
            assert (span.sequence_start, span.sequence_end) == (1, 2)
            assert json.loads(str(attributes[c.OUTPUT_MESSAGES]))[0]["parts"] == [
                {"type": "text", "content": "hello there"},
                {"type": "tool_call", "id": "call_0", "name": "f", "arguments": '{"a": 1}'},
            ]
            assert await rig.records() == []
        [request] = server.requests
        assert request.headers["authorization"] == "Bearer the-endpoint's-key"
        assert not [key for key in request.headers if "lightspan" in key or "stainless" in key]
        assert "traceparent" not in request.headers
        assert request.body["model"] == "frozen-model"
        assert request.body["temperature"] == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retried_call_asks_the_endpoint_once(store: Store, stream: bool) -> None:
    """Check that repeated calls get the first answer, also after a restart."""
    calls = Reply(tool_calls=[ToolCall(name="f"), ToolCall(name="g")])
    body: dict[str, Any] = {"n": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with ScriptedServer([[calls, "two"]]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            first = await rig.ask(**body)
            assert [choice.reason for choice in first.choices.values()] == ["tool_calls", "stop"]
            assert await rig.ask(**body) == first
            await rig.restart()
            assert await rig.ask(**body) == first
            assert len(server.requests) == len(await rig.spans()) == 1


async def test_an_endpoints_answer_with_a_key_is_not_replayed_in_another_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an answer with a redacted key is neither replayed nor requested again."""
    monkeypatch.setenv("DESK_API_KEY", "desk-7f3a9b-11aa22")
    with ScriptedServer("it is desk-7f3a9b-11aa22") as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            first, again = await rig.ask(), await rig.ask()
            assert first == again
            assert first.choices[0].content == "it is desk-7f3a9b-11aa22"
            await rig.restart()
            with pytest.raises(openai.ConflictError, match="held a key and was not stored"):
                await rig.ask()
        assert len(server.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_that_refuses(store: Store, stream: bool) -> None:
    with ScriptedServer([Reply(status=404, text="no such thing")]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            with pytest.raises(openai.APIStatusError, match="no such thing") as caught:
                await rig.ask(stream=stream)
            assert caught.value.status_code == 404
            [span] = await rig.spans()
            assert span.attributes[c.CALL_OUTCOME] == "error"
            assert span.status_message == f"{server.url} answered 404: no such thing"
            assert (span.sequence_start, span.sequence_end) == (1, 2)


async def test_an_endpoint_that_recovers(store: Store) -> None:
    """Check that the engine retries first, and then the SDK with the same call id."""
    bad = Reply(status=503, text="busy")
    with ScriptedServer([bad, bad, bad, "fine"]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            with pytest.raises(openai.InternalServerError, match="busy"):
                await rig.ask()
            assert (await rig.ask()).choices[0].content == "fine"
            [span] = await rig.spans()
            assert (span.attributes[c.CALL_OUTCOME], span.status) == ("ok", SpanStatus.OK)
            assert (span.sequence_start, span.sequence_end) == (1, 3)


async def test_an_endpoint_that_breaks_off(store: Store) -> None:
    with ScriptedServer([Reply(text="a b c", drop=True)]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            with pytest.raises(openai.APIError, match="cannot be reached"):
                await rig.ask(stream=True)
            [span] = await rig.spans()
            assert span.attributes[c.CALL_OUTCOME] == "error"


async def test_a_client_that_leaves_an_endpoints_stream(store: Store) -> None:
    """Check that the part of the answer before the disconnect is recorded."""
    held = threading.Event()

    def before_chunk(number: int) -> None:
        if number == 3:
            held.wait()

    with ScriptedServer([Reply(text="one two three", before_chunk=before_chunk)]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            request: dict[str, Any] = {"model": "m", "messages": MESSAGES, "stream": True}
            text = ""
            async with (
                rig.client() as client,
                await client.chat.completions.create(**request) as got,
            ):
                async for chunk in got:
                    text += chunk.choices[0].delta.content or ""
                    if text == "one two":
                        break
            await wait_for_outcome(rig, CallOutcome.CANCELLED)
            held.set()
            [span] = await rig.spans()
    assert span.attributes[c.RESPONSE_ID] == chunk.id
    assert c.FINISH_REASONS not in span.attributes
    assert json.loads(str(span.attributes[c.OUTPUT_MESSAGES])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "one two"}]}
    ]
