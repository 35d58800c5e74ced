"""Streams of other endpoints: what is recorded is what OpenAI's SDK assembles, or is marked."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.genai_attributes import StreamedAnswer, answer_attributes
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores.protocol import Store
from lightspan_gateway.half_characters import HalfCharacters
from lightspan_gateway.stream_repair import StreamRepair
from lightspan_testing.gateway_suite import MESSAGES, make_rig
from lightspan_testing.scripted import Reply, ScriptedServer

Json = dict[str, Any]
HEAD: Json = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def endpoint(server: ScriptedServer) -> Routing:
    return Routing(
        default=Target(route=Route.ENDPOINT, endpoint=LLM(base_url=server.url, model="m"))
    )


def chunk(delta: Any, **fields: Any) -> Json:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **fields}]}


def call(index: Any, call_id: Any, name: Any, arguments: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    whole = {"index": index, "id": call_id, "type": "function", "function": function}
    fields = {key: value for key, value in whole.items() if value is not ...}
    fields["function"] = {key: value for key, value in function.items() if value is not ...}
    return fields


def assembled(chunks: list[Any]) -> Json | None:
    """Return the message that the SDK assembles; None if it raises an error."""
    state = ChatCompletionStreamState()
    try:
        with warnings.catch_warnings():  # of fields of other types
            warnings.simplefilter("ignore")
            for one in chunks:
                state.handle_chunk(ChatCompletionChunk.construct(**one))
            [choice] = state.current_completion_snapshot.choices
            return plain(choice.message.to_dict())
    except Exception:
        return None


def plain(message: Json) -> Json:
    """Return content, thoughts and calls of a message, in the form of recorded messages."""
    calls = [
        (one.get("id"), *((one.get("function") or {}).get(key) for key in ("name", "arguments")))
        for one in message.get("tool_calls") or ()
    ]
    thought = message.get("reasoning_content") or message.get("reasoning")
    calls = [(i or None, name or "", arguments or "") for i, name, arguments in calls]
    return {"content": message.get("content") or "", "thought": thought or "", "calls": calls}


def recorded(chunks: list[Any]) -> tuple[Json, str]:
    """Return the message that is recorded, and the field for which its attempt is damaged."""
    answer = StreamedAnswer()
    for one in chunks:
        answer.add(one)
    choices = answer.answer()["choices"] or [{"message": {}}]
    [message] = genai_messages.output_messages_of(answer_attributes({"choices": choices}))
    return plain(message), answer.irregular_field


TEXT = st.sampled_from(["", "a", "bc", "{", '{"x": 1}'])
CALL = st.builds(
    call,
    st.sampled_from([0, 0, 1, 2, None, ..., -1, "0", True]),
    st.sampled_from(["one", "two", "", None, ..., ..., ...]),
    st.sampled_from(["f", "g", "", None, ..., ..., 7]),
    TEXT | st.sampled_from([None, ..., {"x": 1}, [], 3, '{"x": 1}']),
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": TEXT
        | st.sampled_from([None, [], [{"type": "text", "text": "part"}], {"a": 1}, 3])
        | st.lists(st.sampled_from([{"type": "thinking", "thinking": "Hm."}, {"type": "x"}, "a"])),
        "reasoning_content": TEXT | st.none(),
        "tool_calls": st.lists(CALL, max_size=2) | st.sampled_from([None, {}, "x", [None]]),
    },
)
CHUNKS = st.lists(st.builds(chunk, DELTA), min_size=1, max_size=6)


@given(CHUNKS)
def test_what_is_recorded_is_what_the_sdk_assembles_or_the_attempt_is_damaged(
    chunks: list[Json],
) -> None:
    theirs = assembled(chunks)
    ours, irregular = recorded(chunks)
    assert irregular or theirs is None or ours == theirs


@given(CHUNKS)
def test_the_gateway_mends_every_stream(chunks: list[Json]) -> None:
    repair = StreamRepair()
    repaired = [repair.repaired(one) for one in chunks]
    ours, irregular = recorded(repaired)
    assert (irregular, ours) == ("", assembled(repaired))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats(allow_nan=False) | st.text("a{"),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "index", "delta", "content", "tool_calls", "function", "arguments", "type",
             "usage", "finish_reason", "text", "name", "id", "model", "message"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "id"]), JUNK), max_size=3))
def test_nothing_that_an_endpoint_sends_raises(chunks: list[Json]) -> None:
    repair = StreamRepair()
    recorded_raw, answer = StreamedAnswer(), StreamedAnswer()
    for one in chunks:
        recorded_raw.add(one)
        answer.add(repair.repaired(one))
        answer_attributes(one)
    assert answer.irregular_field == ""
    answer_attributes(answer.answer())
    answer_attributes(recorded_raw.answer())


MESSAGE = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": TEXT | st.sampled_from([None, [{"type": "text", "text": "part"}], 3]),
        "tool_calls": st.lists(CALL, max_size=3) | st.sampled_from([None, {}, [None]]),
    },
)


@given(MESSAGE)
def test_the_gateway_mends_every_answer(message: Json) -> None:
    answer = {**HEAD, "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
    repaired = StreamRepair().repaired_answer(answer)
    theirs = ChatCompletion.construct(**repaired).choices[0].message
    assert isinstance(theirs.content, str | None)
    for one in theirs.tool_calls or ():
        assert isinstance(one.function.arguments, str | None)
    [kept] = genai_messages.output_messages_of(answer_attributes(repaired))
    assert plain(kept) == plain(theirs.to_dict())
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        assert len(plain(kept)["calls"]) == sum(isinstance(one, dict) for one in calls)


F, G = ("a", "f", '{"x": 1}'), ("b", "g", "{}")
MANGLED: list[tuple[list[Any], list[tuple[str | None, str, str]]]] = [
    # two calls under one index, whole and in parts
    ([[call(0, *F)], [call(0, *G)]], [F, G]),
    ([[call(0, "a", "f", "")], [call(0, ..., ..., '{"x": 1}')], [call(0, *G)]], [F, G]),
    ([[call(0, ..., "f", '{"x": 1}')], [call(0, ..., "f", '{"x": 1}')]], [(None, *F[1:])] * 2),
    # id and name in every chunk
    ([[call(0, "a", "f", '{"x"')], [call(0, "a", "f", ": 1}")]], [F]),
    # an id of its own in every chunk, but one name
    ([[call(0, "a", "f", '{"x"')], [call(0, "z", ..., ": 1}")]], [F]),
    # numbered from 1, or not at all
    ([[call(1, "a", "f", "")], [call(1, ..., ..., '{"x": 1}')], [call(2, *G)]], [F, G]),
    ([[call(None, *F)], [call(None, *G)]], [F, G]),
    ([[call(..., "a", "f", '{"x"'), call(..., ..., ..., ": 1}"), call(..., *G)]], [F, G]),
    # arguments as an object
    ([[call(0, "a", "f", {"x": 1})], [call(1, *G)]], [("a", "f", '{"x":1}'), G]),
]


@pytest.mark.parametrize(("parts", "calls"), MANGLED)
async def test_the_app_gets_the_calls_that_the_endpoint_meant(
    store: Store, parts: list[Any], calls: list[Any]
) -> None:
    chunks = [{**chunk({"tool_calls": part}), "error": None} for part in parts]
    reply = Reply(chunks=[None, *chunks, chunk({}, finish_reason="tool_calls")])
    with ScriptedServer([reply]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            async with (
                rig.client() as client,
                client.chat.completions.stream(model="m", messages=MESSAGES) as stream,
            ):
                message = (await stream.get_final_completion()).choices[0].message
            [span] = await rig.spans()
    assert plain(message.to_dict())["calls"] == calls
    [kept] = genai_messages.output_messages_of(span.attributes)
    assert plain(kept)["calls"] == calls


async def test_thoughts_and_parts_of_content(store: Store) -> None:
    deltas = [
        {"role": "assistant", "reasoning_content": "First "},
        {"reasoning_content": "think."},
        {"content": [{"type": "text", "text": "Then "}]},
        {"content": "answer."},
    ]
    reply = Reply(chunks=[*map(chunk, deltas), chunk({}, finish_reason="stop")])
    with ScriptedServer([reply]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            reading = await rig.ask(stream=True)
            [span] = await rig.spans()
    assert reading.choices[0].content == "Then answer."
    assert json.loads(str(span.attributes[c.OUTPUT_MESSAGES]))[0]["parts"] == [
        {"type": "reasoning", "content": "First think."},
        {"type": "text", "content": "Then answer."},
    ]


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True}
PARTS: list[Any] = [
    [THOUGHT],
    [{"type": "text", "text": "Hi"}, {"type": "reference", "reference_ids": [1]}],
    [{"type": "reference", "reference_ids": [2]}],
    " you",
]


@pytest.mark.parametrize("stream", [True, False])
async def test_thoughts_that_are_parts_of_content(store: Store, stream: bool) -> None:
    """Check Mistral's reasoning models: a streamed and a whole answer are read alike."""
    whole = [*PARTS[0], *PARTS[1], *PARTS[2], {"type": "text", "text": " you"}]
    chunks = [chunk({"content": part}) for part in PARTS]
    text: Any = whole
    reply = Reply(text=text, chunks=[*chunks, chunk({}, finish_reason="stop")], counts_tokens=False)
    with ScriptedServer([reply]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            reading = await rig.ask(stream=stream)
            [span] = await rig.spans()
    assert reading.choices[0].content == "Hi you"
    assert json.loads(str(span.attributes[c.OUTPUT_MESSAGES]))[0]["parts"] == [
        {"type": "reasoning", "content": "Hm."},
        {"type": "text", "content": "Hi you"},
    ]


# --- half a character -----------------------------------------------------------------------
def halves_of(text: str, *, escaped: bool) -> list[bytes]:
    """Return the halves of a text in two JSON strings: escapes, or bytes of UTF-8."""
    if not escaped:
        data = text.encode()
        return [data[:2], data[2:]]
    return [json.dumps(half).strip('"').encode() for half in split(text)]


def split(text: str) -> list[str]:
    data = text.encode("utf-16-le")
    return [data[n : n + 2].decode("utf-16-le", "surrogatepass") for n in (0, 2)]


HALVES = [halves_of("🙂", escaped=escaped) for escaped in (True, False)]
SMILE = "🙂"


class RawEndpoint:
    """An endpoint whose answer is bytes that no JSON encoder writes."""

    def __init__(self, answers: list[bytes], end: bytes = b"data: [DONE]\n\n") -> None:
        self.answers = answers
        self.end = end

    async def serve(self, request: web.Request) -> web.StreamResponse:
        stream = json.loads(await request.read()).get("stream")
        if not stream:
            return web.Response(body=self.answers[0], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for answer in self.answers:
            await response.write(b"data: " + answer + b"\n\n")
        await response.write(self.end)
        return response

    @asynccontextmanager
    async def routing(self) -> AsyncIterator[Routing]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.serve)
        async with TestServer(app) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            yield Routing(
                default=Target(route=Route.ENDPOINT, endpoint=LLM(base_url=url, model="m"))
            )


def raw(delta: bytes, reason: bytes = b"null", kind: bytes = b"delta") -> bytes:
    """Return a chunk or, of the kind `message`, a whole answer; its log-probabilities have half."""
    head = json.dumps(HEAD).encode().removesuffix(b"}")
    tokens = b'{"content": [{"token": "%s", "logprob": NaN}]}' % HALVES[0][0]
    fields = b'"index": 0, "%s": %s, "finish_reason": %s, "logprobs": %s'
    return head + b', "choices": [{' + fields % (kind, delta, reason, tokens) + b"}]}"


@pytest.mark.parametrize(
    ("deltas", "end", "outcome"),
    [
        ([raw(b'{"content": "a b"}')], b"", "error"),
        ([raw(b'{"content": "a b"}')], b"data: [DO", "error"),
        ([], b"", "error"),
        ([raw(b'{"content": "a b"}')], b"data: [DONE]\n\n", "ok"),
        ([raw(b'{"content": "a b"}')], b"data: [DONE]", "ok"),
        ([raw(b'{"content": "a b"}', b'"stop"')], b"", "ok"),
        ([raw(b'{"content": "a b"}', b'"stop"')], b"data: {", "ok"),
    ],
)
async def test_a_stream_is_complete_only_with_its_end(
    store: Store, deltas: list[bytes], end: bytes, outcome: str
) -> None:
    """Check that a server that closes the connection in the middle of its answer is noticed."""
    async with (
        RawEndpoint(deltas, end).routing() as routing,
        make_rig(store, [], routing=routing) as rig,
    ):
        if outcome == "ok":
            assert (await rig.ask(stream=True)).choices[0].content == "a b"
        else:
            with pytest.raises(openai.APIError, match="ended before the answer"):
                await rig.ask(stream=True)
        [span] = await rig.spans()
    assert span.attributes[c.CALL_OUTCOME] == outcome
    messages = genai_messages.output_messages_of(span.attributes)
    assert [message["content"] for message in messages] == ["a b"] * len(deltas)


@pytest.mark.parametrize(
    "answer", [b'{"error": {"message": "no room"}}', b'{"choices": []}', b"{}"]
)
async def test_an_answer_that_is_none_is_the_endpoints_failure(store: Store, answer: bytes) -> None:
    """Check status 200 without choices: the app's client would fail on it, and be blamed."""
    async with (
        RawEndpoint([answer]).routing() as routing,
        make_rig(store, [], routing=routing) as rig,
    ):
        with pytest.raises(openai.InternalServerError, match=r"no room|no choices"):
            await rig.ask()
        [span] = await rig.spans()
    assert span.attributes[c.CALL_OUTCOME] == "error"


@pytest.mark.parametrize("halves", HALVES, ids=["escapes", "bytes"])
async def test_half_a_character_is_joined(store: Store, halves: list[bytes]) -> None:
    first, last = halves
    calls = b'{"tool_calls": [{"index": 0, %s"function": {%s"arguments": "%s"}}]}'
    chunks = [
        raw(b'{"reasoning_content": "Hm%s"}' % first),
        raw(b'{"reasoning_content": "%s."}' % last),
        raw(b'{"content": "a%s"}' % first),
        raw(b'{"content": "%sb%s"}' % (last, first)),
        raw(calls % (b'"id": "c", ', b'"name": "f", ', b"\\" + b'"' + first)),
        raw(calls % (b"", b"", last + b"\\" + b'"')),
        raw(b"{}", b'"stop"'),
    ]
    async with (
        RawEndpoint(chunks).routing() as routing,
        make_rig(store, [], routing=routing) as rig,
    ):
        reading = await rig.ask(stream=True)
        [span] = await rig.spans()
    assert reading.choices[0].content == f"a{SMILE}b\ufffd"
    [kept] = genai_messages.output_messages_of(span.attributes)
    assert plain(kept) == {
        "content": f"a{SMILE}b\ufffd",
        "thought": f"Hm{SMILE}.",
        "calls": [("c", "f", f'"{SMILE}"')],
    }


@pytest.mark.parametrize("half", [HALVES[0][0], HALVES[1][0]], ids=["escape", "bytes"])
async def test_half_a_character_of_a_whole_answer(store: Store, half: bytes) -> None:
    message = b'{"role": "assistant", "content": "a%s"}' % half
    async with (
        RawEndpoint([raw(message, b'"stop"', b"message")]).routing() as routing,
        make_rig(store, [], routing=routing) as rig,
    ):
        reading = await rig.ask()
        [span] = await rig.spans()
    [kept] = genai_messages.output_messages_of(span.attributes)
    assert reading.choices[0].content == plain(kept)["content"]
    assert reading.choices[0].content.rstrip("\ufffd") == "a"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'"\\ud83d"', b"[" * 10**5])
async def test_what_is_no_object_is_refused(store: Store, body: bytes, stream: bool) -> None:
    async with (
        RawEndpoint([body]).routing() as routing,
        make_rig(store, [], routing=routing) as rig,
    ):
        with pytest.raises(openai.APIError, match="answered with no JSON object: b"):
            await rig.ask(stream=stream)


@given(st.text(st.sampled_from("aé漢" + SMILE), max_size=12), st.data(), st.booleans())
def test_every_cut_is_joined(text: str, data: st.DataObject, escaped: bool) -> None:
    """Check that texts cut at any byte, or at any half of UTF-16, are put together again."""
    code = "utf-16-le" if escaped else "utf-8"
    errors, unit = ("surrogatepass", 2) if escaped else ("surrogateescape", 1)
    encoded = text.encode(code)
    cuts = data.draw(st.lists(st.integers(0, len(encoded) // unit), max_size=6))
    places = [0, *sorted(unit * cut for cut in cuts), len(encoded)]
    halves = HalfCharacters()
    parts = [encoded[a:b].decode(code, errors) for a, b in itertools.pairwise(places)]
    joined = [halves.join("content", part) for part in parts]
    assert "".join(joined) == text
    assert list(halves.end()) == []


@pytest.mark.parametrize("form", ["text", "parts"])
async def test_a_character_that_is_cut_in_two_is_joined(store: Store, form: str) -> None:
    halves = ["a\ud83d", "\ude42b"]
    contents = halves if form == "text" else [[{"type": "text", "text": half}] for half in halves]
    chunks = [chunk({"content": content}) for content in contents]
    reply = Reply(chunks=[*chunks, chunk({}, finish_reason="stop")])
    with ScriptedServer([reply]) as server:
        async with make_rig(store, [], routing=endpoint(server)) as rig:
            reading = await rig.ask(stream=True)
            [span] = await rig.spans()
    assert reading.choices[0].content == "a🙂b"
    [kept] = genai_messages.output_messages_of(span.attributes)
    assert kept["content"] == "a🙂b"
