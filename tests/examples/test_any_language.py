"""docs/any-language.md, executed from its text: every file written, every command run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pages  # type: ignore[import-not-found]
import pytest
from pages import printed


class Follower(pages.Follower):  # type: ignore[misc]
    """Also runs the page's own programs, as its reader would."""

    def run(self, command: str) -> None:
        if not re.match(r"\w+=", command):
            super().run(command)
            return
        done = subprocess.run(
            ["sh", "-c", command.replace(pages.PORT, self.port)],
            cwd=self.folder,
            env={key: os.environ[key] for key in ("PATH",)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.printed[command] = done.stdout


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What needs Node.js is left out where there is none."""
    if shutil.which("curl") is None:
        pytest.skip("curl, which the page's shell program calls, is not on this machine")
    follower = Follower(tmp_path_factory.mktemp("newsroom"))
    try:
        for _, name, text in pages.blocks("any-language.md"):
            if name:
                follower.write(name, text)
                continue
            for line in text.splitlines():
                if '"node ' not in line or shutil.which("node") is not None:
                    follower.run(line)
        yield follower
    finally:
        follower.stop()


@pytest.mark.pages
@pytest.mark.timeout(900)
def test_the_shell_program_learns(followed: Any) -> None:
    gain = re.search(
        r"held-out reward: (\S+) -> (\S+) \(n=32, 95% CI of the gain (\S+?)\.\.",
        printed(followed, "python train.py"),
    )
    assert gain is not None
    assert float(gain[3]) > 0.3
    shown = printed(followed, "lightspan inspect")
    assert "calls by agent: headline 448, teaser 448" in shown


@pytest.mark.pages
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["sh newsroom.sh", "node newsroom.mjs"])
def test_the_dry_run_of_each_program(followed: Any, program: str) -> None:
    if shutil.which(program.partition(" ")[0]) is None:
        pytest.skip(f"{program.partition(' ')[0]} is not on this machine")
    report = printed(followed, f'lightspan dev --command "{program}"')
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    assert re.search(r"^  teaser +- +16 .* 0 +16 +0$", report, re.MULTILINE), report


@pytest.mark.pages
@pytest.mark.timeout(900)
def test_the_trained_model_answers_the_same_program(followed: Any) -> None:
    """In capitals; the start's share of them is a tenth."""
    [line] = [line for line in followed.printed if line.startswith("LIGHTSPAN_GATEWAY_URL=")]
    shares = []
    for _ in range(16):
        followed.run(line)
        shares.append(float(followed.printed[line]))
    assert sum(shares) / len(shares) > 0.3
