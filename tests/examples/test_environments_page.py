"""Follow docs/guides/environments.md: run its commands in two environments."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from app_environment import app_environment  # type: ignore[import-not-found]
from pages import TRAIN, Follower, gain_low, printed  # type: ignore[import-not-found]

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("headlines"))
    app_environment(follower.folder / ".venv-app", "openai")
    follower.make_programs(".venv-train/bin")
    try:
        follower.follow("guides/environments.md")
        follower.finish()
        yield follower
    finally:
        follower.stop()


def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed == [
        "python3 -m venv .venv-app && .venv-app/bin/pip install "
        "./packages/core ./packages/cluster openai",
        f"python3 -m venv .venv-train && .venv-train/bin/pip install {TRAIN} ./packages/cluster",
    ]
    report = printed(followed, ".venv-train/bin/lightspan dev")
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    assert gain_low(printed(followed, ".venv-train/bin/python train.py")) > 0.3


def test_a_runner_of_its_own(followed: Follower) -> None:
    assert "held-out reward: " in printed(followed, ".venv-train/bin/python by_hand.py")
    runner = printed(followed, ".venv-app/bin/lightspan runner")
    assert "joined training run-" in runner
    assert runner.endswith("ended; attempts claimed: 192, finished: 192\n")
