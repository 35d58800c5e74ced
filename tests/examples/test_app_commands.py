"""Test the command `app.py` of every example: its output, and its message for a bad endpoint.

The app must import neither lightspan nor torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = {
    "charts": ["What is A plus C?"],
    "desk": ["?"],
    "math": ["?"],
    "quest": [],
    "rag": ["?"],
    "router": ["?"],
    "sql": ["?"],
}


@pytest.fixture(params=ARGUMENTS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(f"{request.param}_example.command")
    return str(request.param)


@pytest.fixture
def command(name: str) -> Any:
    return import_module(f"{name}_example.command")


def test_a_key_is_missing(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        command.main(ARGUMENTS[name])
    assert "OPENAI_API_KEY is not set" in capsys.readouterr().err


def test_no_endpoint_answers(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert command.main(ARGUMENTS[name]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()) == ("", [printed.err.strip()])
    assert printed.err.endswith(": Connection error.\n")


def test_the_app_knows_neither_lightspan_nor_torch(name: str) -> None:
    code = (
        f"import {name}_example.command, sys; "
        "print(sorted({'lightspan', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def calls(tool: str, **arguments: str) -> Reply:
    return Reply(tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments), call_id="one")])


@pytest.mark.parametrize(
    ("example", "question", "replies", "printed"),
    [
        ("desk", "Where is my umbrella?", ["delivery"], "to: delivery\n"),
        (
            "math",
            "Ada has 12 plums and buys 5. How many?",
            [calls("calculator", expression="12+5"), "#### 17"],
            "#### 17\n",
        ),
        (
            "rag",
            "Where was Ada Brook born?",
            [calls("search", query="Ada Brook born"), "Answer: Port Alder"],
            "Port Alder\n",
        ),
        (
            "router",
            "Where is my umbrella?",
            ["delivery", "umbrella"],
            "to: delivery\n"
            "About your umbrella: we ask the carrier where it is and write to you today.\n",
        ),
        (
            "sql",
            "How many singers are there?",
            ["SELECT count(*) FROM singers", "CORRECT"],
            "SELECT count(*) FROM singers\n6\n",
        ),
    ],
)
def test_the_script(example: str, question: str, replies: list[Any], printed: str) -> None:
    pytest.importorskip(f"{example}_example.command")
    command = [sys.executable, str(EXAMPLES / example / "app.py"), question, "--model", "named"]
    with ScriptedServer(replies) as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "own"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == (printed, "", 0)
    assert len(server.requests) == len(replies)
    for request in server.requests:
        assert request.body["model"] == "named"
        assert request.headers["authorization"] == "Bearer own"
