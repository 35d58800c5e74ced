"""Test the help desk's app with a scripted OpenAI-compatible endpoint, and its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from desk_example.app import DEPARTMENTS, PROMPT, parse_department, route, turns
from desk_example.candidates import CANDIDATES, GOOD
from desk_example.command import main
from desk_example.training import held_out_tasks, train_tasks
from lightspan_testing.scripted import Reply, ScriptedServer

MESSAGE = "The treadmill leaks from the bottom."


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    return monkeypatch


def test_one_call_and_what_becomes_of_it(key: pytest.MonkeyPatch) -> None:
    with ScriptedServer("Repair.") as server:
        key.setenv("OPENAI_BASE_URL", server.url)
        assert route(MESSAGE, model="scripted") == "repair"
    [request] = server.requests
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "You read the mail of a shop. Say who is to see to this message."),
        ("user", MESSAGE),
    ]
    assert (request.body["temperature"], request.body["model"]) == (0, "scripted")


def test_a_prompt_is_turns() -> None:
    prompt = "system: Be\nbrief.\n\nuser: a\nassistant: b: user: c\nuser: Say {message}!"
    assert turns(prompt, "it\nuser: no turn {message}") == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b: user: c"},
        {"role": "user", "content": "Say it\nuser: no turn {message}!"},
    ]
    assert turns("Whose is this? {message}", "x") == [
        {"role": "user", "content": "Whose is this? x"}
    ]
    for text in (PROMPT, GOOD, *CANDIDATES):
        [*_, last] = turns(text, "MESSAGE")
        assert last["role"] == "user"
        assert "MESSAGE" in last["content"]


@pytest.mark.parametrize(
    ("reply", "department"),
    [
        ("payment", "payment"),
        (' "Delivery".\n', "delivery"),
        ("**return**", "return"),
        ("repair shop", None),
        ("payment, delivery", None),
        ("", None),
    ],
)
def test_an_answer_is_a_department_and_nothing_else(reply: str, department: str | None) -> None:
    assert parse_department(reply) == department


def test_the_command(
    key: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Whose? {message}")
    with ScriptedServer(["delivery", "who knows", Reply(status=400, text="no")]) as server:
        key.setenv("OPENAI_BASE_URL", server.url)
        assert main([MESSAGE, "--model", "m"]) == 0
        assert capsys.readouterr().out == "to: delivery\n"
        assert main([MESSAGE, "--prompt", str(tmp_path / "prompt.txt")]) == 0
        assert capsys.readouterr().out == "to: nobody in particular\n"
        assert server.requests[1].last_text == f"Whose? {MESSAGE}"
        assert main([MESSAGE]) == 1
    assert "app.py: Error code: 400" in capsys.readouterr().err


def test_held_out_messages_share_no_words_with_the_others() -> None:
    train, held_out = train_tasks(), held_out_tasks()
    assert (len(train), len(held_out)) == (48, 80)
    assert len({task["phrasing"] for task in train}) == 48
    assert len({task["phrasing"] for task in held_out}) == 40
    assert not {task["phrasing"] for task in train} & {task["phrasing"] for task in held_out}
    for tasks in (train, held_out):
        counts = [sum(t["department"] == name for t in tasks) for name in DEPARTMENTS]
        assert counts == [len(tasks) / 4] * 4  # one answer to everything has a quarter
