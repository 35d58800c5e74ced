"""Tests of chat requests: parsing, errors, overrides and answers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from lightspan.protocols.engine import EngineCapabilities
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import input_messages_of, output_messages_of
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import SpanStatus
from lightspan.schema.token_records import CallOutcome, Sampling
from lightspan.stores.protocol import Store
from lightspan_gateway import Gateway
from lightspan_gateway.api_errors import call_token_error
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.gateway_suite import MESSAGES, POLICY, make_rig
from tests.gateway.posting import ask, error, post

TRAINED = Target(route=Route.POLICY, policy="policy", sampling=Sampling(max_tokens=100))


async def test_a_key_that_is_echoed_is_not_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that token ids are recorded unchanged, because they are trained."""
    monkeypatch.setenv("DESK_API_KEY", "desk-7f3a9b-11aa22")
    async with make_rig(store, "it is desk-7f3a9b-11aa22") as rig:
        messages = [{"role": "user", "content": "is it desk-7f3a9b-11aa22"}]
        status, body = await post(rig, ask(messages=messages))
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "it is desk-7f3a9b-11aa22"
        [span] = await rig.spans()
        assert input_messages_of(span.attributes) == [{"role": "user", "content": "is it <key>"}]
        assert output_messages_of(span.attributes)[0]["content"] == "it is <key>"
        [record] = await rig.records()
        assert rig.tokenizer.decode(record.response_ids[:-1]) == "it is desk-7f3a9b-11aa22"


# --- what is returned -----------------------------------------------------------------------
async def test_nothing_is_returned_that_was_not_asked_for(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, ask(), **{c.HEADER_CALL_ID: "call-x"})
        assert status == 200
        assert isinstance(body.pop("created"), int)
        prompt = len(rig.prompt(None))
        assert body == {
            "id": "chatcmpl-call-x",
            "object": "chat.completion",
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "ok"},
                    "finish_reason": "stop",
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3},
        }


async def test_a_stream_says_no_more_than_was_asked_for(store: Store) -> None:
    async with make_rig(store, "ok") as rig, rig.client() as client:
        stream = await client.chat.completions.create(**ask(stream=True))
        chunks = [
            chunk.model_dump(exclude={"id", "created"}, exclude_unset=True)
            async for chunk in stream
        ]

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {"object": "chat.completion.chunk", "model": "policy", "choices": [choice]}

    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "o"}),
        chunk({"content": "k"}),
        chunk({}, "stop"),
    ]


async def test_logprobs(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        _, body = await post(rig, ask(logprobs=True))
        ids = rig.engine.ids("ok")
        assert body["choices"][0]["logprobs"] == {
            "refusal": None,
            "content": [
                {"token": text, "logprob": log, "bytes": list(text.encode()), "top_logprobs": []}
                for text, log in zip(
                    ["o", "k", "<|im_end|>"], rig.engine.logprobs(ids), strict=True
                )
            ],
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_of_tokens_are_those_of_the_text(stream: bool, store: Store) -> None:
    """Check tokens that begin or end within a character."""
    text = "Größe 🙂!"
    async with make_rig(store, text) as rig, rig.client() as client:
        answer: Any = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            logprobs=True,
            stream=stream,
            extra_headers=rig.headers("a"),
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        logprobs = [each.logprobs for chunk in chunks for each in chunk.choices if each.logprobs]
        *tokens, end = [token for each in logprobs for token in each.content]
        assert b"".join(bytes(token.bytes) for token in tokens) == text.encode()
        octets = [rig.tokenizer.token_bytes(token) for token in rig.engine.ids(text)]
        assert [bytes(token.bytes) for token in (*tokens, end)] == octets
        assert any("\ufffd" in token.token for token in tokens)
        assert end.token == "<|im_end|>"


async def test_content_in_parts_is_joined(store: Store) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 7 * 3?"}]
    async with make_rig(store, "ok") as rig:
        await post(rig, ask(messages=[MESSAGES[0], {"role": "user", "content": parts}]))
        assert rig.engine.requests[0].prompt_ids == rig.prompt(None)


async def test_arguments_of_earlier_calls_reach_the_template_as_objects(store: Store) -> None:
    """Check that templates get arguments as objects, because they would quote a text again."""
    function = {"name": "calculator", "arguments": '{"expression": "1"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    conversation = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with make_rig(store, "ok") as rig:
        await post(rig, ask(messages=conversation))
        as_object = {**call, "function": {**function, "arguments": {"expression": "1"}}}
        expected = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [as_object]}]
        assert rig.engine.requests[0].prompt_ids == rig.tokenizer.render(expected)


async def test_max_tokens_is_what_the_context_leaves(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        await post(rig, ask())
        await post(rig, ask(max_completion_tokens=10_000))
        left = 512 - len(rig.prompt(None))
        assert [request.sampling.max_tokens for request in rig.engine.requests] == [left, left]


async def test_models_and_health(store: Store) -> None:
    async with make_rig(store, "ok", policies={"b": 1, "a": 2}) as rig, rig.client() as client:
        assert [model.id async for model in client.models.list()] == ["a", "b"]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{rig.gateway.url}/health") as response:
                expected = {
                    "status": "ok",
                    "protocol": c.PROTOCOL_VERSION,
                    "policies": {"a": 2, "b": 1},
                }
                assert await response.json() == expected
            async with session.get(f"{rig.gateway.url}/v1/models") as response:
                assert response.status == 401


# --- refusals -------------------------------------------------------------------------------
async def test_a_wrong_token(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        for token in ("Bearer wrong", "Basic abc"):
            status, body = await post(rig, ask(), Authorization=token)
            message = call_token_error("wrong" if "wrong" in token else "").message
            assert message.startswith(("unknown call token: ", "a call token is missing: "))
            assert "api_key=llm.api_key" in message
            assert "lightspan_autogen.instrument()" in message
            assert (status, body) == (401, error(message, code="invalid_api_key"))
        assert await rig.spans() == []


async def test_another_attempts_token(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, ask(), **{c.HEADER_ATTEMPT: "at-other"})
        message = "the call token belongs to another attempt than at-other"
        assert (status, body) == (403, error(message))


async def test_an_ended_attempts_token(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        attempt = rig.attempt
        await store.report([attempt.report(AttemptStatus.SUCCEEDED, Outcome.OK)])
        refused = (403, error(f"attempt {attempt.attempt_id} has ended (succeeded)"))
        assert await post(rig, ask()) == refused
        assert await post(rig, ask()) == refused
        assert not list(rig.gateway.access.sessions())


async def test_an_attempt_that_ends_is_noticed(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        assert (await post(rig, ask()))[0] == 200
        await store.cancel([rig.attempt.rollout_id])
        rig.session().checked_at -= 2
        assert (await post(rig, ask()))[0] == 403


async def test_a_chunked_body_that_is_too_large(store: Store) -> None:
    """Check a body without a declared size: the rest beyond the limit is not read."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**20
            sent.append(2**20)

    sent: list[int] = []
    async with make_rig(store, "ok") as rig:
        url = f"{rig.gateway.url}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {rig.attempt.call_token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=endless(), headers=headers) as response,
        ):
            assert response.status == 413
    assert 16 <= len(sent) < 64


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"messages": []}, "'messages' must be a non-empty array", "messages"),
        ({"messages": [1]}, "messages[0] must have a 'role'", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content must be a string or an array of parts",
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is of type 'image_url': only text is understood; images "
            "('image_url') need a policy with a vision model, such as Qwen2.5-VL, and the "
            "embedded engine",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": "x"}]},
            "messages[0].tool_calls must be an array",
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]},
            "messages[0].tool_calls[0] must have a function with a name",
            "messages[0].tool_calls[0]",
        ),
        ({"temperature": "hot"}, "'temperature' must be int or float, not 'hot'", "temperature"),
        ({"stream": "yes"}, "'stream' must be bool, not 'yes'", "stream"),
        ({"tools": {}}, "'tools' must be list, not {}", "tools"),
        ({"model": 3}, "'model' must be str, not 3", "model"),
    ],
)
async def test_wrong_types_and_ranges(
    store: Store, fields: dict[str, Any], message: str, param: str
) -> None:
    """Check that the error names the field, and that the failed call is recorded."""
    async with make_rig(store, "ok") as rig:
        headers = {c.HEADER_AGENT: "writer"}
        status, body = await post(rig, ask(**fields), **headers)
        assert status == 400
        assert body["error"]["message"].startswith(message)
        assert body["error"]["param"] == param
        [span] = await rig.spans()
        assert (span.status, span.attributes[c.CALL_OUTCOME]) == (SpanStatus.ERROR, "error")
        assert span.status_message == body["error"]["message"]
        assert (span.sequence_start, span.sequence_end) == (1, 2)


PICTURE = b"\x89PNG" * 2**18
"""A picture of a megabyte."""
DATA_URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
KEPT = {
    "type": "blob",
    "modality": "image",
    "mime_type": "image/png",
    "size": len(PICTURE),
    "sha256": hashlib.sha256(PICTURE).hexdigest(),
}


@pytest.mark.parametrize(
    ("role", "path", "part", "where", "understood"),
    [
        (
            "tool",
            "/v1/chat/completions",
            {"type": "image_url", "image_url": {"url": DATA_URL}},
            "messages[0].content[1]",
            "only text is understood; images ('image_url') need a policy with a vision model, such "
            "as Qwen2.5-VL, and the embedded engine",
        ),
        (
            "user",
            "/v1/responses",
            {"type": "input_image", "image_url": DATA_URL},
            "input[0].content[1]",
            "only messages with text, calls of tools and their outputs are understood; images "
            "('input_image') need a policy with a vision model, such as Qwen2.5-VL, and the "
            "embedded engine",
        ),
    ],
)
async def test_a_picture_is_refused_and_kept_as_a_reference(
    store: Store, role: str, path: str, part: Any, where: str, understood: str
) -> None:
    content = [{"type": "text", "text": "What is it?"}, part]
    messages = [{"role": role, "content": content}]
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "policy", field: messages}
    async with make_rig(store, "ok", mode=Mode.TRAIN) as rig:
        status, refused = await post(rig, body, path, **{c.HEADER_AGENT: "writer"})
        message = f"{where} is of type {part['type']!r}: {understood}"
        assert (status, refused) == (
            400,
            error(message, param=where, code="unsupported_content"),
        )
        [span] = await rig.spans()
        assert rig.engine.requests == []
    attributes = span.attributes
    said = [{"type": "text", "content": "What is it?"}, KEPT]
    if role == "tool":
        stored_content = [content[0], KEPT]
        said = [{"type": "tool_call_response", "response": stored_content, "id": None}]
    assert json.loads(attributes[c.INPUT_MESSAGES]) == [{"role": role, "parts": said}]
    assert (attributes[c.CALL_REFUSED], attributes[c.ERROR_TYPE]) == (where, "unsupported_content")
    assert (attributes[c.CALL_OUTCOME], span.status_message) == ("error", message)
    assert len(str(span)) < 5_000


UNHONOURED: dict[str, Any] = {
    "seed": 7,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "top_logprobs": 5,
    "logit_bias": {"5": -100},
    "brand_new_field": 1,
}


@pytest.mark.parametrize("field", UNHONOURED)
async def test_what_cannot_be_honoured_is_refused_or_overridden(store: Store, field: str) -> None:
    """Check that an unsupported field is refused in validation, and overridden in training."""
    value = UNHONOURED[field]
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, ask(**{field: value}))
        message = f"'{field}' = {value!r} cannot be honoured by this engine; leave it out"
        assert (status, body) == (400, error(message, param=field))
        assert rig.engine.requests == []
    routing = Routing(default=TRAINED)
    async with make_rig(store, "ok", routing=routing, mode=Mode.TRAIN) as rig:
        status, _ = await post(rig, ask(**{field: value}))
        assert status == 200
        [span] = await rig.spans()
        overrides = json.loads(str(span.attributes[c.SAMPLING_OVERRIDES]))
        assert overrides == {field: [value, None], "max_tokens": [None, 100]}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required", "tools": [TOOL]},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [TOOL]},
    "tools": {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
    "guided_json": {"guided_json": {"type": "object"}},
    "functions": {"functions": [TOOL["function"]]},
}


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL, Mode.DEV])
@pytest.mark.parametrize("field", CONSTRAINTS)
async def test_a_constraint_is_never_left_out(store: Store, field: str, mode: Mode) -> None:
    """Check that an engine without grammars refuses constraints in every mode."""
    fields = CONSTRAINTS[field]
    async with make_rig(store, "ok", routing=Routing(default=TRAINED), mode=mode) as rig:
        status, body = await post(rig, ask(**fields))
        message = f"'{field}' = {fields[field]!r} cannot be honoured by this engine; leave it out"
        assert (status, body) == (400, error(message, param=field))
        assert rig.engine.requests == []


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        (Mode.TRAIN, Sampling(max_tokens=20, stop=("x",))),
        (Mode.VAL, Sampling(temperature=0.2, top_p=0.9, top_k=5, max_tokens=20, stop=("x",))),
    ],
)
async def test_whose_sampling_is_used(store: Store, mode: Mode, used: Sampling) -> None:
    async with make_rig(store, "ok", routing=Routing(default=TRAINED), mode=mode) as rig:
        fields = {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "max_tokens": 20, "stop": "x"}
        assert (await post(rig, ask(**fields)))[0] == 200
        assert rig.engine.requests[0].sampling == used
        [record] = await rig.records()
        assert record.sampling == used
        [span] = await rig.spans()
        found = span.attributes.get(c.SAMPLING_OVERRIDES)
        overrides = {"temperature": [0.2, 1.0], "top_p": [0.9, 1.0], "top_k": [5, 0]}
        assert (json.loads(str(found)) if found else {}) == ({} if mode is Mode.VAL else overrides)


@pytest.mark.parametrize(
    ("field", "value", "shown"), [("stop", "x", "['x']"), ("top_p", 0.5, "0.5"), ("top_k", 3, "3")]
)
async def test_what_the_engine_does_not_declare_is_refused(
    store: Store, field: str, value: Any, shown: str
) -> None:
    weak = EngineCapabilities(exact_tokens=True, stop_strings=False, top_p=False, top_k=False)
    async with make_rig(store, "ok", capabilities=weak) as rig:
        status, body = await post(rig, ask(**{field: value}))
        message = f"'{field}' = {shown} cannot be honoured by this engine; leave it out"
        assert (status, body) == (400, error(message, param=field))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/responses", {"model": "policy", "input": []}, "'input' must be a non-empty"),
        ("/v1/chat/completions", b"{", "not valid JSON"),
        ("/v1/chat/completions", b" " * 70_000, "too large"),
    ],
)
async def test_a_refused_call_is_recorded(store: Store, path: str, body: Any, message: str) -> None:
    """Check that a refused request is recorded as a failed call."""
    async with make_rig(store, "ok") as rig:
        await rig.gateway.close()
        rig.gateway = Gateway(store, rig.engine, limits=GatewayLimits(max_body_bytes=60_000))
        await rig.gateway.start()
        status, _ = await post(rig, body, path, **rig.headers("call-x"))
        assert 400 <= status < 500
        [span] = await rig.spans()
        attributes = span.attributes
        assert (attributes[c.CALL_ID], attributes[c.AGENT_PATH]) == ("call-x", "team/writer")
        assert (attributes[c.CALL_OUTCOME], attributes[c.SELECTED]) == (CallOutcome.ERROR, True)
        assert message in span.status_message
        assert await rig.records() == []


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "truncation", "tools"])
async def test_template_options_that_a_request_must_not_set(store: Store, key: str) -> None:
    async with make_rig(store, "ok", routing=Routing(default=TRAINED), mode=Mode.TRAIN) as rig:
        status, body = await post(rig, ask(chat_template_kwargs={key: "x", "thinking": True}))
        assert status == 400
        assert body["error"]["param"] == f"chat_template_kwargs.{key}"
        status, _ = await post(rig, ask(chat_template_kwargs={"thinking": True}))
        assert status == 200


async def test_a_call_id_opens_nothing_of_another_attempt(store: Store) -> None:
    async with make_rig(store, ["mine", "yours"]) as rig:
        assert (await rig.ask("call-a")).choices[0].content == "mine"
        first, rig.attempt = rig.attempt, await rig.claim(Routing(default=POLICY))
        assert (await rig.ask("call-a")).choices[0].content == "yours"
        [record] = await rig.records()
        assert record.response_ids == rig.engine.ids("yours")
        [record] = (await store.token_records([first.attempt_id]))[first.attempt_id]
        assert record.response_ids == rig.engine.ids("mine")


async def test_the_call_token_is_nowhere_but_in_its_attempt(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with make_rig(store, "ok") as rig:
        token = rig.attempt.call_token
        await rig.ask(stream=True)
        for body in (ask(), ask(seed=1), b"{"):
            await post(rig, body)
        assert token not in repr(await rig.spans()) + repr(await rig.records()) + caplog.text
        for path in ("/v1/rewards", "/v1/spans", f"/v1/attempts/{rig.attempt.attempt_id}"):
            status, answer = await post(rig, {}, path)
            assert (status, token in json.dumps(answer)) == (404, False)


async def test_an_unknown_endpoint(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, {}, "/v1/embeddings")
        assert (status, body) == (404, error("no such endpoint: POST /v1/embeddings"))


async def test_another_protocol_version(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, ask(), **{c.HEADER_PROTOCOL: "7"})
        message = (
            f"the app's lightspan speaks protocol 7, this gateway speaks {c.PROTOCOL_VERSION}; "
            "install the same version of lightspan on both sides"
        )
        assert (status, body) == (400, error(message))


async def test_a_prompt_longer_than_the_context(store: Store) -> None:
    long = [{"role": "user", "content": "word " * 600}]
    async with make_rig(store, "ok") as rig, rig.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=long)  # type: ignore[arg-type]
        assert caught.value.code == "context_length_exceeded"
        length = len(rig.tokenizer.render(long))
        assert f"the prompt has {length} tokens, the model's context holds 512" in str(caught.value)
        assert rig.engine.requests == []


async def test_messages_that_the_template_refuses(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, ask(messages=[{"role": "wizard", "content": "x"}]))
        assert status == 400
        assert body["error"]["param"] == "messages"
        assert "unknown role wizard" in body["error"]["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call"),
        ({"role": "function", "name": "f", "content": "1"}, "role"),
    ],
)
async def test_calls_and_results_as_they_were_before_tools(
    store: Store, message: Any, param: str
) -> None:
    async with make_rig(store, "ok") as rig:
        user = {"role": "user", "content": "x"}
        status, body = await post(rig, ask(messages=[user, message]))
        assert (status, body["error"]["param"]) == (400, f"messages[1].{param}")
        assert "send 'tool_calls', and their results with the role 'tool'" in str(body)
        assert rig.engine.requests == []
        null = {"role": "assistant", "content": "1", "function_call": None}
        assert (await post(rig, ask(messages=[user, null, user])))[0] == 200


async def test_a_developer_is_the_system(store: Store) -> None:
    """Check that the role `developer` becomes `system`, which templates of all models support."""
    user = {"role": "user", "content": "x"}
    async with make_rig(store, "ok") as rig:
        for role in ("developer", "system"):
            rule = {"role": role, "content": "Answer in JSON."}
            assert (await post(rig, ask(messages=[rule, user])))[0] == 200
        prompts = [request.prompt_ids for request in rig.engine.requests]
    assert prompts[0] == prompts[1]


async def test_an_agent_that_is_not_served_here(store: Store) -> None:
    async with make_rig(store, "ok", routing=Routing(rules=[Rule("writer", POLICY)])) as rig:
        status, body = await post(rig, ask(), **{c.HEADER_AGENT: "team/checker"})
        message = (
            "agent 'team/checker' is not served here: it is neither optimised nor frozen to a "
            "model; add it to optimize= or frozen="
        )
        assert (status, body) == (400, error(message))


async def test_a_call_id_of_another_request(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        headers = {c.HEADER_CALL_ID: "call-x"}
        assert (await post(rig, ask(), **headers))[0] == 200
        refused = (400, error("call id call-x was used for another request"))
        assert await post(rig, ask(temperature=0.5), **headers) == refused
        await rig.restart()
        assert await post(rig, ask(temperature=0.5), **headers) == refused
        assert len(await rig.spans()) == 1
