"""Follow docs/start/your-own-app.md: write every file and run every command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from pages import TRAIN, Follower, gain_low, printed  # type: ignore[import-not-found]
from pyarrow import parquet

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("newsroom"))
    try:
        yield follower.follow("start/your-own-app.md")
    finally:
        follower.stop()


def test_what_it_shows_and_teaches(followed: Follower) -> None:
    [installed] = followed.installed
    assert installed == f"pip install {TRAIN} ./packages/langgraph langchain-openai"
    report = printed(followed, "lightspan dev")
    assert re.search(r"^  headline +policy +16 .* 16 +0 +0$", report, re.MULTILINE), report
    assert re.search(r"^  teaser +- +16 .* 0 +16 +0$", report, re.MULTILINE), report
    assert gain_low(printed(followed, "python train.py")) > 0.3
    line = f'lightspan.connect("http://127.0.0.1:{followed.port}")'
    assert line in printed(followed, "lightspan serve")
    # Sampled answers: of a single one too many letters may be none by chance. A special token, such
    # as <tool_call>, is one token of many letters.
    answers = []
    for _ in range(5):
        followed.run("python production.py")
        answers.append(re.sub(r"<\w+>", "?", printed(followed, "python production.py").strip()))
    headlines = "".join(answers)
    assert sum(letter.isupper() for letter in headlines) > len(headlines) / 2


def test_what_it_leaves(followed: Follower) -> None:
    lines = (followed.folder / "good.jsonl").read_text().splitlines()
    good = [json.loads(line) for line in lines]
    assert good
    assert {row["agent"] for row in good} == {"headline"}
    assert min(row["rollout_reward"] for row in good) >= 0.9
    assert {row["messages"][-1]["role"] for row in good} == {"assistant"}
    kept = parquet.read_table(followed.folder / "transitions.parquet").to_pylist()
    trained = [row for row in kept if row["verdict"] == "trained"]
    assert len(trained) == 10 * 8 * 8
    assert {row["agent"] for row in trained} == {"headline"}
