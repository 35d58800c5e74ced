"""Test the uses of production attempts: feedback, chats, tasks, SFT, inspect and export."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lightspan
from lightspan.algorithms.recorded_attempts import parse_time
from lightspan.cli import main
from lightspan.errors import ConfigError, DataError, NotFoundError, RewardError
from lightspan.production.feedback import Rated
from lightspan.production.store_writer import (
    PendingWrite,
    attempt_write,
    write_pending,
)
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import AttemptStatus, Json, Outcome
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Attributes, Span, SpanKind
from lightspan.stores import open_store, public_url
from lightspan.stores.protocol import Summaries
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_testing.strategies import make_reward_span, make_span
from lightspan_tools import overview
from lightspan_tools.export import Filter, export_store
from lightspan_tools.inspect_report import RolloutReport, StoreReport
from lightspan_tools.recorded_tasks import tasks_from_store
from lightspan_torch.sft.chat_dataset import Chats, load_chats
from packages.gateway.tests.remote_store.served import KEYS, READER, serving

HEX = "{:032x}"


def call(number: int, answer: str = "answer", agent: str = "writer", **attributes: Any) -> Span:
    """Return the span of a model call that starts at second `number`."""
    given: Attributes = {
        c.INPUT_MESSAGES: genai_messages.dump([{"role": "user", "content": f"question {number}"}]),
        c.OUTPUT_MESSAGES: genai_messages.dump(
            [{"role": "assistant", "content": answer, "finish_reason": "stop"}]
        ),
        c.FINISH_REASONS: ["stop"],
        c.AGENT_PATH: agent,
        c.CALL_OUTCOME: "ok",
        c.RESPONSE_ID: f"chatcmpl-theirs-{number}",
    }
    return make_span(
        f"{number:016x}",
        start_ns=number * 10**9,
        end_ns=number * 10**9 + 5 * 10**8,
        attributes={**given, **attributes},
    )


def attempt(
    number: int,
    *spans: Span,
    service: str = "support",
    task: Json = None,
    started_at: float = 1000.0,
    capture_errors: tuple[str, ...] = (),
) -> PendingWrite:
    """Return a production attempt; its calls get the ids that are used in production."""
    unique = HEX.format(number)
    attempt_id, rollout_id = f"at-{unique}", f"ro-{unique}"
    owned = []
    for index, span in enumerate(spans, 1):
        named = {c.CALL_ID: f"call-{unique}-{index}"} if span.kind is SpanKind.LLM else {}
        owned.append(
            span.replace(
                attempt_id=attempt_id,
                rollout_id=rollout_id,
                attributes={**named, **span.attributes},
            )
        )
    return attempt_write(
        *(attempt_id, rollout_id, service, task, owned),
        started_at=started_at,
        status=AttemptStatus.SUCCEEDED,
        outcome=Outcome.OK,
        capture_errors=list(capture_errors),
    )


def at(number: int) -> str:
    return f"at-{HEX.format(number)}"


def call_id(number: int, index: int = 1) -> str:
    return f"call-{HEX.format(number)}-{index}"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("LIGHTSPAN_STORE", raising=False)
    return f"sqlite:{tmp_path / 'production.db'}"


def write(url: str, *parcels: PendingWrite) -> None:
    async def write_all() -> None:
        async with open_store(url) as store:
            for write in parcels:
                await write_pending(store, write)

    asyncio.run(write_all())


def answers(found: Chats) -> list[str]:
    return [str(chat["messages"][-1]["content"]) for chat in found.chats]


def test_chats_that_held_a_key_are_no_demonstrations(url: str) -> None:
    """Check that chats with a redacted key are left out, because their text was never sampled."""
    write(url, attempt(1, call(1, "it is <key>", **{c.KEYS_REPLACED: True}), call(2, "text")))
    found = load_chats(url)
    assert answers(found) == ["text"]
    assert found.left_out == {"with keys in them, which are not kept": 1}


def test_chats_with_pictures_are_no_demonstrations(url: str) -> None:
    """Check that chats with pictures are left out, because only references to them are stored."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = {"role": "tool", "tool_call_id": "t1", "content": [image]}
    seen = [
        call(number, **{c.INPUT_MESSAGES: genai_messages.dump([message])})
        for number, message in enumerate(({"role": "user", "content": [image]}, result), 1)
    ]
    write(url, attempt(1, *seen, call(3, "text")))
    found = load_chats(url)
    assert answers(found) == ["text"]
    assert found.left_out == {"with images, sounds or files, of which references are kept": 2}


@pytest.mark.parametrize("arguments", ['{"a": 1', "{'a': 1}", "[1]", '"x"', "null"])
def test_calls_of_tools_that_cannot_be_read_are_no_demonstrations(url: str, arguments: str) -> None:
    """The model would learn calls that no parser reads. An empty text is a call without any."""

    def called(text: str) -> str:
        function = {"name": "f", "arguments": text}
        calls = [{"id": "t", "type": "function", "function": function}]
        return genai_messages.dump([{"role": "assistant", "content": None, "tool_calls": calls}])

    write(
        url,
        attempt(
            1,
            call(1, "", **{c.OUTPUT_MESSAGES: called(arguments)}),
            call(2, "", **{c.OUTPUT_MESSAGES: called("")}),
            call(3, "", **{c.OUTPUT_MESSAGES: called('{"a": 1}')}),
        ),
    )
    found = load_chats(url)
    assert len(found.chats) == 2
    assert found.left_out == {"with arguments of tools that are no JSON object": 1}


def test_calls_of_tools_that_the_provider_runs_are_no_demonstrations(url: str) -> None:
    """Only the text beside them would be imitated: an answer without the search."""
    parts = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "found"},
    ]
    message = {"role": "assistant", "content": parts}
    searched, question = genai_messages.dump([message]), {"role": "user", "content": "q"}
    write(
        url,
        attempt(
            1,
            call(1, "", **{c.OUTPUT_MESSAGES: searched}),
            call(2, "text", **{c.INPUT_MESSAGES: genai_messages.dump([message, question])}),
            call(3, "text"),
        ),
    )
    found = load_chats(url)
    assert answers(found) == ["text"]
    assert found.left_out == {"with calls of tools that the provider runs": 2}


def test_a_tool_may_return_a_list_of_anything(url: str) -> None:
    """Items of a result are no parts of a message, and no calls of tools."""
    items = ["a", {"id": 1}, 7]
    result = {"type": "tool_call_response", "id": "t", "response": items}
    asked = json.dumps([{"role": "tool", "parts": [result]}])
    write(url, attempt(1, call(1, "text", **{c.INPUT_MESSAGES: asked})))
    found = load_chats(url)
    assert [chat["messages"][0]["content"] for chat in found.chats] == [items]
    assert found.left_out == {}


def _said(*messages: tuple[str, str]) -> str:
    return genai_messages.dump([{"role": role, "content": text} for role, text in messages])


def test_a_conversation_that_the_provider_keeps_is_put_together(url: str) -> None:
    """Check a chain of `previous_response_id`, and contexts that the attempt does not have."""
    say = ("user", "again")
    instructed = (("system", "Be short."), ("user", "first"))
    first = call(1, "one", **{c.INPUT_MESSAGES: _said(*instructed), c.INSTRUCTIONS: True})
    chain = [
        call(number, text, **{c.INPUT_MESSAGES: _said(say), c.CALL_CONTEXT: before})
        for number, text, before in (
            (2, "two", "chatcmpl-theirs-1"),
            (4, "another process's", "resp_unknown"),
            (5, "conversation", "conversation"),
            (6, "its own id", "chatcmpl-theirs-6"),
        )
    ]
    new = {c.INPUT_MESSAGES: _said(("system", "Be kind."), say), c.INSTRUCTIONS: True}
    chain.append(call(3, "three", **new, **{c.CALL_CONTEXT: "chatcmpl-theirs-2"}))
    write(url, attempt(1, first, *chain))
    found = load_chats(url)
    assert answers(found) == ["one", "two", "three"]
    messages: list[Any] = [chat["messages"] for chat in found.chats]
    texts = [[message["content"] for message in chat] for chat in messages]
    assert texts == [
        ["Be short.", "first", "one"],
        ["first", "one", "again", "two"],
        ["Be kind.", "first", "one", "again", "two", "again", "three"],
    ]
    assert found.left_out == {"whose prompt the provider keeps": 3}


def test_an_answer_that_the_prompt_begins_is_no_demonstration(url: str) -> None:
    begun = _said(("user", "hi"), ("assistant", "The answer is"))
    write(url, attempt(1, call(1, "4", **{c.INPUT_MESSAGES: begun}), call(2, "text")))
    found = load_chats(url)
    assert answers(found) == ["text"]
    assert found.left_out == {"whose prompt begins the answer": 1}


def test_an_export_by_reward_has_the_calls_that_are_imitated(url: str, tmp_path: Path) -> None:
    two = genai_messages.dump([{"role": "assistant", "content": text} for text in "ab"])
    calls = [
        call(1, "good"),
        call(2, "partial", **{c.CALL_OUTCOME: "cancelled"}),
        call(3, "long", **{c.FINISH_REASONS: ["length"]}),
        call(4, "", **{c.OUTPUT_MESSAGES: two, c.REQUEST_CHOICES: 2}),
        call(5, "it is <key>", **{c.KEYS_REPLACED: True}),
        call(6, "", **{c.CALL_CONTEXT: "conversation"}),
    ]
    write(url, attempt(1, *calls))
    lightspan.feedback(at(1), 1.0, store=url)
    out = tmp_path / "good.jsonl"
    done = export_store(url, "messages", out, only=Filter(min_reward=0.5))
    imitated = load_chats(url, min_reward=0.5)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["messages"] for row in rows] == [chat["messages"] for chat in imitated.chats]
    assert {f"calls {reason}": n for reason, n in imitated.left_out.items()} == done.left_out
    export_store(url, "messages", out)
    reasons = [json.loads(line)["rejection"] for line in out.read_text().splitlines()]
    assert reasons == [
        *(None, "ended with cancelled", "cut off", "with several answers", "with several answers"),
        *("with keys in them, which are not kept", "whose prompt the provider keeps"),
    ]


# --- feedback -------------------------------------------------------------------------------
def test_who_follows_a_store_sees_feedback(url: str) -> None:
    write(url, attempt(1, call(1)), attempt(2, call(2)))

    async def summaries(after: int) -> Summaries:
        async with open_store(url) as store:
            return await store.summaries(after=after)

    cursor = asyncio.run(summaries(0)).cursor
    for reward in (0.25, 0.25, 1.0):
        lightspan.feedback("chatcmpl-theirs-2", reward, store=url)
    page = asyncio.run(summaries(cursor))
    assert [(row.attempt_id, row.feedback) for row in page.rows] == [(at(2), Reward(1.0))]
    lightspan.feedback("chatcmpl-theirs-2", 1.0, store=url)  # repeated
    assert asyncio.run(summaries(page.cursor)).rows == []


def test_feedback_by_attempt_call_and_response(url: str) -> None:
    write(url, attempt(1, call(1), call(2)), attempt(2, call(3)))
    rollout_id = at(1).replace("at-", "ro-")
    assert lightspan.feedback(rollout_id, 0.5, store=url) == Rated(at(1), None)
    assert lightspan.feedback(at(1), 0.5, store=url) == Rated(at(1), None)
    assert lightspan.feedback(call_id(1, 2), True, store=url) == Rated(at(1), call_id(1, 2))
    assert lightspan.feedback("chatcmpl-theirs-3", 0.25, store=url) == Rated(at(2), call_id(2))
    assert load_chats(url, min_reward=0.9).left_out == {"scored too low": 2}
    assert len(load_chats(url, min_reward=1.0).chats) == 1
    assert len(load_chats(url, min_reward=0.25).chats) == 3


def test_the_last_to_arrive_counts_whatever_the_clocks_say(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted = make_reward_span("e" * 16, 0.1, start_ns=2**62)
    write(url, attempt(1, call(1), emitted))
    assert len(load_chats(url, min_reward=0.1).chats) == 1
    for clock, reward in ((10**18, 0.2), (10**17, 0.9), (10**16, 0.2)):
        monkeypatch.setattr("lightspan.production.feedback.now_ns", lambda now=clock: now)
        lightspan.feedback(at(1), reward, store=url)
        assert len(load_chats(url, min_reward=reward).chats) == 1
        assert load_chats(url, min_reward=reward + 0.01).chats == []


@pytest.mark.parametrize("values", [{"style": 0.1}, {"style": 0.1, "length": 1.0}])
def test_named_feedback_needs_the_number_that_counts(url: str, values: dict[str, float]) -> None:
    write(url, attempt(1, call(1)))
    lightspan.feedback(at(1), 0.9, store=url)
    with pytest.raises(RewardError, match="has no 'reward', the number that counts"):
        lightspan.feedback(at(1), values, store=url)
    lightspan.feedback(at(1), {"reward": 0.8, **values}, store=url)
    assert len(load_chats(url, min_reward=0.8).chats) == 1


def test_inspect_counts_a_call_with_two_choices_once(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(url, attempt(1, call(1, **{c.REQUEST_CHOICES: 2}), call(2)))
    assert main(["inspect", url]) == 0
    assert "calls by agent: writer 2\ncalls by outcome: ok 2;" in capsys.readouterr().out


@pytest.mark.parametrize("reward", [math.nan, 10**400, "0.5", None, {}, {"a": math.nan}])
def test_what_is_no_reward(url: str, reward: Any) -> None:
    write(url, attempt(1, call(1)))
    with pytest.raises(RewardError):
        lightspan.feedback(at(1), reward, store=url)


@pytest.mark.parametrize("wrong", ["123456", call_id(1, 7), "chatcmpl-nobody"])
def test_an_id_that_nobody_has(url: str, wrong: str) -> None:
    write(url, attempt(1, call(1)))
    with pytest.raises(NotFoundError, match="no attempt, call or response"):
        lightspan.feedback(wrong, 0.5, store=url)


@pytest.mark.parametrize("short", ["", "at-1", at(1)[-5:]])
def test_an_id_of_few_characters(url: str, short: str) -> None:
    write(url, attempt(1, call(1)))
    message = f"^{short!r} is too short: give 6 characters of the id$"
    with pytest.raises(NotFoundError, match=message):
        lightspan.feedback(short, 0.5, store=url)


def test_feedback_without_a_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="LIGHTSPAN_STORE"):
        lightspan.feedback(at(1), 0.5)
    write(url, attempt(1, call(1)))
    monkeypatch.setenv("LIGHTSPAN_STORE", url)
    lightspan.feedback(at(1), 0.5)


def test_feedback_on_the_command_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(url, attempt(1, call(1)))
    assert main(["feedback", "--store", url, call_id(1), "-0.5", "--comment", "wrong city"]) == 0
    assert capsys.readouterr().out == f"-0.5 on call {call_id(1)} of attempt {at(1)}\n"
    assert main(["feedback", "--store", url, "at-none", "1"]) == 1
    assert "at-none" in capsys.readouterr().err
    assert main(["inspect", url, at(1)[-4:]]) == 0
    assert "lightspan.feedback -0.5 'wrong city'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "read",
    [
        lambda url, out: main(["inspect", url]),
        lambda url, out: main(["export", url, "messages", "-o", out]),
        lambda url, out: main(["feedback", "at-1", "1", "--store", url]),
        lambda url, out: load_chats(url),
    ],
    ids=["inspect", "export", "feedback", "chats"],
)
def test_a_mistyped_store_is_named_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], read: Callable[[str, str], int]
) -> None:
    wrong, said = tmp_path / "prodcution.db", ""
    try:
        assert read(f"sqlite://{wrong}", str(tmp_path / "out.jsonl")) == 1
        said = capsys.readouterr().err
    except NotFoundError as error:
        said = str(error)
    assert f"there is no store {wrong}" in said
    assert list(tmp_path.iterdir()) == []


# --- chats ----------------------------------------------------------------------------------
def test_a_calls_own_feedback_goes_before_its_attempts(url: str) -> None:
    write(
        url,
        attempt(1, call(1, "good"), call(2, "bad")),
        attempt(2, call(3, "unscored"), call(4, "praised")),
        attempt(3, call(5, "low")),
    )
    lightspan.feedback(at(1), 0.9, store=url)
    lightspan.feedback(call_id(1, 2), 0.1, store=url)
    lightspan.feedback(call_id(2, 2), 1.0, store=url)
    lightspan.feedback(at(3), 0.2, store=url)
    found = load_chats(url, min_reward=0.8)
    assert answers(found) == ["good", "praised"]
    assert found.left_out == {"scored too low": 2, "unscored": 1}
    assert answers(load_chats(url)) == ["good", "bad", "unscored", "praised", "low"]


def test_a_failed_call_is_left_out_for_the_same_reason_with_and_without_a_minimum(url: str) -> None:
    failed = call(1, **{c.CALL_OUTCOME: "error"})
    write(url, attempt(1, failed, call(2, "unscored")))
    assert load_chats(url).left_out == {"ended with error": 1}
    assert load_chats(url, min_reward=0.5).left_out == {"ended with error": 1, "unscored": 1}


def test_a_reward_on_a_call_goes_before_feedback_on_its_attempt(url: str) -> None:
    on_call = {c.REWARD_CALL_ID: call_id(1)}
    emitted = make_reward_span("e" * 16, 0.9, on_call, start_ns=2 * 10**9)
    whole = make_reward_span("f" * 16, 0.1, start_ns=3 * 10**9)
    write(url, attempt(1, call(1, "own"), call(2, "attempt's"), emitted, whole))
    assert answers(load_chats(url, min_reward=0.5)) == ["own"]
    lightspan.feedback(at(1), 0.7, store=url)
    assert answers(load_chats(url, min_reward=0.8)) == ["own"]
    assert answers(load_chats(url, min_reward=0.7)) == ["own", "attempt's"]
    lightspan.feedback(call_id(1), 0.2, store=url)
    assert answers(load_chats(url, min_reward=0.5)) == ["attempt's"]


def test_what_is_no_chat_to_imitate(url: str) -> None:
    two = genai_messages.dump([{"role": "assistant", "content": text} for text in "ab"])
    write(
        url,
        attempt(
            1,
            call(1, "whole"),
            call(2, **{c.CALL_OUTCOME: "error"}),
            call(3, "cut", "writer", **{c.FINISH_REASONS: ["length"]}),
            call(4, **{c.OUTPUT_MESSAGES: two}),
            call(5, **{c.OUTPUT_MESSAGES: "not json"}),
            call(6, **{c.INPUT_MESSAGES: "[]"}),
            call(7, "another's", agent="checker"),
            call(9, **{c.OUTPUT_MESSAGES: genai_messages.dump([{"role": "assistant"}])}),
        ),
        attempt(2, call(8), capture_errors=("3 spans dropped",)),
    )
    found = load_chats(url, agents="writer")
    assert answers(found) == ["whole"]
    assert found.left_out == {
        "ended with error": 1,
        "cut off": 1,
        "with several answers": 1,
        "unreadable": 1,
        "without messages": 1,
        "without an answer": 1,
        "of other agents": 1,
        "of damaged attempts": 1,
    }


def test_chats_carry_their_tools(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    write(url, attempt(1, call(1, **{c.TOOL_DEFINITIONS: json.dumps(tools)})))
    assert load_chats(url).chats == [
        {
            "messages": [
                {"role": "user", "content": "question 1"},
                {"role": "assistant", "content": "answer"},
            ],
            "tools": tools,
        }
    ]


def test_by_service_and_time(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tasks.jsonl"
    now = time.time()
    write(
        url,
        attempt(1, call(1, "old"), started_at=now - 7200),
        attempt(2, call(2, "new"), started_at=now - 60),
        attempt(3, call(3, "other"), service="billing", started_at=now),
    )
    assert answers(load_chats(url, service="support")) == ["old", "new"]
    assert answers(load_chats(url, since="1h")) == ["new", "other"]
    assert answers(load_chats(url, until=datetime.now(UTC) - timedelta(hours=1))) == ["old"]
    assert answers(load_chats(url, since=now - 7200, until=now - 60)) == ["old"]
    there = "no attempt is of the service 'nobody'"
    with pytest.raises(DataError, match=there):
        load_chats(url, service="nobody")
    for arguments in (["inspect", url], ["export", url, "tasks", "-o", str(out)]):
        assert main([*arguments, "--service", "nobody"]) == 1
        shown = capsys.readouterr().err
        assert there in shown
        assert "there are: billing, support" in shown or "shows the services" in shown
    assert not out.exists()


@pytest.mark.parametrize("wrong", ["yesterday", math.nan, True])
def test_what_is_no_time(url: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="give a time"):
        load_chats(url, since=wrong)


def test_times() -> None:
    moment = datetime(2026, 11, 20, 9, 0, tzinfo=UTC)
    assert parse_time(moment, "since") == moment.timestamp()
    assert parse_time("2026-11-20T09:00+00:00", "since") == moment.timestamp()
    assert parse_time(12, "since") == 12.0
    assert abs(parse_time("1.5h", "since") - (time.time() - 5400)) < 5


@pytest.mark.parametrize("wrong", [math.nan, "0.5"])
def test_what_is_no_least_reward(url: str, wrong: Any) -> None:
    for use in (load_chats, tasks_from_store):
        with pytest.raises(ConfigError, match="min_reward"):
            use(url, min_reward=wrong)


# --- tasks ----------------------------------------------------------------------------------
def test_tasks_are_the_inputs_once_each(url: str, caplog: pytest.LogCaptureFixture) -> None:
    write(
        url,
        attempt(1, call(1), task={"q": "one"}),
        attempt(2, call(2), task={"q": "two"}),
        attempt(3, call(3), task={"q": "one"}),
        attempt(4, call(4), task=None),
    )
    lightspan.feedback(at(2), 0.1, store=url)
    lightspan.feedback(at(3), 0.9, store=url)
    assert tasks_from_store(url) == [{"q": "one"}, {"q": "two"}]
    command = f"lightspan inspect {public_url(url)} ID"
    assert caplog.messages == [f"lightspan: 1 of 4 attempts are no tasks: `{command}` shows why"]
    assert tasks_from_store(url, distinct=False) == [{"q": "one"}, {"q": "two"}, {"q": "one"}]
    assert tasks_from_store(url, min_reward=0.5) == [{"q": "one"}]
    assert tasks_from_store(url, max_reward=0.5) == [{"q": "two"}]
    assert len(caplog.messages) == 2  # the attempt without an input has no reward
    with pytest.raises(DataError, match="shows the services"):
        tasks_from_store(url, service="nobody")


def test_no_input_is_known(url: str) -> None:
    write(url, attempt(1, call(1), task=None), attempt(2, call(2), task=None))
    with pytest.raises(DataError, match="none of 2 attempts has a known input"):
        tasks_from_store(url)


# --- inspect and export ---------------------------------------------------------------------
def test_feedback_on_a_response_counts_for_its_attempt(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check tasks, sorting and what is shown; the app's own reward says the opposite."""
    liked = attempt(1, call(1), call(2), make_reward_span("f" * 16, 0.1), task="liked")
    disliked = attempt(2, call(3), make_reward_span("f" * 16, 0.9), task="disliked")
    whole = attempt(3, call(4), task="whole")
    write(url, liked, disliked, whole)
    lightspan.feedback("chatcmpl-theirs-1", 0.2, store=url)
    lightspan.feedback("chatcmpl-theirs-2", 0.7, store=url)
    lightspan.feedback("chatcmpl-theirs-1", 1.0, store=url)  # the last to arrive
    lightspan.feedback("chatcmpl-theirs-3", 0.0, store=url)
    lightspan.feedback(at(3), 0.6, store=url)
    lightspan.feedback("chatcmpl-theirs-4", 0.0, store=url)
    assert tasks_from_store(url, max_reward=0.5) == ["disliked"]
    assert tasks_from_store(url, min_reward=0.5) == ["liked", "whole"]
    assert main(["inspect", url, "--sort", "reward"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if " support" in f" {line}"]
    shown = [number for row in rows for number in (1, 2, 3) if at(number)[-6:] in row]
    assert shown == [2, 3, 1]
    assert main(["inspect", url, at(1)[-6:]]) == 0
    text = capsys.readouterr().out
    assert f"attempt {at(1)}: reward 1 (feedback)" in text
    assert "rejected" not in text


@pytest.mark.parametrize("part", [at(7)[-6:], at(7)[:-1] + "7"])
def test_feedback_by_a_short_id(url: str, part: str) -> None:
    write(url, attempt(7, call(1)), attempt(8, call(2)))
    assert lightspan.feedback(part, 1.0, store=url) == Rated(at(7), None)
    with pytest.raises(NotFoundError, match=r"stands for 2 attempts: at-0+8, at-0+7"):
        lightspan.feedback(at(7)[:9], 1.0, store=url)


def test_inspect_a_store_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        url,
        attempt(1, call(1), call(2, agent="critic")),
        attempt(2, call(3), service="other", capture_errors=("reason",)),
    )
    lightspan.feedback("chatcmpl-theirs-2", 0.25, store=url)
    assert main(["inspect", url, "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=StoreReport)
    assert (report.total, report.counted, report.others) == (2, 2, 0)
    assert report.services == {"support": 1, "other": 1}
    assert report.agents == {"writer": 2, "critic": 1}
    first, second = report.rows
    assert (first.id, first.reward, first.calls) == (at(1), 0.25, {"writer": 1, "critic": 1})
    assert (first.service, first.damaged, first.started_at) == ("support", False, 1000.0)
    assert (second.id, second.reward, second.damaged) == (at(2), None, True)
    assert main(["inspect", url, "--json", "--agent", "crit*", "--grep", "question 2"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=StoreReport)
    assert [row.id for row in report.rows] == [at(1)]
    assert main(["inspect", url, at(1), "--json"]) == 0
    rollout = msgspec.json.decode(capsys.readouterr().out, type=RolloutReport)
    assert (rollout.attempt_id, rollout.reward) == (at(1), 0.25)
    assert [(each.agent, each.status) for each in rollout.calls] == [
        ("writer", None),
        ("critic", None),
    ]


def test_a_readers_key_is_enough_to_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "served.db"
    write(f"sqlite:{path}", attempt(1, call(1)))
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", READER)
    with serving(lambda: SQLiteStore(path), Keys(KEYS)) as served:
        for command in (["inspect"], ["inspect", "--grep", "question 1"], ["status"]):
            assert main([*command, served.url]) == 0
        assert "calls by agent: writer 1" in capsys.readouterr().out
        assert main(["inspect", served.url, at(1)]) == 0
        assert "writer: ok" in capsys.readouterr().out
        assert main(["feedback", at(1), "1", "--store", served.url]) == 1
        assert "a reader's key may not call add_spans" in capsys.readouterr().err


def test_a_store_too_large_to_count_every_call(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(url, *(attempt(n, call(n), started_at=1000.0 + n) for n in range(1, 8)))
    monkeypatch.setattr(overview, "MAX_READ", 3)
    assert main(["inspect", url, "--limit", "2"]) == 0
    text = capsys.readouterr().out
    assert "7 attempts by service: support 7" in text
    assert "calls by agent, of the 2 shown: writer 2" in text
    assert "calls of 2 of 7 are counted, those shown below; --all counts every call" in text
    assert [line for line in text.splitlines() if line.endswith("writer")][-1].startswith(
        "00000007"
    )
    assert main(["inspect", url, "--limit", "2", "--all"]) == 0
    assert "calls by agent: writer 7" in capsys.readouterr().out


def test_inspect_a_store(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        url, attempt(1, call(1), call(2, agent="checker")), attempt(2, call(3), service="billing")
    )
    lightspan.feedback(at(1), 0.9, store=url)
    assert main(["inspect", url, "--service", "support"]) == 0
    shown = capsys.readouterr().out
    assert f"\n{at(1)[-8:]}  support" in shown
    assert at(2)[-8:] not in shown
    assert "1 attempts by service: support 1" in shown
    assert "calls by agent: checker 1, writer 1" in shown
    assert main(["inspect", url, at(1)]) == 0
    shown = capsys.readouterr().out
    assert "reward 0.9 (feedback)" in shown
    assert "calls: 2 recorded in production, which trains none" in shown
    assert main(["inspect", url, at(1), call_id(1, 2)]) == 0
    assert "question 2" in capsys.readouterr().out
    assert main(["inspect", url, "at-nobody"]) == 1
    assert "there is no attempt 'at-nobody'" in capsys.readouterr().err


def test_inspect_says_what_an_sdk_sent_again(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    again = call(1)
    again = again.replace(attributes={**again.attributes, c.CALL_REPEATS: 2})
    write(url, attempt(1, again, call(2)))
    assert main(["inspect", url, at(1)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the SDK sent it again 2 times; the usage is the answer's alone") == 1
    assert main(["inspect", url, at(1), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sorted(one.get("repeats", 0) for one in report["calls"]) == [0, 2]


def export(*arguments: str) -> list[Any]:
    assert main(["export", *arguments]) == 0
    return [msgspec.json.decode(line) for line in Path(arguments[-1]).read_bytes().splitlines()]


def test_export_from_a_store(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        url,
        attempt(1, call(1, "good"), call(2, "bad"), task={"q": 1}),
        attempt(2, call(3), task={"q": 1}, service="billing"),
    )
    lightspan.feedback(at(1), 0.9, store=url)
    lightspan.feedback(call_id(1, 2), 0.1, store=url)
    out = str(tmp_path / "out.jsonl")
    [row] = export(url, "messages", "--min-reward", "0.8", "-o", out)
    assert row["messages"][-1] == {"role": "assistant", "content": "good"}
    assert (row["mode"], row["attempt_id"], row["rollout_reward"]) == ("production", at(1), 0.9)
    assert "calls that scored too low" in capsys.readouterr().err
    assert len(export(url, "spans", "--service", "support", "-o", out)) == 4
    assert export(url, "tasks", "-o", out) == [{"q": 1}]
    assert main(["export", url, "transitions", "-o", out]) == 1
    assert "no token ids" in capsys.readouterr().err
