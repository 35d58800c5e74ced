"""Fixtures of the tests of prompt searches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightspan_testing.scripted import ScriptedServer
from packages.prompts.tests.made_up import reflects


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflects) as running:
        yield running
