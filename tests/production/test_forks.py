"""Test that lightspan's threads import nothing while an app may fork.

Otherwise a child could have a partially imported module.
"""

from __future__ import annotations

from pathlib import Path

from lightspan.stores.sqlite import SQLiteStore
from lightspan_testing.scripted import ScriptedServer
from packages.core.tests.production.imports import imports_of_threads
from packages.gateway.tests.remote_store.served import serving


def test_threads_that_write_import_nothing(server: ScriptedServer, tmp_path: Path) -> None:
    threads, *modules = imports_of_threads(
        server.url, LIGHTSPAN_STORE=f"sqlite:{tmp_path / 'a.db'}"
    )
    assert int(threads) >= 2  # the app's and the journal's
    assert modules == []


def test_threads_that_write_to_a_served_store_import_nothing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "a.db")) as served:
        threads, *found = imports_of_threads(server.url, LIGHTSPAN_STORE=served.url)
    assert int(threads) >= 2
    assert found == []
