"""Tests of the adapter suite: its checks can fail, and its stage follows the script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import openai
import pytest

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan_testing.adapter_harness import Part, Played, Stage
from lightspan_testing.adapter_suite import (
    AdapterSuite,
    App,
    instructions,
)
from lightspan_testing.adapter_suite.checks import changed

TREE = """
    invoke_agent writer @writer
      chat @writer
      execute_tool look @writer
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as running:
        yield running


async def nothing(text: str) -> None:
    """Do nothing, as the `run` of an app that is never run."""


APP = App(run=nothing, tree=TREE)


def play(stage: Stage) -> Played:
    """Return an attempt of an app in plain Python, recorded like by a correct adapter."""
    played = stage.open(Part({"writer": ["A draft of {task}."]}), through_gateway=True)
    messages: Any = [
        {"role": "system", "content": instructions("writer")},
        {"role": "user", "content": played.text},
    ]

    async def attempt() -> None:
        async with openai.AsyncOpenAI(base_url=stage.url, api_key="key") as client:
            with open_scope(played.scope), lightspan.agent("writer"):
                await client.chat.completions.create(model="m", messages=messages)
                with lightspan.tool("look", '{"what": "seven"}') as span:
                    assert span is not None
        await sdk_instrumentation.aclose()

    asyncio.run(attempt())
    stage.close(played)
    result = {c.TOOL_CALL_RESULT: "seven: 7"}
    played.spans = [
        span.replace(attributes={**span.attributes, **result}) if is_tool(span) else span
        for span in played.spans
    ]
    return played


def is_tool(span: Any) -> bool:
    return bool(span.kind is SpanKind.TOOL)


def is_call(span: Any) -> bool:
    return bool(span.kind is SpanKind.LLM)


def is_agent(span: Any) -> bool:
    return bool(span.kind is SpanKind.AGENT)


def with_attribute(which: Callable[[Any], bool], key: str, value: Any) -> Callable[[Played], None]:
    """Return a function that changes an attribute of a span; None removes the attribute."""

    def spoil(played: Played) -> None:
        for number, span in enumerate(played.spans):
            if which(span):
                rest = {k: v for k, v in span.attributes.items() if k != key}
                new = rest if value is None else {**rest, key: value}
                played.spans[number] = span.replace(attributes=new)

    return spoil


def with_fields(which: Callable[[Any], bool], **fields: Any) -> Callable[[Played], None]:
    """Return a function that changes fields of a span."""

    def spoil(played: Played) -> None:
        played.spans = [s.replace(**fields) if which(s) else s for s in played.spans]

    return spoil


def with_record(**fields: Any) -> Callable[[Played], None]:
    """Return a function that changes fields of the token record."""

    def spoil(played: Played) -> None:
        played.records = [msgspec.structs.replace(one, **fields) for one in played.records]

    return spoil


def without(which: Callable[[Any], bool]) -> Callable[[Played], None]:
    def spoil(played: Played) -> None:
        played.spans = [span for span in played.spans if not which(span)]

    return spoil


def doubled(played: Played) -> None:
    (call,) = (span for span in played.spans if is_call(span))
    played.spans.append(call.replace(span_id="b" * 16))


def check(played: Played, stage: Stage) -> None:
    AdapterSuite().check(played, "single", APP, stage)


def test_what_is_right_passes(stage: Stage) -> None:
    check(play(stage), stage)
    assert stage.brain.problems == []


SPOILED: dict[str, Callable[[Played], None]] = {
    "a call under another path": with_attribute(is_call, c.AGENT_PATH, "team/writer"),
    "a call of another attempt": with_fields(is_call, attempt_id="at-other"),
    "a call that asks of another task": with_attribute(
        is_call,
        c.INPUT_MESSAGES,
        '[{"role":"system","parts":[{"content":"You are writer. task-0"}]}]',
    ),
    "a call that is lost": without(is_call),
    "a call that is doubled": doubled,
    "a call beside its agent": with_fields(is_call, parent_id="00000000000000aa"),
    "an agent that is lost": without(is_agent),
    "an agent that failed": with_fields(is_agent, status=SpanStatus.ERROR),
    "an agent that says more": with_attribute(is_agent, c.TOOL_NAME, "look"),
    "a tool with other arguments": with_attribute(is_tool, c.TOOL_CALL_ARGUMENTS, "{}"),
    "a tool with another result": with_attribute(is_tool, c.TOOL_CALL_RESULT, "8"),
    "a token record that is lost": lambda played: played.records.clear(),
    "a prompt that is not what was asked": with_record(prompt=bytes(8)),
    "an answer that is not what was sampled": with_record(response=bytes(4)),
    "a record of another agent": with_record(agent_path="checker"),
    "a record of another call": with_record(call_id="call-other"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_wrong_fails(stage: Stage, what: str) -> None:
    played = play(stage)
    SPOILED[what](played)
    with pytest.raises((AssertionError, KeyError)):
        check(played, stage)


def test_what_is_no_longer_what_it_was() -> None:
    one, other = object(), object()
    before = {"kept": one, "changed": one, "gone": one, "equal": [one, 1]}
    after = {"kept": one, "changed": other, "new": one, "equal": [one, 1]}
    assert changed(before, after) == ["changed", "gone", "new"]
    assert changed(before, before) == []
