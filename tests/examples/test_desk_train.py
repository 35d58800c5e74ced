"""Test the help desk's `train.py` with a scripted model, which also reflects."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from desk_example import options
from desk_example.app import DEPARTMENTS, PROMPT, turns
from desk_example.candidates import CANDIDATES
from desk_example.reflection import NO_MORE, Script, answered, in_order
from desk_example.training import held_out_tasks, train_tasks
from lightspan_prompts.search.candidates import read_found
from lightspan_testing.scripted import Request, ScriptedServer
from tests.reports.ui_numbers import check_run

TRAIN = Path(__file__).parents[2] / "examples" / "desk" / "train.py"
RIGHT = {task["message"]: task["department"] for task in (*train_tasks(), *held_out_tasks())}


@pytest.fixture(scope="module")
def train() -> Any:
    """Return the module `train`."""
    spec = importlib.util.spec_from_file_location("desk_train", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(request: Request) -> str:
    """Return the model's answer, which is right for more messages with more examples in the
    prompt.
    """
    shown, asked = len(request.messages) // 2, request.last_text
    return RIGHT[asked] if shown > 1 and len(asked) % 12 < shown else "I see."


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setenv("OPENAI_API_KEY", "own-key")
    with ScriptedServer(answers) as server:
        yield server


def run(train: Any, folder: Path, model: ScriptedServer, *more: str) -> int:
    given = ["--base-url", model.url, "--endpoint-model", "scripted", "--folder", str(folder)]
    given += ["--runners", "2", *more]
    status: int = options.main(train.prepare, train.train, train.__doc__, given)
    return status


def test_it_finds_a_better_prompt(
    train: Any, tmp_path: Path, model: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(train, folder, model) == 0
    said = capsys.readouterr().out
    assert "-system: You read the mail of a shop." in said
    assert "routed right" in said
    found = read_found(folder)
    assert found is not None
    assert found.rollouts <= options.MAX_ROLLOUTS
    assert found.candidates[found.chosen].mean > found.candidates[0].mean == 0.0
    learned = json.loads((folder / "prompts.json").read_text())["prompt"]
    assert learned["after"]["template"] in CANDIDATES
    evaluated = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["mean"] for line in evaluated if line["kind"] == "eval")
    assert last > first == 0.0
    assert answered(folder) == found.reflections
    tried = {json.dumps(turns(text, "{message}")) for text in (PROMPT, *CANDIDATES)}
    asked = [[*r.messages[:-1], {"role": "user", "content": "{message}"}] for r in model.requests]
    assert {json.dumps(each) for each in asked if len(each) > 2} <= tried
    assert {r.headers["authorization"] for r in model.requests} == {"Bearer own-key"}
    asyncio.run(check_run(folder))


def test_a_real_model_may_reflect(train: Any, tmp_path: Path, model: ScriptedServer) -> None:
    told = f"system: Which: {', '.join(DEPARTMENTS)}?\n"
    text = told + "user: My bowl broke.\nassistant: repair\n" * 12 + "user: {message}"
    with ScriptedServer(f"<prompt>{text}</prompt>") as thinker:
        more = ["--reflection-url", thinker.url, "--reflection-model", "thinker"]
        assert run(train, tmp_path / "run", model, *more, "--max-rollouts", "90") == 0
        assert thinker.requests[0].body["model"] == "thinker"
        assert PROMPT in thinker.requests[0].last_text
        assert "the right answer is the one word" in thinker.requests[0].last_text
    learned = json.loads((tmp_path / "run" / "prompts.json").read_text())["prompt"]
    assert learned["after"]["template"] == text


# --- the script -----------------------------------------------------------------------------
def test_the_script_proposes_each_text_once_in_a_seeded_order(tmp_path: Path) -> None:
    request = Request("/v1/chat/completions", {}, {"messages": []})
    orders = []
    for order in range(5):
        script = Script(order)
        said = [script(request) for _ in CANDIDATES]
        assert sorted(said) == sorted(f"<prompt>\n{text}\n</prompt>" for text in CANDIDATES)
        assert script(request) == NO_MORE
        orders.append(said)
        # one that goes on begins where the other stopped
        assert [Script(order, 3)(request)] == said[3:4]
        assert in_order(order) == Script(order).texts
    assert len({said[0] for said in orders} | {said[1] for said in orders}) > 4
    assert answered(tmp_path) == 0
