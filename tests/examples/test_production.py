"""Follow docs/tutorials/production.md: write every file and run every command.

The blocks of docs/guides/feedback.md are then run on the store of that page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pages import Follower, blocks, printed  # type: ignore[import-not-found]

pytest.importorskip("langchain_openai")

from lightspan_testing.scripted import Request, ScriptedServer

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


def answer(request: Request) -> str:
    question = request.last_text.removeprefix("Answer: ")
    return f"About {question.split()[-1]}"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    with ScriptedServer(answer) as server:
        environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "secret-key"}
        yield Follower(tmp_path_factory.mktemp("desk"), **environment).follow(
            "tutorials/production.md"
        )


def lines(followed: Follower, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (followed.folder / name).read_text().splitlines()]


def test_what_it_records_and_what_not(followed: Follower) -> None:
    shown = printed(followed, "lightspan inspect")
    assert "4 attempts by service: desk 4" in shown
    assert "calls by agent: answer 4" in shown
    for path in followed.folder.glob("production.db*"):
        assert b"ann@example.org" not in path.read_bytes()
        assert b"secret-key" not in path.read_bytes()
    questions = [line["question"] for line in lines(followed, "tasks.jsonl")]
    assert questions[1] == "I am <email>, where is my order?"


def test_what_was_good_is_imitated(followed: Follower) -> None:
    assert "2 imitated, left out: {'scored too low': 2}" in printed(followed, "python tune.py")
    said = [line["messages"][-1]["content"] for line in lines(followed, "good.jsonl")]
    assert said == ["About invoice?", "About invoice?"]
    assert (followed.folder / "tuned" / "config.json").is_file()


def test_what_went_wrong_is_asked_again(followed: Follower) -> None:
    asked = printed(followed, "LIGHTSPAN_STORE= python replay.py").splitlines()
    assert [line.partition(" -> ")[2] for line in asked] == ["About password?", "About order?"]


def test_the_guide_on_feedback(followed: Follower) -> None:
    first = lines(followed, "answers.jsonl")[0]["attempt"]
    program, rate, use = [text for _, _, text in blocks("guides/feedback.md")]
    shown = re.findall(r"at-[0-9a-f]{32}", program)[0]
    assert shown[-8:] in rate
    (followed.folder / "rate.py").write_text(program.replace(shown, first))
    for command in ("python rate.py", rate.replace(shown[-8:], first[-8:]), use):
        done = followed.shell(command)
        assert done.returncode == 0, done.stderr
    # the three good ones, now that the first is one
    assert [line["messages"][-1]["content"] for line in lines(followed, "good.jsonl")] == [
        "About password?",
        "About invoice?",
        "About invoice?",
    ]
