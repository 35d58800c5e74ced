"""Test that the examples' apps replay to the byte: real frameworks, tools, processes and a file.

LangGraph (quest, sql), AutoGen with an MCP server (math), OpenAI Agents SDK (rag). The model's
answers are random, so that the paths through the apps are, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, LocalRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan_testing.adapter_harness import CAPABILITIES
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer
from lightspan_testing.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GIVES_UP = 0.2
"""Probability of an answer without a tool."""


def tool(name: str, **arguments: str) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def quest(rng: random.Random) -> str:
    doors = ["north", "east", "south", "west"]
    return rng.choice([*(tool("go", exit=door) for door in doors), tool("take")])


def sql(rng: random.Random) -> str:
    return rng.choice(["YES", "NO", "SELECT 1", "SELECT * FROM nothing", "SELECT 'a'"])


def math(rng: random.Random) -> str:
    if rng.random() < GIVES_UP:
        return f"#### {rng.randrange(99)}"
    return tool("calculator", expression=f"{rng.randrange(99)}+{rng.randrange(9)}")


def rag(rng: random.Random) -> str:
    if rng.random() < GIVES_UP:
        return f"answer {rng.randrange(99)}"
    return tool("search", query=rng.choice(["river", "mountain", "city", "who", "where"]))


@pytest.mark.parametrize("speak", [quest, sql, math, rag], ids=lambda speak: speak.__name__)
def test_an_example_replays_to_the_byte(
    speak: Callable[[random.Random], str], tmp_path: Path, few_tasks: Callable[[str], Path]
) -> None:
    name = speak.__name__
    if find_spec(f"{name}_example") is None:
        pytest.skip(f"the example {name} is not installed here")
    training: Any = import_module(f"{name}_example.training")
    rng = random.Random(name)
    model = tiny_model(tmp_path / "model", seed=0, context=8192)
    engine = ScriptedEngine(
        tiny_chat_tokenizer(context_length=8192),
        lambda request: speak(rng),
        policies={"policy": 0, "base": 0},
        capabilities=CAPABILITIES,
    )
    algorithm = LightningRL(model, optimize=training.TRAINED, frozen="base", learning_rate=1e-3)
    trainer = Trainer(
        algorithm,
        engine=engine,
        runners=LocalRunners(8, processes=2),
        steps=1,
        reporter=SilentReporter(),
    )
    tasks = training.load_tasks(few_tasks(name), "train")[:2]
    report = trainer.dev(training.answer, tasks, group_size=2)
    replays = report.replays
    assert replays is not None
    assert replays.departures == [], report.text()
    assert replays.rewards == []
    assert (replays.repeated, replays.exact) == (4, 4)
    assert replays.replayed == replays.calls == len(engine.requests)
    assert replays.calls > 4
