"""Fixtures for tests with a PostgreSQL server, which all of them share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.postgres.cluster import Cluster, programs

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Path:
    """Return the folder of PostgreSQL's programs; without them skip the tests, or fail in CI."""
    folder = programs()
    if folder is None:
        reason = "no PostgreSQL server here: apt-get install postgresql"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def cluster(postgres: Path) -> Iterator[Cluster]:
    with Cluster(postgres) as cluster:
        yield cluster


@pytest.fixture
def make_url(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Return a function that returns the URL of a new schema; drop the schemas at the end.

    With thousands of tables, recovery after a crash would take long.
    """
    schemas: list[str] = []

    def make(name: str = "x", user: str = "lightspan") -> str:
        schemas.append(f"{name}_{next(_numbers)}")
        return cluster.url(schemas[-1], user)

    yield make
    with cluster.connect() as db:
        for schema in schemas:
            db.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')


@pytest.fixture
def url(make_url: Callable[..., str]) -> str:
    return make_url()
