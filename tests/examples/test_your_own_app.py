"""docs/your-own-app.md, executed from its text: every file written, every command run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from pyarrow import parquet

PAGE = Path(__file__).parents[2] / "docs" / "your-own-app.md"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "8000"


class Follower:
    """Does what the page says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(_free_port())
        self.printed: dict[str, str] = {}
        """Command → what it printed."""
        self._served: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text.replace(PORT, self.port))

    def run(self, command: str) -> None:
        program, *rest = shlex.split(command.replace(PORT, self.port))
        module = {"python": [], "lightspan": ["-m", "lightspan.cli"]}[program]
        arguments = [sys.executable, *module, *rest]
        if "serve" in rest:
            self._serve(command, arguments)
            return
        done = subprocess.run(
            arguments, cwd=self.folder, env=_environment(), capture_output=True, text=True
        )
        self.printed[command] = done.stdout
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"

    def _serve(self, command: str, arguments: list[str]) -> None:
        log = self.folder / "serve.log"
        self._output = log.open("wb")
        self._served = subprocess.Popen(
            arguments, cwd=self.folder, env=_environment(), stdout=self._output, stderr=self._output
        )
        deadline = time.monotonic() + 90
        while "Ctrl-C stops" not in log.read_text():
            assert self._served.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.printed[command] = log.read_text()

    def stop(self) -> None:
        if self._served is not None and self._output is not None:
            self._served.send_signal(signal.SIGINT)
            assert self._served.wait(30) == 0
            self._output.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _environment() -> dict[str, str]:
    """A newcomer's: the folder is importable, and no settings of the tests are left."""
    left_out = ("PYTHONSAFEPATH", "PYTHONPATH", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    return {key: value for key, value in os.environ.items() if key not in left_out}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("newsroom"))
    installed = []
    try:
        for kind, name, text in BLOCK.findall(PAGE.read_text()):
            if name:
                follower.write(name, text)
            elif kind == "sh" and text.startswith("pip install "):
                installed.append(text)
            else:
                for line in text.splitlines():
                    follower.run(line)
        assert installed == [
            "pip install './packages/core[train]' ./packages/langgraph langchain-openai\n"
        ]
        yield follower
    finally:
        follower.stop()


def printed(followed: Follower, start: str) -> str:
    [text] = [text for command, text in followed.printed.items() if command.startswith(start)]
    return text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_can_be_followed(followed: Follower) -> None:
    assert list(followed.printed) == [
        "python prepare.py",
        "lightspan dev learning:answer train.jsonl --val val.jsonl --model start "
        "--optimize headline --frozen base --steps 8",
        "python train.py",
        "lightspan inspect runs/newsroom",
        f"lightspan serve runs/newsroom --port {PORT}",
        "python production.py",
        "lightspan export runs/newsroom messages --agent headline --min-reward 0.9 -o good.jsonl",
        "lightspan export runs/newsroom transitions -o transitions.parquet",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_it_shows_and_teaches(followed: Follower) -> None:
    report = printed(followed, "lightspan dev")
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    assert re.search(r"^  teaser +- +16 .* 0 +16 +0$", report, re.MULTILINE), report
    gain = re.search(
        r"held-out reward: (\S+) -> (\S+) \(n=32, 95% CI of the gain (\S+?)\.\.",
        printed(followed, "python train.py"),
    )
    assert gain is not None
    assert float(gain[3]) > 0.3
    line = f'lightspan.connect("http://127.0.0.1:{followed.port}")'
    assert line in printed(followed, "lightspan serve")
    headline = printed(followed, "python production.py").strip()
    assert sum(letter.isupper() for letter in headline) > len(headline) / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_it_leaves(followed: Follower) -> None:
    lines = (followed.folder / "good.jsonl").read_text().splitlines()
    good = [json.loads(line) for line in lines]
    assert good
    assert {row["agent"] for row in good} == {"headline"}
    assert min(row["rollout_reward"] for row in good) >= 0.9
    assert {row["messages"][-1]["role"] for row in good} == {"assistant"}
    kept = parquet.read_table(followed.folder / "transitions.parquet").to_pylist()
    trained = [row for row in kept if row["verdict"] == "trained"]
    assert len(trained) == 8 * 8 * 8
    assert {row["agent"] for row in trained} == {"headline"}
