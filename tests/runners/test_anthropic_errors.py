"""Test the outcomes of apps that do not catch the gateway's errors in Anthropic's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from lightspan.runners.outcome import classify
from lightspan.schema.records import Outcome
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import make_rig
from lightspan_testing.scripted_engine import Say


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        pytest.param("a b " * 600, Outcome.CONTEXT_OVERFLOW, id="context"),
        pytest.param("hi", Outcome.INFRASTRUCTURE, id="engine"),
    ],
)
async def test_whose_fault_an_error_is(
    store: Store, text: str, outcome: Outcome, streamed: bool
) -> None:
    """Check that a context overflow is a failure of the app, and an engine failure is not."""

    async def ask(client: anthropic.AsyncAnthropic) -> None:
        messages_: Any = [{"role": "user", "content": text}]
        answer: Any = await client.messages.create(
            model="policy", max_tokens=9, messages=messages_, stream=streamed
        )
        assert [event async for event in answer]

    say = Say(text="a b c d", errors={2: RuntimeError("broke")})
    async with make_rig(store, lambda request: say) as rig:
        url = rig.gateway.url
        key = rig.attempt.call_token
        async with anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await ask(client)
    assert classify(caught.value, url).outcome is outcome
    assert classify(caught.value, "http://elsewhere").outcome is outcome  # of another model
