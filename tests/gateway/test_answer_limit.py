"""Tests of the limit of answers for which neither the app nor the algorithm sets one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.token_records import Sampling
from lightspan.stores.protocol import Store
from lightspan_gateway.answer_limit import default_max_tokens
from lightspan_testing.gateway_suite import Rig
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer
from tests.gateway.posting import ask, post
from tests.serving.gateways import ask as ask_served, input_messages_of, serving

CONTEXT = 65_536


@pytest.mark.parametrize(
    ("context", "cache", "limit"),
    [
        (131_072, None, 8_192),
        (131_072, 16_384, 2_048),
        (16_384, None, 4_096),
        (512, 64, 1_024),  # the context ends the answer sooner
    ],
)
def test_the_limit_follows_from_context_and_cache(
    context: int, cache: int | None, limit: int
) -> None:
    assert default_max_tokens(context, cache) == limit


async def limit_of(
    store: Store,
    fields: dict[str, Any],
    *,
    mode: Mode = Mode.TRAIN,
    own: int | None = None,
    validate_temperature: float | None = None,
    cache: int | None = None,
    path: str = "/v1/chat/completions",
    context: int = CONTEXT,
) -> tuple[int | None, Any]:
    """Return the limit of an answer, and the recorded override of it.

    Args:
        fields: fields of the request.
        mode: mode of the attempt.
        own: limit of the algorithm; None for none.
        validate_temperature: temperature of evaluations; None for the app's.
        cache: size of the engine's cache in tokens; None if it does not say.
        path: path of the API.
        context: length of the context in tokens.
    """
    tokenizer = tiny_chat_tokenizer(context_length=context)
    engine: Any = ScriptedEngine(tokenizer, "ok")
    if cache is not None:
        engine.cache_tokens = {"policy": cache}.__getitem__
    rig = Rig(store, engine, tokenizer, None)
    target = Target(
        route=Route.POLICY,
        policy="policy",
        sampling=Sampling(max_tokens=own),
        validate_temperature=validate_temperature,
    )
    await rig.start(Routing(default=target), mode)
    try:
        status, answer = await post(rig, fields, path)
        assert status == 200, answer
        [span] = await rig.spans()
        overrides = json.loads(str(span.attributes.get(c.SAMPLING_OVERRIDES, "{}")))
        limits = {key: pair for key, pair in overrides.items() if "max_" in key}
        return engine.requests[0].sampling.max_tokens, limits
    finally:
        await rig.gateway.close()


async def test_an_answer_without_a_limit(store: Store) -> None:
    assert await limit_of(store, ask()) == (8_192, {"max_tokens": [None, 8_192]})


async def test_the_engines_memory_counts(store: Store) -> None:
    assert (await limit_of(store, ask(), cache=16_384))[0] == 2_048


async def test_evaluations_have_the_same_limit(store: Store) -> None:
    assert (await limit_of(store, ask(), mode=Mode.VAL))[0] == 8_192


async def test_a_limit_beyond_the_context_is_none(store: Store) -> None:
    fields = {"model": "policy", "input": "hi", "max_output_tokens": 200_000}
    limit = await limit_of(store, fields, path="/v1/responses")
    assert limit == (8_192, {"max_output_tokens": [200_000, 8_192]})


async def test_the_apps_limit_counts(store: Store) -> None:
    assert await limit_of(store, ask(max_tokens=64_000)) == (64_000, {})


MESSAGES = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL, Mode.DEV])
@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", MESSAGES, "max_tokens"),
        ("/v1/chat/completions", MESSAGES, "max_completion_tokens"),
        ("/v1/completions", {"model": "policy", "prompt": "hi"}, "max_tokens"),
        ("/v1/responses", {"model": "policy", "input": "hi"}, "max_output_tokens"),
        ("/v1/messages", MESSAGES, "max_tokens"),
    ],
)
async def test_the_algorithms_limit_counts_in_every_mode(
    store: Store, mode: Mode, path: str, fields: dict[str, Any], name: str
) -> None:
    recorded = "max_tokens" if name == "max_completion_tokens" else name
    for asked, used in ((99, 40), (200_000, 40), (40, 40), (8, 8)):
        found = await limit_of(store, {**fields, name: asked}, mode=mode, own=40, path=path)
        assert found == (used, {} if asked == used else {recorded: [asked, used]})


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL])
async def test_the_algorithms_limit_replaces_the_default(store: Store, mode: Mode) -> None:
    found = await limit_of(store, ask(), mode=mode, own=20_000)
    assert found == (20_000, {"max_tokens": [None, 20_000]})


async def test_validation_with_a_temperature_keeps_the_algorithms_limit(store: Store) -> None:
    found = await limit_of(store, ask(), mode=Mode.VAL, own=40, validate_temperature=0.0)
    assert found == (40, {"max_tokens": [None, 40]})


async def test_a_short_context_ends_the_answer(store: Store) -> None:
    limit, override = await limit_of(store, ask(), context=512)
    assert limit is not None
    assert (limit < 512, override) == (True, {})


async def test_serve_has_its_own_limit() -> None:
    async with serving(max_tokens=7) as gateway:
        await ask_served(gateway)
        assert [request.sampling.max_tokens for request in input_messages_of(gateway)] == [7]
        assert gateway.usage.ignored_fields == {}
