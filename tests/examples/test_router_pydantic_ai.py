"""Test the router's task as a Pydantic AI app: its requests, agents and training."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structured_training import check_control, check_it_learns  # type: ignore[import-not-found]

from lightspan import LightningRL
from lightspan.capture import sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan.progress import SilentReporter
from lightspan_examples.example import Run
from lightspan_testing.adapter_harness import Part, Stage
from lightspan_testing.adapter_suite import tree
from lightspan_testing.scripted import Reply, ScriptedServer
from router_example.app import build_graph, chat_model as langchain_model
from router_example.prompts import answer_prompt, route_prompt

pytest.importorskip("pydantic_ai")

from router_example.pydantic_ai_app import CustomerService, chat_model

MESSAGE = "The treadmill leaks from the bottom."


async def served(url: str, message: str, **more: Any) -> Any:
    service = CustomerService(chat_model("scripted", base_url=url, api_key="k", **more))
    try:
        return await service.serve(message)
    finally:
        await service.route.model.client.close()  # type: ignore[union-attr]


# --- the app --------------------------------------------------------------------------------
def test_it_sends_what_the_langgraph_app_sends() -> None:
    """Compare every message, so that measurements of both apps concern the same task."""
    settings = {"temperature": 0.7, "max_tokens": 6}
    with ScriptedServer(["Repair.", "The treadmill"] * 2) as server:
        final = asyncio.run(served(server.url, MESSAGE, **settings))
        model = langchain_model("scripted", base_url=server.url, api_key="k", **settings)
        assert final == build_graph(model).invoke({"message": MESSAGE})
    asked = [
        [(said["role"], said["content"]) for said in request.messages]
        for request in server.requests
    ]
    assert asked == [route_prompt(MESSAGE), answer_prompt(MESSAGE)] * 2
    assert [request.body["temperature"] for request in server.requests] == [0.7] * 4
    assert final["answer"] == "About your treadmill: our workshop writes to you today with a date."


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_agent_that_says_nothing_is_not_asked_again(finish: Any) -> None:
    replies = [Reply(text="", finish_reason=finish), Reply(text="treadmill")]
    with ScriptedServer(replies) as server:
        final = asyncio.run(served(server.url, MESSAGE))
    assert len(server.requests) == 2
    assert (final["department"], final["product"]) == (None, "treadmill")


def test_the_app_needs_nothing_of_lightspan_nor_of_langgraph() -> None:
    program = (
        "import sys, router_example.pydantic_ai_app; "
        "print([m for m in sys.modules if m.split('.')[0] in ('lightspan', 'torch', 'langgraph')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


# --- as it is trained -------------------------------------------------------------------------
def test_who_acts() -> None:
    from router_example import pydantic_ai_training as training

    task = training.load_tasks(Path(), "train")[0]
    says = {"route": [task["department"]], "answer": [task["product"]]}
    marks = {"Which department": "route", "Which product": "answer"}
    with Stage() as stage:
        played = stage.open(Part(says, marks), through_gateway=True)

        async def run() -> Any:
            with open_scope(played.scope):
                said = await training.answer({**task, "message": played.text, "max_tokens": 64})
            await sdk_instrumentation.aclose()
            return said

        assert asyncio.run(run()) == {"reward": 1.0, "department": 1.0, "product": 1.0}
        stage.close(played)
        assert stage.brain.problems == []
    assert tree(played.spans) == [
        "invoke_agent route @route",
        "  chat @route",
        "invoke_agent answer @answer",
        "  chat @answer",
    ]
    assert len(played.records) == 2


# --- the command ------------------------------------------------------------------------------
@pytest.fixture
def script(script_of: Callable[[str], Any], torch_threads: None) -> Any:
    return script_of("router")


def test_the_same_training_but_for_the_app(script: Any) -> None:
    given = ["--framework", "pydantic-ai", "--model", "org/unread"]
    run = Run(script.EXAMPLE, script.EXAMPLE.parser("").parse_args(given), SilentReporter())
    trainer, tasks, held_out = script.prepare(run)
    assert (len(tasks), len(held_out)) == (384, 320)
    assert run.training.answer.is_async
    assert run.training.AGENTS == ("route", "answer")
    other = script.EXAMPLE.parser("").parse_args(given[2:])
    langgraph = script.prepare(Run(script.EXAMPLE, other, SilentReporter())).trainer
    assert isinstance(trainer.algorithm, LightningRL)
    assert trainer.algorithm.config() == langgraph.algorithm.config()
    assert str(trainer.folder.path) == "runs/router-unread-pydantic-ai-seed0"


@pytest.mark.controls
@pytest.mark.timeout(900)
def test_a_structured_app_learns(tmp_path: Path) -> None:
    """Check a Pydantic AI app whose every model call has structured output."""
    check_it_learns("pydantic_ai", tmp_path)


@pytest.mark.controls
@pytest.mark.timeout(3600)
def test_permuted_rewards_teach_nothing(tmp_path: Path) -> None:
    check_control("pydantic_ai", tmp_path)
