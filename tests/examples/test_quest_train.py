"""Test the quest app in lightspan's runners."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall
from quest_example import training
from quest_example.app import build_graph, chat_model
from quest_example.player import careful_path
from quest_example.world import World


def test_the_reward_of_an_attempt(
    monkeypatch: pytest.MonkeyPatch, few_tasks: Callable[[str], Path]
) -> None:
    task = training.load_tasks(few_tasks("quest"), "dev")[0]
    path = careful_path(World.from_json(task["world"]), task["max_calls"])
    assert path is not None
    calls = [
        ToolCall(name=action.tool, arguments=json.dumps(action.arguments), call_id="call_1")
        for _, action in path
    ]
    right = [Reply(tool_calls=[call]) for call in calls]
    with ScriptedServer([*right, *["?"] * 20]) as server:
        model = chat_model("m", base_url=server.url, api_key="k")
        graph = build_graph(model, max_calls=task["max_calls"])
        monkeypatch.setattr(training, "_graph", lambda max_tokens, max_calls: graph)
        assert [training.answer(task), training.answer(task)] == [1.0, 0.0]
        assert len(server.requests) == len(right) + 20
