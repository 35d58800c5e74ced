"""Test that an AutoGen app learns whose every model call has structured output."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("autogen_agentchat", reason="AutoGen is in an environment of its own")

from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]

# AutoGen's client logs the SDK's parsed answer as a plain completion, of which pydantic warns.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_learns(tmp_path: Path) -> None:
    check_it_learns("autogen", tmp_path)


@pytest.mark.controls
@pytest.mark.timeout(3600)
def test_permuted_rewards_teach_nothing(tmp_path: Path) -> None:
    check_control("autogen", tmp_path)
