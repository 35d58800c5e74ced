"""Run the programs on docs/explain/threads.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import Follower, blocks  # type: ignore[import-not-found]

pytest.importorskip("torch")

from lightspan_testing.tiny import tiny_model

pytestmark = pytest.mark.pages

DRY_RUN = "lightspan dev child:answer tasks.jsonl --model start --optimize writer --count 1 --json"
CONTEXT = """
import contextvars
import workers

named = contextvars.ContextVar("named")
named.set("of the attempt")
print(workers.submit(named.get))
"""


@pytest.fixture
def page(tmp_path: Path) -> Follower:
    follower = Follower(tmp_path)
    for _, name, text in blocks("explain/threads.md"):
        if name:
            follower.write(name, text)
    return follower


def test_a_worker_runs_in_the_context_of_its_work(page: Follower) -> None:
    page.write("context.py", CONTEXT)
    assert page.shell("python context.py").stdout == "of the attempt\n"


def test_a_child_process_calls_the_trained_model(page: Follower) -> None:
    tiny_model(page.folder / "start", seed=0)
    page.write("tasks.jsonl", json.dumps({"question": "Which?", "gold": "This."}) + "\n")
    done = page.shell(DRY_RUN)
    [agent] = json.loads(done.stdout)["agents"]
    assert (agent["path"], agent["calls"], agent["trained"]) == ("writer", 4, 4)
