"""Follow docs/tutorials/any-language.md: write every file and run every command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from pages import Follower, gain_low, printed  # type: ignore[import-not-found]

pytestmark = [pytest.mark.pages, pytest.mark.timeout(900)]


class OnThisMachine(Follower):  # type: ignore[misc]
    """Follow the page, and leave out what needs Node.js where it is not installed."""

    def run(self, command: str) -> None:
        if '"node ' not in command or shutil.which("node") is not None:
            super().run(command)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    if shutil.which("curl") is None:
        pytest.skip("curl, which the page's shell program calls, is not on this machine")
    follower = OnThisMachine(tmp_path_factory.mktemp("newsroom"))
    try:
        yield follower.follow("tutorials/any-language.md")
    finally:
        follower.stop()


def test_the_shell_program_learns(followed: Follower) -> None:
    assert gain_low(printed(followed, "python train.py")) > 0.3
    shown = printed(followed, "lightspan inspect")
    assert "calls by agent: headline 448, teaser 448" in shown


@pytest.mark.parametrize("program", ["sh newsroom.sh", "node newsroom.mjs"])
def test_the_dry_run_of_each_program(followed: Follower, program: str) -> None:
    if shutil.which(program.partition(" ")[0]) is None:
        pytest.skip(f"{program.partition(' ')[0]} is not on this machine")
    report = printed(followed, f'lightspan dev --command "{program}"')
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    assert re.search(r"^  teaser +- +16 .* 0 +16 +0$", report, re.MULTILINE), report


def test_the_trained_model_answers_the_same_program(followed: Follower) -> None:
    """Check the share of capitals in the answers, which is a tenth before the training."""
    [line] = [line for line in followed.printed if line.startswith("LIGHTSPAN_GATEWAY_URL=")]
    shares = [float(followed.shell(line).stdout) for _ in range(16)]
    assert sum(shares) / len(shares) > 0.3
