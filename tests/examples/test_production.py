"""docs/production.md, executed from its text: every file written, every command run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import blocks  # type: ignore[import-not-found]

pytest.importorskip("langchain_openai")

from lightspan_testing.scripted import Request, ScriptedServer

NO_SETTINGS = (
    "LIGHTSPAN_STORE",
    "LIGHTSPAN_SAMPLE",
    "LIGHTSPAN_REDACT",
    "OTEL_SERVICE_NAME",
    "PYTHONSAFEPATH",
    "PYTHONPATH",
)


class Follower:
    """Does what the page says, in an empty folder and one shell."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}
        """Command → what it printed."""
        self._exported: list[str] = []
        kept = {name: value for name, value in os.environ.items() if name not in NO_SETTINGS}
        programs = folder / ".bin"
        programs.mkdir()
        for name, call in {"python": "", "lightspan": "-m lightspan.cli"}.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
            program.chmod(0o700)
        self._environment = {
            **kept,
            "PATH": f"{programs}:{kept['PATH']}",
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_API_KEY": "secret-key",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, command: str) -> None:
        if command.startswith("export "):
            self._exported.append(command)
            return
        done = subprocess.run(
            ["bash", "-c", "\n".join(["set -e", *self._exported, command])],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.printed[command] = done.stdout
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def answer(request: Request) -> str:
    question = request.last_text.removeprefix("Answer: ")
    return f"About {question.split()[-1]}"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with ScriptedServer(answer) as server:
        follower = Follower(tmp_path_factory.mktemp("desk"), server.url)
        for kind, name, text in blocks("production.md"):
            if name:
                (follower.folder / name).write_text(text)
            elif kind == "sh" and not text.startswith("pip install "):
                for line in text.splitlines():
                    follower.run(line)
        yield follower


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_the_page_can_be_followed(followed: Follower) -> None:
    assert list(followed.printed) == [
        "python desk.py < questions.txt > answers.jsonl",
        "lightspan inspect sqlite:production.db --service desk --since 7d",
        "python verdicts.py",
        "python tune.py",
        "lightspan export sqlite:production.db messages --min-reward 0.8 -o good.jsonl",
        "LIGHTSPAN_STORE= python replay.py",
        "lightspan export sqlite:production.db tasks -o tasks.jsonl",
    ]


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_what_it_records_and_what_not(followed: Follower) -> None:
    shown = followed.printed["lightspan inspect sqlite:production.db --service desk --since 7d"]
    assert "4 attempts by service: desk 4" in shown
    assert "calls by agent: answer 4" in shown
    for path in followed.folder.glob("production.db*"):
        assert b"ann@example.org" not in path.read_bytes()
        assert b"secret-key" not in path.read_bytes()
    questions = [line["question"] for line in followed.lines("tasks.jsonl")]
    assert questions[1] == "I am <email>, where is my order?"


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_what_was_good_is_imitated(followed: Follower) -> None:
    printed = followed.printed["python tune.py"]
    assert "2 imitated, left out: {'scored too low': 2}" in printed
    said = [line["messages"][-1]["content"] for line in followed.lines("good.jsonl")]  # type: ignore[index]
    assert said == ["About invoice?", "About invoice?"]
    assert (followed.folder / "tuned" / "config.json").is_file()


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_what_went_wrong_is_asked_again(followed: Follower) -> None:
    printed = followed.printed["LIGHTSPAN_STORE= python replay.py"].splitlines()
    assert [line.partition(" -> ")[2] for line in printed] == ["About password?", "About order?"]
