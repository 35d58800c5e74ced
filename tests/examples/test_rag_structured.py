"""Test that an app on the OpenAI Agents SDK learns whose every model call is structured."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents", reason="the OpenAI Agents SDK is in an environment of its own")

from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_learns(tmp_path: Path) -> None:
    check_it_learns("openai_agents", tmp_path)


@pytest.mark.controls
@pytest.mark.timeout(3600)
def test_permuted_rewards_teach_nothing(tmp_path: Path) -> None:
    check_control("openai_agents", tmp_path)
