"""Tests of programs like those of Agent Lightning's examples, with the import changed alone.

The programs are in `tests/apps/tutorial`: calls, options and classes are the original's; agents,
tools and texts are our own. `tests/examples/test_sql_tutorial.py` and the tests of APO have others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightspan.schema.records import Mode
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan_testing.stored_episodes import stored_episodes

SCRIPTS = Path(__file__).parents[1] / "apps" / "tutorial"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def run(
    script: str, *arguments: str, place: Path, url: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder with a model endpoint; return it when it has succeeded."""
    skipped = ("PYTHONSAFEPATH", "OPENAI_API_KEY")
    environment = {k: v for k, v in os.environ.items() if k not in skipped}
    if url:
        environment |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        cwd=place,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def grade(request: Request) -> str:
    """Answer questions with the prompt, and grade short answers better."""
    if request.last_text.startswith("Grade"):
        return "0.75" if "briefly" in request.last_text else "0.25"
    return request.last_text


def test_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    with ScriptedServer(grade) as server:
        done = run("apo_custom_algorithm.py", place=tmp_path, url=server.url)
        assert len(server.requests) == 6
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer key"}
    *calls, best = done.stdout.splitlines()
    assert best == "best: ('Answer briefly: {any_question}', 0.75)"
    assert len(calls) == 6


def test_debugging_with_runner_hooks_and_trainer(tmp_path: Path) -> None:
    with ScriptedServer(grade) as server:
        run("apo_debug.py", place=tmp_path, url=server.url)
        assert len(server.requests) == 2
        hooked = run("apo_debug.py", "--mode", "hook", place=tmp_path, url=server.url)
        tried = run("apo_debug.py", "--mode", "trainer", place=tmp_path, url=server.url)
        assert len(server.requests) == 8
    spans = [line for line in hooked.stdout.splitlines() if line.startswith("- ")]
    assert len(spans) == 2
    assert all(line.startswith("- chat") for line in spans)
    assert tried.stdout.startswith("2 rollouts, 2 scored, mean reward 0.250")


def calculate(request: Request) -> Any:
    if any(message["role"] == "tool" for message in request.messages):
        return "### ANSWER: 42 ###"
    return Reply(tool_calls=[ToolCall(name="add", arguments='{"a": 12, "b": 30}')])


def test_an_autogen_agent_is_debugged(tmp_path: Path) -> None:
    pytest.importorskip("autogen_ext.models.openai")
    with ScriptedServer(calculate) as server:
        done = run("calc_agent.py", place=tmp_path, url=server.url)
        assert len(server.requests) == 2
    status, spans, reward = done.stdout.split()
    assert (status, reward) == ("succeeded", "1.0")
    assert int(spans) >= 4  # the attempt, two calls, the reward


@pytest.mark.parametrize("options", [(), ("--llm-proxy",)])
def test_an_autogen_agent_is_trained(options: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("autogen_ext.models.openai")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    for name, numbers in {"train": range(4), "test": range(4, 6)}.items():
        tasks = [
            {"id": str(n), "question": f"What is {n} + {n}?", "result": str(2 * n)} for n in numbers
        ]
        table = pyarrow.Table.from_pylist(tasks)
        parquet.write_table(table, tmp_path / "data" / f"{name}.parquet")
    done = run("train_calc_agent.py", "--model", str(tiny), *options, place=tmp_path)
    assert "without effect: " in done.stdout
    assert "spin" not in done.stderr
    [made] = (tmp_path / "runs").iterdir()
    [line] = [line for line in RunFolder(made).metrics() if line["kind"] == "train"]
    assert line["rollouts"] == line["scored"] == 8
    assert line["failed"] == line["damaged"] == 0
    assert line["calls/trained"] == line["calls"] >= 8
    episodes = stored_episodes(RunFolder(made).store_url, mode=Mode.TRAIN)
    assert all(episode.reward_source == "emitted" for episode in episodes)
