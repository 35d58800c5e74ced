"""The real graph against a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sql_example.app import State, build_graph, chat_model, graph
from sql_example.command import main
from sql_example.prompts import approves, parse_query, run_query
from sql_example.worlds import app_input, generate

SCHEMA = "table singers: id name age"
QUESTION = "How many singers are there?"
GOOD = "SELECT count(*) FROM singers"


class ScriptedEndpoint(ThreadingHTTPServer):
    """Answers chat completions with `replies` in turn and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """The content of every request, which has one user message."""
        for request in self.requests:
            assert [message["role"] for message in request["messages"]] == ["user"]
        return [request["messages"][0]["content"] for request in self.requests]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedEndpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(json.loads(body))
        self.server.keys.append(self.headers["authorization"])
        reply = {"role": "assistant", "content": self.server.replies.pop(0)}
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "message": reply, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "music.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE singers (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        rows = [("Ada", 30), ("Bob", 20)]
        connection.executemany("INSERT INTO singers (name, age) VALUES (?, ?)", rows)
    return str(path)


def ask(endpoint: ScriptedEndpoint, db: str, replies: list[str], **options: int) -> dict[str, Any]:
    endpoint.replies = list(replies)
    model = chat_model("scripted", base_url=endpoint.url, api_key="k", temperature=0.7)
    final = build_graph(model, **options).invoke({"question": QUESTION, "db": db})
    assert endpoint.replies == []
    return final


def test_a_correct_draft_takes_two_calls(endpoint: ScriptedEndpoint, db: str) -> None:
    assert ask(endpoint, db, [GOOD, "CORRECT"]) == {
        "question": QUESTION,
        "db": db,
        "schema": SCHEMA,
        "query": GOOD,
        "outcome": "2",
        "feedback": "CORRECT",
        "turns": 1,
    }
    assert endpoint.prompts == [
        f"Write one SQLite query.\n{SCHEMA}\n{QUESTION}",
        f"Is it CORRECT or WRONG?\n{QUESTION}\n{GOOD}\n2",
    ]
    assert [request["temperature"] for request in endpoint.requests] == [0.7, 0.7]
    assert [request["model"] for request in endpoint.requests] == ["scripted", "scripted"]


def test_a_wrong_draft_is_rewritten(endpoint: ScriptedEndpoint, db: str) -> None:
    bad = "SELECT count(*) FROM singer"
    final = ask(endpoint, db, [bad, "WRONG", GOOD, "CORRECT"])
    assert (final["query"], final["outcome"], final["turns"]) == (GOOD, "2", 2)
    assert endpoint.prompts[1:3] == [
        f"Is it CORRECT or WRONG?\n{QUESTION}\n{bad}\nError: no such table: singer",
        f"Fix the SQLite query.\n{SCHEMA}\n{QUESTION}\n{bad}\nError: no such table: singer\nWRONG",
    ]


def test_the_loop_ends_after_max_turns(endpoint: ScriptedEndpoint, db: str) -> None:
    final = ask(endpoint, db, ["SELECT 1", "WRONG", "SELECT 2", "WRONG", "SELECT 3"], max_turns=3)
    assert (final["query"], final["outcome"], final["turns"]) == ("SELECT 3", "3", 3)
    final = ask(endpoint, db, ["SELECT 1"], max_turns=1)
    assert (final["query"], final["outcome"], final["turns"]) == ("SELECT 1", "1", 1)


def test_no_turn_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns is 0; at least one query has to be written"):
        build_graph(max_turns=0)


def test_outcomes_are_truncated(endpoint: ScriptedEndpoint, db: str) -> None:
    final = ask(endpoint, db, ["SELECT name, age FROM singers", "CORRECT"], truncate_length=9)
    assert final["outcome"] == "Ada, 30\nB..."


def test_a_gold_query_never_reaches_the_app(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    task = generate(tmp_path, worlds={"test": 1})["test"][0]
    endpoint.replies = ["SELECT 1", "WRONG", "SELECT 2"]
    model = chat_model("scripted", base_url=endpoint.url, api_key="k")
    given = app_input(task, tmp_path)
    app = build_graph(model, max_turns=2)
    final = app.invoke(State(question=given["question"], schema=given["schema"], db=given["db"]))
    assert task["gold"] not in json.dumps([endpoint.requests, final])
    assert task["question"] in endpoint.prompts[0]


def test_the_graph_compiled_at_import_reads_the_environment(
    endpoint: ScriptedEndpoint, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    monkeypatch.setenv("SQL_MODEL", "named")
    endpoint.replies = [GOOD, "CORRECT"]
    assert graph.invoke({"question": QUESTION, "db": db})["query"] == GOOD
    assert endpoint.requests[0]["model"] == "named"
    assert endpoint.keys == ["Bearer from-environment"] * 2


def test_node_names() -> None:
    assert set(graph.get_graph().nodes) == {
        "__start__",
        "write_query",
        "execute_query",
        "check_query",
        "rewrite_query",
        "__end__",
    }


def test_the_app_does_not_know_lightspan_or_torch() -> None:
    loaded = "import sql_example.app, sys; print(sorted({'lightspan', 'torch'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", loaded],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("SELECT 1", "SELECT 1"),
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
        ("CORRECT", True),
        ("The query is correct.", True),
        ("WRONG", False),
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


SCRIPT = Path(__file__).parents[2] / "examples" / "sql" / "app.py"


def _environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    return {**kept, "PYTHONPATH": str(SCRIPT.parent), **extra}


def test_the_script_answers_about_the_demo_database(endpoint: ScriptedEndpoint) -> None:
    endpoint.replies = [GOOD, "CORRECT"]
    found = subprocess.run(
        [sys.executable, str(SCRIPT), QUESTION, "--model", "named"],
        capture_output=True,
        text=True,
        env=_environment(OPENAI_BASE_URL=endpoint.url, OPENAI_API_KEY="k"),
        check=False,
    )
    assert (found.stdout, found.stderr, found.returncode) == (f"{GOOD}\n6\n", "", 0)
    assert endpoint.requests[0]["model"] == "named"


def test_the_command_answers_about_a_file(
    endpoint: ScriptedEndpoint,
    db: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint.replies = [GOOD, "CORRECT"]
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert main([QUESTION, "--db", db]) == 0
    assert capsys.readouterr() == (f"{GOOD}\n2\n", "")


def test_the_command_says_that_the_key_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([QUESTION])
    assert "OPENAI_API_KEY is not set; set it, and OPENAI_BASE_URL" in capsys.readouterr().err


def test_the_command_says_that_the_file_is_missing_or_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(SystemExit, match="2"):
        main([QUESTION, "--db", str(tmp_path / "absent.db")])
    assert f"--db: no database file at {tmp_path / 'absent.db'}" in capsys.readouterr().err
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not a database" * 100)
    with pytest.raises(SystemExit, match="2"):
        main([QUESTION, "--db", str(foreign)])
    assert f"--db: {foreign} can't be read as a SQLite database" in capsys.readouterr().err


def test_the_command_says_that_the_endpoint_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert main([QUESTION]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "http://127.0.0.1:9/v1 did not answer: Connection error.\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "OPENAI_BASE_URL  an OpenAI-compatible endpoint" in printed
