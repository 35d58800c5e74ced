"""Tests of `/v1/completions`: parsing, errors, records and training."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.protocols.engine import PromptRefused
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.token_records import Sampling
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import make_rig
from lightspan_testing.scripted_engine import Say

FORCED = Sampling(temperature=0.5, max_tokens=40)
TRAINED = Target(route=Route.POLICY, policy="policy", sampling=FORCED)


# --- what is returned -----------------------------------------------------------------------
async def test_nothing_is_returned_that_was_not_asked_for(store: Store) -> None:
    async with make_rig(store, "ok") as rig, rig.client() as client:
        answer = await client.completions.create(
            model="policy", prompt="SELECT", extra_headers=rig.headers("call-x")
        )
        body = answer.model_dump(exclude_unset=True)
        assert isinstance(body.pop("created"), int)
        prompt = len(rig.tokenizer.encode("SELECT"))
        assert body == {
            "id": "cmpl-call-x",
            "object": "text_completion",
            "model": "policy",
            "choices": [{"index": 0, "text": "ok", "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3},
        }


async def test_sixteen_tokens_unless_told_otherwise(store: Store) -> None:
    async with make_rig(store, "a b c d e f g h i j k l m n o p q r s t u v w x y z") as rig:
        reading = await rig.ask_text(prompt="SELECT")
        assert reading.usage[1] == 16
        assert reading.choices[0].reason == "length"
        assert (await rig.ask_text("call-b", prompt="SELECT", max_tokens=3)).usage[1] == 3


async def test_logprobs_are_those_of_the_sampled_tokens(store: Store) -> None:
    async with make_rig(store, "Größe 🙂!") as rig, rig.client() as client:
        answer = await client.completions.create(model="m", prompt="x", logprobs=0, max_tokens=99)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        ids = rig.engine.ids("Größe 🙂!")
        assert logprobs.token_logprobs == rig.engine.logprobs(ids)
        assert logprobs.top_logprobs is None
        octets = [rig.tokenizer.token_bytes(token) for token in ids]
        assert logprobs.tokens == [each.decode(errors="replace") for each in octets]
        # a token starts at the end of the text before it; bytes of one character share an offset
        for token, offset in zip(logprobs.tokens, logprobs.text_offset or (), strict=True):
            if "\ufffd" not in token and token != "<|im_end|>":
                assert answer.choices[0].text[offset:].startswith(token)


async def test_the_prompt_is_taken_as_it_is(store: Store) -> None:
    """Check that no template is applied and no token is added; special tokens in the text are
    tokens.
    """
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    async with make_rig(store, "ok") as rig:
        await rig.ask_text(prompt=text)
        [record] = await rig.records()
        assert record.prompt_ids == rig.tokenizer.encode(text)
        chat = rig.tokenizer.render([{"role": "user", "content": "hi"}])
        assert record.prompt_ids == chat


# --- what is refused ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"echo": True}, "echo", "'echo' = True cannot be honoured"),
        ({"best_of": 3}, "best_of", "cannot be honoured"),
        ({"logprobs": 2}, "logprobs", "'logprobs' = 2 cannot be honoured"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be honoured"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "more than 128 choices"),
        ({"prompt": ""}, "prompt", "nothing to complete"),
        ({"prompt": [[]]}, "prompt", "must be a text"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text"),
        ({"prompt": [2**31]}, "prompt", "must be a text"),
        ({"prompt": "a b " * 600}, "prompt", "shorten the prompt"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "cannot be honoured"),
    ],
)
async def test_refusals_name_the_field(
    store: Store, fields: dict[str, Any], param: str, message: str
) -> None:
    async with make_rig(store, "ok") as rig:
        async with rig.client() as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="policy", prompt="x", extra_body=fields)
        error: Any = caught.value.body
        assert error["param"] == param
        assert message in error["message"]
        [span] = await rig.spans()  # refused, and recorded
        assert span.attributes[c.CALL_OUTCOME] == "error"
        assert rig.engine.requests == []


async def test_ids_beyond_the_vocabulary_are_a_bad_request(store: Store) -> None:
    beyond = PromptRefused("prompt ids must be from 0 to 404; got 399999 to 399999")
    async with make_rig(store, [Say(text="x", errors={0: beyond})]) as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await rig.ask_text(prompt=[399999])
        error: Any = caught.value.body
        assert (error["param"], error["message"]) == ("prompt", str(beyond))


# --- in a scope, through the shim -----------------------------------------------------------
@pytest.fixture
def shim() -> Any:
    yield
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


async def test_a_scope_hands_completions_to_the_gateway(store: Store, shim: None) -> None:
    """Check the exact ids of all prompts and choices, by sync and async clients, streamed or
    not.
    """
    routing = Routing(rules=[Rule("writer", TRAINED)])
    nowhere: Any = {"base_url": "http://127.0.0.1:9/v1", "api_key": "own", "max_retries": 0}
    async with make_rig(store, "ok", routing=routing, mode=Mode.TRAIN) as rig:
        scope = AttemptContext(
            rollout_id=rig.attempt.rollout_id,
            attempt_id=rig.attempt.attempt_id,
            gateway_url=rig.gateway.url,
            call_token=rig.attempt.call_token,
            routing=routing,
        )
        with open_scope(scope), agent("writer"):
            with openai.OpenAI(**nowhere) as client:
                create = client.completions.create
                await asyncio.to_thread(create, model="m", prompt=["SELECT", "How"], n=2)
            async with openai.AsyncOpenAI(**nowhere) as client:
                stream = await client.completions.create(model="m", prompt=[5, 6, 7], stream=True)
                assert "".join([part.choices[0].text async for part in stream]) == "ok"
            await sdk_instrumentation.aclose()
        assert scope.recorder.capture_errors() == []
        prompts = [rig.tokenizer.encode("SELECT")] * 2 + [rig.tokenizer.encode("How")] * 2
        records = await rig.records()
        assert [record.prompt_ids for record in records] == [*prompts, [5, 6, 7]]
        assert {tuple(record.response_ids) for record in records} == {tuple(rig.engine.ids("ok"))}
        assert {record.agent_path for record in records} == {"writer"}
