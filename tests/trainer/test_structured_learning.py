"""Test that apps learn whose every model call is structured: plain clients, and LangGraph.

Apps of other frameworks are tested with the examples that have their environments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]

APPS = ["plain", "langgraph", "langgraph_tool", "anthropic_plain", "langgraph_anthropic"]
IN_LONG = {"anthropic_plain"}
"""Apps that are tested in the session `ring(long)`; the others are tested with the controls."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "app",
    [
        pytest.param(app, marks=pytest.mark.long if app in IN_LONG else pytest.mark.controls)
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
