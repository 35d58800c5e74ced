"""URLs of PostgreSQL stores and their secrets; no test needs a server."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lightspan.errors import ConfigError
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema import clock
from lightspan.stores import names_store, open_store, public_url
from lightspan.stores.credentials import secrets_of
from lightspan_cluster.postgres.dsn import read_address
from lightspan_cluster.postgres.server import Retry
from lightspan_cluster.standalone import JoinOptions

SECRET = "hunter2"
URL = f"postgresql://ada:{SECRET}@db.example:5433/agents?sslmode=require"


@pytest.mark.parametrize(
    ("url", "parameters", "schema"),
    [
        ("postgresql://", {}, "lightspan"),
        ("postgresql:///agents", {"dbname": "agents"}, "lightspan"),
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
        (
            "postgresql://a%40b@/x?host=/run/pg",
            {"user": "a@b", "dbname": "x", "host": "/run/pg"},
            "lightspan",
        ),
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
            "postgresql://ada:a%40%2Fb@h/x?schema=y",
            "postgresql://ada@h/x?schema=y",
            {"password": "a@/b"},
        ),
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
        (f"postgresql://ada:{SECRET}@h/x?schema=pg_x", "pg_"),
        (f"postgresql://ada:{SECRET}@h/x?schema=" + 64 * "x", "63 bytes"),
        (f"postgresql://h/x?password={SECRET}&schema=", "63 bytes"),
        (f"postgresql://ada:{SECRET}@h/x?power_loss=true", "power_loss"),
        (f"postgresql://ada:{SECRET}@h/x?password={SECRET}", "password is given twice"),
        (f"postgresql://ada:12?{SECRET}@h/x", "%40"),
        (f"postgresql://ada:{SECRET}/x", "host or its port"),
        (f"mysql://ada:{SECRET}@h/x", "is not known"),
        (f"mysql://ada:{SECRET}@h/x?a=b", "no option"),
    ],
)
def test_urls_of_nothing_are_refused_without_their_secrets(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert words in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_is_written_or_shown_has_no_secret() -> None:
    options = JoinOptions(store_url=URL, app="my_app:answer")
    assert SECRET not in repr(options)
    plan = RunnerPlan(
        store_url=options.store_url,
        app="my_app:answer",
        store_secrets=secrets_of(options.store_url),
    )
    assert plan.store_secrets == {"password": SECRET}
    assert SECRET not in repr(plan)
    assert public_url("sqlite:x.db") == "sqlite:x.db"


def test_without_psycopg_the_extra_is_named() -> None:
    program = """
import sys
import time
sys.modules["psycopg"] = None
from lightspan.errors import ConfigError
from lightspan.stores import open_store, public_url
assert public_url("postgresql://ada:x@h/y") == "postgresql://ada@h/y"
try:
    open_store("postgresql://h/y")
except ConfigError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "psycopg" in done.stdout
    assert "[postgres]" in done.stdout


def test_patience_begins_with_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a connection may be noticed after half a minute only."""
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    retry = Retry(30.0)
    now = 1_000.0
    assert retry.pause()
    now = 1_029.0
    assert retry.pause()
    now = 1_031.0
    assert not retry.pause()
