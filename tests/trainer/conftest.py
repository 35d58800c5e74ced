"""Fixtures of the help desk, an app that nobody edits (`desk_graph`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """The app's own key; its endpoint is the test's to set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "own-key")
        patch.syspath_prepend(str(APPS))
        yield patch


@pytest.fixture(scope="module")
def desk(environment: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `desk_learning`."""
    from langchain_core.globals import set_llm_cache

    import lightspan_langgraph

    yield importlib.import_module("desk_learning")
    lightspan_langgraph.uninstrument()
    set_llm_cache(None)
