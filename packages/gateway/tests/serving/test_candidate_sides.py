"""Tests of which side an attempt is on, and of what makes requests one attempt or conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightspan.schema.routing import Route, Routing, Target
from lightspan.training.manifest import ServedPolicy, ServedRun
from lightspan_gateway.serving.candidate.sides import (
    Mark,
    Side,
    attempt_key,
    conversation_keys,
    earlier_keys,
    read_mark,
    side_of,
    user_key,
    weights_digest,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_the_side_is_a_function_of_salt_and_key() -> None:
    """These literals hold for all versions: servers of two versions must agree after a restart."""
    sides = [side_of(f"attempt at-{n}", "salt", 0.25) for n in range(16)]
    # SHA-256 of "salt", a zero byte and the key; for at-0 it begins with 8e, above a quarter of 256
    assert [n for n, side in enumerate(sides) if side is Side.CANDIDATE] == [9, 15]
    others = [side_of(f"attempt at-{n}", "other salt", 0.25) for n in range(5)]
    assert [n for n, side in enumerate(others) if side is Side.CANDIDATE] == [2, 4]


def test_shares_are_exact_and_grow_without_moving_an_attempt_back() -> None:
    keys = [f"attempt {n}" for n in range(20_000)]
    small, large = (
        {key for key in keys if side_of(key, "salt", share) is Side.CANDIDATE}
        for share in (0.1, 0.3)
    )
    assert small < large
    assert len(small) == pytest.approx(2_000, abs=4 * 42.5)  # 4 standard deviations
    assert len(large) == pytest.approx(6_000, abs=4 * 65)
    assert not {key for key in keys if side_of(key, "salt", 0.0) is Side.CANDIDATE}
    assert all(side_of(key, "salt", 1.0) is Side.CANDIDATE for key in keys)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"x-lightspan-attempt": "at-1"}, "attempt at-1"),
        (
            {"x-lightspan-attempt": "at-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
            "attempt at-1",
        ),
        (
            {"x-lightspan-attempt": "", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
            f"trace {TRACE}",
        ),
        ({"traceparent": "nonsense"}, None),
        ({"traceparent": f"00-{'0' * 32}-{'0' * 16}-00"}, None),
        ({}, None),
    ],
)
def test_what_identifies_an_attempt(headers: dict[str, str], key: str | None) -> None:
    assert attempt_key(headers) == key


def test_what_identifies_a_user() -> None:
    assert user_key({"user": "u1"}) == user_key({"metadata": {"user_id": "u1"}}) == "user u1"
    assert user_key({"safety_identifier": "s", "user": "u1"}) == "user s"
    assert user_key({"user": 3, "metadata": []}) is None


# --- conversations --------------------------------------------------------------------------
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"city": "Rome"}'},
}


def chat(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def test_a_chat_continues_the_answered_one() -> None:
    asked = chat(("system", "It is Monday."), ("user", "Hello"))
    [key] = conversation_keys(asked, [{"role": "assistant", "content": "Hi! "}])
    later = chat(
        ("system", "It is Tuesday."), ("user", "Hello"), ("assistant", "Hi!"), ("user", "And?")
    )
    assert earlier_keys(later) == [key]
    assert not earlier_keys(asked)
    other = chat(("user", "Hello"), ("assistant", "Good day."), ("user", "And?"))
    assert key not in earlier_keys(other)


def test_the_longest_conversation_comes_first() -> None:
    first = chat(("user", "a"))
    second = chat(("user", "a"), ("assistant", "b"), ("user", "c"))
    keys = [
        *conversation_keys(second, [{"role": "assistant", "content": "d"}]),
        *conversation_keys(first, [{"role": "assistant", "content": "b"}]),
    ]
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    third = chat(*turns)
    assert earlier_keys(third) == keys


def test_all_apis_and_tool_calls_have_the_same_keys() -> None:
    asked = chat(("user", "Weather?"))
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    [key] = conversation_keys(asked, [answer])
    arguments = {"city": "Rome"}
    chats = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                **answer,
                "tool_calls": [
                    {
                        **CALL,
                        "function": {
                            "name": "look_up",
                            "arguments": json.dumps(arguments, indent=1),
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
    }
    anthropic = {
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "call_1", "name": "look_up", "input": arguments}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}],
            },
        ],
    }
    responses = {
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "look_up",
                "arguments": json.dumps(arguments),
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        ]
    }
    assert [earlier_keys(body) for body in (chats, anthropic, responses)] == [[key]] * 3


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 3},
        {"messages": [3]},
        {"input": {}},
        {"messages": [{"role": []}]},
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]},
    ],
)
def test_malformed_requests_have_no_earlier_answer(body: dict[str, Any]) -> None:
    assert all(isinstance(key, bytes) for key in earlier_keys(body))


# --- names of weights -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("sql@0123456789ab", Mark("sql", "0123456789ab", None, "")),
        (
            "a@b@0123456789ab+candidate.12345678",
            Mark("a@b", "0123456789ab", Side.CANDIDATE, "12345678"),
        ),
        (
            "sql@0123456789ab+current.12345678",
            Mark("sql", "0123456789ab", Side.CURRENT, "12345678"),
        ),
    ],
)
def test_a_model_name_shows_weights_side_and_comparison(text: str, mark: Mark) -> None:
    assert read_mark(text) == mark
    assert str(mark) == text


@pytest.mark.parametrize("text", ["gpt-4o", "sql@0123", "sql@0123456789ab+other.12345678", None, 3])
def test_other_model_names_are_none_of_a_comparison(text: object) -> None:
    assert read_mark(text) is None


def test_the_digest_changes_with_weights_template_and_routing(tmp_path: Path) -> None:
    def served(policy: str = "sql") -> ServedRun:
        routing = Routing(default=Target(route=Route.POLICY, policy=policy))
        policies = {"sql": ServedPolicy(folder="model", model="base")}
        return ServedRun(policies=policies, base_model="base", routing=routing)

    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "chat_template.jinja").write_text("template")
    before = weights_digest(served(), tmp_path)
    assert len(before) == 12
    (tmp_path / "candidate.db").write_bytes(b"a file that does not count")
    assert weights_digest(served(), tmp_path) == before
    digests = {before, weights_digest(served("base"), tmp_path)}
    (model / "chat_template.jinja").write_text("another")
    digests.add(weights_digest(served(), tmp_path))
    (model / "model.safetensors").write_bytes(b"others")
    digests.add(weights_digest(served(), tmp_path))
    assert len(digests) == 4
