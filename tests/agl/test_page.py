"""Tests of the guide for users of Agent Lightning: programs, output, attribute keys."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, blocks

import lightspan_agl as agl
from lightspan_testing.scripted import ScriptedServer

PAGE = "guides/agent-lightning.md"


def test_the_first_program_prints_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [program] = [text for kind, _, text in blocks(PAGE) if kind == "python" and "TASKS = " in text]
    [output] = [text for kind, _, text in blocks(PAGE) if kind == "text"]
    with ScriptedServer(lambda request: "4") as server:
        script = tmp_path / "script.py"
        script.write_text(program.replace("http://localhost:8000/v1", server.url))
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == output


def test_the_other_programs_are_python() -> None:
    programs = [text for kind, _, text in blocks(PAGE) if kind == "python"]
    assert len(programs) == 3
    for text in programs:
        ast.parse(text)


async def test_the_pages_attributes_are_those_of_spans() -> None:
    @agl.rollout
    def agent(task: Any) -> None:
        agl.emit_message("m")
        agl.emit_object({"a": 1})
        agl.emit_annotation({"tag": "t"})
        agl.emit_reward({"a": 1.0, "b": 0.5}, primary_key="a")
        with agl.operation(name="op") as op:
            op.set_input(1)
            op.set_output(2)

    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]
        rollout = await runner.step({})
    spans = await store.query_spans(rollout.rollout_id)
    keys = {key for span in spans for key in span.attributes}
    text = (DOCS / PAGE).read_text()
    for name in ("reward.value", "message.body", "object.json", "object.type"):
        assert f"lightspan.{name}" in keys
        assert f"lightspan.{name}`" in text or f'lightspan.{name}"' in text
    for name in ("operation.input", "operation.output"):
        assert f"lightspan.{name}" in keys
        assert f"`lightspan.{name}`" in text
    for prefix in ("lightspan.reward.dimension.", "lightspan.annotation."):
        assert any(key.startswith(prefix) for key in keys)
        assert f"`{prefix}`" in text
    assert {"lightspan.reward", "lightspan.message", "op"} <= {span.name for span in spans}
