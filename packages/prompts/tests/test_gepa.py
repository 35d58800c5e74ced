"""Tests of GEPA's search with simulated rollouts: merging, comparisons, finalists, budgets.
`test_search.py` has what it shares with APO's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lightspan import GEPA, LLM, Price, PromptTemplate
from lightspan.errors import RewardError
from lightspan.schema.records import task_id
from lightspan_prompts.search.candidates import read_found
from lightspan_testing.scripted import Request, ScriptedServer
from packages.prompts.tests.made_up import TASKS, World, call, gepa, pool, score, search


# --- candidates -----------------------------------------------------------------------------
async def test_siblings_are_merged(server: ScriptedServer, tmp_path: Path) -> None:
    """The library's choice among ancestors fails where their scores sum to 0."""
    merged, batches = [], []
    for seed in (5, 10, 17):  # some of which merge siblings
        world = World(tmp_path / str(seed))
        found = await search(gepa(server, seed=seed, proposals=3, max_rollouts=200), world)
        assert world.batches[:2] == [5, 6]  # the selection split; both minibatches concurrently
        batches += world.batches
        merged += [
            [found.candidates[parent].parents for parent in each.parents]
            for each in found.candidates
            if len(each.parents) == 2
        ]
    assert [[0], [0]] in merged
    assert {10, 15} & set(batches)  # two or three candidates on the selection split concurrently
    alone = await search(gepa(server, merge=False, proposals=3, seed=5), World(tmp_path / "alone"))
    assert all(len(each.parents) < 2 for each in alone.candidates)


# --- what it is compared by -----------------------------------------------------------------
async def test_rounding_makes_no_candidate_better(server: ScriptedServer, tmp_path: Path) -> None:
    """Sums of equal rewards depend on their order: 0.3 + 0.2 + 0.1 is less than 0.1 + 0.2 + 0.3."""
    algorithm = gepa(server, minibatch=3, selection=0.7, max_rollouts=200)
    places = {task_id(task): n for n, task in enumerate(algorithm.split(TASKS).feedback)}

    def shuffled(task: Any, texts: Mapping[str, str]) -> float:
        turn = places.get(task_id(task), 0) + sum(map(len, texts.values()))
        return (0.1, 0.2, 0.3)[turn % 3]

    found = await search(algorithm, World(tmp_path, shuffled))
    assert found.reflections > 10
    assert len(found.candidates) == 1


@pytest.mark.parametrize("low", [-3.0, -1e5])
async def test_rewards_may_be_negative(server: ScriptedServer, tmp_path: Path, low: float) -> None:
    world = World(tmp_path, lambda task, texts: low + score(task, texts))
    found = await search(gepa(server), world)
    assert found.candidates[0].mean == low
    assert found.candidates[found.chosen].mean > low + 0.3


async def test_rewards_that_are_too_large_end_it(server: ScriptedServer, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"a reward of 1e\+06 is too large to compare exactly"):
        await search(gepa(server), World(tmp_path, lambda task, texts: 1e6))
    assert server.requests == []


async def test_a_key_in_a_task_is_shown_nowhere(server: ScriptedServer, tmp_path: Path) -> None:
    key = "sk-" + "proj-abcdefghijklmnop1234567890"
    world = World(tmp_path)
    world.tasks = [{**task, "with": key} for task in TASKS]
    await search(gepa(server, max_reflections=1), world)
    [request] = server.requests
    logged = (tmp_path / "journal" / "gepa.jsonl").read_text()
    assert key not in request.last_text + logged
    assert '"with": "<key>"' in request.last_text
    assert logged.count("<key>") > 5


# --- the finalists --------------------------------------------------------------------------
class Lucky:
    """Rewards of a lucky prompt: with ALPHA, 1 on each task in the first run and 0 afterwards.

    With BETA alone a prompt scores 0.6, and the initial prompts score 0.55.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def __call__(self, task: Any, texts: Mapping[str, str]) -> float:
        text = texts["first"]
        if "ALPHA" not in text:
            return 0.6 if "BETA" in text else 0.55
        is_new = (text, task_id(task)) not in self.seen
        self.seen.add((text, task_id(task)))
        return float(is_new)


@pytest.mark.parametrize(
    ("finalists", "chosen", "means"),
    [
        (0, 2, [0.55, 0.6, 1.0]),
        (1, 0, [0.55, 0.6, 0.5]),  # candidate 1 has no further result
        (2, 1, [0.55, 0.6, 0.5]),
        (9, 1, [0.55, 0.6, 0.5]),
    ],
)
async def test_one_that_won_by_luck_is_not_chosen(
    tmp_path: Path, finalists: int, chosen: int, means: list[float]
) -> None:
    def answers(request: Request) -> str:
        text = request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]
        return f"<prompt>\n{text} {'ALPHA' if len(server.requests) > 1 else 'BETA'}\n</prompt>"

    prompts, world = {"first": PromptTemplate("Do {q}.")}, World(tmp_path, Lucky())
    with ScriptedServer(answers) as server:
        llm = LLM(base_url=server.url, model="thinker")
        algorithm = GEPA(prompts, llm, max_reflections=2, finalists=finalists, significance=None)
        found = await search(algorithm, world)
    assert [each.mean for each in found.candidates] == pytest.approx(means)
    assert found.chosen == chosen
    again = [number for number, each in enumerate(found.candidates) if each.again]
    assert again == [[], [0, 2], [0, 1, 2], [0, 1, 2]][min(finalists, 3)]
    assert {*found.candidates[2].again.values()} == ({0.0} if finalists else set())
    assert found.rollouts == world.rollouts_done
    assert read_found(tmp_path) == found


# --- budgets --------------------------------------------------------------------------------
async def test_finalists_need_candidates_and_tokens(server: ScriptedServer, tmp_path: Path) -> None:
    many = await search(gepa(server, finalists=30), World(tmp_path / "many"))
    assert len(many.candidates) > 1
    assert any(each.again for each in many.candidates)
    spent = await search(gepa(server, max_tokens=1), World(tmp_path / "spent"))
    assert spent.ended.startswith("max_tokens=1 is used up")
    assert not any(each.again for each in spent.candidates)
    world = World(tmp_path / "half")
    half = await search(gepa(server, max_tokens=many.tokens // 2), world)
    assert len(half.candidates) > 1
    assert not any(each.again for each in half.candidates)
    assert f"{half.ended}, so no candidate is run a second time: first runs decide" in world.notes


@pytest.mark.parametrize(("limit", "count"), [(36, 0), (37, 2), (41, 2), (42, 3)])
async def test_a_budget_that_does_not_suffice_for_the_finalists_is_told(
    server: ScriptedServer, tmp_path: Path, limit: int, count: int
) -> None:
    """If it does not suffice for the initial prompts and one finalist, none is run again."""
    world = World(tmp_path, lambda task, texts: len("".join(texts.values())) / 100)
    found = await search(gepa(server, max_rollouts=limit, proposals=2), world)
    assert sum(bool(each.again) for each in found.candidates) == count
    text = f"max_rollouts={limit} suffices to run {max(0, count - 1)} of 2 finalists and the "
    text += "initial prompts a second time" + ("" if count else ", so first runs are compared")
    assert (text in world.notes) is (count < 3)


@pytest.mark.parametrize(
    "limit", [{"max_rollouts": 20}, {"max_rollouts": 60}, {"max_reflections": 2}]
)
async def test_a_smaller_budget(
    server: ScriptedServer, tmp_path: Path, limit: dict[str, int]
) -> None:
    """The log's further entries are left unchanged, and what was paid for them is counted."""
    prices = {"thinker": Price(input=1.0, output=1.0)}
    whole = await search(gepa(server, prices=prices), World(tmp_path))
    asked, world = len(server.requests), World(tmp_path)
    less = await search(gepa(server, **limit, prices=prices), world)
    assert (len(server.requests), world.rollouts_done) == (asked, 0)
    assert len(less.candidates) < len(whole.candidates)
    for name in ("rollouts", "reflections", "tokens", "cost", "usage"):
        assert getattr(less, name) == getattr(whole, name), name
    assert sum("of an earlier, larger budget are counted" in note for note in world.notes) == 1
    assert pool(less)[0] == pool(whole)[0]
    again = await search(gepa(server, prices=prices), World(tmp_path))
    assert (pool(again), again.tokens) == (pool(whole), whole.tokens)


@pytest.mark.parametrize("more", [151, 170, 200, 300])
async def test_finalists_of_a_smaller_budget_are_paid_for(
    server: ScriptedServer, tmp_path: Path, more: int
) -> None:
    """They count in a larger budget too, and the same finalists are not run again."""
    first = World(tmp_path, calls=[call(1, "small", 10, 5)])
    less = await search(gepa(server), first)
    assert any(each.again for each in less.candidates)
    second = World(tmp_path, calls=first.calls)
    found = await search(gepa(server, max_rollouts=more), second)
    assert found.rollouts == first.rollouts_done + second.rollouts_done <= more
    assert found.reflections == len(server.requests)
    assert found.usage["small"] == (10 * found.rollouts, 5 * found.rollouts)
    third = World(tmp_path, calls=first.calls)
    again = await search(gepa(server, max_rollouts=more), third)
    # the totals in proposals are of their time, and answers arrive at the same time
    assert replace(again, proposals=[]) == replace(found, proposals=[])
    assert third.rollouts_done == 0
    smaller = World(tmp_path, calls=first.calls)
    back = await search(gepa(server), smaller)
    assert (smaller.rollouts_done, pool(back), back.chosen) == (0, pool(less), less.chosen)
    assert back.rollouts == found.rollouts


async def test_finalists_that_are_paid_for_need_no_rollouts(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """Raise a budget by one candidate: it takes 11 rollouts, and 5 more if it is a finalist.

    Both finalists and the initial prompts were run a second time.
    """
    world = World(tmp_path)
    less = await search(gepa(server), world)
    assert sum(bool(each.again) for each in less.candidates) == 1 + gepa(server).finalists == 3
    too_small = await search(gepa(server, max_rollouts=less.rollouts + 15), World(tmp_path))
    assert (too_small.reflections, too_small.rollouts) == (less.reflections, less.rollouts)
    assert too_small.ended.endswith("another candidate may take 11; 5 are for the finalists")
    found = await search(gepa(server, max_rollouts=less.rollouts + 16), World(tmp_path))
    assert found.reflections > less.reflections
    assert less.rollouts < found.rollouts <= less.rollouts + 16
    again = World(tmp_path)
    assert pool(await search(gepa(server, max_rollouts=less.rollouts + 16), again)) == pool(found)
    assert again.rollouts_done == 0


@pytest.mark.parametrize(("tasks", "minibatch"), [(4, 3), (5, 2)])
async def test_a_minibatch_has_no_task_twice(
    server: ScriptedServer, tmp_path: Path, tasks: int, minibatch: int
) -> None:
    """The library fills a minibatch up with tasks that are in it already."""
    world = World(tmp_path)
    world.tasks = TASKS[:tasks]
    await search(gepa(server, max_rollouts=60, minibatch=minibatch, merge=False), world)
    lines = (tmp_path / "journal/gepa.jsonl").read_text().splitlines()
    batches = [
        [one["task_id"] for one in entry["seen"]]
        for entry in map(json.loads, lines)
        if entry.get("split") == "feedback"
    ]
    assert len(batches) > 4
    assert {len(batch) for batch in batches} == {2}
    assert all(len(set(batch)) == 2 for batch in batches)
    note = "minibatch=3: reflections show 2 tasks, all that the selection split leaves"
    assert (note in world.notes) is (minibatch == 3)


async def test_a_merge_on_a_small_selection_split_repeats_no_task(
    server: ScriptedServer, tmp_path: Path
) -> None:
    world = World(tmp_path)
    world.tasks = TASKS[:8]
    await search(gepa(server, max_rollouts=200), world)
    lines = (tmp_path / "journal/gepa.jsonl").read_text().splitlines()
    for entry in map(json.loads, lines):
        ids = [one["task_id"] for one in entry.get("seen", ())]
        assert len(set(ids)) == len(ids)
