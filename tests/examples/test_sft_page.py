"""Follow docs/guides/sft.md: write every file and run every command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, printed  # type: ignore[import-not-found]

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
"""The page's program, which sends itself SIGINT at the third update."""


class Stopped(Follower):  # type: ignore[misc]
    """Follow the page, and interrupt the first `tune.py`, as the page says is possible."""

    stopped = ""
    """Output of the interrupted program."""

    def run(self, command: str) -> None:
        if command != "python tune.py":
            super().run(command)
            return
        (self.folder / "ctrl_c.py").write_text(CTRL_C)
        done = self.shell("python ctrl_c.py")
        assert done.returncode != 0
        self.stopped = done.stdout
        assert sorted(path.name for path in self.folder.glob("tuned*")) == ["tuned.unfinished"]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with ScriptedServer(lambda request: f"About {request.last_text.split()[-1]}") as server:
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        yield Stopped(tmp_path_factory.mktemp("sft"), **environment).follow("guides/sft.md")


def test_the_page_can_be_followed(followed: Follower) -> None:
    assert followed.installed == [f"pip install {TRAIN} openai"]


def test_a_file_is_imitated_and_goes_on_after_ctrl_c(followed: Follower) -> None:
    kept = followed.folder / "tuned.unfinished"
    assert f"interrupted after 3 of 40 updates, saved in {kept}: continue with" in followed.stopped
    said = printed(followed, "python tune.py --resume").splitlines()
    before, after = said[-1].removeprefix("40 updates, loss ").split(" -> ")
    assert float(after) < 0.5 < float(before)
    assert (followed.folder / "tuned" / "config.json").is_file()
    assert not kept.exists()


def test_every_turn_of_a_list_is_imitated(followed: Follower) -> None:
    assert printed(followed, "python turns.py").endswith("1 chat imitated\n")
    assert (followed.folder / "both-turns" / "config.json").is_file()


def test_what_scored_well_in_a_store_is_imitated(followed: Follower) -> None:
    said = printed(followed, "python from_store.py")
    assert said.endswith("2 imitated, left out: {'scored too low': 1}\n")
