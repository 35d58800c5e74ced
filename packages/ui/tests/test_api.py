"""The answers of the API about runs and stores."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lightspan_ui.views as v
from lightspan.production.feedback import feedback
from lightspan.schema import semconv as c
from lightspan.schema.resources import ROUTING
from lightspan.schema.routing import make_routing
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.training import jsonl_log
from lightspan.training.folder import RunFolder
from lightspan_testing.store_suite.base import make_production, make_span
from lightspan_ui.catalogue import Catalogue, histogram
from lightspan_ui.links import links_of
from lightspan_ui.rollouts import MAX_TOTAL
from lightspan_ui.server import PREFIX
from packages.ui.tests.recorded import (
    RUN_ID,
    make_production_store,
    make_run,
    metrics_line,
    record,
    roll_out,
)
from packages.ui.tests.ui_client import TOKEN, Client, eventually, serving


# --- runs -------------------------------------------------------------------------------------
async def test_a_run_is_summarised(tmp_path: Path) -> None:
    await make_run(tmp_path / "runs" / "first", steps=3)
    async with serving(tmp_path / "runs") as client:
        [run] = (await client.get("/places", v.Places)).runs
        assert (run.name, run.state, run.steps, run.planned) == ("first", "finished", 3, 3)
        assert (run.algorithm, run.model, run.app) == ("lightning_rl", "tiny", "app:answer")
        assert run.rewards == [0.5, 0.5, 0.5]
        assert [(each.step, each.split) for each in run.evaluations] == [
            (0, "held-out"),
            (3, "held-out"),
        ]
        assert run.gain is not None
        assert run.gain.mean == pytest.approx(0.5)
        assert (run.gain.n, run.seconds, run.eta_s) == (4, 6.0, None)


async def test_a_run_has_settings_agents_and_curves(tmp_path: Path) -> None:
    await make_run(tmp_path / "first", steps=3)
    async with serving(tmp_path / "first") as client:
        run = await client.get("/runs/first", v.RunDetail)
        assert run.settings["loss.kl"] == "0"
        assert run.settings["optimize"] == "writer"
        assert run.result == "held-out reward: 0.25 -> 0.75"
        writer, checker = run.agents
        assert (writer.path, writer.learns, writer.calls, writer.trained) == ("writer", True, 6, 6)
        assert (checker.path, checker.learns, checker.frozen) == ("checker", False, 6)
        assert (run.coverage_of, run.rollouts, run.error) == (6, 6, "")
        metrics = await client.get("/runs/first/metrics", v.Metrics, names="reward")
        assert metrics.lines == 5
        assert [point.x for point in metrics.series["reward"]] == [1, 2, 3]
        low, high = metrics.series["reward"][0].low, metrics.series["reward"][0].high
        assert (low, high) == (pytest.approx(0.304, abs=1e-4), pytest.approx(0.696, abs=1e-4))
        later = await client.get("/runs/first/metrics", v.Metrics, names="reward", after=3)
        assert [point.x for point in later.series["reward"]] == [3]
        held_out = await client.get("/runs/first/metrics", v.Metrics, kind="eval", names="mean")
        assert [point.x for point in held_out.series["mean"]] == [0, 3]


async def test_long_curves_are_averaged(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "first", steps=1)
    lines = [metrics_line(step, (0.0, step / 1001)) for step in range(2, 1002)]
    jsonl_log.append(folder.path / "metrics.jsonl", lines)
    async with serving(tmp_path / "first") as client:
        answer = await client.get("/runs/first/metrics", v.Metrics, names="reward", points=50)
        points = answer.series["reward"]
        assert len(points) == 50
        assert points[-1].y == pytest.approx(0.495, abs=0.01)
        first = points[0]
        assert first.low is not None
        assert first.high is not None
        assert (first.high - first.low) / 2 == pytest.approx(0.196 / math.sqrt(20), rel=0.01)
        [run] = (await client.get("/places", v.Places)).runs
        assert len(run.rewards) == 100


async def test_runs_are_compared(tmp_path: Path) -> None:
    await make_run(tmp_path / "a")
    await make_run(tmp_path / "b", config={"loss": {"kl": 0.1}, "seed": 1})
    async with serving(tmp_path) as client:
        path = f"{PREFIX}/compare?run=a&run=b"
        comparison = (await client.send(path)).read(v.Comparison)
        assert [run.name for run in comparison.runs] == ["a", "b"]
        differing = {each.name: each.values for each in comparison.settings}
        assert differing == {"loss.kl": {"a": "0", "b": "0.1"}, "seed": {"b": "1"}}
        [pair] = comparison.pairs
        assert pair.difference is not None
        assert (pair.difference.mean, pair.difference.n) == (0.0, 4)
        assert "chance" in pair.sentence


async def test_runs_of_one_name_and_odd_names_are_told_apart(tmp_path: Path) -> None:
    odd = "rün ‮ <b> & x.js"
    for name in ("one/first", "two/first", f"one/{odd}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        await make_run(tmp_path / name, steps=1)
    undecodable = os.fsencode(tmp_path / "one") + b"/\xff"
    Path(os.fsdecode(undecodable)).mkdir()
    (Path(os.fsdecode(undecodable)) / "config.json").write_text("{}")
    async with serving(tmp_path / "one", tmp_path / "two") as client:
        names = {run.name for run in (await client.get("/places", v.Places)).runs}
        assert names == {"first", "first~2", odd, "�"}
        from urllib.parse import quote

        run = await client.get(f"/runs/{quote(odd, safe='')}", v.RunDetail)
        assert run.summary.name == odd


# --- state ------------------------------------------------------------------------------------
async def test_states_of_runs(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=2, is_complete=False)
    lock = folder.path / "lock"
    async with serving(folder.path) as client:

        async def state() -> str:
            return (await client.get("/places", v.Places)).runs[0].state

        lock.write_text("4194999")  # no such process
        assert await state() == "stopped"
        lock.write_text(str(os.getpid()))
        assert await state() == "running"
        old = time.time() - 10_000
        os.utime(folder.path / "metrics.jsonl", (old, old))
        assert await state() == "silent"
        os.utime(lock, (old, old))  # another process got the id later
        assert await state() == "stopped"
        folder.add_metrics(metrics_line(3))  # a trainer on another machine
        assert await state() == "running"
        folder.write_result({"steps": 3, "summary": ""})
        assert await state() == "finished"


async def test_a_running_run_has_a_remaining_time(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=2, config={"steps": 10}, is_complete=False)
    (folder.path / "lock").write_text(str(os.getpid()))
    async with serving(folder.path) as client:
        [run] = (await client.get("/places", v.Places)).runs
        assert (run.state, run.eta_s) == ("running", 16.0)


# --- rollouts ---------------------------------------------------------------------------------
async def test_rollouts_are_filtered_sorted_and_paged(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=3, rewards=(0.0, 1.0, 0.5))
    async with serving(tmp_path / "run") as client:

        async def ids(**query: Any) -> list[str]:
            page = await client.get("/runs/run/rollouts", v.RolloutPage, **query)
            return [row.rollout_id.removeprefix("ro-") for row in page.rows]

        assert await ids() == ["3-2", "3-1", "3-0", "2-2", "2-1", "2-0", "1-2", "1-1", "1-0"]
        assert (await ids(sort="oldest"))[0] == "1-0"
        assert (await ids(sort="best"))[:3] == ["3-1", "2-1", "1-1"]
        assert (await ids(sort="worst", limit=2)) == ["3-0", "2-0"]
        assert await ids(step=2) == ["2-2", "2-1", "2-0"]
        assert await ids(step_min=2, step_max=2, reward_min=0.5, reward_max=0.9) == ["2-2"]
        assert await ids(group="group-1", reward_min=1) == ["1-1"]
        assert await ids(task="task-3", status="succeeded", mode="train", rated="no", limit=1)
        assert await ids(agent="writer", limit=3) == ["3-2", "3-1", "3-0"]
        assert await ids(agent="nobody") == []
        assert await ids(text="answer 1") == ["3-1", "2-1", "1-1"]
        assert await ids(text="ro-2-0") == ["2-0"]
        assert await ids(text="in no span") == []
        assert await ids(until="1970-01-01T00:00:01") == []
        first = await client.get("/runs/run/rollouts", v.RolloutPage, limit=4)
        second = await client.get("/runs/run/rollouts", v.RolloutPage, limit=4, cursor=first.cursor)
        last = await client.get("/runs/run/rollouts", v.RolloutPage, limit=4, cursor=second.cursor)
        assert [len(page.rows) for page in (first, second, last)] == [4, 4, 1]
        assert (last.cursor, last.total, last.readable) == ("", 9, 9)


async def test_a_row_has_its_texts_and_reward(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=1)
    async with serving(tmp_path / "run") as client:
        page = await client.get("/runs/run/rollouts", v.RolloutPage, limit=1)
        [row] = page.rows
        assert (row.rollout_id, row.reward, row.step, row.group) == ("ro-1-1", 1.0, 1, "group-1")
        assert (row.task, row.question, row.answer) == ("task 1", "task 1", "fine")
        assert row.agents == {"writer": 1, "checker": 1}
        assert row.dimensions == {"style": 0.5}
        assert (row.run_id, row.tokens, row.is_read) == (RUN_ID, 12, True)


async def test_groups_and_a_group(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=2, rewards=(0.25, 1.0))
    async with serving(tmp_path / "run") as client:
        page = await client.get("/runs/run/groups", v.GroupPage, sort="spread", limit=1)
        assert (page.total, len(page.groups)) == (2, 1)
        [group] = page.groups
        assert (group.size, group.mean, group.spread) == (2, 0.625, 0.75)
        assert [member.reward for member in group.members] == [1.0, 0.25]
        after = await client.get(
            "/runs/run/groups", v.GroupPage, sort="spread", limit=1, cursor=page.cursor
        )
        assert after.groups[0].group != group.group
        detail = await client.get("/runs/run/groups/group-1", v.GroupDetail, step=1)
        assert detail.task == '{"question": "task 1"}'
        assert detail.agents == ["writer", "checker"]
        best = detail.rollouts[0]
        assert best.row.reward == 1.0
        [writer, checker] = best.answers
        assert (writer.text, writer.fate, writer.advantage) == ("answer 1", "trained", 0.375)
        assert (checker.fate, checker.advantage) == ("frozen", None)


async def test_a_rollout_has_its_tree_calls_and_neighbours(tmp_path: Path) -> None:
    await make_run(tmp_path / "run", steps=2)
    async with serving(tmp_path / "run") as client:
        rollout = await client.get("/runs/run/rollouts/ro-1-0", v.RolloutDetail)
        assert (rollout.rank, rollout.group_size, rollout.source) == (2, 2, "returned")
        assert (rollout.newer, rollout.older) == ("ro-1-1", "")
        writer, checker = rollout.calls
        assert (writer.fate, writer.advantage, writer.tokens) == ("trained", -0.5, 2)
        assert writer.why.startswith("advantage -0.5 = (0 - 0.5) / 1; dr_grpo")
        assert (checker.fate, checker.reason) == ("frozen", "agent checker is not selected")
        first = rollout.spans[0]
        assert (first.kind, first.agent, first.call_id) == ("llm", "writer", writer.call_id)
        assert [message.role for message in first.input] == ["system", "user"]
        assert first.output[0].text == "answer 0"
        same = await client.get(f"/runs/run/rollouts/{rollout.row.attempt_id}", v.RolloutDetail)
        assert same == rollout
        span = await client.get(f"/runs/run/rollouts/ro-1-0/spans/{first.span_id}", v.SpanDetail)
        assert span.attributes[c.CALL_ID] == writer.call_id
        call = await client.get(f"/runs/run/rollouts/ro-1-0/calls/{writer.call_id}", v.CallDetail)
        [choice] = call.choices
        assert choice.reasons is not None
        assert (choice.reasons.value, choice.reasons.baseline) == (0.0, 0.5)
        assert [(mate.rollout_id, mate.value, mate.is_this) for mate in choice.mates] == [
            ("ro-1-1", 1.0, False),
            ("ro-1-0", 0.0, True),
        ]
        assert [(token.id, token.logprob) for token in choice.tokens] == [(4, -0.5), (5, -1.25)]
        for missing in ("rollouts/none", "rollouts/ro-1-0/calls/none", "rollouts/ro-1-0/spans/0"):
            assert (await client.send(f"{PREFIX}/runs/run/{missing}")).status == 404


# --- production -------------------------------------------------------------------------------
async def test_the_cost_of_a_call_counts_once(tmp_path: Path) -> None:
    """Check costs that are described twice: by two libraries, and by the agent around them."""
    url, key = f"sqlite:///{tmp_path / 'app.db'}", "llm.cost.total"
    attempt = make_production("ro-1", "token-ro-1", run_id="app").attempt
    costs = {11: (1, 0.5), 12: (11, 0.5), 13: (2, 0.25), 14: (None, None), 15: (14, 0.125)}
    spans = [
        make_span(
            attempt,
            number,
            parent_id=None if above is None else f"{above:016x}",
            attributes={} if cost is None else {key: cost},
        )
        for number, (above, cost) in costs.items()
    ]
    async with open_store(url) as store:
        await record(store, "ro-1", more={key: 0.75}, spans=spans)
    async with serving(url) as client:
        [row] = (await client.get("/stores/app/rollouts", v.RolloutPage)).rows
    assert row.cost == 0.5 + 0.25 + 0.125


async def test_production_is_filtered_by_what_spans_tell(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        await record(store, "ro-1", question="first", reward=0.25)
        await record(
            store, "ro-2", more={"user.id": "bob", "tag.tags": "a, b", "gen_ai.usage.cost": 0.5}
        )
        await record(store, "ro-3", fails="boom", service="other")
    async with serving(url) as client:
        [store_summary] = (await client.get("/places", v.Places)).stores
        assert store_summary.name == "app"
        assert store_summary.rollouts == {"succeeded": 2, "failed": 1}

        async def ids(**query: Any) -> list[str]:
            page = await client.get("/stores/app/rollouts", v.RolloutPage, **query)
            assert (page.read, page.readable) == (3, 3) or not query
            return [row.rollout_id for row in page.rows]

        assert await ids(user="bob") == ["ro-2"]
        assert await ids(session="s-1", service="support") == ["ro-2", "ro-1"]
        assert await ids(tag="b") == ["ro-2"]
        assert await ids(cost_min=0.4) == ["ro-2"]
        assert await ids(agent="writer", outcome="app_error") == ["ro-3"]
        assert await ids(agent="router/*", reward_max=0.5) == ["ro-1"]
        assert await ids(tokens_min=1_000) == []
        times = (await client.get("/stores/app/rollouts", v.RolloutPage)).rows
        assert len({row.seconds for row in times}) == 1
        seconds = times[0].seconds
        assert seconds is not None
        assert await ids(seconds_min=seconds, user="bob") == ["ro-2"]
        assert await ids(seconds_min=seconds + 1) == []
        assert await ids(seconds_max=seconds - 1) == []
        facets = await client.get("/stores/app/facets", v.Facets)
        assert {each.name: each.n for each in facets.service} == {"support": 2, "other": 1}
        assert {each.name: each.n for each in facets.user} == {"ada": 2, "bob": 1}
        assert {each.name: each.n for each in facets.tag} == {"billing": 2, "a": 1, "b": 1}
        assert {each.name: each.n for each in facets.agent} == {"router": 3, "router/writer": 3}
        assert (facets.total, facets.scored, facets.mean) == (3, 1, 0.25)
        some = await client.get("/stores/app/facets", v.Facets, service="other", user="ada")
        assert some.total == 1
        assert {each.name: each.n for each in some.service} == {"support": 1, "other": 1}
        assert {each.name: each.n for each in some.user} == {"ada": 1}
        assert sum(each.n for each in facets.rewards) == 1
        rollout = await client.get("/stores/app/rollouts/at-ro-3", v.RolloutDetail)
        assert rollout.row.message == "boom"
        assert (rollout.spans[0].status, rollout.spans[0].message) == ("error", "boom")
        tool = next(span for span in rollout.spans if span.kind == "tool")
        assert (tool.arguments, tool.result) == ('{"query": "pay"}', "cards, cash")


async def test_a_rating_is_there_at_once(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    async with serving(url, write=True) as client:
        before = await client.get("/stores/app/rollouts", v.RolloutPage, rated="no")
        assert before.total == 3
        rated = await client.send(
            f"{PREFIX}/stores/app/feedback",
            method="POST",
            body={"id": "at-ro-1", "reward": 0.75, "comment": "good"},
        )
        assert rated.read(v.Rated) == v.Rated(attempt_id="at-ro-1", call_id="", reward=0.75)
        page = await client.get("/stores/app/rollouts", v.RolloutPage, rated="yes", reward_min=0.7)
        assert [(row.rollout_id, row.reward, row.rated) for row in page.rows] == [
            ("ro-1", 0.75, True)
        ]
        # by another process, on a call
        await asyncio.to_thread(feedback, "call-at-ro-2-0", 0.25, store=url)
        page = await client.get("/stores/app/rollouts", v.RolloutPage, rated="yes")
        assert {row.rollout_id: row.reward for row in page.rows} == {"ro-1": 0.75, "ro-2": 0.25}
        rollout = await client.get("/stores/app/rollouts/ro-1", v.RolloutDetail)
        assert rollout.source == "feedback"
        [rating] = rollout.ratings
        assert (rating.reward, rating.comment) == (0.75, "good")
        for body in ({"id": "at-ro-1"}, {"id": 3, "reward": 1}, {"id": "a", "reward": 1, "x": 1}):
            path = f"{PREFIX}/stores/app/feedback"
            assert (await client.send(path, method="POST", body=body)).status == 400
        missing = await client.send(path, method="POST", body={"id": "at-none-0", "reward": 1.0})
        assert missing.status == 404


async def test_a_search_stops_when_a_page_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan_ui.catalogue.SEARCH_PORTION", 2)
    url = await make_production_store(tmp_path / "app.db", 9)
    async with serving(url) as client:
        query = {"text": "Question", "limit": 2}
        first = await client.get("/stores/app/rollouts", v.RolloutPage, **query)
        assert [row.rollout_id for row in first.rows] == ["ro-8", "ro-7"]
        assert first.is_partial
        assert 3 <= first.total < 9
        pages, cursor = [first.rows], first.cursor
        while cursor:
            page = await client.get("/stores/app/rollouts", v.RolloutPage, cursor=cursor, **query)
            pages.append(page.rows)
            cursor = page.cursor
        assert [row.rollout_id for rows in pages for row in rows] == [
            f"ro-{n}" for n in range(8, -1, -1)
        ]
        whole = await client.get("/stores/app/rollouts", v.RolloutPage, sort="oldest", **query)
        assert (whole.total, whole.is_partial) == (9, False)


async def test_a_search_goes_on_where_its_time_was_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that groups and counts say, too, that a search is incomplete."""
    monkeypatch.setattr("lightspan_ui.catalogue.SEARCH_PORTION", 2)
    monkeypatch.setattr("lightspan_ui.catalogue.SEARCH_DEADLINE_S", 0.0)
    url = await make_production_store(tmp_path / "app.db", 5)
    async with serving(url) as client:

        async def found(name: str, kind: Any, text: str) -> Any:
            return await client.get(f"/stores/app/{name}", kind, text=text)

        kinds = {"rollouts": v.RolloutPage, "groups": v.GroupPage, "facets": v.Facets}
        for name, kind in kinds.items():
            text = f"nothing has {name}"
            first = await found(name, kind, text)
            assert (first.total, first.is_partial) == (0, True)

            async def is_whole(name: str = name, kind: Any = kind, text: str = text) -> bool:
                answer = await found(name, kind, text)
                assert answer.total == 0
                return not answer.is_partial

            await eventually(is_whole)

        async def all_are_found() -> bool:
            page = await found("rollouts", v.RolloutPage, "Question")
            return (page.total, page.is_partial) == (5, False)

        await eventually(all_are_found)


async def test_a_search_goes_before_the_reading_in_the_background(tmp_path: Path) -> None:
    async with open_store(await make_production_store(tmp_path / "app.db")) as store:
        catalogue = Catalogue(store, None)
        await catalogue.refresh()
        async with catalogue._search_lock:
            catalogue.read_in_background()
            await catalogue.wait_read(0.1)
            assert (catalogue.read, catalogue.readable) == (0, 3)
        await catalogue.wait_read(20.0)
        assert catalogue.read == 3
        await catalogue.close()


async def test_large_texts_are_cut_and_shown_whole_on_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    text = "é" * (v.MAX_TEXT + 10)
    attempt = make_production("ro-1").attempt
    many = [
        make_span(
            attempt,
            1000 + n,
            kind=SpanKind.TOOL,
            start_ns=9 * 10**9,
            attributes={c.TOOL_CALL_RESULT: text},
        )
        for n in range(8)
    ]
    async with open_store(url) as store:
        await record(store, "ro-1", answer=text, spans=many)
    async with serving(url) as client:
        answer = await client.send(f"{PREFIX}/stores/app/rollouts/ro-1")
        assert len(answer.body) < 2 * (MAX_TOTAL + 2 * v.MAX_TEXT)
        rollout = answer.read(v.RolloutDetail)
        last = next(s for s in rollout.spans if s.agent == "router/writer")
        assert last.output[0].is_cut
        assert len(last.output[0].text) == v.MAX_TEXT
        span = await client.get(f"/stores/app/rollouts/ro-1/spans/{last.span_id}", v.SpanDetail)
        assert span.row.output[0].text == text


# --- secrets ----------------------------------------------------------------------------------
async def test_no_answer_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "call token": "calltoken-planted-1",
        "variable": "sk-" + "planted-variable-1234567890",
        "password": "planted-password-9",
        "key in a URL": "planted-user-key-7",
    }
    monkeypatch.setenv("OPENAI_API_KEY", secrets["variable"])
    monkeypatch.setenv("LIGHTSPAN_OTLP", f"http://user:{secrets['password']}@127.0.0.1:6006")
    url = f"sqlite:///{tmp_path / 'app.db'}"
    async with open_store(url) as store:
        await record(store, "ro-1", token=secrets["call token"], fails="no key")
    await make_run(
        tmp_path / "run",
        config={
            "reflection": {"base_url": f"https://me:{secrets['password']}@host.example/v1"},
            "note": f"key {secrets['variable']}",
            "endpoints": [f"http://{secrets['key in a URL']}:x{secrets['password']}@host.example"],
        },
    )
    (tmp_path / "run" / "result.json").write_text(
        json.dumps({"steps": 2, "summary": "done", "serving": {"key": secrets["password"]}})
    )
    broken = f"postgresql://me:{secrets['password']}@127.0.0.1:9/none"
    async with serving(tmp_path / "run", url, broken, write=True) as client:
        bodies = await _all_answers(client)
        assert len(bodies) > 20
        for path, body in bodies.items():
            for name, secret in {**secrets, "token": TOKEN}.items():
                if name != "key in a URL":
                    assert secret.encode() not in body, (path, name)


async def _all_answers(client: Client) -> dict[str, bytes]:
    """Read every path of the API, those with ids too."""
    paths = ["/places", "/compare?run=run", "/runs/run", "/runs/run/metrics", "/runs/run/prompts"]
    bodies: dict[str, bytes] = {}
    for place in ("/runs/run", "/stores/app", "/stores/none"):
        paths += [f"{place}/{name}" for name in ("rollouts", "facets", "groups", "export")]
        page = await client.send(f"{PREFIX}{place}/rollouts")
        if page.status == 200:
            for row in page.read(v.RolloutPage).rows:
                path = f"{place}/rollouts/{row.rollout_id}"
                detail = await client.get(path, v.RolloutDetail)
                paths += [path, f"{place}/groups/{row.group}?step={row.step}"]
                paths += [f"{path}/calls/{call.call_id}" for call in detail.calls]
                paths += [f"{path}/spans/{span.span_id}" for span in detail.spans]
    for path in paths:
        bodies[path] = (await client.send(PREFIX + path)).body
    feedback_path = f"{PREFIX}/stores/app/feedback"
    rated = await client.send(feedback_path, method="POST", body={"id": "at-ro-1", "reward": 1.0})
    bodies["feedback"] = rated.body
    return bodies


# --- damage -----------------------------------------------------------------------------------
async def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    for name in ("good", "line", "config", "result", "evaluation", "gone"):
        await make_run(tmp_path / name)
    metrics = tmp_path / "line" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + lines[1][:30] + b"\n" + b"".join(lines[2:]))
    (tmp_path / "config" / "config.json").write_text("{")
    (tmp_path / "result" / "result.json").write_text("[]")
    next((tmp_path / "evaluation" / "evaluations").iterdir()).write_text("{}")
    (tmp_path / "gone" / "store.db").unlink()
    async with serving(tmp_path) as client:
        runs = {run.name: run for run in (await client.get("/places", v.Places)).runs}
        assert {name: run.state for name, run in runs.items()} == {
            "good": "finished",
            "gone": "finished",
            **dict.fromkeys(("line", "config", "result", "evaluation"), "damaged"),
        }
        assert "line 2" in runs["line"].error
        for name in ("line", "config", "result", "evaluation"):
            assert runs[name].error
            run = await client.get(f"/runs/{name}", v.RunDetail)
            assert run.summary.error == runs[name].error
        gone = await client.get("/runs/gone", v.RunDetail)
        assert "store.db" in gone.error
        answer = await client.send(f"{PREFIX}/runs/gone/rollouts")
        assert answer.status == 404
        assert "store.db" in answer.error
        assert (await client.get("/runs/good", v.RunDetail)).coverage_of == 4


async def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=1, is_complete=False)
    line = msgspec.json.encode(metrics_line(2)) + b"\n"
    metrics = folder.path / "metrics.jsonl"
    async with serving(folder.path) as client:

        async def steps() -> list[float]:
            answer = await client.get("/runs/run/metrics", v.Metrics, names="reward")
            return [point.x for point in answer.series["reward"]]

        with metrics.open("ab") as file:
            file.write(line[:20])
        assert await steps() == [1]
        with metrics.open("ab") as file:
            file.write(line[20:])
        assert await steps() == [1, 2]
        folder.rewind(1)  # as a resumed run does
        folder.add_metrics({**metrics_line(2), "reward": 0.125})
        answer = await client.get("/runs/run/metrics", v.Metrics, names="reward")
        assert [point.y for point in answer.series["reward"]] == [0.5, 0.125]


@pytest.mark.slow
async def test_stores_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    good = await make_production_store(tmp_path / "good.db")
    (tmp_path / "text.db").write_text("no store")
    (tmp_path / "empty.db").touch()
    names = ["text", "empty", "missing"]
    urls = [f"sqlite:///{tmp_path / name}.db" for name in names]
    served = "http://127.0.0.1:9"
    async with serving(good, *urls, served) as client:
        stores = {each.name: each for each in (await client.get("/places", v.Places)).stores}
        assert stores["good"].error == ""
        for name in (*names, "127.0.0.1-9"):
            assert stores[name].error, name
            answer = await client.send(f"{PREFIX}/stores/{name}/rollouts")
            assert answer.status in (404, 503, 400), (name, answer)
            assert answer.error


async def test_a_store_may_be_replaced_and_grow(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    url = await make_production_store(path, 2)
    async with serving(url) as client:

        async def total() -> int:
            return (await client.get("/stores/app/rollouts", v.RolloutPage)).total

        assert await total() == 2
        async with open_store(url) as store:
            await record(store, "ro-more")
        assert await total() == 3
        await make_production_store(tmp_path / "other.db", 5)
        (tmp_path / "other.db").replace(path)
        assert await total() == 5
        path.rename(tmp_path / "moved.db")
        answer = await client.send(f"{PREFIX}/stores/app/rollouts")
        assert answer.status == 404
        (tmp_path / "moved.db").rename(path)
        assert await total() == 5


async def test_a_store_may_be_pruned(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db", 4)
    async with serving(url) as client:
        assert (await client.get("/stores/app/rollouts", v.RolloutPage)).total == 4
        async with open_store(url) as store:
            assert await store.prune(0.0) > 0
        await client.get("/stores/app/rollouts", v.RolloutPage)
        page = await client.get("/stores/app/rollouts", v.RolloutPage)
        assert page.total < 4
        assert (page.read, page.readable) == (page.total, page.total)
        assert (await client.send(f"{PREFIX}/stores/app/rollouts/ro-0")).status == 404


async def test_stores_that_no_page_needs_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightspan_ui.api.UNUSED_S", 0.0)
    urls = [await make_production_store(tmp_path / f"{name}.db") for name in ("a", "b")]
    async with serving(*urls) as client:
        places = client.server._sources.stores
        await client.get("/stores/a/rollouts", v.RolloutPage)
        assert (places["a"].is_open, places["b"].is_open) == (True, False)
        await client.get("/stores/b/rollouts", v.RolloutPage)
        assert (places["a"].is_open, places["b"].is_open) == (False, True)
        assert (await client.get("/stores/a/rollouts", v.RolloutPage)).total == 3


async def test_nothing_on_disk_changes(tmp_path: Path) -> None:
    await make_run(tmp_path / "runs" / "run")
    url = await make_production_store(tmp_path / "runs" / "app.db")

    def content() -> dict[str, tuple[bytes, int]]:
        return {
            str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in sorted((tmp_path / "runs").rglob("*"))
            if path.is_file()
        }

    before = content()
    async with serving(tmp_path / "runs", url) as client:
        await _all_answers_of_run(client)
    assert content() == before


async def _all_answers_of_run(client: Client) -> None:
    for path in ("/places", "/runs/run", "/runs/run/rollouts?text=a", "/runs/run/facets"):
        await client.send(PREFIX + path)
    for path in ("/stores/app/rollouts?agent=router", "/stores/app/rollouts/ro-1"):
        assert (await client.send(PREFIX + path)).status == 200


# --- events -----------------------------------------------------------------------------------
@asynccontextmanager
async def changes_of(client: Client) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Open the stream of changes; yield a function that waits for the next one."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with client.session.get(f"{client.server.url}{PREFIX}/events", headers=headers) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"

        async def next_change() -> dict[str, Any]:
            async with asyncio.timeout(10):
                while True:
                    line = (await stream.content.readline()).decode()
                    if line.startswith("data: "):
                        change: dict[str, Any] = json.loads(line.removeprefix("data: "))
                        return change

        yield next_change


@pytest.mark.slow
async def test_pages_are_told_of_changes(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "runs" / "run", steps=1, is_complete=False)
    url = await make_production_store(tmp_path / "app.db")
    async with serving(tmp_path / "runs", url) as client:
        await client.get("/runs/run", v.RunDetail)
        await client.get("/stores/app/rollouts", v.RolloutPage)
        async with changes_of(client) as next_change:
            await asyncio.sleep(1.2)  # the times of the files are read
            folder.add_metrics(metrics_line(2))
            assert (await next_change())["place"] == "runs/run"
            async with open_store(url) as store:
                await record(store, "ro-new")
            change = await next_change()
            assert change["place"] == "stores/app"
            await make_run(tmp_path / "runs" / "second")
            assert (await next_change())["place"] == ""


# --- links, export ----------------------------------------------------------------------------
def test_traces_are_linked_to_the_backend() -> None:
    trace = "a" * 32
    [phoenix] = links_of(trace, "http://127.0.0.1:6006?api_key=x")
    assert (phoenix.name, phoenix.url) == (
        "Phoenix",
        f"http://127.0.0.1:6006/redirects/traces/{trace}",
    )
    [langfuse] = links_of(trace, "https://me:x@cloud.langfuse.com/api/public/otel/v1/traces")
    assert langfuse.url == f"https://cloud.langfuse.com/trace/{trace}"
    for url in ("", "http://127.0.0.1:4318", "javascript:alert(1)", "http://[", "file:///x"):
        assert links_of(trace, url) == []
    assert links_of("", "http://127.0.0.1:6006") == []


async def test_what_is_shown_can_be_exported(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    await asyncio.to_thread(feedback, "at-ro-1", 0.75, store=url)
    async with serving(url) as client:
        export = await client.get(
            "/stores/app/export", v.Export, reward_min=0.5, agent="router", user="ada"
        )
        assert (export.attempts, export.calls) == (1, 1)
        assert export.note.endswith("such a filter: user")
        assert f"# {export.note}" in export.program
        assert f"from_store='{url}'" in export.program
        lacking = "# not applied, as Preferences has no such filter: user, reward_min"
        assert export.preferences.splitlines() == [
            "from lightspan_torch import Preferences",
            "",
            lacking,
            "Preferences(",
            '    "MODEL",',
            f"    from_store='{url}',",
            "    agents='router',",
            ').fit(folder="runs/preferences")',
        ]
        assert "min_reward=0.5" in export.program
        command = f"lightspan export {url} messages --agent=router --min-reward=0.5 -o chats.jsonl"
        assert export.command == command


def test_bins_of_rewards() -> None:
    assert histogram([]) == []
    bins = histogram([0.0, 0.5, 1.0, 1.0])
    assert (bins[0].low, bins[-1].high) == (0.0, 1.0)
    assert [each.n for each in bins if each.n] == [1, 1, 2]
    wide = histogram([-3.0, 5.0])
    assert (wide[0].low, wide[-1].high, wide[0].n, wide[-1].n) == (-3.0, 5.0, 1, 1)
    assert sum(each.n for each in histogram([7.0])) == 1


async def test_a_run_that_begins_is_shown(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert (await client.get("/places", v.Places)).runs == []
        await make_run(tmp_path / "new")

        async def names() -> list[str]:
            return [run.name for run in (await client.get("/places", v.Places)).runs]

        assert await eventually(names) == ["new"]
        RunFolder(tmp_path / "new").path.rename(tmp_path.parent / f"{tmp_path.name}-away")
        assert await names() == []


async def test_lines_are_read_once_by_many_requests(tmp_path: Path) -> None:
    folder = await make_run(tmp_path / "run", steps=1, is_complete=False)
    async with serving(folder.path) as client:
        for step in range(2, 12):
            folder.add_metrics(metrics_line(step))
            requests = [
                client.send(PREFIX + path)
                for path in ("/places", "/runs/run/metrics?names=reward", "/runs/run") * 4
            ]
            await asyncio.gather(*requests)
        metrics = await client.get("/runs/run/metrics", v.Metrics, names="reward")
        assert [point.x for point in metrics.series["reward"]] == list(range(1, 12))


async def test_a_store_of_another_format_says_so(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "newer.db")
    with sqlite3.connect(tmp_path / "newer.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    async with serving(url) as client:
        [store] = (await client.get("/places", v.Places)).stores
        assert "newer" in store.error
        answer = await client.send(f"{PREFIX}/stores/newer/rollouts")
        assert (answer.status, answer.error) == (503, store.error)


async def test_half_a_surrogate_pair_hides_nothing(tmp_path: Path) -> None:
    await make_run(tmp_path / "good")
    await make_run(tmp_path / "odd", config={"app": "app:\ud800", "\udfff": ["\udfff"]})
    async with serving(tmp_path) as client:
        runs = {run.name: run for run in (await client.get("/places", v.Places)).runs}
        assert runs["odd"].app == "app:\ufffd"
        assert runs["good"].app == "app:answer"
        run = await client.get("/runs/odd", v.RunDetail)
        assert run.settings["\ufffd"] == "\ufffd"


@pytest.mark.parametrize(
    "config",
    [
        *("[]", "1", "{}", '{"train": "x"}', '{"steps": "many", "optimize": 5, "epochs": []}'),
        *('{"store": 5, "run_id": []}', '{"reward": {"name": "../x"}}', '{"failure_reward": {}}'),
    ],
)
async def test_odd_settings_hide_no_other_run(config: str, tmp_path: Path) -> None:
    await make_run(tmp_path / "good", steps=1)
    odd = await make_run(tmp_path / "odd", steps=1)
    (odd.path / "config.json").write_text(config)
    async with serving(tmp_path) as client:
        names = {run.name for run in (await client.get("/places", v.Places)).runs}
        assert names == {"good", "odd"}
        for path in ("/runs/odd", "/runs/odd/metrics", "/runs/odd/rollouts", "/runs/odd/prompts"):
            answer = await client.send(PREFIX + path)
            assert answer.status == 200 or answer.error


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "train", "step": 1, "seconds": "x", "reward": "high"},
        {"kind": "eval", "step": 99, "mean": [], "n": {}},
        {"kind": "train", "step": -1, "rollouts": "x", "failed": None, "cost": "much"},
        {"kind": "other", "step": 10**30},
    ],
)
async def test_odd_metrics_hide_no_other_run(line: dict[str, Any], tmp_path: Path) -> None:
    await make_run(tmp_path / "good", steps=1)
    odd = await make_run(tmp_path / "odd", steps=1, is_complete=False)
    with (odd.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    async with serving(tmp_path) as client:
        runs = {run.name: run for run in (await client.get("/places", v.Places)).runs}
        assert runs["good"].error == ""
        for path in ("/runs/odd", "/runs/odd/metrics", "/runs/odd/rollouts"):
            answer = await client.send(PREFIX + path)
            assert answer.status == 200 or answer.error


@pytest.mark.slow
async def test_a_store_grows_and_moves_while_a_page_is_open(tmp_path: Path) -> None:
    place, other = tmp_path / "here" / "run", tmp_path / "here" / "other"
    place.parent.mkdir()
    folder = await make_run(place, steps=2)
    await make_run(other, steps=1)
    async with serving(tmp_path / "here") as client, changes_of(client) as next_change:
        first = await client.get("/runs/run/rollouts", v.RolloutPage, limit=2)
        assert [row.rollout_id for row in first.rows] == ["ro-2-1", "ro-2-0"]
        await asyncio.sleep(1.2)  # the times of the files are read
        async with open_store(folder.store_url) as store:
            routing = make_routing({"writer": "main"}, None, "main", None)
            resources = await store.put_resources({ROUTING: routing})
            for number in range(3):
                await roll_out(store, resources, 3, number, 0.5)
        assert (await next_change())["place"] == "runs/run"
        # the next page goes on where the first one ended, although there are new rows before it
        query = {"limit": 2, "cursor": first.cursor}
        second = await client.get("/runs/run/rollouts", v.RolloutPage, **query)
        assert [row.rollout_id for row in second.rows] == ["ro-1-1", "ro-1-0"]
        assert (second.total, second.cursor) == (7, "")
        assert (await client.get("/runs/run", v.RunDetail)).coverage_of == 7

        file, away = place / "store.db", tmp_path / "away.db"
        file.rename(away)
        assert (await next_change())["place"] == "runs/run"
        for path in ("rollouts", "facets", "groups", "rollouts/ro-1-0", "export"):
            answer = await client.send(f"{PREFIX}/runs/run/{path}")
            assert (answer.status, "store.db" in answer.error) == (404, True)
        run = await client.get("/runs/run", v.RunDetail)
        assert "store.db" in run.error
        assert (run.summary.state, run.summary.steps) == ("finished", 2)
        assert (await client.get("/runs/other/rollouts", v.RolloutPage)).total == 2

        away.rename(file)
        assert (await next_change())["place"] == "runs/run"
        assert (await client.get("/runs/run/rollouts", v.RolloutPage)).total == 7
        assert (await client.get("/runs/run", v.RunDetail)).error == ""

        place.rename(place.with_name("renamed"))  # with its store open
        while (await next_change())["place"]:  # until the list of runs changes
            pass
        assert (await client.send(f"{PREFIX}/runs/run/rollouts")).status == 404
        assert (await client.get("/runs/renamed/rollouts", v.RolloutPage)).total == 7


@pytest.mark.parametrize("version", [1, 99])
async def test_a_store_that_changes_its_format_says_so(version: int, tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    async with serving(url) as client:
        assert (await client.get("/stores/app/rollouts", v.RolloutPage)).total == 3
        await make_production_store(tmp_path / "new.db")
        with sqlite3.connect(tmp_path / "new.db") as db:
            db.execute(f"PRAGMA user_version = {version}")
        db.close()
        (tmp_path / "new.db").replace(tmp_path / "app.db")
        answer = await client.send(f"{PREFIX}/stores/app/rollouts")
        assert answer.status in (400, 503)
        assert "app.db" in answer.error


async def test_a_store_that_is_written_to_is_read(tmp_path: Path) -> None:
    url = await make_production_store(tmp_path / "app.db")
    async with serving(url) as client:
        for begin in ("BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"):
            db = sqlite3.connect(tmp_path / "app.db")
            db.execute(begin)
            [store] = (await client.get("/places", v.Places)).stores
            assert (store.error, store.rollouts) == ("", {"succeeded": 3})
            assert (await client.get("/stores/app/rollouts", v.RolloutPage)).total == 3
            db.rollback()
            db.close()
