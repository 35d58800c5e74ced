"""Test the math app in lightspan's runners."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

pytest.importorskip("autogen_agentchat", reason="AutoGen is in an environment of its own")
pytest.importorskip("mcp", reason="the MCP library is in the environment of AutoGen's tests")


import lightspan_autogen
from lightspan.errors import DataError
from lightspan.progress import SilentReporter
from lightspan_testing.scripted import ScriptedServer
from math_example import training
from math_example.app import calculator, chat_client, make_agent


def test_the_agents_are_those_of_the_app() -> None:
    client = chat_client("m", base_url="http://127.0.0.1:9/v1", api_key="k")
    agent = make_agent(client, calculator("http://127.0.0.1:9/mcp"))
    assert lightspan_autogen.agents(agent).paths == training.AGENTS


def test_published_data_as_tasks(tmp_path: Path) -> None:
    record = {"question": "What is 3 times 4?", "answer": "3*4=<<3*4=12>>12\n#### 12"}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    reporter = SilentReporter()
    assert training.load_data(tmp_path, "train", reporter, training.REAL_MODEL) == [
        {
            "id": "train.jsonl:1",
            "problem": "What is 3 times 4?",
            "answer": "12",
            "max_tokens": 512,
            "max_calls": 6,
        }
    ]
    with pytest.raises(DataError, match="no file of the split test"):
        training.load_data(tmp_path, "test", reporter, training.REAL_MODEL)


def test_the_reward_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = training.load_tasks(Path(), "dev")[:1]
    answers = [f"#### {task['answer']}.0", "#### 0", "I do not know."]
    with ScriptedServer(answers) as server:

        async def attempts() -> list[float]:
            client = chat_client("m", base_url=server.url, api_key="k")
            monkeypatch.setattr(training, "_client", lambda max_tokens: client)
            rewards = [await training.answer(task) for _ in answers]
            await client.close()
            return rewards

        assert asyncio.run(attempts()) == [1.0, 0.0, 0.0]
