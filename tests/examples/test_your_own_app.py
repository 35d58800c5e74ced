"""Follow docs/start/your-own-app.md: write every file and run every command.

Check the output on docs/guides/read-output.md, and the programs on docs/guides/resume.md,
docs/guides/task-choice.md and docs/guides/best-step.md, which go on from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from pages import (  # type: ignore[import-not-found]
    TRAIN,
    Follower,
    blocks,
    gain_low,
    printed,
)
from pyarrow import parquet

pytestmark = [pytest.mark.pages, pytest.mark.timeout(600)]

STEPS = "steps=2, validate_every=1"
"""Instead of the steps on docs/guides/best-step.md, which take minutes."""


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


def test_the_output_is_explained_as_it_is(followed: Follower) -> None:
    """Check the output on docs/guides/read-output.md, line by line, except numbers and ids."""
    rollout, call = trained_call(followed)
    texts = [text for _, _, text in blocks("guides/read-output.md") if text.startswith("$ ")]
    assert len(texts) == 5
    for text in texts:
        command, *explained = text.splitlines()
        words = command.removeprefix("$ ").split()
        if words[1] == "inspect" and not words[3].startswith("-"):
            words[3:] = [rollout, call][: len(words) - 3]
        command = " ".join(words)
        real = followed.printed.get(command) or shown(followed, command)
        missing = lines_of("\n".join(explained)) - lines_of(real)
        assert not missing, f"{command}:\n{real}"


def trained_call(followed: Follower) -> tuple[str, str]:
    """Return the ids of a rollout and of its call that has an advantage."""
    listed = shown(followed, "lightspan inspect runs/newsroom --limit 0")
    for rollout in re.findall(r"^(\S+) +train ", listed, re.MULTILINE):
        text = shown(followed, f"lightspan inspect runs/newsroom {rollout}")
        if "grpo over" in text:
            return rollout, re.findall(r"^  (call-\w+)/0 headline: trained", text, re.MULTILINE)[0]
    raise AssertionError(listed)


def shown(followed: Follower, command: str) -> str:
    done = followed.shell(command)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def lines_of(text: str) -> set[str]:
    """Return the distinct lines of a text without what differs from run to run.

    Numbers, ids, paths and units of time become `#`. Rewards of single tasks and answers of the
    model are left out.
    """
    kept = [line for line in text.splitlines() if not re.match(r"  [0-9a-f]{16} |.*\ufffd", line)]
    numbered = [re.sub(r"\S*[\d/]\S*", "#", line).replace("GiB", "MiB") for line in kept]
    numbered = [re.sub(r"# (s|min|h)\b", "#", line) for line in numbered]
    return {re.sub(r"#( #)+", "#", " ".join(line.split())) for line in numbered}


def test_the_programs_of_other_pages(followed: Follower) -> None:
    """Resume the complete run, choose tasks, replay groups, and keep the best step."""
    [resumable] = [text for _, name, text in blocks("guides/resume.md") if name]
    followed.write("resumable.py", resumable)
    said = shown(followed, "python resumable.py")
    assert said.startswith("runs/newsroom is complete: nothing is left to train\nheld-out reward: ")
    programs = {name: text for _, name, text in blocks("guides/task-choice.md") if name}
    shown_by_inspect = {"adaptive": "tasks='adaptive': ", "rare": "replay: "}
    for name, line in shown_by_inspect.items():
        followed.write(f"{name}.py", programs[f"{name}.py"].replace("steps=6", "steps=3"))
        assert "held-out reward: " in shown(followed, f"python {name}.py")
        assert f"\n{line}" in shown(followed, f"lightspan inspect runs/{name} --limit 0")
    [longer] = [text for _, name, text in blocks("guides/best-step.md") if name]
    followed.write("longer.py", longer.replace("steps=200, validate_every=10", STEPS))
    said = shown(followed, "python longer.py")
    assert re.search(r"step \d is kept: .*, the highest of 3, so by luck too", said)
    assert re.search(r"held-out reward: .*, keeping step \d$", said.strip())
