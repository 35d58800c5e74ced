"""docs/sft.md, executed from its text: every file written, every command run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import TRAIN, blocks  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan_testing.scripted import ScriptedServer

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

CTRL_C = """
import os, runpy, signal
from lightspan_torch.sft import algorithm
from lightspan.progress import PlainReporter

class Pressing(PlainReporter):
    def advance(self, count=1, **values):
        super().advance(count, **values)
        if self._done == 3:
            os.kill(os.getpid(), signal.SIGINT)

algorithm.default_reporter = Pressing
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_path("tune.py")
"""
"""The page's program, at whose third update somebody presses Ctrl-C."""


class Follower:
    """Does what the page says, in an empty folder; the first `tune.py` is stopped, as the page
    says it may be."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.installed: list[str] = []
        self.printed: dict[str, str] = {}
        """Command → what it printed."""
        self.stopped = ""
        """What the program printed that was stopped."""
        left_out = ("PYTHON", "OPENAI_", "LIGHTSPAN_", "OTEL_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
        self._environment = {**kept, "OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": "key"}

    def run(self, command: str) -> None:
        program, *rest = command.split()
        if program == "pip":
            self.installed.append(command)
            return
        assert program == "python"
        if rest == ["tune.py"]:
            done = self._python("-c", CTRL_C)
            assert done.returncode != 0
            self.stopped = done.stdout
            assert sorted(path.name for path in self.folder.glob("tuned*")) == ["tuned.unfinished"]
            return
        done = self._python(*rest)
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
        self.printed[command] = done.stdout

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with ScriptedServer(lambda request: f"About {request.last_text.split()[-1]}") as server:
        follower = Follower(tmp_path_factory.mktemp("sft"), server.url)
        for kind, name, text in blocks("sft.md"):
            if name:
                (follower.folder / name).write_text(text)
                continue
            assert kind == "sh"
            for line in text.splitlines():
                follower.run(line)
        yield follower


def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed == [f"pip install {TRAIN} openai"]
    assert list(followed.printed) == [
        "python prepare.py",
        "python tune.py --resume",
        "python turns.py",
        "python ask.py",
        "python from_store.py",
    ]


def test_a_file_is_imitated_and_goes_on_after_ctrl_c(followed: Follower) -> None:
    kept = followed.folder / "tuned.unfinished"
    assert f"interrupted after 3 of 40 updates, saved in {kept}: continue with" in followed.stopped
    said = followed.printed["python tune.py --resume"].splitlines()
    before, after = said[-1].removeprefix("40 updates, loss ").split(" -> ")
    assert float(after) < 0.5 < float(before)
    assert (followed.folder / "tuned" / "config.json").is_file()
    assert not kept.exists()


def test_every_turn_of_a_list_is_imitated(followed: Follower) -> None:
    assert followed.printed["python turns.py"].endswith("1 chat imitated\n")
    assert (followed.folder / "both-turns" / "config.json").is_file()


def test_what_scored_well_in_a_store_is_imitated(followed: Follower) -> None:
    said = followed.printed["python from_store.py"]
    assert said.endswith("2 imitated, left out: {'scored too low': 1}\n")
