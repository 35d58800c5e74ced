"""Test structured output from the request to the gradient, with one model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
import unfollowed_app  # type: ignore[import-not-found]

from lightspan import LightningRL, Trainer
from lightspan.lightning.rows import Row, build_rows
from lightspan.lightning.transitions import Transition
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.token_records import FinishReason, Sampling
from lightspan.stores import open_store
from lightspan_testing.gateway_suite import Rig
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.grammars import LIBRARY
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

GAP = 1e-4
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "maxItems": 2},
    },
    "required": ["color", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"Tag": {"enum": ["a", "b"]}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [tool("add", x={"enum": [1, 2]}, y={"enum": [3]}), tool("stop")]
PARAMETERS = {entry["function"]["name"]: entry["function"]["parameters"] for entry in TOOLS}
ASKED: dict[str, dict[str, Any]] = {
    "format": {"response_format": FORMAT},
    "object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
    },
    "format or tool": {"tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": False},
    "free": {"max_tokens": 12},
}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("structured") / request.param
    return tiny_model(path, seed=4, family=request.param, context=1024)


@asynccontextmanager
async def running(folder: Path, mode: Mode = Mode.TRAIN) -> AsyncIterator[Rig]:
    """Run a gateway in front of the real engine."""
    engine: Any = TransformersEngine({"policy": folder}, seed=0)
    await engine.start()
    async with open_store("memory:") as store:
        rig = Rig(store, engine, load_tokenizer(folder))
        sampling = Sampling(max_tokens=300) if mode is Mode.TRAIN else None
        target = Target(route=Route.POLICY, policy="policy", sampling=sampling)
        await rig.start(Routing(default=target), mode)
        try:
            yield rig
        finally:
            await rig.gateway.close()
            await engine.close()


def check(kind: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    """Check that a finished answer has the requested structure."""
    if kind in ("required", "named") or calls:
        [(name, arguments)] = calls
        assert name in (("add",) if kind == "named" else PARAMETERS)
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])
        assert not content
    elif kind != "free":
        schema = {"type": "object"} if kind == "object" else SCHEMA
        jsonschema.validate(json.loads(content or ""), schema)


def rows_of(records: list[Any], **fields: Any) -> list[Row]:
    transitions = [
        Transition("ro", record.attempt_id, "t", "g", "writer", "policy", record, 0)
        for record in records
    ]
    built = build_rows(transitions, **fields)
    assert built.rejected == {}
    return built.rows


async def test_every_answer_is_valid_and_trained_exactly(folder: Path) -> None:
    """Check sixteen concurrent requests: engine and learner compute the same log-probabilities.

    Without the grammar's masks they would differ.
    """
    kinds = [list(ASKED)[number % len(ASKED)] for number in range(16)]
    async with running(folder) as rig:
        answers = await asyncio.gather(
            *(
                rig.ask(f"call-{number}", stream=number % 2 == 0, **ASKED[kind])
                for number, kind in enumerate(kinds)
            )
        )
        records = await rig.records()
    by_call = {record.call_id: record for record in records}
    finished = 0
    for number, (kind, answer) in enumerate(zip(kinds, answers, strict=True)):
        record, choice = by_call[f"call-{number}"], answer.choices[0]
        assert bool(record.grammar) is (kind != "free")
        assert record.grammar_library == (LIBRARY if record.grammar else "")
        if record.finish_reason is FinishReason.STOP:
            finished += 1
            check(kind, choice.content, choice.calls)
    assert finished >= 10
    learner = TorchLearner({"policy": folder})
    assert learner.grammar_mismatches(records) == {}
    gap, unmasked = 0.0, 0.0
    for record in records:
        [row] = rows_of([record])
        bare = replace(row, constraints=())
        sampled = slice(-len(record.logprobs), None)
        for way, constrained in ((row, True), (bare, False)):
            [scores] = learner.score([way])
            difference = max(
                abs(own - theirs)
                for own, theirs in zip(scores[sampled], record.logprobs, strict=True)
            )
            if constrained:
                gap = max(gap, difference)
            elif record.grammar:
                unmasked = max(unmasked, difference)
    assert gap <= GAP
    assert unmasked > 0.1


async def test_what_cannot_be_followed_is_refused_by_name(folder: Path) -> None:
    """Check that an unsupported schema is refused in training too, without sampling."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "response_format",
        ),
        ({"tools": [*TOOLS, bad]}, "tools"),
    ]
    async with running(folder) as rig:
        for number, (fields, param) in enumerate(cases):
            with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
                await rig.ask(f"call-{number}", **fields)
            assert caught.value.param == param
        assert await rig.records() == []
        assert [span.attributes[c.CALL_OUTCOME] for span in await rig.spans()] == ["error"] * 2


def test_a_dry_run_says_first_what_cannot_be_followed(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(LightningRL(str(folder), optimize="writer"), folder=tmp_path / "run")
    report = trainer.dev(unfollowed_app.tag, ["a"])
    assert (report.rewards.failed, report.rewards.mean) == (4, 0.0)
    assert "'response_format' cannot be honoured: " in report.text()
    assert 'Unimplemented keys: ["uniqueItems"]' in report.text()
