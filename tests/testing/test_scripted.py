"""Tests of the scripted server and the scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from lightspan.errors import ContextOverflowError, EngineClosedError, NotFoundError
from lightspan.protocols.engine import GenerationRequest, TokenEngine
from lightspan.schema.token_records import FinishReason, Sampling
from lightspan_testing.gateway_suite import shared_tokenizer
from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.scripted_engine import Gate, Say, ScriptedEngine, logprob_of

MESSAGES: Any = [{"role": "user", "content": "hi there"}]


def client_of(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)


def test_a_server_answers_in_turn() -> None:
    script: list[Any] = ["one", Reply(text="two"), ["a", "b"]]
    with ScriptedServer(script) as server, client_of(server) as client:
        ask = client.chat.completions.create
        first = ask(model="m", messages=MESSAGES)
        assert first.choices[0].message.content == "one"
        assert first.usage is not None
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (2, 1)
        assert ask(model="m", messages=MESSAGES).choices[0].message.content == "two"
        both = ask(model="m", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in both.choices] == ["a", "b"]
        with pytest.raises(openai.InternalServerError, match="no answer for call 4"):
            ask(model="m", messages=MESSAGES)
        assert [model.id for model in client.models.list()] == ["scripted"]
    assert [request.last_text for request in server.requests] == ["hi there"] * 4


# --- the engine -----------------------------------------------------------------------------
def request_of(name: str = "call-0-1", prompt: list[int] | None = None, **sampling: Any) -> Any:
    return GenerationRequest(
        request_id=name,
        policy="policy",
        prompt_ids=[1, 5, 6] if prompt is None else prompt,
        sampling=Sampling(**{"max_tokens": 100, **sampling}),
    )


async def collect(engine: ScriptedEngine, request: Any, *, stream: bool = True) -> list[Any]:
    return [chunk async for chunk in engine.generate(request, stream=stream)]


async def test_an_engine_says_its_text() -> None:
    engine = ScriptedEngine(shared_tokenizer(), "abc")
    assert isinstance(engine, TokenEngine)
    ids = engine.ids("abc")
    assert shared_tokenizer().decode(ids, skip_special_tokens=False) == "abc<|im_end|>"
    chunks = await collect(engine, request_of())
    assert [chunk.ids for chunk in chunks] == [[token] for token in ids]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(ids) - 1)
    assert chunks[-1].finish_reason is FinishReason.STOP
    [whole] = await collect(engine, request_of("call-1-1"), stream=False)
    assert (whole.ids, whole.logprobs) == (ids, [logprob_of(token) for token in ids])
    assert engine.usage() == {"tokens": 2.0 * len(ids), "requests": 2.0, "cpu_s": 0.0}
    assert (engine.finished, engine.cancelled) == (["call-0-1", "call-1-1"], [])


async def test_an_engine_goes_on_from_part_of_its_answer() -> None:
    engine = ScriptedEngine(shared_tokenizer(), ["abcdef", "other"])
    ids = engine.ids("abcdef")
    iterator: Any = engine.generate(request_of("a-0-1"), stream=True)
    first = [await anext(iterator), await anext(iterator)]
    await iterator.aclose()
    assert engine.cancelled == ["a-0-1"]
    sampled = [token for chunk in first for token in chunk.ids]
    rest = await collect(engine, request_of("a-0-2", [1, 5, 6, *sampled]))
    assert [token for chunk in rest for token in chunk.ids] == ids[2:]
    other = await collect(engine, request_of("a-0-3"), stream=False)
    assert other[0].ids == engine.ids("other")


async def test_an_engine_waits_at_gates_and_changes_versions() -> None:
    gate = Gate()
    engine = ScriptedEngine(shared_tokenizer(), [Say(text="abc", gates={1: gate})])
    task = asyncio.create_task(collect(engine, request_of(), stream=False))
    await gate.reached.wait()
    assert engine.policies() == {"policy": 1}
    await engine.update("policy", {}, 2)
    gate.open()
    assert [(chunk.version, len(chunk.ids)) for chunk in await task] == [(1, 1), (2, 3)]


async def test_an_engine_fails() -> None:
    failing = Say(text="abc", errors={1: ValueError("bad")})
    engine = ScriptedEngine(shared_tokenizer(), [failing])
    with pytest.raises(ValueError, match="bad"):
        await collect(engine, request_of())
    with pytest.raises(AssertionError, match="the script has no answer for call-0-2"):
        await collect(engine, request_of("call-0-2"))
    with pytest.raises(ContextOverflowError, match="has 512 tokens, the context 512"):
        await collect(engine, request_of(prompt=[5] * 512))
    with pytest.raises(NotFoundError, match="'x' is served here"):
        engine.tokenizer("x")
    await engine.close()
    with pytest.raises(EngineClosedError):
        await collect(engine, request_of())
