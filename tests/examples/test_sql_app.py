"""Test the SQL example's graph with a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lightspan_testing.scripted import Request, ScriptedServer
from sql_example.app import State, build_graph, chat_model, graph
from sql_example.command import main
from sql_example.prompts import approves, parse_query, run_query
from sql_example.worlds import app_input, generate

SCHEMA = "table singers: id name age"
QUESTION = "How many singers are there?"
GOOD = "SELECT count(*) FROM singers"


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "music.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE singers (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        rows = [("Ada", 30), ("Bob", 20)]
        connection.executemany("INSERT INTO singers (name, age) VALUES (?, ?)", rows)
    return str(path)


def ask(db: str, replies: list[str], **options: int) -> tuple[dict[str, Any], list[Request]]:
    """Run the graph; return its final state and the requests to the model."""
    with ScriptedServer(replies) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        final = build_graph(model, **options).invoke({"question": QUESTION, "db": db})
    assert len(server.requests) == len(replies)
    return final, server.requests


def test_a_correct_draft_takes_two_calls(db: str) -> None:
    final, requests = ask(db, [GOOD, "CORRECT"])
    assert final == {
        "question": QUESTION,
        "db": db,
        "schema": SCHEMA,
        "query": GOOD,
        "outcome": "2",
        "feedback": "CORRECT",
        "turns": 1,
    }
    assert [request.body["messages"] for request in requests] == [
        [{"role": "user", "content": f"Write one SQLite query.\n{SCHEMA}\n{QUESTION}"}],
        [{"role": "user", "content": f"Is it CORRECT or WRONG?\n{QUESTION}\n{GOOD}\n2"}],
    ]
    assert [request.body["temperature"] for request in requests] == [0.7, 0.7]


def test_a_wrong_draft_is_rewritten(db: str) -> None:
    bad = "SELECT count(*) FROM singer"
    final, requests = ask(db, [bad, "WRONG", GOOD, "CORRECT"])
    assert (final["query"], final["outcome"], final["turns"]) == (GOOD, "2", 2)
    assert [request.last_text for request in requests[1:3]] == [
        f"Is it CORRECT or WRONG?\n{QUESTION}\n{bad}\nError: no such table: singer",
        f"Fix the SQLite query.\n{SCHEMA}\n{QUESTION}\n{bad}\nError: no such table: singer\nWRONG",
    ]


def test_the_loop_ends_after_max_turns(db: str) -> None:
    final, _ = ask(db, ["SELECT 1", "WRONG", "SELECT 2", "WRONG", "SELECT 3"], max_turns=3)
    assert (final["query"], final["outcome"], final["turns"]) == ("SELECT 3", "3", 3)
    final, _ = ask(db, ["SELECT 1"], max_turns=1)
    assert (final["query"], final["outcome"], final["turns"]) == ("SELECT 1", "1", 1)
    with pytest.raises(ValueError, match="max_turns is 0; at least one query has to be written"):
        build_graph(max_turns=0)


def test_outcomes_are_truncated(db: str) -> None:
    final, _ = ask(db, ["SELECT name, age FROM singers", "CORRECT"], truncate_length=9)
    assert final["outcome"] == "Ada, 30\nB..."


def test_a_gold_query_never_reaches_the_app(tmp_path: Path) -> None:
    task = generate(tmp_path, worlds={"test": 1})["test"][0]
    given = app_input(task, tmp_path)
    with ScriptedServer(["SELECT 1", "WRONG", "SELECT 2"]) as server:
        app = build_graph(chat_model("m", base_url=server.url, api_key="k"), max_turns=2)
        state = State(question=given["question"], schema=given["schema"], db=given["db"])
        final = app.invoke(state)
    asked = [dict(request.body) for request in server.requests]
    assert task["gold"] not in json.dumps([asked, final])
    assert task["question"] in server.requests[0].last_text


def test_the_graph_compiled_at_import_reads_the_environment(
    db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer([GOOD, "CORRECT"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
        monkeypatch.setenv("SQL_MODEL", "named")
        assert graph.invoke({"question": QUESTION, "db": db})["query"] == GOOD
    assert server.requests[0].body["model"] == "named"
    assert server.requests[0].headers["authorization"] == "Bearer from-environment"


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("  SELECT 1;\n", "SELECT 1;"),
        ("Here it is:\n```sql\nSELECT 1\n```\nDone.", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```SQLite\nSELECT 1```", "SELECT 1"),
        ("", ""),
    ],
)
def test_parse_query(reply: str, query: str) -> None:
    assert parse_query(reply) == query


@pytest.mark.parametrize(
    ("reply", "approved"),
    [
        ("The query is correct.", True),
        ("INCORRECT", False),
        ("It is not WRONG, so: CORRECT", True),
        ("CORRECT? No, WRONG: a filter is missing.", False),
        ("", False),
    ],
)
def test_approves(reply: str, approved: bool) -> None:
    assert approves(reply) is approved


@pytest.mark.parametrize(
    ("query", "outcome"),
    [
        ("SELECT name, age FROM singers ORDER BY id", "Ada, 30\nBob, 20"),
        ("SELECT max(age) FROM singers WHERE age > 90", "NULL"),
        ("SELECT name FROM singers WHERE age > 90", "no rows"),
        ("SELECT name FROM singers WHERE name = Ada", "Error: no such column: Ada"),
        ("DROP TABLE singers", "Error: not authorized"),
    ],
)
def test_run_query(db: str, query: str, outcome: str) -> None:
    assert run_query(db, query, 100) == outcome


def test_the_command_takes_a_file(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ScriptedServer([GOOD, "CORRECT"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main([QUESTION, "--db", db]) == 0
    assert capsys.readouterr() == (f"{GOOD}\n2\n", "")
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    for name, message in (
        ("absent.db", "--db: no database file at {}"),
        ("notes.txt", "--db: {} can't be read as a SQLite database"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([QUESTION, "--db", str(tmp_path / name)])
        assert message.format(tmp_path / name) in capsys.readouterr().err
