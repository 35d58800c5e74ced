"""Tests of APO's search with simulated rollouts: rounds, equal candidates after any interruption,
budgets, failing models. `test_apo_runs.py` has real rollouts."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan import APO, LLM, Price, PromptTemplate
from lightspan.errors import CheckpointError, ConfigError, EngineError, RewardError
from lightspan.schema.records import task_id
from lightspan_prompts import endpoint_client
from lightspan_prompts.apo import reflection_prompts
from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_prompts.search.search_log import Evaluation, Reflection, SearchLog
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.prompts.tests.made_up import TASKS, WORDS, World, pool, score

SMALL: dict[str, Any] = {
    "beam_width": 1,
    "branch_factor": 1,
    "beam_rounds": 1,
    "gradient_batch_size": 2,
    "val_batch_size": 3,
}
BEAM: dict[str, Any] = {**SMALL, "beam_width": 2, "branch_factor": 2, "beam_rounds": 3}


def is_edit(request: Request) -> bool:
    return "<critique>" in request.last_text


def text_of(request: Request) -> str:
    return request.last_text.partition("<prompt>\n")[2].partition("\n</prompt>")[0]


def reflects(request: Request) -> str:
    """The critic names a word that depends on the whole request, the editor adds it."""
    if not is_edit(request):
        return f"it lacks {random.Random(request.last_text).choice([*WORDS, 'nothing'])}"
    word = request.last_text.partition("it lacks ")[2].split()[0]
    return f"<prompt>\n{text_of(request)} {word}\n</prompt>"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflects) as running:
        yield running


def apo(server: ScriptedServer, **options: Any) -> APO:
    prompts = {"first": PromptTemplate("Do {q}."), "second": PromptTemplate("Then {q}.")}
    llm = LLM(base_url=server.url, model="thinker")
    return APO(prompts, llm, **{**BEAM, "perfect_reward": None, **options})


async def search(algorithm: APO, world: World) -> SearchResult:
    await algorithm.run_step(world)  # type: ignore[arg-type]
    assert algorithm.found is not None
    return algorithm.found


# --- rounds ---------------------------------------------------------------------------------
async def test_it_finds_better_prompts(server: ScriptedServer, tmp_path: Path) -> None:
    algorithm, world = apo(server, beam_rounds=6), World(tmp_path)
    result = await search(algorithm, world)
    first, best = result.candidates[0], result.candidates[result.chosen]
    assert (first.templates, first.parents) == ({"first": "Do {q}.", "second": "Then {q}."}, [])
    assert (first.mean, first.is_whole) == (0.0, True)
    assert best.mean == max(each.mean for each in result.candidates if each.is_whole) >= 0.6
    assert algorithm.resources() == {n: PromptTemplate(t) for n, t in best.templates.items()}
    learned = algorithm.learned_prompts()
    assert {name: each.after for name, each in learned.items()} == algorithm.resources()
    assert result.rollouts == world.rollouts_done
    assert result.reflections == len(server.requests)
    assert result.ended == "6 rounds of the beam are done"
    assert read_found(tmp_path) == result
    again = apo(server)
    again.load_state(json.loads(json.dumps(algorithm.state())))
    assert again.resources() == algorithm.resources()


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


async def test_a_large_round_is_run_in_parts(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed within it loses one of them."""
    monkeypatch.setattr("lightspan_prompts.apo.search.MAX_CONCURRENT_ROLLOUTS", 4)
    world = World(tmp_path)
    result = await search(apo(server, beam_rounds=1), world)
    fresh = len(result.candidates) - 1
    assert fresh > 1
    assert world.batches[: 3 + 1 + fresh] == [5, 4, 4, *[3] * (1 + fresh)]


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


async def test_a_round_without_new_candidates_compares_nothing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.script = lambda request: "I would rather talk about the weather, at length."
    world = World(tmp_path)
    result = await search(apo(server, beam_rounds=2), world)
    assert world.batches == [5, 8, 8]
    assert (len(result.candidates), result.reflections, result.unusable) == (1, 16, 8)
    assert world.notes[-2].startswith("2 rounds of the beam are done. Of 1 candidate the prompts s")
    assert world.notes[-1] == "8 of 16 answers of the reflection model were unusable"


async def test_a_candidate_that_wins_by_luck_is_not_chosen(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """It is lucky on the batch, and no better than the initial one on the whole split."""
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


async def test_a_change_that_gains_nothing_is_not_made(
    server: ScriptedServer, tmp_path: Path
) -> None:
    result = await search(apo(server), World(tmp_path, lambda task, texts: 0.25))
    assert len(result.candidates) > 3
    assert result.chosen == 0
    assert [each.is_whole for each in result.candidates[1:]] == [False] * (
        len(result.candidates) - 1
    )


async def test_an_equal_seed_finds_equal_candidates_and_another_one_others(
    server: ScriptedServer, tmp_path: Path
) -> None:
    one, two, other = [
        pool(await search(apo(server, seed=seed), World(tmp_path / name)))
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    ]
    assert one == two != other


async def test_it_ends_when_nothing_is_left_to_learn(
    server: ScriptedServer, tmp_path: Path
) -> None:
    result = await search(
        apo(server, perfect_reward=1.0), World(tmp_path / "a", lambda task, texts: 1.0)
    )
    assert (result.rollouts, result.reflections, result.chosen) == (5, 0, 0)
    assert result.ended == "the selection split has the perfect reward on every task"
    # solved tasks are not reflected on: here only the selection split has an unsolved one
    algorithm = apo(server, perfect_reward=1.0)
    bad = task_id(algorithm.split(TASKS).selection[0])
    world = World(tmp_path / "b", lambda task, texts: float(task_id(task) != bad))
    result = await search(algorithm, world)
    assert (result.reflections, world.batches) == (0, [5, 8, 8, 8])


# --- going on -------------------------------------------------------------------------------
async def test_it_goes_on_wherever_it_was_cut_off(server: ScriptedServer, tmp_path: Path) -> None:
    """The answers of a round arrive in any order."""
    whole_world = World(tmp_path / "whole")
    whole = await search(apo(server, beam_rounds=2), whole_world)
    lines = (tmp_path / "whole" / "journal" / "apo.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds.count("reflection") == whole.reflections > 12
    for cut in range(1, len(lines) + 1):
        torn = lines[cut - 1][: len(lines[cut - 1]) // 2] if cut % 3 == 0 else b""
        path = tmp_path / f"cut-{cut}"
        (path / "journal").mkdir(parents=True)
        (path / "journal" / "apo.jsonl").write_bytes(b"".join(lines[:cut]) + torn)
        world, asked = World(path), len(server.requests)
        result = await search(apo(server, beam_rounds=2), world)
        assert (pool(result), result.chosen) == (pool(whole), whole.chosen)
        kept = [json.loads(line) for line in lines[1:cut]]
        replayed = sum(len(entry.get("seen", ())) for entry in kept)
        assert world.rollouts_done == whole_world.rollouts_done - replayed
        reflected = sum(entry["type"] == "reflection" for entry in kept)
        assert len(server.requests) - asked == whole.reflections - reflected
        assert (result.rollouts, result.reflections, result.tokens, result.unusable) == (
            whole.rollouts,
            whole.reflections,
            whole.tokens,
            whole.unusable,
        )


def test_a_journal_answers_what_is_asked_at_once_in_any_order(tmp_path: Path) -> None:
    def entry(key: str) -> Reflection:
        answer = {"answer": f"to {key}", "finish_reason": "stop", "asked": "why?"}
        return Reflection(key=key, prompt="p", input_tokens=1, output_tokens=1, **answer)

    path = tmp_path / "journal" / "x.jsonl"
    journal = SearchLog(path, "x 1")
    for key in ("b", "a", "c"):
        journal.add(entry(key))
    journal.close()
    journal = SearchLog(path, "x 1")
    assert journal.replayed(["a", "b"], Reflection) == [entry("a"), entry("b")]
    assert journal.replayed(["d", "c", "c"], Reflection) == [None, entry("c"), None]
    assert not journal.is_replaying
    assert journal.replayed(["e"], Reflection) == [None]
    journal.close()
    for keys, kind in ((["a", "c"], Reflection), (["b"], Evaluation)):
        journal = SearchLog(path, "x 1")
        with pytest.raises(
            CheckpointError, match=r"x\.jsonl: entry \d differs from the current request"
        ):
            journal.replayed(keys, kind)
        journal.close()
    with pytest.raises(CheckpointError, match=r"was begun with Header\(library='x 1'"):
        SearchLog(path, "x 2")


async def test_a_journal_of_other_questions(server: ScriptedServer, tmp_path: Path) -> None:
    await search(apo(server), World(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"apo.jsonl: entry 1 differs from the current request"
    ):
        await search(apo(server, seed=1), World(tmp_path))


# --- what candidates are compared by --------------------------------------------------------
async def test_reflections_never_see_the_selection_split(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm = apo(server)
    split = algorithm.split(TASKS)
    await search(algorithm, World(tmp_path))
    asked = "".join(request.last_text for request in server.requests)
    assert all(json.dumps(task) in asked for task in split.feedback)
    assert not any(json.dumps(task) in asked for task in split.selection)


async def test_what_has_no_reward_stays_in_the_mean(server: ScriptedServer, tmp_path: Path) -> None:
    """A timeout, for example: lost rollouts must not improve a candidate's mean."""

    def some(task: Any, texts: Mapping[str, str]) -> float | None:
        return None if task["n"] % 2 else 0.5

    result = await search(apo(server, failure_reward=-1.0), World(tmp_path, some))
    selection = apo(server).split(TASKS).selection
    unscored = sum(task["n"] % 2 for task in selection)
    first = result.candidates[0]
    assert 0 < unscored < 5
    assert first.mean == (0.5 * (5 - unscored) - unscored) / 5
    assert list(first.rewards.values()).count(None) == unscored
    assert result.mean == 0.5
    assert result.unscored > unscored


async def test_rewards_that_cannot_be_compared_end_it(
    server: ScriptedServer, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match="no rollout of the initial prompts has a reward"):
        await search(apo(server), World(tmp_path, lambda task, texts: None))
    assert server.requests == []


# --- budgets --------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [18, 23, 40, 60, 61, 62])
async def test_rollouts_are_never_more_than_given(
    server: ScriptedServer, tmp_path: Path, limit: int
) -> None:
    world = World(tmp_path)
    result = await search(apo(server, max_rollouts=limit), world)
    assert result.rollouts == world.rollouts_done <= limit
    assert f"{result.rollouts} of max_rollouts={limit} rollouts are done, and" in result.ended
    assert len(result.candidates) > 1


async def test_too_few_rollouts_for_one_candidate(server: ScriptedServer, tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=r"max_rollouts=17\) is too few .* at least 18"):
        await search(apo(server, max_rollouts=17), world)
    assert world.rollouts_done == 0


@pytest.mark.parametrize(("limit", "asked"), [(2, 2), (5, 4), (9, 8), (10, 10)])
async def test_reflections_are_never_more_than_given(
    server: ScriptedServer, tmp_path: Path, limit: int, asked: int
) -> None:
    result = await search(apo(server, max_reflections=limit), World(tmp_path))
    assert result.reflections == len(server.requests) == asked
    done = f"{asked} of max_reflections={limit} reflections are done"
    assert result.ended == f"{done}, and another candidate takes two"


async def test_tokens_are_counted(server: ScriptedServer, tmp_path: Path) -> None:
    result = await search(apo(server, max_tokens=500), World(tmp_path))
    assert result.tokens > sum(len(request.last_text.split()) for request in server.requests) > 500
    assert result.ended == f"max_tokens=500 is used up: {result.tokens} tokens"
    assert result.reflections == 4  # concurrent critiques; no edit


async def test_money_is_counted(server: ScriptedServer, tmp_path: Path) -> None:
    prices = {"thinker": Price(input=1000.0, output=1000.0)}
    result = await search(apo(server, max_cost=0.5, prices=prices), World(tmp_path))
    assert result.cost == pytest.approx(result.tokens * 1000.0 / 1e6, rel=1e-12)
    assert result.ended == f"max_cost=0.5 is used up: {result.cost:.4g}"
    assert result.reflections == 4  # concurrent critiques; no edit
    edits = LLM(base_url=server.url, model="editor")
    with pytest.raises(ConfigError, match="none for 'editor'"):
        apo(server, max_cost=0.5, prices=prices, edits=edits)


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


async def test_answers_that_are_of_no_use_cost_no_rollouts(
    server: ScriptedServer, tmp_path: Path
) -> None:
    edits: Any = (
        "I would rather talk about the weather, at length. " * 500,
        "<prompt>no placeholder any more</prompt>",
        "<prompt>Do {q}.</prompt>",
        Reply(text="<prompt>Do {q}, and", finish_reason="length"),
        Reply(text=None),
    )
    values = iter(edits)
    server.script = lambda request: next(values) if is_edit(request) else "bad " * 50_000
    world = World(tmp_path)
    prompts = {"first": PromptTemplate("Do {q}.")}
    algorithm = APO(
        prompts,
        LLM(base_url=server.url, model="thinker"),
        **{**SMALL, "beam_rounds": 6, "max_reflections": 11, "reflections_at_once": 1},
    )
    world.reward = lambda task, texts: 0.0
    result = await search(algorithm, world)
    assert (result.reflections, result.unusable, len(result.candidates)) == (10, 5, 1)
    assert world.batches == [5, 2, 2, 2, 2, 2]
    useless = [note for note in world.notes if "is unusable" in note]
    whys = ("no <prompt>…</prompt>", "has no {q}", "is unchanged", "cut off", "no <prompt>")
    assert len(useless) == 5
    assert all(why in note for why, note in zip(whys, useless, strict=True))
    # a long critique is truncated in the next request
    longest = max(len(request.last_text) for request in server.requests if is_edit(request))
    assert longest < 10_000
    assert "characters left out" in server.requests[1].last_text


async def test_an_empty_critique_is_not_passed_on(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Reply(text=None)
    world = World(tmp_path)
    result = await search(apo(server, **SMALL), world)
    assert (result.reflections, result.unusable, len(server.requests)) == (1, 1, 1)
    assert any("the critique is empty" in note for note in world.notes)


async def test_a_failing_model_ends_it_and_it_goes_on_later(
    server: ScriptedServer, tmp_path: Path
) -> None:
    whole = await search(apo(server), World(tmp_path / "whole"))
    number = len(server.requests)

    def fails(request: Request) -> Any:
        tired = len(server.requests) > number + 10
        return Reply(status=400, text="no more") if tired else reflects(request)

    server.script = fails
    world = World(tmp_path / "run")
    with pytest.raises(EngineError, match=r"thinker at http.* failed: BadRequestError: .*no more"):
        await search(apo(server), world)
    done = world.rollouts_done
    server.script = reflects
    again = World(tmp_path / "run")
    assert pool(await search(apo(server), again)) == pool(whole)
    assert done + again.rollouts_done == whole.rollouts


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=401, text="who are you"), "AuthenticationError: .*who are you"),
        (Reply(drop=True), "APIConnectionError"),
        (Reply(text="late", delay_s=2.0), "(API)?TimeoutError"),
        (Reply(status=429, headers={"retry-after": "31"}), "RateLimitError"),
    ],
)
async def test_a_model_that_does_not_answer(
    server: ScriptedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: Reply,
    error: str,
) -> None:
    monkeypatch.setattr(endpoint_client, "RETRY_BACKOFF_S", 0.01)
    server.script = lambda request: reply if is_edit(request) else reflects(request)
    algorithm = apo(server, reflection_timeout_s=0.5, patience_s=30.0, beam_rounds=1)
    with pytest.raises(EngineError, match=f"failed: {error}"):
        await search(algorithm, World(tmp_path))
    entries = (tmp_path / "journal" / "apo.jsonl").read_text().splitlines()
    assert sum('"type":"reflection"' in line for line in entries) == 4  # the critiques are logged


async def test_a_dead_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(endpoint_client, "RETRY_BACKOFF_S", 0.01)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    algorithm = APO({"first": PromptTemplate("{q}")}, LLM(base_url=url, model="thinker"), **SMALL)
    with pytest.raises(EngineError, match=f"thinker at {url} failed: APIConnectionError"):
        await search(algorithm, World(tmp_path, lambda task, texts: 0.0))


async def test_it_can_be_cancelled_while_it_waits(server: ScriptedServer, tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(request: Request) -> Any:
        loop.call_soon_threadsafe(asked.set)
        return Reply(text="late", delay_s=30)

    server.script = slow
    running = asyncio.create_task(search(apo(server), World(tmp_path)))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.script = reflects
    assert (await search(apo(server), World(tmp_path))).rollouts > 0


# --- questions ------------------------------------------------------------------------------
def test_what_is_asked() -> None:
    template = PromptTemplate('As {{"a": 1}}: {q} {n:.1f} {q}')
    asked = reflection_prompts.critique("style", template, [], reflection_prompts.ANGLES[0])
    changed = reflection_prompts.edit("style", template, " too long ", reflection_prompts.WAYS[0])
    for text in (asked, changed):
        assert '"style"' in text
        assert '<prompt>\nAs {"a": 1}: {q} {n:.1f} {q}\n</prompt>' in text
        assert "placeholders that the application fills: {q}, {n:.1f}." in text
    assert "<critique>\ntoo long\n</critique>" in changed
    assert reflection_prompts.ANGLES[0] in asked
    assert reflection_prompts.WAYS[0] in changed
    plain = PromptTemplate("plain")
    assert "placeholders" not in reflection_prompts.critique("style", plain, [], "")
    assert "placeholders" not in reflection_prompts.edit("style", plain, "", "")


async def test_runs_are_looked_at_in_several_ways(server: ScriptedServer, tmp_path: Path) -> None:
    await search(apo(server, beam_rounds=6), World(tmp_path))
    asked = [request.last_text for request in server.requests]
    for way in (*reflection_prompts.ANGLES, *reflection_prompts.WAYS):
        assert any(way in text for text in asked)
    assert all(re.search("### Run 1\n.*### Run 2\n", text, re.S) for text in asked[:4])


# --- options --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": {}}, r"APO has no prompt to learn: give prompts=.* or optimize=\[\"agent\"\]"),
        ({"optimize": ["p"]}, "'p' is in prompts and in optimize"),
        ({"optimize": [""]}, r"optimize=\[''\]: '' is no name"),
        ({"prompts": {"p": "text"}}, r"prompts\['p'\] is a str: use PromptTemplate"),
        ({"reflection": "gpt"}, "reflection='gpt': use LLM"),
        ({"edits": "gpt"}, "edits='gpt': use LLM"),
        ({"edits": LLM(base_url="x", model="m")}, "the base URL of edits= 'x' is no"),
        ({"beam_width": 0}, "beam_width=0 must be at least 1"),
        ({"branch_factor": 0}, "branch_factor=0"),
        ({"beam_rounds": 1.5}, "beam_rounds=1.5"),
        ({"gradient_batch_size": 0}, "gradient_batch_size=0"),
        ({"val_batch_size": 0}, "val_batch_size=0"),
        ({"max_rollouts": 0}, "max_rollouts=0"),
        ({"max_reflections": 1}, "max_reflections=1 must be at least 2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"reflections_at_once": 0}, "reflections_at_once=0"),
        ({"selection": 0.0}, "selection=0.0"),
        ({"failure_reward": float("nan")}, "failure_reward=nan"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    values = {"prompts": {"p": PromptTemplate("x")}, "reflection": llm, **options}
    with pytest.raises(ConfigError, match=message):
        APO(**values)


def test_its_settings_are_known_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINKER_KEY", "secret-thing")
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="THINKER_KEY")
    config = APO({"p": PromptTemplate("x")}, llm).config()
    assert "secret-thing" not in json.dumps(config)
    assert (config["algorithm"], config["beam_width"], config["val_batch_size"]) == ("APO", 4, 16)


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_prompts.search.validation.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"APO needs 'openai': .*core\[prompts\]"):
        APO({"p": PromptTemplate("x")}, LLM(base_url="http://127.0.0.1:9/v1", model="m"))
