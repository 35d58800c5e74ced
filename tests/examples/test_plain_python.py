"""Follow docs/guides/plain-python.md: write every file and run every command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, gain_low, printed  # type: ignore[import-not-found]

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("newsroom"))
    try:
        yield follower.follow("guides/plain-python.md")
    finally:
        follower.stop()


def test_the_named_agent_learns(followed: Follower) -> None:
    assert followed.installed == [f"pip install {TRAIN} openai"]
    assert gain_low(printed(followed, "python train.py")) > 0.3
    shown = printed(followed, "lightspan inspect")
    assert "calls by agent: headline 1088, teaser 1088" in shown
    assert "coverage of calls: frozen 1088, trained 1024, rejected:mode_not_train 64" in shown
