"""Test the router's graph with a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import pytest

from lightspan_testing.scripted import ScriptedServer
from router_example.app import build_graph, chat_model
from router_example.command import main
from router_example.messages import tasks
from router_example.prompts import parse_department, parse_product

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


@pytest.mark.parametrize(
    ("reply", "department"),
    [
        (" Payment.\n", "payment"),
        ('"return"', "return"),
        ("repairs", None),
        ("payment, delivery", None),
    ],
)
def test_departments(reply: str, department: str | None) -> None:
    assert parse_department(reply) == department


@pytest.mark.parametrize(
    ("reply", "product"),
    [
        ("yoga mat", "yoga mat"),
        (" The Yoga Mat.\n", "yoga mat"),
        ("an easel", "easel"),
        ("my yoga mat", "my yoga mat"),
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


def test_the_command_of_a_message_for_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ScriptedServer(["nobody", "umbrella"]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main(["Where is my umbrella?"]) == 0
    other = "About your umbrella: somebody reads your message and writes to you."
    assert capsys.readouterr().out == f"to: nobody in particular\n{other}\n"
