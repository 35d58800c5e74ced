"""Test scripts like those of the original tutorial that import `lightspan_agl` instead.

Configuration, classes and calls are the original's; agent and reward are our own.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("langchain")
pytest.importorskip("pyarrow")

import pyarrow
from pyarrow import parquet

from lightspan.schema.records import Mode
from lightspan.schema.routing import Route
from lightspan.training.folder import RunFolder
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.tiny import tiny_model
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.timeout(300)

SCRIPTS = Path(__file__).parents[1] / "apps" / "tutorial"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a data set in the tutorial's layout and a tiny model."""
    place = tmp_path_factory.mktemp("tutorial")
    root = place / "data"
    for folder in ("database", "test_database"):
        (root / folder / "singer").mkdir(parents=True)
        connection = sqlite3.connect(root / folder / "singer" / "singer.sqlite")
        connection.execute("create table singer (name text, age int)")
        connection.commit()
        connection.close()
    tasks = [
        {
            "question": f"How many singers are older than {age}?",
            "query": f"SELECT count(*) FROM singer WHERE age > {age}",
            "db_id": "singer",
        }
        for age in range(6)
    ]
    for name, chosen in {"train_spider": tasks[:4], "test_dev_500": tasks[4:]}.items():
        parquet.write_table(pyarrow.Table.from_pylist(chosen), root / f"{name}.parquet")
    (root / "dev.json").write_text(json.dumps(tasks[:3]))
    tiny_model(place / "model", seed=0)
    return place


def run(script: str, place: Path, *arguments: str, **environment: str) -> Any:
    """Run a script, and return its result."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "OPENAI_API_KEY")}
    env = {
        **kept,
        "VERL_SPIDER_DATA_DIR": str(place / "data"),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.pages
def test_agents_whose_name_has_write_in_it_learn(place: Path) -> None:
    """Check that `write` selects `rewrite_query` too, and that the checker shares the weights."""
    done = run("train_sql_agent.py", place, str(place / "model"), "--active-agent", "write")
    printed = done.stdout.splitlines()
    assert printed[0] == "Adapter agent match acknowledged: write"
    assert printed[1].startswith("VERL(config): without effect: ")
    [made] = (place / "runs").iterdir()
    folder = RunFolder(made)
    lines = [line for line in folder.metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollouts"] == line["scored"] == 8
        assert line["failed"] == line["damaged"] == 0
        calls = {name: line[f"agent/{name}/calls"] for name in ("write_query", "rewrite_query")}
        assert calls["write_query"] == 8
        assert calls["rewrite_query"] > 0
        assert line["calls/trained"] == sum(calls.values())
        assert line["calls/frozen"] == line["agent/check_query/calls"] == sum(calls.values())
    hashes = {
        TorchLearner({"policy": str(m)}).weight_hash("policy")
        for m in (place / "model", folder.model)
    }
    assert len(hashes) == 2
    episodes = stored_episodes(folder.store_url, mode=Mode.TRAIN)
    calls_made = [call for episode in episodes for call in episode.calls]
    assert all(call.record is not None for call in calls_made)
    checked = [call for call in calls_made if call.agent_path == "check_query"]
    versions = {v for call in checked if call.record for v, _ in call.record.versions}
    assert len(versions) == 2
    assert {str(call.span.attributes["lightspan.route"]) for call in checked} == {Route.SHARED}
    evaluations = folder.evaluations()
    assert [(e.step, len(e.rewards), e.unscored) for e in evaluations] == [(0, 2, 0), (2, 2, 0)]


def test_dev_runs(place: Path) -> None:
    def answer(request: Request) -> str:
        return "CORRECT" if request.last_text.startswith("Is it") else "SELECT 1"

    with ScriptedServer(answer) as server:
        done = run("sql_agent.py", place, OPENAI_API_BASE=server.url)
        bodies = [request.body for request in server.requests]
    assert len(bodies) == 6
    assert {body["model"] for body in bodies} == {"gpt-4.1-nano"}
    assert {body["temperature"] for body in bodies} == {0.7}
    lines = done.stdout.splitlines()
    assert lines[0].startswith("3 rollouts, 3 scored, mean reward 0.")
    assert lines[-2:] == [
        "  agent check_query: 3 calls, would be trained",
        "  agent write_query: 3 calls, would be trained",
    ]
