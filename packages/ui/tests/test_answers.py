"""What the answers of the API say about failures, evaluations, neighbours and exports."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import lightspan_ui.views as v
from lightspan.production.feedback import feedback
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import make_routing
from lightspan.stores import open_store
from lightspan.training.folder import RunFolder
from lightspan_tools.inspect import inspect_run
from lightspan_ui.catalogue import histogram
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import (
    evaluate,
    make_production_store,
    make_run,
    metrics_line,
    record,
    roll_out,
)
from packages.ui.tests.ui_client import serving


async def add_rollouts(folder: RunFolder, step: int, *options: dict[str, Any]) -> None:
    """Record a rollout of the run for each of `options`, which go to `roll_out`."""
    async with open_store(folder.store_url) as store:
        routing = make_routing({"writer": "main"}, None, "main", None)
        resources = await store.put_resources({ROUTING: routing})
        for place, each in enumerate(options):
            values = {"reward": 0.0, **each}
            await roll_out(store, resources, step, place, values.pop("reward"), **values)


# --- exports ------------------------------------------------------------------------------------
async def test_an_export_counts_what_the_program_takes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        for number in range(3):
            await record(store, f"ro-{number}", question=f"question {number}")
    await asyncio.to_thread(feedback, "at-ro-0", 0.75, store=url)
    await asyncio.to_thread(feedback, "call-at-ro-1-2", 0.95, store=url)  # of its second agent
    async with serving(url) as client:

        async def export(**query: Any) -> v.Export:
            return await client.get("/stores/app/export", v.Export, **query)

        whole = await export(mode="production")
        assert (whole.attempts, whole.calls, whole.note) == (3, 6, "")
        for filters in ({"text": "question 1"}, {"user": "nobody"}, {"rated": "yes", "task": "x"}):
            wider = await export(**filters)
            assert (wider.attempts, wider.calls) == (3, 6)
            assert wider.note == (
                "not applied, as neither SFT nor lightspan export has such a filter: "
                + ", ".join(filters)
            )
            assert wider.command == whole.command
        rated = await export(reward_min=0.7)
        assert (rated.attempts, rated.calls) == (2, 3)
        rated = await export(reward_min=0.9499999999999999)
        assert (rated.attempts, rated.calls) == (1, 1)
        assert "min_reward=0.95," in rated.program
        assert "--min-reward=0.95 " in rated.command


async def test_an_export_says_what_sft_leaves_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        await record(store, "ro-1")
        await record(store, "ro-2")
        await store.mark_damaged("at-ro-2", "a span is missing")
    async with serving(url) as client:
        export = await client.get("/stores/app/export", v.Export)
        assert (export.attempts, export.calls) == (1, 2)
        assert export.note.startswith("the command also writes 2 calls that SFT leaves out")


def test_edges_of_bins_are_short() -> None:
    bins = histogram([0.0, 0.15, 0.95, 1.0])
    assert [each.low for each in bins] == [round(0.05 * n, 2) for n in range(20)]
    assert [each.low for each in bins if each.n] == [0.0, 0.15, 0.95]


# --- neighbours ---------------------------------------------------------------------------------
async def test_neighbours_are_those_of_the_list(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=3, rewards=(0.0, 1.0, 0.5))
    async with serving(tmp_path / "run") as client:

        async def walk(first: str, **query: Any) -> list[str]:
            """Return the rollouts that come one after the other, checked in both directions."""
            ids, before = [first], ""
            while True:
                path = f"/runs/run/rollouts/ro-{ids[-1]}"
                detail = await client.get(path, v.RolloutDetail, **query)
                assert detail.newer.removeprefix("ro-") == before
                if not detail.older:
                    return ids
                before = ids[-1]
                ids.append(detail.older.removeprefix("ro-"))

        for query in (
            {},
            {"sort": "oldest"},
            {"sort": "worst"},
            {"step_min": 2, "sort": "best"},
            {"reward_min": 0.5, "sort": "tokens"},
            {"text": "answer 1"},
            {"text": "answer 1", "sort": "oldest"},
            {"agent": "writer", "group": "group-2"},
        ):
            page = await client.get("/runs/run/rollouts", v.RolloutPage, **query)
            ids = [row.rollout_id.removeprefix("ro-") for row in page.rows]
            assert await walk(ids[0], **query) == ids
        # it need not pass the filters itself
        path = "/runs/run/rollouts/ro-2-0"
        detail = await client.get(path, v.RolloutDetail, reward_min=0.5)
        assert (detail.newer, detail.older) == ("ro-2-1", "ro-1-2")


# --- alerts -------------------------------------------------------------------------------------
async def test_a_step_that_failed_is_an_alert_here_and_in_inspect(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=2)
    await add_rollouts(folder, 3, {"fails": "ValueError: early"}, {"fails": "TimeoutError:\n60 s"})
    folder.add_metrics({**metrics_line(3), "failed": 2})
    text = "2 of 2 rollouts failed in step 3, for example TimeoutError: 60 s"
    async with serving(folder.path) as client:
        [run] = (await client.get("/places", v.Places)).runs
        assert [(each.step, each.text) for each in run.alerts] == [(3, text)]
        assert (await client.get("/runs/run", v.RunDetail)).summary.alerts == run.alerts
        printed = await asyncio.to_thread(inspect_run, folder.path)
        page = "docs/troubleshooting.md#of-failed-in-step"
        assert f"warning, step 3: {text} ({page})" in printed.splitlines()
        as_json = await asyncio.to_thread(inspect_run, folder.path, as_json=True)
        assert text in as_json
        folder.add_metrics(metrics_line(4))  # it works again
        assert (await client.get("/places", v.Places)).runs[0].alerts == []
        folder.add_metrics({**metrics_line(5), "failed": 1, "rollouts": 20})
        (folder.path / "store.db").unlink()
        [run] = (await client.get("/places", v.Places)).runs
        assert [each.text for each in run.alerts] == ["1 of 20 rollouts failed in step 5"]


async def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=2, config={"steps": 9}, is_complete=False)
    (folder.path / "lock").write_text("4194999")  # no such process
    async with serving(folder.path) as client:
        [run] = (await client.get("/places", v.Places)).runs
        [alert] = run.alerts
        assert (alert.name, alert.step) == ("stopped", 2)
        assert alert.text.startswith("the run stopped after step 2 of 9 and has no result")
        assert "resume=True" in alert.text


# --- rows, parameters ---------------------------------------------------------------------------
async def test_an_answer_may_be_a_call_of_a_tool(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    call = {
        "id": "t1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "pay"}'},
    }
    async with open_store(url) as store:
        await record(store, "ro-1")
        await record(store, "ro-2", tools=[call, call])
    async with serving(url) as client:
        page = await client.get("/stores/app/rollouts", v.RolloutPage)
        text = 'search({"query": "pay"})'
        assert [row.answer for row in page.rows] == [f"{text} {text}", "By card."]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("step=abc", "step=abc: give a whole number"),
        ("step=1.5", "step=1.5: give a whole number"),
        ("reward_min=high&step=1", "reward_min=high: give a number"),
        ("reward_min=nan", "reward_min=nan: give a number"),
        ("rated=maybe", "rated=maybe: give one of yes, no"),
        ("limit=all", "limit=all: give a whole number"),
        ("limit=201", "limit=201: give 1 to 200"),
        ("limit=0", "limit=0: give 1 to 200"),
    ],
)
async def test_a_parameter_of_another_type_is_refused(
    query: str, message: str, tmp_path: Path
) -> None:
    url = await make_production_store(tmp_path / "app.db", 1)
    async with serving(url) as client:
        answer = await client.send(f"{PREFIX}/stores/app/rollouts?{query}")
        assert (answer.status, answer.error) == (400, message)


# --- comparison ---------------------------------------------------------------------------------
async def test_a_comparison_says_what_it_rests_on(tmp_path: Path) -> None:
    for name, start, tasks in (("a", 0.1, 40), ("b", 0.5, 40), ("c", 0.1, 50)):
        folder = await make_run(tmp_path / name, steps=1)
        (folder.path / "metrics.jsonl").unlink()
        for file in (folder.path / "evaluations").iterdir():
            file.unlink()
        evaluate(folder, 0, start, tasks)
        evaluate(folder, 2, 0.6, tasks)
    async with serving(tmp_path) as client:

        async def sentences(*names: str) -> list[str]:
            query = "&".join(f"run={name}" for name in names)
            answer = await client.send(f"{PREFIX}/compare?{query}")
            return [pair.sentence for pair in answer.read(v.Comparison).pairs]

        [sentence] = await sentences("a", "b")
        assert "Compared on 40 tasks: all of both runs" in sentence
        assert "The runs began with different rewards: b minus a was 0.400" in sentence
        assert "pairs" not in sentence
        [sentence] = await sentences("a", "c")
        shared = "Compared only on the tasks that both scored: 40 of 40 of a and 40 of 50 of c"
        assert shared in sentence
        assert "began" not in sentence
        for sentence in await sentences("a", "b", "c"):
            assert "3 pairs are compared, and their intervals are not corrected" in sentence


# --- coverage -----------------------------------------------------------------------------------
async def test_evaluations_are_not_rejected(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=1)
    await add_rollouts(folder, 2, {"mode": Mode.VAL, "reward": 0.25}, {"mode": Mode.VAL})
    async with serving(folder.path) as client:
        run = await client.get("/runs/run", v.RunDetail)
        writer, checker = run.agents
        assert (writer.calls, writer.trained, writer.evaluation, writer.rejected) == (4, 2, 2, {})
        assert (checker.frozen, checker.evaluation) == (4, 0)
        assert writer.reward == checker.reward == pytest.approx((0.0 + 1.0 + 0.25 + 0.0) / 4)
        detail = await client.get("/runs/run/rollouts/ro-2-0", v.RolloutDetail)
        assert [call.fate for call in detail.calls] == ["evaluation", "frozen"]


async def test_the_reward_of_an_agent_is_that_of_its_rollouts(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=1, rewards=(0.5,))
    rollouts = ({"reward": reward, "agent": "rare"} for reward in (0.0, None))
    await add_rollouts(folder, 2, *rollouts)
    async with serving(folder.path) as client:
        agents = {each.path: each for each in (await client.get("/runs/run", v.RunDetail)).agents}
        assert agents["writer"].reward == 0.5
        assert agents["rare"].reward == 0.0
        assert agents["checker"].reward == 0.25


@pytest.mark.parametrize("attributes", [{}, {c.PROMPT_ORIGINAL: "Be brief."}])
async def test_a_search_for_prompts_freezes_no_call(
    attributes: dict[str, Any], tmp_path: Path
) -> None:
    folder = await make_run(tmp_path / "run", steps=0, config={"algorithm": "GEPA"})
    async with open_store(folder.store_url) as store:
        resources = await store.put_resources({ROUTING: make_routing({}, None, "main", None)})
        await roll_out(store, resources, 1, 0, 0.5, more=attributes)
    async with serving(folder.path) as client:
        agents = {each.path: each for each in (await client.get("/runs/run", v.RunDetail)).agents}
        assert [(each.calls, each.recorded, each.frozen) for each in agents.values()] == [
            (1, 1, 0),
            (1, 1, 0),
        ]
        assert agents["writer"].learns
        assert agents["checker"].learns == (not attributes)  # no call says which prompt it used
        detail = await client.get("/runs/run/rollouts/ro-1-0", v.RolloutDetail)
        assert [(call.fate, call.reason) for call in detail.calls] == [("recorded", "")] * 2


async def test_a_list_is_read_again_after_a_rating_and_after_pruning(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    async with serving(url, write=True) as client:

        async def ids() -> list[str]:
            page = await client.get("/stores/app/rollouts", v.RolloutPage, rated="no")
            return [row.rollout_id for row in page.rows]

        assert await ids() == ["ro-2", "ro-1", "ro-0"]
        path = f"{PREFIX}/stores/app/feedback"
        rating = {"id": "at-ro-1", "reward": 1.0}
        assert (await client.send(path, method="POST", body=rating)).status == 200
        assert await ids() == ["ro-2", "ro-0"]
        detail = await client.get("/stores/app/rollouts/ro-1", v.RolloutDetail, rated="no")
        assert (detail.newer, detail.older) == ("ro-2", "ro-0")  # the next ones to rate
        async with open_store(url) as store:
            assert await store.prune(0.0) > 0
        await ids()  # notices it
        assert await ids() == ["ro-2"]
