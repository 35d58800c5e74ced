"""Test the quest example's graph with a scripted OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lightspan_langgraph
from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from quest_example.app import MAX_CALLS, build_graph, chat_model, graph
from quest_example.command import main, world_of
from quest_example.demonstrations import TOOLS
from quest_example.player import careful_path
from quest_example.prompts import RULES, observation_of
from quest_example.world import CROWN, Exit, World

WORLD = World(
    rooms=("hall", "den", "crypt"),
    exits=(
        (Exit("north", 2, "red"), Exit("east", 1)),
        (Exit("west", 0),),
        (Exit("south", 0, "red"),),
    ),
    things={1: "red", 2: CROWN},
)
HALL = "You are in the hall.\nnorth: red door\neast: passage, lit\nBag:\nnothing"
SCRIPT = Path(__file__).parents[2] / "examples" / "quest" / "app.py"


def call(tool: str, **arguments: str) -> Reply:
    text = json.dumps(arguments)
    return Reply(tool_calls=[ToolCall(name=tool, arguments=text, call_id="call_1")])


def raw(tool: str, arguments: str) -> Reply:
    return Reply(tool_calls=[ToolCall(name=tool, arguments=arguments, call_id="call_1")])


RIGHT = [
    call("go", exit="east"),
    call("take"),
    call("go", exit="west"),
    call("unlock", exit="north", key="red"),
    call("go", exit="north"),
    call("take"),
]


def play(
    replies: Sequence[str | Reply], *, max_calls: int = MAX_CALLS
) -> tuple[dict[str, Any], list[str]]:
    """Run the graph; return its final state, and the prompts without the rules."""
    with ScriptedServer(replies) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        final = build_graph(model, max_calls=max_calls).invoke({"world": WORLD})
        for request in server.requests:
            assert [message["role"] for message in request.messages] == ["system", "user"]
            assert request.messages[0]["content"] == RULES
            assert request.body["tools"] == TOOLS
            assert request.body["temperature"] == 0.7
        prompts = [request.last_text for request in server.requests]
    assert len(prompts) == final["calls"]
    return final, prompts


def test_a_quest_that_is_solved() -> None:
    final, prompts = play([*RIGHT, "never asked"])
    assert final["position"].is_won
    assert final["calls"] == 6
    assert prompts == [
        f"The quest begins.\n\n{HALL}",
        "You go east.\n\nYou are in the den.\nwest: passage\nHere: red key\nBag:\nnothing",
        "You take the red key.\n\nYou are in the den.\nwest: passage, lit\nBag:\nred key",
        "You go west.\n\nYou are in the hall.\nnorth: red door, lit\neast: passage\nBag:\nred key",
        "The red key is used up, the door is open.\n\n"
        "You are in the hall.\nnorth: open door, lit\neast: passage\nBag:\nnothing",
        "You go north.\n\nYou are in the crypt.\nsouth: open door\nHere: crown\nBag:\nnothing",
    ]
    assert final["messages"][-1].text == "You take the crown."
    assert len(final["messages"]) == 1, "what came before is not kept"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("I go east.", "Call a tool."),
        (raw("go", '{"exit": '), "Call a tool."),
        (call("go", exit="up"), "There is no exit up."),
        (call("take"), "Nothing lies here."),
        (call("unlock", exit="north", key="red"), "You have no red key."),
        (call("fly"), "Error: fly is not a valid tool, try one of [go, take, unlock]."),
    ],
)
def test_what_did_nothing_is_said_and_costs_a_call(reply: str | Reply, told: str) -> None:
    final, prompts = play([reply, *RIGHT])
    assert (final["calls"], final["position"].is_won) == (7, True)
    assert prompts[1] == f"{told}\n\n{HALL}"
    assert observation_of(prompts[0]) == observation_of(prompts[1]) == HALL


def test_only_the_first_of_several_calls_counts() -> None:
    both = Reply(
        tool_calls=[
            ToolCall(name="go", arguments='{"exit": "east"}', call_id="one"),
            ToolCall(name="go", arguments='{"exit": "west"}', call_id="two"),
        ]
    )
    _, prompts = play([both, *RIGHT[1:]])
    assert prompts[1].startswith("You go east.\n\nYou are in the den.")


def test_it_ends_after_max_calls() -> None:
    final, prompts = play([call("go", exit="east"), "", "?"], max_calls=3)
    assert (final["calls"], final["position"].is_won) == (3, False)
    assert prompts[1:] == [
        f"{told}\n\nYou are in the den.\nwest: passage\nHere: red key\nBag:\nnothing"
        for told in ("You go east.", "Call a tool.")
    ]
    with pytest.raises(ValueError, match="max_calls is 0; the model has to be asked at least once"):
        build_graph(max_calls=0)


def test_the_agents_and_the_nodes() -> None:
    assert set(graph.get_graph().nodes) == {"__start__", "explore", "tools", "__end__"}
    found = lightspan_langgraph.agents(graph)
    assert (found.paths, found.complete) == (("explore",), True)


# --- the command ----------------------------------------------------------------------------
def test_the_script_plays_a_quest() -> None:
    path = careful_path(world_of(3), MAX_CALLS) or []
    with ScriptedServer([call(do.tool, **do.arguments) for _, do in path]) as server:
        found = subprocess.run(
            [sys.executable, str(SCRIPT), "--seed", "3", "--model", "named"],
            capture_output=True,
            text=True,
            env={**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "k"},
            check=False,
        )
    assert (found.stderr, found.returncode) == ("", 0)
    lines = found.stdout.splitlines()
    assert lines[-2:] == ["You take the crown.", f"solved with {len(path)} calls"]
    assert len(lines) == len(path) + 1
    assert server.requests[0].body["model"] == "named"


def test_a_quest_that_is_not_solved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with ScriptedServer(["I would rather not."] * 2) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert main(["--max-calls", "2"]) == 1
    assert capsys.readouterr() == ("Call a tool.\nCall a tool.\n", "not solved with 2 calls\n")
