"""Follow docs/guides/fork.md: run its app, find the call that lost a rollout, continue from one."""

from __future__ import annotations

import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
from pages import Follower, blocks  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.forking.report import answer_of

pytestmark = pytest.mark.pages

PICTURE = Path(__file__).parents[2] / "docs/images/fork.png"


def breaks(answer: str) -> bool:
    return zlib.crc32(answer.encode()) % 8 == 0


def test_the_page(tmp_path: Path) -> None:
    """Follow the page, but with the rollout of the one group that was lost last.

    What is sampled depends on the batching, so that another rollout may have been lost than on the
    page. LIGHTSPAN_PICTURES writes the page's picture.
    """
    page = Follower(tmp_path)
    [(_, name, text)] = [block for block in blocks("guides/fork.md") if block[1]]
    page.write(name, text)
    sh = [text for kind, name, text in blocks("guides/fork.md") if kind == "sh" and not name]
    commands = [line for text in sh for line in text.splitlines()]
    train, inspect, search, one = commands
    for command in (train, inspect):
        page.run(command)
    shown = page.printed[inspect]
    assert shown.startswith("runs/bridge: lightning_rl on ")
    episodes = stored_episodes(tmp_path / "runs/bridge/store.db")
    solved = {episode.group_id for episode in episodes if episode.reward == 1}
    numbers = {
        episode.rollout_id: 1 + [breaks(answer_of(call)) for call in episode.calls].index(True)
        for episode in episodes
        if episode.reward == 0 and episode.group_id in solved
    }
    rollout = max(numbers, key=lambda each: numbers[each])
    search, one = (command.replace("1-1-0-5", rollout) for command in (search, one))
    page.run(search)
    page.run(one)
    found = page.printed[search]
    assert f"lost after this call:\n  call {numbers[rollout]}, of walker: " in found
    mean = r"mean reward [\d.]+ \(95% CI [\d.]+..[\d.]+, n=4\)"
    assert re.search(mean, page.printed[one])
    assert "recorded call 4, of walker: " in page.printed[one]
    if os.environ.get("LIGHTSPAN_PICTURES"):
        shutil.copy(tmp_path / "lost.png", PICTURE)
    assert (tmp_path / "lost.png").stat().st_size > 10_000
    assert 10_000 < PICTURE.stat().st_size < 100_000
