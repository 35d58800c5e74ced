"""URLs of PostgreSQL stores, and their secrets; no test needs a server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import psycopg
import pytest

from lightspan.errors import ConfigError
from lightspan.schema import clock
from lightspan.stores import names_store, open_store, public_url
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.postgres.dsn import read_address
from lightspan_cluster.postgres.server import Link, Retry, Server

SECRET = "hunter2"
URL = f"postgresql://ada:{SECRET}@db.example:5433/agents?sslmode=require"


@pytest.mark.parametrize(
    ("url", "parameters", "schema"),
    [
        ("postgresql://", {}, "lightspan"),
        (
            "postgresql://ada@db.example:5433/agents?sslmode=require&schema=run%201",
            {
                "user": "ada",
                "host": "db.example",
                "port": "5433",
                "dbname": "agents",
                "sslmode": "require",
            },
            "run 1",
        ),
        (
            "postgresql://a,b:1/x",
            {"host": "a,b", "port": ",1", "dbname": "x"},
            "lightspan",
        ),
        ("postgresql://[::1]:5432/x", {"host": "::1", "port": "5432", "dbname": "x"}, "lightspan"),
        ("postgresql:///?service=agents", {"service": "agents"}, "lightspan"),
    ],
)
def test_urls(url: str, parameters: dict[str, str], schema: str) -> None:
    address = read_address(url)
    assert (address.parameters, address.schema) == (parameters, schema)
    assert address.secrets == {}
    assert read_address(address.url) == address
    assert names_store(url)


@pytest.mark.parametrize(
    ("url", "public", "secrets"),
    [
        (URL, "postgresql://ada@db.example:5433/agents?sslmode=require", {"password": SECRET}),
        (
            f"postgresql://h/x?password={SECRET}&schema=y&sslpassword=two",
            "postgresql://h/x?schema=y",
            {"password": SECRET, "sslpassword": "two"},
        ),
        (
            f"postgres://ada:{SECRET}@h/x?oauth_client_secret=two",
            "postgresql://ada@h/x",
            {"password": SECRET, "oauth_client_secret": "two"},
        ),
    ],
)
def test_what_is_secret_stays_in_this_process(
    url: str, public: str, secrets: dict[str, str]
) -> None:
    assert public_url(url) == public
    assert read_address(public).secrets == secrets
    store = open_store(url)
    assert store.url == public
    assert SECRET not in repr(store)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"postgresql://ada:{SECRET}@h:port/x", "host or its port"),
        (f"postgresql://ada:{SECRET}/more@h/x", "%40"),
        (f"postgresql://ada:{SECRET}#@h/x", "%40"),
        (f"postgresql://ada:{SECRET}@h/x?user=ada", "user is given twice"),
        (f"postgresql://ada:{SECRET}@h/x?schema=" + 64 * "x", "63 bytes"),
        (f"postgresql://ada:{SECRET}@h/x?password={SECRET}", "password is given twice"),
        (f"mysql://ada:{SECRET}@h/x", "is not known"),
    ],
)
def test_urls_of_nothing_are_refused_without_their_secrets(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_without_psycopg_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["psycopg"] = None
from lightspan.errors import ConfigError
from lightspan.stores import open_store
try:
    open_store("postgresql://h/y")
except ConfigError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "psycopg" in done.stdout
    assert "[postgres]" in done.stdout


@pytest.mark.parametrize("timeout_s", [30.0, 30, lambda: 30.0])
def test_patience_begins_with_the_first_pause(
    timeout_s: float | Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit does not start earlier, because a lost connection may be noticed late."""
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    retry = Retry(timeout_s)
    now = 1_000.0
    assert retry.pause()
    now = 1_029.0
    assert retry.pause()
    now = 1_031.0
    assert not retry.pause()


def test_an_outage_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lightspan_cluster.postgres.server._WARN_FROM_S", 0.0)
    server = Server(read_address("postgresql://127.0.0.1:9/agents"), StoreTimings())
    link, retry = Link(server), Retry(30.0)
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError) as raised:
            assert link.db
        assert link.recover(raised.value, retry)
    [record] = caplog.records
    assert record.getMessage().startswith(
        "retrying for up to 30 s: store postgresql://127.0.0.1:9/agents: the server cannot be "
        "reached: is it running, and is this its address? ("
    )
