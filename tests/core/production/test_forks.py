"""No thread of ours imports anything while an app may fork: the child has half a module for ever.

Where the encoder of OTLP was imported by the thread that sends, a child of a fork in those 75 ms
lost its spans ("cannot import name … from partially initialized module").
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.core.production.backend import Backend
from tests.core.production.imports import imports_of_threads
from tests.core.stores.served import serving

from lightspan.stores.sqlite import SQLiteStore
from lightspan.testing.scripted import ScriptedServer


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.close()


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_threads_that_write_and_send_import_nothing(
    server: ScriptedServer, backend: Backend, tmp_path: Path, protocol: str
) -> None:
    threads, *found = imports_of_threads(
        server.url,
        LIGHTSPAN_STORE=f"sqlite:{tmp_path / 'a.db'}",
        LIGHTSPAN_OTLP=backend.url,
        OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
    )
    assert int(threads) >= 3  # the app's, the journal's and the one that sends
    assert found == []


def test_threads_that_write_to_a_served_store_import_nothing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "a.db")) as served:
        threads, *found = imports_of_threads(server.url, LIGHTSPAN_STORE=served.url)
    assert int(threads) >= 2
    assert found == []
