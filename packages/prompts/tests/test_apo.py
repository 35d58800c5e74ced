"""Tests of APO's search with simulated rollouts: rounds, models, unusable answers. `test_search.py`
has what it shares with GEPA's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan import LLM
from lightspan.schema.records import task_id
from lightspan_testing.scripted import Reply, ScriptedServer
from packages.prompts.tests.made_up import (
    SMALL,
    TASKS,
    World,
    apo,
    call,
    is_edit,
    reflects,
    score,
    search,
    text_of,
)


# --- rounds ---------------------------------------------------------------------------------
async def test_one_round_is_what_it_says(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: (
        f"<prompt>{text_of(request)} ALPHA BETA</prompt>" if is_edit(request) else "lacks both"
    )
    world = World(tmp_path)
    result = await search(apo(server, **SMALL), world)
    # the initial prompt on the whole selection split; the tasks of the critique; both prompts on a
    # batch; the better one on the whole split
    assert world.batches == [5, 2, 6, 5]
    assert (result.rollouts, result.reflections, result.unusable) == (18, 2, 0)
    changed = {"first": "Do {q}. ALPHA BETA", "second": "Then {q}."}
    assert [each.templates for each in result.candidates[1:]] == [changed]
    assert result.candidates[1].parents == [0]
    split = apo(server, **SMALL).split(TASKS)
    wanted = {task_id(task): score(task, changed) for task in split.selection}
    assert result.candidates[1].rewards == wanted
    assert result.candidates[1].mean == sum(filter(None, wanted.values())) / 5
    assert result.chosen == 1


@pytest.mark.parametrize("limit", range(140, 620, 60))
async def test_each_text_is_a_proposal_if_a_budget_ends_the_search(
    server: ScriptedServer, tmp_path: Path, limit: int
) -> None:
    """Each rollout takes 20 tokens. Texts that were not compared are dropped, and told."""
    server.script = lambda request: (
        f"<prompt>{text_of(request)} {len(server.requests)}</prompt>"
        if is_edit(request)
        else "lacks a number"
    )
    world = World(tmp_path, lambda task, texts: 0.5, calls=[call(1, "small", 15, 5)])
    found = await search(apo(server, max_tokens=limit), world)
    lines = (tmp_path / "journal/apo.jsonl").read_text().splitlines()
    edits = [entry for entry in map(json.loads, lines[1:]) if "<prompt>" in entry.get("answer", "")]
    assert "max_tokens" in found.ended
    assert len(found.proposals) == len(edits)
    assert all(each.text and each.line() in world.notes for each in found.proposals)
    open_ones = [each for each in found.proposals if each.after is None]
    assert {each.why for each in open_ones} <= {"the search ended before it was compared"}


async def test_a_beam_is_expanded_and_cut(server: ScriptedServer, tmp_path: Path) -> None:
    """Every new candidate is distinct here, so each round has four."""
    server.script = lambda request: (
        f"<prompt>{text_of(request)} {len(server.requests)}</prompt>"
        if is_edit(request)
        else "lacks a number"
    )
    world = World(tmp_path, lambda task, texts: 1.0 + len(texts["first"]))
    result = await search(apo(server, beam_rounds=2, reflections_at_once=1), world)
    # a round: 4 x 2 for critiques, then the beam (1, later 2) and 4 new ones on a batch of 3
    assert world.batches == [5, 8, 15, 5, 8, 18, 5]
    assert len(result.candidates) == 9
    assert [each.parents for each in result.candidates[1:5]] == [[0]] * 4
    means = {n: each.mean for n, each in enumerate(result.candidates[:5])}
    beam = sorted(means, key=lambda n: (-means[n], n))[:2]
    assert [each.parents for each in result.candidates[5:]] == [[n] for n in (*beam, *beam)]
    # with two prompts, expansions alternate between them, and new candidates continue with the next
    changes = [
        [n for n in each.templates if each.templates[n] != result.candidates[p].templates[n]]
        for each in result.candidates[1:]
        for p in each.parents
    ]
    others = [["second"] if n in (1, 3) else ["first"] for n in beam]
    assert changes == [["first"], ["second"]] * 2 + [*others, *(_other(n) for n in others)]
    assert [n for n, each in enumerate(result.candidates) if each.is_whole] == [0, 1, 7]


def _other(names: list[str]) -> list[str]:
    return ["first"] if names == ["second"] else ["second"]


async def test_equal_candidates_are_one(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: (
        "<prompt>{q} anew</prompt>" if is_edit(request) else "write it anew"
    )
    world = World(tmp_path)
    result = await search(apo(server, beam_rounds=1, branch_factor=3), world)
    assert [each.templates for each in result.candidates[1:]] == [
        {"first": "{q} anew", "second": "Then {q}."},
        {"first": "Do {q}.", "second": "{q} anew"},
    ]
    assert (result.reflections, result.unusable) == (12, 4)
    assert sum("it equals candidate 1" in note for note in world.notes) == 2


async def test_a_lucky_candidate_is_not_chosen(server: ScriptedServer, tmp_path: Path) -> None:
    """It is the best on the batch, and no better than the initial one on the whole split."""
    seen: dict[str, int] = {}

    def lucky(task: Any, texts: Mapping[str, str]) -> float:
        looks = seen[task_id(task)] = seen.get(task_id(task), 0) + 1
        return 0.5 if "Q." in texts["first"][-2:] else float(looks < 4)

    server.script = lambda request: (
        f"<prompt>{text_of(request)} luck</prompt>" if is_edit(request) else "lacks luck"
    )
    result = await search(apo(server, **SMALL), World(tmp_path, lucky))
    assert result.candidates[1].is_whole
    assert result.candidates[1].mean < result.candidates[0].mean == 0.5
    assert result.chosen == 0


async def test_a_change_without_gain_is_not_made(server: ScriptedServer, tmp_path: Path) -> None:
    result = await search(apo(server), World(tmp_path, lambda task, texts: 0.25))
    assert len(result.candidates) > 3
    assert result.chosen == 0
    assert not any(each.is_whole for each in result.candidates[1:])


async def test_solved_tasks_are_not_reflected_on(server: ScriptedServer, tmp_path: Path) -> None:
    """Only the selection split has an unsolved task here."""
    algorithm = apo(server, perfect_reward=1.0)
    bad = task_id(algorithm.split(TASKS).selection[0])
    world = World(tmp_path, lambda task, texts: float(task_id(task) != bad))
    result = await search(algorithm, world)
    assert (result.reflections, world.batches) == (0, [5, 8, 8, 8])


# --- models that fail -----------------------------------------------------------------------
async def test_a_critic_and_an_editor_of_their_own(tmp_path: Path) -> None:
    with ScriptedServer(reflects) as critic, ScriptedServer(reflects) as editor:
        algorithm = apo(
            critic, edits=LLM(base_url=editor.url, model="writer", sampling={"temperature": 0.5})
        )
        result = await search(algorithm, World(tmp_path))
        assert not any(map(is_edit, critic.requests))
        assert all(map(is_edit, editor.requests))
        assert len(critic.requests) + len(editor.requests) == result.reflections
        bodies = [(each.body["model"], each.body["temperature"]) for each in editor.requests]
        assert set(bodies) == {("writer", 0.5)}


async def test_a_long_critique_is_truncated(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: reflects(request) if is_edit(request) else "it lacks " * 50_000
    await search(apo(server, **SMALL), World(tmp_path))
    _, edit = server.requests
    assert len(edit.last_text) < 10_000
    assert "characters left out" in edit.last_text


async def test_an_empty_critique_is_not_passed_on(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Reply(text=None)
    world = World(tmp_path)
    result = await search(apo(server, **SMALL), world)
    assert (result.reflections, result.unusable, len(server.requests)) == (1, 1, 1)
    assert any("the critique is empty" in note for note in world.notes)
