"""Fixtures of the help desk, an app without lightspan (`desk_graph`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Set the app's own key; a test sets the endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "own-key")
        patch.syspath_prepend(str(APPS))
        yield patch


@pytest.fixture(scope="module")
def desk(environment: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module `desk_learning`."""
    from langchain_core.globals import set_llm_cache

    import lightspan_langgraph

    yield importlib.import_module("desk_learning")
    lightspan_langgraph.uninstrument()
    set_llm_cache(None)
