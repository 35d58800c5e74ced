"""docs/environments.md, executed from its text, in two environments."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import TRAIN, blocks  # type: ignore[import-not-found]

PROGRAMS = {
    ".venv-train/bin/python": [sys.executable],
    ".venv-train/bin/lightspan": [sys.executable, "-m", "lightspan.cli"],
}


class Follower:
    """Does what the page says, in an empty folder whose `.venv-app` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.installed: list[str] = []
        self.printed: dict[str, str] = {}
        """Command → what it printed."""
        self._runners: dict[str, subprocess.Popen[bytes]] = {}
        left_out = ("PYTHON", "OPENAI_", "LIGHTSPAN_")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}

    def run(self, command: str) -> None:
        program, *rest = shlex.split(command)
        arguments = [*PROGRAMS.get(program, [program]), *rest]
        if rest[0] == "runner":  # in another terminal
            with (self.folder / "runner.log").open("wb") as log:
                self._runners[command] = subprocess.Popen(
                    arguments, cwd=self.folder, env=self._env, stdout=log, stderr=log
                )
            return
        done = subprocess.run(
            arguments, cwd=self.folder, env=self._env, capture_output=True, text=True
        )
        self.printed[command] = done.stdout
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"

    def finish(self) -> None:
        """Runners end with their training."""
        for command, process in self._runners.items():
            assert process.wait(60) == 0
            self.printed[command] = (self.folder / "runner.log").read_text()

    def stop(self) -> None:
        for process in self._runners.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    from app_environment import app_environment  # type: ignore[import-not-found]

    follower = Follower(tmp_path_factory.mktemp("headlines"))
    app_environment(follower.folder / ".venv-app", "openai")
    try:
        for kind, name, text in blocks("environments.md"):
            if name:
                (follower.folder / name).write_text(text)
                continue
            assert kind == "sh"
            for line in text.splitlines():
                if "pip install" in line:
                    follower.installed.append(line)
                else:
                    follower.run(line)
        follower.finish()
        yield follower
    finally:
        follower.stop()


def printed(followed: Follower, part: str) -> str:
    [text] = [text for command, text in followed.printed.items() if part in command]
    return text


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed == [
        "python3 -m venv .venv-app && .venv-app/bin/pip install "
        "./packages/core ./packages/cluster openai",
        f"python3 -m venv .venv-train && .venv-train/bin/pip install {TRAIN} ./packages/cluster",
    ]
    report = printed(followed, "lightspan dev")
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    gain = re.search(
        r"held-out reward: (\S+) -> (\S+) \(n=32, 95% CI of the gain (\S+?)\.\.",
        printed(followed, "python train.py"),
    )
    assert gain is not None
    assert float(gain[3]) > 0.3


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_a_runner_of_its_own(followed: Follower) -> None:
    assert "held-out reward: " in printed(followed, "python by_hand.py")
    runner = printed(followed, "lightspan runner")
    assert "joined training run-" in runner
    assert runner.endswith("ended; attempts claimed: 192, finished: 192\n")
