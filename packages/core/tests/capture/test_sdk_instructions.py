"""Test the replacement of agents' instructions in requests of every API and client method.

Requests keep the app's own client and key, and nothing else in them changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightspan import prompt
from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.system_prompts import (
    COMPLETION,
    LATE,
    NEW_AGENT,
    NO_INSTRUCTIONS,
    OTHER_PROMPT,
    OTHER_TEXT,
    SEVERAL_PARTS,
    STORED,
    Instructions,
)
from lightspan_testing.scripted import ScriptedServer
from packages.core.tests.capture.clients import client_of, llm_spans, text_of

pytestmark = pytest.mark.usefixtures("unwrapped")

OLD, NEW = "You are router. Today is Monday.", "Route well. Today is Monday."
TOLD = Instructions(
    surveyed=["router", "other"],
    prompts={
        "router": LearnedPrompt(
            before=PromptTemplate("You are router. Today is {date_1}."),
            after=PromptTemplate("Route well. Today is {date_1}."),
            place=PromptPlace.AGENT,
            agent="router",
        )
    },
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
SYSTEM: dict[str, Any] = {"role": "system", "content": OLD}
BLOCK: Any = {"type": "text", "text": OLD, "cache_control": {"type": "ephemeral"}}


@contextmanager
def told(
    told: Instructions | None, name: str = "router", routing: Routing | None = None, **more: Any
) -> Iterator[AttemptContext]:
    scope = AttemptContext(
        rollout_id="ro-1",
        attempt_id="at-1",
        instructions=told,
        routing=routing or Routing(),
        **more,
    )
    with open_scope(scope), agent(name):
        yield scope
    assert scope.recorder.capture_errors() == []


def chat(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="m", **{"messages": [SYSTEM, USER], **more})


# --- what is sent ---------------------------------------------------------------------------
CHATS: dict[str, Any] = {
    "create": chat,
    "stream": lambda client: [*chat(client, stream=True)],
    "raw": lambda client: client.chat.completions.with_raw_response.create(
        model="m", messages=[SYSTEM, USER]
    ).parse(),
    "developer": lambda client: chat(client, messages=[{**SYSTEM, "role": "developer"}, USER]),
    "one part": lambda client: chat(
        client, messages=[{"role": "system", "content": [{"type": "text", "text": OLD}]}, USER]
    ),
    "extra_body": lambda client: chat(client, extra_body={"messages": [SYSTEM, USER]}),
    "with its own answer": lambda client: chat(
        client, messages=[SYSTEM, USER, chat(client).choices[0].message, USER]
    ),
    "responses": lambda client: client.responses.create(model="m", instructions=OLD, input="hi"),
    "responses stream": lambda client: [
        *client.responses.create(model="m", instructions=OLD, input="hi", stream=True)
    ],
    "responses message": lambda client: client.responses.create(model="m", input=[SYSTEM, USER]),
}


@pytest.mark.parametrize("way", CHATS)
def test_every_way_to_ask(elsewhere: ScriptedServer, way: str) -> None:
    """Check that a request differs from the app's only in the text of the instructions."""
    with client_of(elsewhere) as client:
        CHATS[way](client)
        with told(TOLD) as scope:
            CHATS[way](client)
    half = len(elsewhere.requests) // 2
    for plain, sent in zip(elsewhere.requests[:half], elsewhere.requests[half:], strict=True):
        expected = json.dumps(plain.body).replace(json.dumps(OLD), json.dumps(NEW))
        assert json.dumps(sent.body) == expected != json.dumps(plain.body)
        same = ("authorization", "x-stainless-retry-count", "user-agent")
        assert [sent.headers[key] for key in same] == [plain.headers[key] for key in same]
        assert sent.headers["authorization"] == "Bearer app-key"
    for span in llm_spans(scope):
        assert span.attributes[c.PROMPT_ORIGINAL] == OLD
        assert span.attributes[c.PROMPT_APPLIED] is True
        assert genai_messages.input_messages_of(span.attributes)[0]["content"] == NEW
        assert span.attributes[c.ROUTE] == Route.APP


@pytest.mark.parametrize("system", [OLD, [BLOCK]], ids=["text", "block"])
async def test_anthropic(elsewhere: ScriptedServer, system: Any) -> None:
    """Check `system` as a text and as a block, whose `cache_control` is kept."""
    anthropic = pytest.importorskip("anthropic")
    asked: Any = {"model": "m", "max_tokens": 9, "messages": [USER], "system": system}
    with told(TOLD) as scope:
        with anthropic.Anthropic(base_url=elsewhere.origin, api_key="app-key") as client:
            client.messages.create(**asked)
        async with anthropic.AsyncAnthropic(base_url=elsewhere.origin, api_key="app-key") as own:
            await own.messages.create(**asked)
    expected = NEW if system == OLD else [{**BLOCK, "text": NEW}]
    assert [request.body["system"] for request in elsewhere.requests] == [expected] * 2
    assert BLOCK["text"] == OLD
    for request in elsewhere.requests:
        assert {"app-key", "Bearer app-key"} & {*request.headers.values()}  # of either version
    for span in llm_spans(scope):
        assert span.attributes[c.PROMPT_ORIGINAL] == OLD
        assert span.attributes[c.PROMPT_APPLIED] is True


# --- what is left alone ---------------------------------------------------------------------
LEFT_ALONE: dict[str, tuple[Any, str]] = {
    "another text": ({"messages": [{**SYSTEM, "content": "You are a writer."}, USER]}, OTHER_TEXT),
    "none": ({"messages": [USER]}, NO_INSTRUCTIONS),
    "two messages": ({"messages": [SYSTEM, SYSTEM, USER]}, SEVERAL_PARTS),
    "late": ({"messages": [USER, SYSTEM]}, LATE),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_cannot_be_replaced_is_sent_as_it_is(elsewhere: ScriptedServer, name: str) -> None:
    asked, reason = LEFT_ALONE[name]
    with client_of(elsewhere) as client:
        chat(client, **asked)
        with told(TOLD) as scope:
            chat(client, **asked)
    plain, sent = elsewhere.requests
    assert json.dumps(plain.body) == json.dumps(sent.body)
    [span] = llm_spans(scope)
    assert (span.attributes[c.PROMPT_APPLIED], span.attributes[c.PROMPT_REASON]) == (False, reason)


def test_prompts_that_the_provider_keeps_and_completions(elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client, told(TOLD) as scope:
        client.responses.create(model="m", prompt={"id": "pmpt_1"}, input="hi")
        client.completions.create(model="m", prompt=OLD)
        client.responses.create(model="m", instructions=OLD, input=[SYSTEM, USER])
    reasons = [span.attributes[c.PROMPT_REASON] for span in llm_spans(scope)]
    assert reasons == [STORED, COMPLETION, SEVERAL_PARTS]
    assert elsewhere.requests[2].body["instructions"] == OLD


def test_other_agents_are_not_touched(elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client:
        chat(client)
        with told(TOLD, "checker") as scope:
            chat(client)
        with told(TOLD, "other") as unseen:  # meant, and made no call when texts were found
            chat(client)
    assert len({json.dumps(request.body) for request in elsewhere.requests}) == 1
    assert not {c.PROMPT_ORIGINAL, c.PROMPT_REASON} & llm_spans(scope)[0].attributes.keys()
    assert llm_spans(unseen)[0].attributes[c.PROMPT_REASON] == NEW_AGENT


def test_a_survey_writes_texts_down_and_changes_nothing(elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client:
        chat(client)
        with told(Instructions(surveyed=["r*"])) as scope:
            chat(client)
            chat(client, messages=[USER, SYSTEM])
    assert elsewhere.requests[0].body == elsewhere.requests[1].body
    first, late = (span.attributes for span in llm_spans(scope))
    assert first[c.PROMPT_ORIGINAL] == OLD
    assert {c.PROMPT_APPLIED, c.PROMPT_REASON} & first.keys() == set()
    assert late[c.PROMPT_REASON] == LATE


# --- retries, keys, caches, side by side ----------------------------------------------------


def test_a_policys_call_goes_to_the_gateway_with_the_candidates_text(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    routing = Routing(rules=[Rule("router", Target(route=Route.POLICY, policy="p"))])
    with (
        client_of(elsewhere) as client,
        told(TOLD, routing=routing, gateway_url=gateway.origin, call_token="token") as scope,
    ):
        assert text_of(chat(client)) == "from the gateway"
    [request] = gateway.requests
    assert request.body["messages"][0]["content"] == NEW
    assert request.headers["authorization"] == "Bearer token"
    [span] = [span for span in scope.recorder.drain() if span.name == "lightspan.prompt"]
    assert span.attributes[c.PROMPT_CALL] == request.headers[c.HEADER_CALL_ID]
    assert span.attributes[c.PROMPT_ORIGINAL] == OLD


# --- prompts that the app asks for ----------------------------------------------------------
def learned(before: str, after: str) -> Instructions:
    change = LearnedPrompt(before=PromptTemplate(before), after=PromptTemplate(after))
    return Instructions(surveyed=["mails"], prompts={"mails": change})


def test_a_prompt_that_the_app_asks_for() -> None:
    assert prompt("mails", "Which {mail}?") == "Which {mail}?"  # outside every attempt
    with told(None):
        assert prompt("mails", "Which {mail}?") == "Which {mail}?"
    with told(learned("Which {mail}?", 'As {{"desk": 1}}: {mail}')) as scope:
        assert prompt("mails", "Which {mail}?") == 'As {{"desk": 1}}: {mail}'
        assert prompt("mails", "Other {mail}?") == "Other {mail}?"
        assert prompt("letters", "Which {mail}?") == "Which {mail}?"
    first, second = (span.attributes for span in scope.recorder.drain() if span.name[:2] == "li")
    assert first[c.PROMPT_NAME] == "mails"
    assert (first[c.PROMPT_ORIGINAL], first[c.PROMPT_APPLIED]) == ("Which {mail}?", True)
    assert first[c.AGENT_PATH] == "router"
    assert (second[c.PROMPT_APPLIED], second[c.PROMPT_REASON]) == (False, OTHER_PROMPT)


def test_what_fails_is_ours_and_the_app_goes_on(
    elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr("lightspan.capture.sdk_instrumentation.with_text", broken)
    monkeypatch.setattr(Instructions, "text_of", broken)
    scope = AttemptContext(rollout_id="r", attempt_id="a", instructions=TOLD)
    with client_of(elsewhere) as client, open_scope(scope), agent("router"):
        assert text_of(chat(client)) == "from elsewhere"
        assert prompt("mails", "Be brief.") == "Be brief."
    assert elsewhere.requests[0].body["messages"][0]["content"] == OLD
    damages = " ".join(scope.recorder.capture_errors())
    assert "instructions of a call could not be replaced: RuntimeError" in damages
    assert "the prompt 'mails' could not be read: RuntimeError" in damages
    sdk_instrumentation.close()
