"""Tests that slow work runs in threads, so that other requests are answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from lightspan.errors import UnsupportedError
from lightspan.protocols.engine import EngineCapabilities
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_gateway import call_recorder, request_body
from lightspan_testing.gateway_suite import Rig, make_rig
from lightspan_testing.wait import until
from tests.gateway.posting import ask, post

ABLE = EngineCapabilities(exact_tokens=True, grammars="the script")
LONG = [{"role": "user", "content": "a " * 6_000}]
"""Messages that are tokenised in a thread and too long for the context."""
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}},
}
OBJECT = {"type": "json_object"}


class Held:
    """A step of a request that blocks its thread until `go_on` is set."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def wait(self) -> None:
        """Block the current thread, which must not be the event loop's."""
        self.begun.set()
        assert threading.current_thread() is not threading.main_thread(), "made on the event loop"
        assert self.go_on.wait(60)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str) -> Iterator[Held]:
    """Block the first call of the function `name` in `thing`."""
    step, before = Held(), getattr(thing, name)

    def waiting(*arguments: Any, **options: Any) -> Any:
        if not step.begun.is_set():
            step.wait()
        return before(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(thing, name, waiting)
        try:
            yield step
        finally:
            step.go_on.set()


async def neighbours_are_answered(rig: Rig) -> None:
    async with aiohttp.ClientSession() as session, session.get(rig.gateway.url + "/health") as got:
        assert got.status == 200
    assert (await post(rig, ask()))[0] == 200
    assert (await post(rig, ask(response_format=OBJECT)))[0] == 200


@pytest.mark.parametrize("what", ["reading", "prompts", "grammar", "refusal"])
async def test_others_are_answered_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with make_rig(store, lambda request: "ok", capabilities=ABLE) as rig:
        await neighbours_are_answered(rig)  # compiles their grammar
        thing: Any
        body = ask(messages=LONG)
        if what == "grammar":
            thing, name, body = rig.engine, "check_grammar", ask(response_format=FORMAT)
        elif what == "reading":
            thing, name = request_body, "decode_body"
        elif what == "refusal":
            thing, name = call_recorder, "request_attributes"
        else:
            thing, name = rig.tokenizer, "render"
        with held(monkeypatch, thing, name) as step:
            asking = asyncio.create_task(post(rig, body))
            assert await asyncio.to_thread(step.begun.wait, 60)
            await neighbours_are_answered(rig)
            assert not asking.done()
        status, answer = await asking
        assert status == (200 if what == "grammar" else 400), answer


async def test_a_client_that_leaves_meanwhile_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a disconnect during compilation is recorded, and that the next try is answered."""
    async with make_rig(store, ["one"], capabilities=ABLE) as rig:
        headers = {c.HEADER_CALL_ID: "call-a"}
        with held(monkeypatch, rig.engine, "check_grammar") as step:
            left = asyncio.create_task(
                post(rig, ask(response_format=FORMAT), "/v1/chat/completions", **headers)
            )
            assert await asyncio.to_thread(step.begun.wait, 60)
            left.cancel()
            await until(lambda: rig.session().sequence == 2)  # the call has started and ended
            await rig.gateway.access.log.drain()
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == CallOutcome.CANCELLED
        assert c.CALL_REFUSED not in span.attributes
        assert "the client disconnected" in span.status_message
        again = post(rig, ask(response_format=FORMAT), "/v1/chat/completions", **headers)
        assert (await again)[0] == 200
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == CallOutcome.OK


@pytest.mark.parametrize("levels", [40, 125, 5_000])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_message_that_is_nested_deeply_is_refused(
    store: Store, path: str, levels: int
) -> None:
    """Check that a deeply nested message is refused, because recursive code would fail."""
    text = '{"content": [' * levels + "1" + "]}" * levels
    messages = f'[{{"role": "user", "content": [{text}]}}]'
    field = "input" if path == "responses" else "messages"
    async with make_rig(store, "ok") as rig:
        data = f'{{"model": "policy", "max_tokens": 5, "{field}": {messages}}}'.encode()
        status, answer = await post(rig, data, f"/v1/{path}")
        assert status == 400, answer
        if levels == 125:
            assert "nested more than 128 levels deep" in answer["error"]["message"]
        [span] = await rig.spans()
        assert c.CALL_REFUSED in span.attributes


async def test_an_engine_that_refuses_names_the_field(store: Store) -> None:
    async with make_rig(store, "ok", capabilities=ABLE, mode=Mode.TRAIN) as rig:

        def refuses(policy: str, grammar: str) -> None:
            raise UnsupportedError("no such word")

        rig.engine.check_grammar = refuses  # type: ignore[method-assign]
        status, body = await post(rig, ask(response_format=FORMAT))
        assert (status, body["error"]["param"]) == (400, "response_format")
        assert body["error"]["message"] == "'response_format' cannot be honoured: no such word"
