"""What takes long is made beside the event loop: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
from tests.core.gateway.posting import ask, post

from lightspan.engines.protocol import EngineCapabilities
from lightspan.errors import UnsupportedError
from lightspan.gateway import bodies, store_log
from lightspan.gateway.bodies import letters_of
from lightspan.gateway.calls import CallInfo
from lightspan.gateway.store_log import call_span
from lightspan.schema import conventions as c
from lightspan.schema.records import Mode
from lightspan.schema.spans import Span
from lightspan.schema.tokens import CallOutcome
from lightspan.stores.protocol import Store
from lightspan.testing.conditions import until
from lightspan.testing.gateway_suite import Rig, make_rig

ABLE = EngineCapabilities(exact_tokens=True, grammars="the script")
LONG = [{"role": "user", "content": "a " * 6_000}]
"""More than is tokenised at once, and too long for the context."""
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {}}}},
}
OBJECT = {"type": "json_object"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a" * 1_100_000}}


class Held:
    """A step that waits, in whatever thread it is made, until it is let go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def wait(self) -> None:
        """Be held here; on the event loop nobody would ever let it go on."""
        self.begun.set()
        assert threading.current_thread() is not threading.main_thread(), "made on the event loop"
        assert self.go_on.wait(60)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str) -> Iterator[Held]:
    """The function of this name waits before its first call."""
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


@pytest.mark.parametrize("what", ["reading", "prompts", "grammar", "refusal", "count"])
async def test_others_are_answered_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with make_rig(store, lambda request: "ok", capabilities=ABLE) as rig:
        await neighbours_are_answered(rig)  # so that their grammar is known
        thing: Any
        path, body = "/v1/chat/completions", ask(messages=LONG)
        if what == "grammar":
            thing, name, body = rig.engine, "check_grammar", ask(response_format=FORMAT)
        elif what == "reading":
            thing, name = bodies, "_decoded"
        elif what == "refusal":
            thing, name = store_log, "request_attributes"
        else:
            thing, name = rig.tokenizer, "render"
        if what == "count":
            path = "/v1/messages/count_tokens"
        with held(monkeypatch, thing, name) as step:
            asking = asyncio.create_task(post(rig, body, path))
            assert await asyncio.to_thread(step.begun.wait, 60)
            await neighbours_are_answered(rig)
            assert not asking.done()
        status, answer = await asking
        assert status == (200 if what in ("grammar", "count") else 400), answer


async def test_a_retry_that_comes_meanwhile_is_the_same_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_rig(store, ["one"], capabilities=ABLE) as rig:
        headers = {c.HEADER_CALL_ID: "call-a"}
        with held(monkeypatch, rig.engine, "check_grammar") as step:
            tries = [
                asyncio.create_task(
                    post(rig, ask(response_format=FORMAT), "/v1/chat/completions", **headers)
                )
                for _ in range(3)
            ]
            assert await asyncio.to_thread(step.begun.wait, 60)
        answers = await asyncio.gather(*tries)
        assert [status for status, _ in answers] == [200] * 3
        assert len({body["id"] for _, body in answers}) == 1
        assert len(rig.engine.requests) == len(await rig.spans()) == 1


async def test_a_client_that_leaves_meanwhile_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next try of its call is answered."""
    async with make_rig(store, ["one"], capabilities=ABLE) as rig:
        headers = {c.HEADER_CALL_ID: "call-a"}
        with held(monkeypatch, rig.engine, "check_grammar") as step:
            left = asyncio.create_task(
                post(rig, ask(response_format=FORMAT), "/v1/chat/completions", **headers)
            )
            assert await asyncio.to_thread(step.begun.wait, 60)
            left.cancel()
            await until(lambda: rig.account().sequence == 2)  # of a call that began and ended
            await rig.gateway.terms.log.drain()
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == CallOutcome.CANCELLED
        assert c.CALL_REFUSED not in span.attributes
        assert "the client left" in span.status_message
        again = post(rig, ask(response_format=FORMAT), "/v1/chat/completions", **headers)
        assert (await again)[0] == 200
        [span] = await rig.spans()
        assert span.attributes[c.CALL_OUTCOME] == CallOutcome.OK


async def test_a_grammar_is_written_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_rig(store, lambda request: "ok", capabilities=ABLE) as rig:
        asked: list[str] = []
        monkeypatch.setattr(rig.engine, "check_grammar", lambda policy, text: asked.append(text))
        for _ in range(3):
            assert (await post(rig, ask(response_format=FORMAT)))[0] == 200
        assert len(asked) == 1
        assert [request.grammar for request in rig.engine.requests] == asked * 3


async def test_a_refused_grammar_is_not_remembered(store: Store) -> None:
    async with make_rig(store, "ok", capabilities=ABLE) as rig:
        wrong = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
        for _ in range(2):
            status, body = await post(rig, ask(response_format=wrong))
            assert (status, body["error"]["param"]) == (400, "response_format")
            assert "no answer to it ends" in body["error"]["message"]


# --- what is far too long -------------------------------------------------------------------
HUGE = "a " * 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 1_000}, "messages"),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": HUGE}}],
            },
            "messages",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "chat_template_kwargs": {"documents": HUGE},
            },
            "messages",
        ),
        ("completions", {"prompt": HUGE}, "prompt"),
        ("responses", {"input": HUGE}, "input"),
        (
            "messages",
            {"messages": [{"role": "user", "content": HUGE}], "max_tokens": 5},
            "messages",
        ),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
    ],
)
async def test_what_cannot_fit_is_not_tokenised(
    store: Store, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    async with make_rig(store, "ok") as rig:

        def never(*arguments: Any, **options: Any) -> Any:
            raise AssertionError("it is tokenised")

        monkeypatch.setattr(rig.tokenizer, "render", never)
        monkeypatch.setattr(rig.tokenizer, "encode", never)
        status, answer = await post(rig, {"model": "policy", **body}, f"/v1/{path}")
        assert status == 400
        assert "at most 16,384 are read" in answer["error"]["message"]
        assert f"'{param}'" in answer["error"]["message"]
        if not path.startswith("messages"):
            assert answer["error"]["param"] == param
            assert answer["error"]["code"] == c.CONTEXT_OVERFLOW


@pytest.mark.parametrize("letters", [400_000, 1_100_000])
async def test_of_a_refused_request_of_megabytes_nothing_said_is_kept(
    store: Store, letters: int
) -> None:
    """The store would be busy with it while others wait; its span says so."""
    async with make_rig(store, "ok") as rig:
        messages = [{"role": "user", "content": "a" * letters}]
        status, _ = await post(rig, ask(messages=messages, max_tokens=7))
        assert status == 400
        [span] = await rig.spans()
    assert c.CALL_REFUSED in span.attributes
    assert span.attributes[c.REQUEST_MAX_TOKENS] == 7
    is_kept = letters < 2**20
    assert (c.INPUT_MESSAGES in span.attributes) == is_kept
    assert (
        span.status_message.endswith("(what it said is not kept: over 1,048,576 letters)")
        != is_kept
    )


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [
        ("chat/completions", "messages", [{"role": "user", "content": "a" * 1_100_000}]),
        (
            "chat/completions",
            "tools",
            [{"type": "function", "function": {"name": "f" * 1_100_000}}],
        ),
        ("completions", "prompt", "a" * 1_100_000),
        ("messages", "messages", [{"role": "user", "content": [DOCUMENT]}]),
        ("responses", "input", "a" * 1_100_000),
        ("responses", "instructions", "a" * 1_100_000),
        ("messages", "system", "a" * 1_100_000),
    ],
)
async def test_nor_is_it_worded(
    store: Store, monkeypatch: pytest.MonkeyPatch, path: str, field: str, said: Any
) -> None:
    """That is a step for which all of Python waits. What is short is kept, of every dialect."""
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 7}
    asked["messages"] = [{"role": "user", "content": "hi"}]
    if path in ("completions", "responses"):
        asked["prompt" if path == "completions" else "input"] = asked.pop("messages")
    worded: list[int] = []

    def seen(info: CallInfo, *others: Any, **more: Any) -> Span:
        worded.append(letters_of(info.body))
        return call_span(info, *others, **more)

    monkeypatch.setattr(store_log, "call_span", seen)
    async with make_rig(store, "ok") as rig:
        status, _ = await post(rig, asked | {field: said}, f"/v1/{path}")
        assert status == 400
        [span] = await rig.spans()
    assert max(worded) < 1_000
    assert "over 1,048,576 letters" in span.status_message
    assert span.attributes[c.OPERATION_NAME] == (
        "text_completion" if path == "completions" else "chat"
    )
    assert (c.INPUT_MESSAGES in span.attributes) == (field == "tools")
    assert c.TOOL_DEFINITIONS not in span.attributes


@pytest.mark.parametrize("levels", [40, 125, 500, 5_000])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_message_that_is_nested_deeply_is_refused(
    store: Store, path: str, levels: int
) -> None:
    """Whoever reads it: what goes down into it would fail in the middle."""
    text = '{"content": [' * levels + "1" + "]}" * levels
    said = f'[{{"role": "user", "content": [{text}]}}]'
    field = "input" if path == "responses" else "messages"
    async with make_rig(store, "ok") as rig:
        data = f'{{"model": "policy", "max_tokens": 5, "{field}": {said}}}'.encode()
        status, answer = await post(rig, data, f"/v1/{path}")
        assert status == 400, answer
        if levels == 125:
            assert "nested more than 128 levels deep" in answer["error"]["message"]
        [span] = await rig.spans()
        assert c.CALL_REFUSED in span.attributes


# --- one id, one call -----------------------------------------------------------------------
async def test_a_call_id_is_of_one_dialect(store: Store) -> None:
    """A body may be one of several: an answer in the words of another would be replayed."""
    body = ask(max_tokens=50)
    body["messages"] = body["messages"][1:]
    headers = {c.HEADER_CALL_ID: "call-a"}
    paths = ("/v1/chat/completions", "/v1/messages")
    for first, second in (paths, paths[::-1]):
        async with make_rig(store, "ok") as rig:
            for _ in range(2):
                assert (await post(rig, body, first, **headers))[0] == 200
                status, answer = await post(rig, body, second, **headers)
                assert status == 400
                assert "call-a was used for another request" in answer["error"]["message"]
                await rig.restart()
            # and without the shim: a retry in another dialect is a retry of nothing
            assert (await post(rig, body, second, **{"x-stainless-retry-count": "1"}))[0] == 200
            assert len(rig.engine.requests) == 2


async def test_an_engine_that_refuses_names_the_field(store: Store) -> None:
    async with make_rig(store, "ok", capabilities=ABLE, mode=Mode.TRAIN) as rig:

        def refuses(policy: str, grammar: str) -> None:
            raise UnsupportedError("no such word")

        rig.engine.check_grammar = refuses  # type: ignore[method-assign]
        status, body = await post(rig, ask(response_format=FORMAT))
        assert (status, body["error"]["param"]) == (400, "response_format")
        assert body["error"]["message"] == "'response_format' cannot be honoured: no such word"
