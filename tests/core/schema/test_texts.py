"""Texts of apps as they are kept."""

from __future__ import annotations

import json

import pytest

from lightspan.schema.texts import (
    LONGEST_TEXT,
    is_secret,
    kept_text,
    values_without_keys,
    without_keys,
)


def test_a_text_that_fits_is_kept_as_it_is() -> None:
    text = "é\n\tx🇪🇺" + "x" * (LONGEST_TEXT - 6)
    assert len(text) == LONGEST_TEXT
    assert kept_text(text) == text


def test_both_ends_of_a_longer_text_are_kept() -> None:
    assert kept_text("0123456789", 4) == "01 […6 characters left out…] 89"


@pytest.mark.parametrize("size", [10_000, 1_048_576, 2_097_152, 3_000_000])
def test_what_is_left_out_is_counted(size: int) -> None:
    left_out = size - LONGEST_TEXT
    expected = f"{'a' * 4096} […{left_out} characters left out…] {'a' * 4096}"
    assert kept_text("a" * size) == expected


@pytest.mark.parametrize("padding", [4_090, 1_048_570])
def test_a_key_at_a_cut_is_not_kept_by_half(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret-of-mine")
    text = "x" * padding + "secret-of-mine" + "y" * 3_000_000
    assert "secret" not in kept_text(text)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Authorization: Bearer abcdefgh", "Authorization: Bearer <key>"),
        ("the bearer of news", "the bearer of news"),
        ("a forbearer abcdefgh", "a forbearer abcdefgh"),
        (f"a desk-{'a' * 16}, what-1.{'a' * 32}", f"a desk-{'a' * 16}, what-1.{'a' * 32}"),
        (f"wrong key {'sk'}-ant-api03-aaaaaaaaaaaaaaaa.", "wrong key <key>."),
        ("a risk-averse-agent-that-explores", "a risk-averse-agent-that-explores"),
        (f"at-18ea6d239a7618e7.{'aB3_-678' * 4}", "<key>"),
        ("at-18ea6d239a7618e7", "at-18ea6d239a7618e7"),
        ("\udc80", "\ufffd"),
    ],
)
def test_what_is_replaced(text: str, kept: str) -> None:
    assert kept_text(text) == kept


def test_values_of_variables_that_hold_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "long-value")
    monkeypatch.setenv("B_SECRET", "long-value-and-more")
    monkeypatch.setenv("C_KEY", "none")
    monkeypatch.setenv("KEYBOARD", "qwertz-layout")
    text = "long-value, long-value-and-more, none, qwertz-layout"
    assert without_keys(text) == "<key>, <key>, none, qwertz-layout"
    assert not is_secret("KEYBOARD")


def test_what_is_taken_out_of_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys as they stand in JSON, and in JSON inside JSON; no word that is a password too."""
    monkeypatch.setenv("DB_PASSWORD", "postgres-it-is")
    monkeypatch.setenv("APP_PRIVATE_KEY", 'BEGIN "KEY"\nabcdefgh\\')
    key = 'BEGIN "KEY"\nabcdefgh\\'
    once = json.dumps({"key": key, "db": "postgres-it-is"})
    values = {"text": key, "json": once, "twice": json.dumps(once), "list": [key, 1], "n": 7}
    assert values_without_keys(values) == {
        "text": "<key>",
        "json": '{"key": "<key>", "db": "postgres-it-is"}',
        "twice": json.dumps('{"key": "<key>", "db": "postgres-it-is"}'),
        "list": ["<key>", 1],
        "n": 7,
    }
    said = {"said": "Bearer authentication, " + "sk-learn" + "-compatible-models"}
    assert values_without_keys(said) == said
