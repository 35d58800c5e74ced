"""The router's real graph against a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightspan_testing.scripted import Reply, ScriptedServer
from router_example.app import build_graph, chat_model, graph
from router_example.command import main
from router_example.messages import tasks
from router_example.prompts import compose, parse_department, parse_product

MESSAGE = "The treadmill leaks from the bottom."
ROUTE = [
    ("system", "Which department: payment, delivery, return, repair?"),
    ("user", "My toy box is broken."),
    ("assistant", "repair"),
    ("user", "My shirt has not arrived yet."),
    ("assistant", "delivery"),
    ("user", "There is a mistake on my bill for the rug."),
    ("assistant", "payment"),
    ("user", "I want to send the mug back and get my money."),
    ("assistant", "return"),
]
ANSWER = [
    ("system", "Which product?"),
    ("user", "My toy box is broken."),
    ("assistant", "toy box"),
    ("user", "My shirt has not arrived yet."),
    ("assistant", "shirt"),
]


def test_two_calls_and_what_becomes_of_them() -> None:
    with ScriptedServer(["Repair.", "The treadmill"]) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        final = build_graph(model).invoke({"message": MESSAGE})
    assert final == {
        "message": MESSAGE,
        "department": "repair",
        "product": "treadmill",
        "answer": "About your treadmill: our workshop writes to you today with a date.",
    }
    asked = [[(m["role"], m["content"]) for m in request.messages] for request in server.requests]
    assert asked == [[*ROUTE, ("user", MESSAGE)], [*ANSWER, ("user", MESSAGE)]]
    assert [request.body["temperature"] for request in server.requests] == [0.7, 0.7]


def test_a_department_that_there_is_not() -> None:
    with ScriptedServer(["repair and return", "treadmill"]) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k")
        final = build_graph(model).invoke({"message": MESSAGE})
    assert final["department"] is None
    expected = "About your treadmill: somebody reads your message and writes to you."
    assert final["answer"] == expected == compose(None, "treadmill")


@pytest.mark.parametrize(
    ("reply", "department"),
    [
        ("payment", "payment"),
        (" Payment.\n", "payment"),
        ('"return"', "return"),
        ("repairs", None),
        ("payment, delivery", None),
        ("", None),
    ],
)
def test_departments(reply: str, department: str | None) -> None:
    assert parse_department(reply) == department


@pytest.mark.parametrize(
    ("reply", "product"),
    [
        ("yoga mat", "yoga mat"),
        (" The Yoga Mat.\n", "yoga mat"),
        ("a yoga mat", "yoga mat"),
        ("an easel", "easel"),
        ("anvil", "anvil"),
        ("my yoga mat", "my yoga mat"),
        ("", ""),
    ],
)
def test_products(reply: str, product: str) -> None:
    assert parse_product(reply) == product


def test_what_is_right_never_reaches_the_app() -> None:
    task = tasks("test")[0]
    with ScriptedServer(["nothing", "nothing"]) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k")
        final = build_graph(model).invoke({"message": task["message"]})
    last = [request.last_text for request in server.requests]
    assert last == [task["message"], task["message"]]
    assert (final["department"], final["product"]) == (None, "nothing")


def test_the_graph_that_is_compiled_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(["payment", "quilt"], model="mine") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("ROUTER_MODEL", "mine")
        assert graph.invoke({"message": "m"})["department"] == "payment"
    assert {request.body["model"] for request in server.requests} == {"mine"}


# --- the command ----------------------------------------------------------------------------
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(["delivery", "umbrella", "nobody", "umbrella"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert main(["Where is my umbrella?", "--model", "m"]) == 0
        assert main(["Where is my umbrella?", "--model", "m"]) == 0
    text = "About your umbrella: we ask the carrier where it is and write to you today."
    other = "About your umbrella: somebody reads your message and writes to you."
    printed = f"to: delivery\n{text}\nto: nobody in particular\n{other}\n"
    assert capsys.readouterr().out == printed


def test_the_command_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["Where is it?"])
    assert "OPENAI_API_KEY is not set; set it, and" in capsys.readouterr().err


def test_the_command_of_an_endpoint_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(lambda request: Reply(status=400, text="no such model")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert main(["Where is it?"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"{server.url} did not answer: ")


def test_the_app_needs_nothing_of_lightspan() -> None:
    program = (
        "import sys, router_example.app, router_example.command; "
        "print([m for m in sys.modules if m.split('.')[0] in ('lightspan', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_script_is_the_command() -> None:
    script = Path(__file__).parents[2] / "examples" / "router" / "app.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Route and answer a customer's message" in done.stdout
