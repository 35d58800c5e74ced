"""Apps whose every call is structured learn: the clients alone, and LangGraph in three ways.

Those of the other frameworks stand with the examples that have their environments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]

APPS = ["plain", "langgraph", "langgraph_tool", "anthropic_plain", "langgraph_anthropic"]
IN_SLOW = {"anthropic_plain"}
"""The others with the controls: of LangGraph, the quickstart shows that an app learns."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "app",
    [
        pytest.param(app, marks=pytest.mark.slow if app in IN_SLOW else pytest.mark.controls)
        for app in APPS
    ],
)
def test_it_learns(app: str, tmp_path: Path) -> None:
    check_it_learns(app, tmp_path)


@pytest.mark.controls
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("app", APPS)
def test_permuted_rewards_teach_nothing(app: str, tmp_path: Path) -> None:
    check_control(app, tmp_path)
