"""Tests of the URL of a served store, and of its key, which no message contains."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from lightspan.errors import ConfigError, StoreUnreachableError
from lightspan.schema.redaction import without_keys
from lightspan.stores import names_store, open_existing, open_store, public_url
from lightspan.stores.credentials import _secrets, secrets_of
from lightspan_gateway.remote_store.url import keep_tunnel, read_address, take_key

KEY = "a-key-of-this-test-0123456789"


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LIGHTSPAN_STORE_KEY", raising=False)
    before = dict(_secrets)
    yield
    _secrets.clear()
    _secrets.update(before)


@pytest.mark.parametrize(
    ("url", "kept", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("HTTPS://Db.Example/", "https://db.example", "https://db.example"),
        ("https://[::1]:80/a/b/", "https://[::1]:80/a/b", "https://[::1]:80/a/b"),
    ],
)
def test_urls(url: str, kept: str, base: str) -> None:
    store = open_store(url)
    assert store.url == public_url(url) == open_store(store.url).url == kept
    assert read_address(url).base == base
    assert names_store(url)
    assert store.capabilities.multi_process  # before the store is opened
    assert open_existing(url).url == kept


def test_a_variable_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://db.example/x?api_key_env=MY_WORD"
    monkeypatch.setenv("MY_WORD", KEY)
    store = open_store(url)
    assert store.url == public_url(url) == url
    assert read_address(url).base == "https://db.example/x"
    assert secrets_of(url) == {"api_key": KEY}
    assert KEY not in without_keys(f"somebody quotes {KEY}")
    assert KEY not in f"{store!r} {store.url}"


def test_a_variable_that_is_not_set() -> None:
    with pytest.raises(ConfigError, match="api_key_env=GONE_WORD: that variable is not set"):
        open_store("https://db.example?api_key_env=GONE_WORD")
    open_store("https://db.example")  # the key is optional


def test_a_key_that_no_header_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "line\nend"
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", key)
    with pytest.raises(ConfigError, match=r"\$LIGHTSPAN_STORE_KEY is no key") as caught:
        open_store("https://db.example")
    assert key not in str(caught.value)


def test_a_key_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later store in this process has the key; a new key in the environment replaces it."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", KEY)
    take_key("https://db.example")
    assert "LIGHTSPAN_STORE_KEY" not in os.environ
    take_key("https://db.example")
    assert read_address("https://db.example").key() == KEY
    assert read_address("https://other.example").key() == ""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", f"{KEY}-new")
    assert read_address("https://db.example").key() == f"{KEY}-new"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://host:99999",
        "http://[::1",
        f"https://:{KEY}@host",
        f"https://{KEY}@host/",
        f"https://host?api_key={KEY}",
        f"https://host?api_key_env={KEY}",
    ],
)
def test_urls_of_nothing(url: str) -> None:
    """The error does not contain what may be a key."""
    for work in (open_store, public_url):
        with pytest.raises(ConfigError, match="store ") as caught:
            work(url)
        assert KEY not in str(caught.value)
        assert "https://HOST:PORT" in str(caught.value) or "does not belong" in str(caught.value)


async def test_a_tunnel_that_ended_is_named() -> None:
    """Check a runner process whose parent, which kept the tunnel, was killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keep_tunnel("https://db.example:5", f"http://127.0.0.1:{port}", KEY)
    with pytest.raises(StoreUnreachableError) as raised:
        await open_store("https://db.example:5").open()
    text = str(raised.value)
    assert "`lightspan runner --join` of this machine that led there has ended" in text
    assert "serve --store" not in text
