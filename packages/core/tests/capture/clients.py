"""Every way in which an app calls a model by the OpenAI client, each in a scope of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from lightspan.capture.context import AttemptContext
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.spans import Span, SpanKind
from lightspan_testing.scripted import ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TRAINED = Routing(rules=[Rule("writer", Target(route=Route.POLICY, policy="policy"))])


def make_scope(gateway: ScriptedServer | None, routing: Routing = TRAINED) -> AttemptContext:
    return AttemptContext(
        rollout_id="ro-1",
        attempt_id="at-1",
        gateway_url=None if gateway is None else gateway.origin,
        call_token="token-1",
        routing=routing,
        trace_id="0123456789abcdef0123456789abcdef",
    )


@contextmanager
def acting_as(gateway: ScriptedServer | None, name: str) -> Iterator[AttemptContext]:
    with open_scope(make_scope(gateway)) as scope, agent(name):
        yield scope


def llm_spans(scope: AttemptContext) -> list[Span]:
    return [span for span in scope.recorder.drain() if span.kind is SpanKind.LLM]


def client_of(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": server.url, "api_key": "app-key", **options})


def async_client_of(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": server.url, "api_key": "app-key", **options})


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def text_of_stream(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def _raw_stream(client: openai.OpenAI) -> str:
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES, stream=True
    )
    assert raw.headers["content-type"] == "text/event-stream"
    return text_of_stream(raw.parse())


def _helper_stream(client: openai.OpenAI) -> str:
    with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        return text_of(stream.get_final_completion())


def _streaming_response(client: openai.OpenAI) -> str:
    with client.chat.completions.with_streaming_response.create(
        model="m", messages=MESSAGES
    ) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


WAYS: dict[str, Any] = {
    "create": lambda client: text_of(client.chat.completions.create(model="m", messages=MESSAGES)),
    "stream=True": lambda client: text_of_stream(
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    ),
    "stream()": _helper_stream,
    "raw": lambda client: text_of(
        client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES).parse()
    ),
    "raw stream": _raw_stream,
    "streaming response": _streaming_response,
    "with_options": lambda client: text_of(
        client.with_options(timeout=5).chat.completions.create(model="m", messages=MESSAGES)
    ),
}
ASYNC_WAYS = ("create", "stream=True", "stream()", "raw", "raw stream", "streaming response")


async def ask_async(client: openai.AsyncOpenAI, way: str) -> str:
    api: Any = client.chat.completions
    asked: dict[str, Any] = {"model": "m", "messages": MESSAGES}
    match way:
        case "create":
            return text_of(await api.create(**asked))
        case "raw":
            return text_of((await api.with_raw_response.create(**asked)).parse())
        case "stream()":
            async with api.stream(**asked) as stream:
                return text_of(await stream.get_final_completion())
        case "streaming response":
            async with api.with_streaming_response.create(**asked) as response:
                body = json.loads(await response.read())
                return str(body["choices"][0]["message"]["content"])
    if way == "raw stream":
        stream = (await api.with_raw_response.create(**asked, stream=True)).parse()
    else:
        stream = await api.create(**asked, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
