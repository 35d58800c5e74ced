"""Test the removal of keys from recorded texts."""

from __future__ import annotations

import json
import os

import pytest

from lightspan.schema import content, redaction, semconv as c
from lightspan.schema.redaction import (
    MAX_TEXT_LENGTH,
    add_client_key,
    add_key_variable,
    bounded_text,
    values_without_keys,
    without_keys,
)
from lightspan.schema.spans import SpanEvent
from lightspan_testing.strategies import make_span


def test_a_text_that_fits_is_kept_as_it_is() -> None:
    text = "é\n\tx🇪🇺" + "x" * (MAX_TEXT_LENGTH - 6)
    assert len(text) == MAX_TEXT_LENGTH
    assert bounded_text(text) == text


def test_both_ends_of_a_longer_text_are_kept() -> None:
    assert bounded_text("0123456789", 4) == "01 […6 characters left out…] 89"


@pytest.mark.parametrize("size", [10_000, 2_097_152])
def test_what_is_left_out_is_counted(size: int) -> None:
    left_out = size - MAX_TEXT_LENGTH
    expected = f"{'a' * 4096} […{left_out} characters left out…] {'a' * 4096}"
    assert bounded_text("a" * size) == expected


@pytest.mark.parametrize("padding", [4_090, 1_048_570])
def test_a_key_at_a_cut_is_not_kept_by_half(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-of-mine")
    text = "x" * padding + "secret-of-mine" + "y" * 3_000_000
    assert "secret" not in bounded_text(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer <key>"),
        ("the bearer of news", "the bearer of news"),
        (f"a desk-{'a' * 16}, what-1.{'a' * 32}", f"a desk-{'a' * 16}, what-1.{'a' * 32}"),
        (f"wrong key {'sk'}-ant-api03-aaaaaaaaaaaaaaaa.", "wrong key <key>."),
        ("a risk-averse-agent-that-explores", "a risk-averse-agent-that-explores"),
        (f"at-18ea6d239a7618e7.{'aB3_-678' * 4}", "<key>"),
        ("\udc80", "\ufffd"),
    ],
)
def test_what_is_replaced(text: str, expected: str) -> None:
    assert bounded_text(text) == expected


def test_what_is_taken_out_of_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that keys are replaced in JSON and in nested JSON, and common words are kept."""
    monkeypatch.setenv("DB_PASSWORD", "postgres-it-is")
    key = 'BEGIN "KEY"\nabcd1234\\'
    monkeypatch.setenv("APP_PRIVATE_KEY", key)
    once = json.dumps({"key": key, "db": "postgres-it-is"})
    values = {"text": key, "json": once, "twice": json.dumps(once), "list": [key, 1], "n": 7}
    assert values_without_keys(values) == {
        "text": "<key>",
        "json": '{"key": "<key>", "db": "postgres-it-is"}',
        "twice": json.dumps('{"key": "<key>", "db": "postgres-it-is"}'),
        "list": ["<key>", 1],
        "n": 7,
    }
    words = ("learn-ensemble-v2-classifier", "fading-circle-delay2", "2024-report-of-the-year.html")
    values = {"said": "Bearer authentication, " + " ".join(f"sk-{word}" for word in words)}
    assert values_without_keys(values) == values


NO_KEYS = {
    "SSH_KEY": "~/.ssh/id_ed25519",
    "SORT_KEY": "customer_identifier_of_old",
    "CACHE_KEY": "singer.name, singer.age 2",
    "KEYBOARD": "qwertz-layout-0123456789",
    "OLDPWD": "/srv/me-0123456789",
    "MAX_TOKENS": "0123456789",
    "C_KEY": "none",
}
KEYS = {
    "A_TOKEN": "long-value-0123456789",
    "B_SECRET": "long-value-0123456789-and-more",
    "PGPASSWORD": "pg-password-1-and-more",
    "OPENAI_APIKEY": "an-apikey-0123456789",
    "OPENAI_API_KEYS": "several-keys-0123456789",
    "GITHUB_PAT": "pat-0123456789abcdef",
    "DB_PASS": "no-digit-but-a-password",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPx",
}


def test_which_variables_hold_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check variables whose names suggest a key, but whose values are a path or a column."""
    for name, value in {**NO_KEYS, **KEYS}.items():
        monkeypatch.setenv(name, value)
    address = "postgres://me:a-password-0123456789@db.test/app"
    monkeypatch.setenv("DATABASE_URL", address)
    values = values_without_keys({**NO_KEYS, **KEYS, "url": address})
    assert values == {
        **NO_KEYS,
        **dict.fromkeys(KEYS, "<key>"),
        "url": "postgres://me:<key>@db.test/app",
    }


def test_a_key_is_known_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check keys of the environment, of added variables and of a client, until they are removed."""
    first, second, third = (f"{name}-key-0123456789" for name in ("first", "second", "third"))
    values = {"said": f"{first} {second} {third}"}

    def left() -> str:
        return str(values_without_keys(values)["said"])

    assert left() == f"{first} {second} {third}"
    monkeypatch.setenv("APP_TOKEN", first)
    assert left() == f"<key> {second} {third}"
    monkeypatch.setenv("APP_TOKEN", second)
    assert left() == f"{first} <key> {third}"
    monkeypatch.setenv("APP_WORD", first)
    assert left() == f"{first} <key> {third}"
    monkeypatch.setattr(redaction, "_key_variables", set())
    add_key_variable("APP_WORD")
    assert left() == f"<key> <key> {third}"
    monkeypatch.setattr(redaction, "_client_keys", {})
    add_client_key(third)
    assert left() == "<key> <key> <key>"
    monkeypatch.delenv("APP_TOKEN")
    assert left() == f"<key> {second} <key>"
    monkeypatch.setattr(os, "environ", {"APP_TOKEN": second})  # as some tests of apps do
    assert left() == f"{first} <key> <key>"


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        ("sk-", "proj-" + "aB3_" * 4 + "x9" * 12),
        ("sk-", "ant-api03-" + "q7" * 20),
        ("gsk_", "A1" * 20),
        ("AIza", "b2_-Z" * 7),
        ("ghp_", "c3" * 18),
        ("github_pat_", "d4" * 20),
        ("hf_", "e5" * 17),
        ("AKIA", "F6" * 8),
        ("xox", "b-1234567890-abcdefghij"),
    ],
)
def test_keys_of_vendors(start: str, rest: str) -> None:
    assert values_without_keys({"said": f"It is {start}{rest}."}) == {"said": "It is <key>."}
    assert without_keys(f"key={start}{rest}") == "key=<key>"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start", ["sk-", "xoxb-"])
def test_a_text_of_nothing_but_beginnings_of_keys(start: str) -> None:
    """Check that searching a text of many beginnings of keys does not take minutes."""
    values = {"said": start * 100_000}
    assert values_without_keys(values) == values


def test_the_keys_of_model_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only a limited number of the latest keys of clients is known."""
    monkeypatch.setattr(redaction, "_client_keys", {})
    keys = [f"clients-key-{number:08}" for number in range(1_100)]
    for key in (*keys, "unused", "lightspan-placeholder", None, 7):
        add_client_key(key)
    assert without_keys(f"Incorrect API key provided: {keys[-1]}; unused") == (
        "Incorrect API key provided: <key>; unused"
    )
    assert values_without_keys({"a": keys[-1], "b": keys[0], "c": "lightspan-placeholder"}) == {
        "a": "<key>",
        "b": keys[0],
        "c": "lightspan-placeholder",
    }


def test_keys_anywhere_in_a_span_are_replaced() -> None:
    """Check descriptions of tools, annotations, attributes of others and events."""
    key = "sk-proj-" + "A1b2C3d4" * 5
    attributes = {
        c.TOOL_DEFINITIONS: json.dumps([{"function": {"name": "f", "description": key}}]),
        f"{c.ANNOTATION}note": f"use {key}",
        c.MESSAGE_BODY: key,
        "retrieval.documents.0.document.content": f"doc {key}",
        "mine": ["a", key],
        "count": 7,
    }
    span = make_span("1", attributes=attributes, events=[SpanEvent("e", 1, {"x": key, "n": 1})])
    found = content.without_keys(span)
    assert found.attributes == {
        c.TOOL_DEFINITIONS: '[{"function": {"name": "f", "description": "<key>"}}]',
        f"{c.ANNOTATION}note": "use <key>",
        c.MESSAGE_BODY: "<key>",
        "retrieval.documents.0.document.content": "doc <key>",
        "mine": ["a", "<key>"],
        "count": 7,
        c.KEYS_REPLACED: True,
    }
    assert found.events == [SpanEvent("e", 1, {"x": "<key>", "n": 1})]
    plain = make_span("1", attributes={"mine": "a"}, events=[SpanEvent("e", 1, {"x": "b"})])
    assert content.without_keys(plain) is plain
