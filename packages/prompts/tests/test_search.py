"""Tests of what both prompt searches share, with simulated rollouts: equal candidates after any
interruption, comparisons, budgets, failing models, options. `tests/trainer` has real rollouts."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import APO, GEPA, LLM, Price, PromptTemplate
from lightspan.errors import CheckpointError, ConfigError, DataError, EngineError, RewardError
from lightspan.lightning.episode import Episode
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import Outcome, task_id
from lightspan_prompts.search.candidates import read_found
from lightspan_prompts.search.search_log import Evaluation, Reflection, SearchLog
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.prompts.tests.made_up import (
    TASKS,
    World,
    apo,
    call,
    gepa,
    is_edit,
    pool,
    reflects,
    search,
    text_of,
)

Make = partial[Any]


@pytest.fixture(params=[gepa, apo], ids=["gepa", "apo"])
def make(request: pytest.FixtureRequest, server: ScriptedServer) -> Make:
    """Return a function that creates a GEPA or an APO with the server as its model."""
    return partial(request.param, server)


def journal(folder: Path) -> Path:
    [path] = (folder / "journal").glob("*.jsonl")
    return path


# --- candidates -----------------------------------------------------------------------------
async def test_it_finds_better_prompts(make: Make, server: ScriptedServer, tmp_path: Path) -> None:
    algorithm, world = make(), World(tmp_path)
    result = await search(algorithm, world)
    first, best = result.candidates[0], result.candidates[result.chosen]
    assert first.templates == {"first": "Do {q}.", "second": "Then {q}."}
    assert (first.parents, first.mean, first.is_whole) == ([], 0.0, True)
    assert best.mean == max(each.mean for each in result.candidates if each.is_whole) > 0.3
    assert all("{q}" in text for each in result.candidates for text in each.templates.values())
    assert algorithm.resources() == {n: PromptTemplate(t) for n, t in best.templates.items()}
    learned = algorithm.learned_prompts()
    assert {name: each.after for name, each in learned.items()} == algorithm.resources()
    assert any(each.is_changed for each in learned.values())
    assert result.rollouts == world.rollouts_done
    assert result.reflections == len(server.requests)
    assert read_found(tmp_path) == result
    again = make()
    again.load_state(json.loads(json.dumps(algorithm.state())))
    assert again.resources() == algorithm.resources()


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("make_search", [gepa, apo])
async def test_a_model_that_sees_is_shown_the_images(
    make_search: Any, most: int, tmp_path: Path
) -> None:
    """Each rollout shows two images; the model sees at most as many as it is allowed."""
    files = [Image.of(name, "image/png") for name in (b"one", b"two")]
    urls = [f"data:image/png;base64,{base64.b64encode(file.data).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = genai_messages.dump([{"role": "user", "content": parts}])
    one = call(1, "reader", 3, 4)
    assert one.span is not None
    span = one.span.replace(attributes={**one.span.attributes, c.INPUT_MESSAGES: messages})
    world = World(tmp_path, calls=[msgspec.structs.replace(one, span=span)])
    world.files = {file.digest: file for file in files}
    shown: list[list[Any]] = []

    def answers(request: Request) -> str:
        content = request.body["messages"][-1]["content"]
        assert isinstance(content, str) or most
        rest = [] if isinstance(content, str) else content[1:]
        shown.append([part for part in rest if part["type"] == "image_url"])
        text = content if isinstance(content, str) else content[0]["text"]
        return reflects(replace(request, body=asked(text)))

    with ScriptedServer(answers) as server:
        await search(make_search(server, reflection_images=most), world)
    assert any(shown) == bool(most)
    assert all(images in ([], parts[:most]) for images in shown)


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def test_equal_seeds(make: Make, tmp_path: Path) -> None:
    one, two, other = [
        pool(await search(make(seed=seed), World(tmp_path / name)))
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    ]
    assert one == two != other


async def test_it_ends_when_all_is_solved(make: Make, tmp_path: Path) -> None:
    world = World(tmp_path, lambda task, texts: 1.0)
    result = await search(make(perfect_reward=1.0), world)
    assert (result.rollouts, result.reflections, result.chosen) == (5, 0, 0)
    assert result.ended == (
        "every task of the selection split has perfect_reward=1 with the initial prompts, so "
        "there is nothing to learn; if a higher reward is possible, give it as perfect_reward=, "
        "or perfect_reward=None"
    )
    assert any("the prompts stay unchanged" in note for note in world.notes)


# --- going on -------------------------------------------------------------------------------
async def test_it_resumes_from_any_cut(make: Make, server: ScriptedServer, tmp_path: Path) -> None:
    """The answers of APO's rounds arrive in any order."""
    options = {"max_rollouts": 80}
    whole_world = World(tmp_path / "whole")
    whole = await search(make(**options), whole_world)
    path = journal(tmp_path / "whole")
    lines = path.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds.count("reflection") == whole.reflections > 3
    for cut in range(1, len(lines) + 1):
        torn = lines[cut - 1][: len(lines[cut - 1]) // 2] if cut % 2 else b""
        folder = tmp_path / f"cut-{cut}"
        (folder / "journal").mkdir(parents=True)
        (folder / "journal" / path.name).write_bytes(b"".join(lines[:cut]) + torn)
        world, before = World(folder), len(server.requests)
        result = await search(make(**options), world)
        assert (pool(result), result.chosen) == (pool(whole), whole.chosen)
        logged = [json.loads(line) for line in lines[1:cut]]
        replayed = sum(len(entry.get("seen", ())) for entry in logged)
        assert world.rollouts_done == whole_world.rollouts_done - replayed
        reflected = sum(entry["type"] == "reflection" for entry in logged)
        assert len(server.requests) - before == whole.reflections - reflected
        assert (result.rollouts, result.reflections, result.tokens, result.unusable) == (
            whole.rollouts,
            whole.reflections,
            whole.tokens,
            whole.unusable,
        )


async def test_duplicates_are_not_run_again(tmp_path: Path, server: ScriptedServer) -> None:
    """Neither a copy of the first prompt nor a text that was dropped before."""
    server.script = lambda request: f"<prompt>\nSay {{q}} {len(server.requests) // 9}\n</prompt>"
    world = World(tmp_path, lambda task, texts: 0.25)
    found = await search(gepa(server), world)
    runs = [json.loads(line) for line in journal(tmp_path).read_text().splitlines()]
    tried = [json.dumps(run["candidate"]) for run in runs if run["type"] == "evaluation"]
    first = json.dumps(found.candidates[0].templates)
    others = [one for one in tried if one != first]
    assert len(others) == len(set(others)) > 2
    assert found.unusable == found.reflections - len(others) > 5
    assert sum("is unusable: it equals the proposal of" in note for note in world.notes) > 5


@pytest.mark.parametrize("answer", ["refused", "empty"])
async def test_a_question_without_an_answer_does_not_end_the_run(
    make: Make, server: ScriptedServer, tmp_path: Path, answer: str
) -> None:
    """Such as one that a filter refuses, which it would do again after a resume."""

    def filters(request: Request) -> Any:
        if len(server.requests) % 3:
            return reflects(request)
        return Reply(status=400, text="a policy") if answer == "refused" else Reply(text="")

    server.script = filters
    world = World(tmp_path)
    whole = await search(make(reflections_at_once=1) if make.func is apo else make(), world)
    asked = len(server.requests)
    refused = asked // 3 if answer == "refused" else 0
    assert whole.reflections == asked - refused
    whys = [each.why for each in whole.proposals if "refused" in each.why]
    assert len(whys) == refused
    assert not any("unusable" in why or "prompt>" in why for why in whys)
    unusable = [each for each in whole.proposals if "is unusable" in each.why]
    assert len(unusable) == whole.unusable >= (0 if refused else asked // 3 > 2)
    if make.func is gepa:  # a reflection has one line at most
        numbers = [each.why.split()[1] for each in unusable]
        assert len(set(numbers)) == len(numbers)
    assert not any("resume=True" in note for note in world.notes)
    again = await search(
        make(reflections_at_once=1) if make.func is apo else make(), World(tmp_path)
    )
    assert len(server.requests) == asked
    assert (pool(again), again.reflections, again.unusable) == (
        pool(whole),
        whole.reflections,
        whole.unusable,
    )


@pytest.mark.parametrize("answer", ["refused", "empty"])
async def test_a_model_that_answers_nothing_ends_the_run_before_its_budget(
    make: Make, server: ScriptedServer, tmp_path: Path, answer: str
) -> None:
    server.script = lambda request: (
        Reply(status=422, text="no temperature") if answer == "refused" else Reply(text=" ")
    )
    why = "no temperature" if answer == "refused" else r"no text \(stop\)"
    with pytest.raises(EngineError, match=f"thinker answered 3 questions in a row .*{why}"):
        await search(make(), World(tmp_path))
    assert 3 <= len(server.requests) <= 6
    unanswered = len(server.requests)
    server.script = reflects
    result = await search(make(), World(tmp_path))
    assert result.reflections > 10
    if answer == "empty" and make.func is gepa:  # one at a time, and each is paid for
        assert result.reflections == len(server.requests)
        assert result.unusable >= unanswered
    assert result.candidates[result.chosen].mean > 0.3


async def test_every_proposal_has_a_line(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    """With its parent, both scores and the reason; dropped texts are kept; a resume adds none."""
    numbers = {"reflections_at_once": 1} if make.func is apo else {"merge": False}

    def adds(request: Request) -> str:
        if make.func is apo and not is_edit(request):
            return "vague"
        text, number = text_of(request), len(server.requests)
        return "no" if number % 5 == 1 else f"<prompt>\n{text} {number}\n</prompt>"

    server.script = adds
    world = World(tmp_path, lambda task, texts: (len(texts["first"]) % 7) / 10)
    found = await search(make(**numbers), world)
    proposals = found.proposals
    assert list(map(msgspec.to_builtins, proposals)) == [
        json.loads(line) for line in (tmp_path / "proposals.jsonl").read_text().splitlines()
    ]
    lowest = {"failure_reward": 0.0}
    assert world.recorded == [{"kind": "search", **each.metrics(), **lowest} for each in proposals]
    assert {"rollouts", "reflections", "tokens", "tasks", "best"} <= world.recorded[0].keys()
    assert not any(None in line.values() for line in world.recorded)
    usable = [each for each in proposals if each.text]
    assert len(proposals) - len(usable) == found.unusable > 0
    dropped = [each for each in usable if each.candidate is None]
    assert dropped
    for each in usable:
        parent = found.candidates[each.parents[0]].templates
        assert each.text != parent[each.prompt]
        if each.candidate is not None:
            new = found.candidates[each.candidate]
            assert (new.templates[each.prompt], new.parents) == (each.text, each.parents)
        assert (each.why == "") == (each.candidate is not None)
        assert (each.before is None) == (each.after is None) == ("ended" in each.why)
        assert each.line() in world.notes
    assert [each.rollouts for each in proposals] == sorted(each.rollouts for each in proposals)
    one = next(each for each in dropped if each.after is not None)
    assert one.line().startswith(
        f"a text for {one.prompt!r} in place of candidate {one.parents[0]}'s: {one.before:.3f} -> "
        f"{one.after:.3f} on {one.tasks} tasks; dropped, it is no"
    )
    again = World(tmp_path, world.reward)
    assert (await search(make(**numbers), again)).proposals == proposals
    assert not any("in place of" in note for note in again.notes)
    assert again.recorded == world.recorded  # `metrics.jsonl` begins anew with the step
    assert len((tmp_path / "proposals.jsonl").read_text().splitlines()) == len(proposals)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.2, 0.4, 0.3, 0.1)])
async def test_a_sum_of_floats_is_a_perfect_reward(
    make: Make, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    world = World(tmp_path, lambda task, texts: sum(weights))
    result = await search(make(perfect_reward=1.0), world)
    assert sum(weights) != 1.0
    assert (result.rollouts, result.reflections, result.chosen) == (5, 0, 0)
    assert not any("is above" in note for note in world.notes)


async def test_an_order_of_adding_is_no_gain(make: Make, tmp_path: Path) -> None:
    """The better texts give 1.0, the initial ones 0.9999999999999999."""

    def reward(task: Any, texts: Mapping[str, str]) -> float:
        is_initial = texts == {"first": "Do Q.", "second": "Then Q."}
        return 0.7 + 0.2 + 0.1 if is_initial else 1.0

    result = await search(make(significance=0.5), World(tmp_path, reward))
    assert (result.chosen, result.best) == (0, 0)


async def test_rewards_above_the_perfect_one(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    """37 of 100 is nothing solved: with such rewards there is no perfect one."""

    def percent(task: Any, texts: Mapping[str, str]) -> float:
        return 37.0 + 10 * ("ALPHA" in texts["first"])

    world = World(tmp_path, percent)
    result = await search(make(perfect_reward=1.0), world)
    assert result.reflections > 5
    assert result.candidates[result.chosen].mean == 47.0
    assert [note for note in world.notes if "is above" in note] == [
        "a reward of 37 is above perfect_reward=1, so no task counts as solved: give the highest "
        "reward there is, or perfect_reward=None"
    ]


async def test_it_resumes_after_a_failure(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    whole = await search(make(), World(tmp_path / "whole"))
    number = len(server.requests)

    def fails(request: Request) -> Any:
        tired = len(server.requests) > number + 10
        return Reply(status=403, text="no more") if tired else reflects(request)

    server.script = fails
    world = World(tmp_path / "run")
    error = r"thinker at http.* failed: PermissionDeniedError: .*no more"
    with pytest.raises(EngineError, match=error):
        await search(make(), world)
    done = world.rollouts_done
    server.script = reflects
    again = World(tmp_path / "run")
    assert pool(await search(make(), again)) == pool(whole)
    assert done + again.rollouts_done == whole.rollouts


async def test_a_judge_that_scores_nothing_is_quoted(make: Make, tmp_path: Path) -> None:
    world = World(tmp_path, lambda task, texts: None)
    world.unscored = "the judge's answer has no line of JSON: 'Fine.'"
    with pytest.raises(RewardError, match=r"the first one is unscored: the judge's .*: 'Fine\.'"):
        await search(make(), world)


async def test_equal_tasks_are_said(make: Make, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tasks = TASKS * 3
    await make().check_run(world)
    assert world.notes == ["equal training tasks count once while prompts are compared and shown"]
    world = World(tmp_path)
    await make().check_run(world)
    assert world.notes == []


async def test_different_tasks_of_one_id_are_refused(make: Make, tmp_path: Path) -> None:
    """Three files of a benchmark, each numbered from 0, would lose two thirds of their tasks."""
    world = World(tmp_path)
    world.tasks = [{"id": n, "part": part} for part in ("easy", "hard") for n in range(4)]
    with pytest.raises(DataError, match=r"train\[0\] and train\[4\] .* have one id \(0\)"):
        await search(make(), world)
    assert world.rollouts_done == 0


async def test_it_can_be_cancelled(make: Make, server: ScriptedServer, tmp_path: Path) -> None:
    waits = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(request: Request) -> Any:
        loop.call_soon_threadsafe(waits.set)
        return Reply(text="late", delay_s=2)

    server.script = slow
    running = asyncio.create_task(search(make(), World(tmp_path)))
    await waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.script = reflects
    assert (await search(make(), World(tmp_path))).rollouts > 0


def test_a_journal_answers_what_is_asked_at_once_in_any_order(tmp_path: Path) -> None:
    def entry(key: str) -> Reflection:
        answer = {"answer": f"to {key}", "finish_reason": "stop", "asked": "why?"}
        return Reflection(key=key, prompt="p", input_tokens=1, output_tokens=1, **answer)

    path = tmp_path / "journal" / "x.jsonl"
    log = SearchLog(path, "x 1")
    for key in ("b", "a", "c"):
        log.add(entry(key))
    log = SearchLog(path, "x 1")
    assert log.replayed(["a", "b"], Reflection) == [entry("a"), entry("b")]
    assert log.replayed(["d", "c", "c"], Reflection) == [None, entry("c"), None]
    assert not log.is_replaying
    assert log.replayed(["e"], Reflection) == [None]
    for keys, kind in ((["a", "c"], Reflection), (["b"], Evaluation)):
        log = SearchLog(path, "x 1")
        with pytest.raises(CheckpointError, match=r"x\.jsonl: entry \d differs from the current"):
            log.replayed(keys, kind)
    with pytest.raises(CheckpointError, match=r"was begun with Header\(library='x 1'"):
        SearchLog(path, "x 2")
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{}\n" + b"".join(rest))
    with pytest.raises(
        ConfigError, match=r"x\.jsonl is damaged in line 2: .*; delete it and all lines that follow"
    ):
        SearchLog(path, "x 1")


async def test_a_journal_of_another_seed(make: Make, tmp_path: Path) -> None:
    await search(make(), World(tmp_path))
    with pytest.raises(CheckpointError, match=r"jsonl: entry 1 differs from the current request"):
        await search(make(seed=1), World(tmp_path))


# --- what candidates are compared by --------------------------------------------------------
async def test_the_selection_split_is_hidden(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm = make()
    split = algorithm.split(TASKS)
    assert (len(split.feedback), len(split.selection)) == (5, 5)
    assert sorted(map(task_id, split.feedback + split.selection)) == sorted(map(task_id, TASKS))
    await search(algorithm, World(tmp_path))
    sent = "".join(request.last_text for request in server.requests)
    assert all(json.dumps(task) in sent for task in split.feedback)
    assert not any(json.dumps(task) in sent for task in split.selection)
    assert make(seed=1).split(TASKS) != split


def test_a_split_needs_tasks_on_both_sides(server: ScriptedServer) -> None:
    assert len(gepa(server, selection=0.01).split(TASKS).selection) == 1
    assert len(gepa(server).split([*TASKS, *TASKS]).feedback) == 5
    with pytest.raises(DataError, match=r"selection=0.5 of 1 distinct training task leaves none"):
        gepa(server).split([TASKS[0], TASKS[0]])


async def test_the_failure_reward(make: Make, tmp_path: Path) -> None:
    """Of an app that gave no reward: this must not improve a candidate's mean."""

    def some(task: Any, texts: Mapping[str, str]) -> float | None:
        return None if task["n"] % 2 else 0.5

    result = await search(make(failure_reward=-1.0), World(tmp_path, some))
    unscored = sum(task["n"] % 2 for task in make().split(TASKS).selection)
    first = result.candidates[0]
    assert 0 < unscored < 5
    assert first.mean == (0.5 * (5 - unscored) - unscored) / 5
    assert list(first.rewards.values()).count(-1.0) == unscored
    assert result.mean == 0.5
    assert result.unscored > unscored


def breaks(task: Any, texts: Mapping[str, str]) -> float:
    """Return negative rewards; better with GOOD, as far as the text does not break the app."""
    return -10.0 + 5 * ("GOOD" in texts["first"] or task["n"] % 5 == 0)


@pytest.mark.parametrize("end", [Outcome.APP_ERROR, Outcome.TIMEOUT, None, Outcome.INFRASTRUCTURE])
@pytest.mark.parametrize("failure_reward", ["lowest", 0.0])
async def test_a_text_that_breaks_the_app_is_not_chosen(
    make: Make, server: ScriptedServer, tmp_path: Path, end: Outcome | None, failure_reward: Any
) -> None:
    """Whether the app raises, times out or gives no reward; with negative rewards 0 is a lot."""

    def proposes(request: Request) -> str:
        return f"it lacks x\n<prompt>\nBREAK {{q}} {len(server.requests)}\n</prompt>"

    def reward(task: Any, texts: Mapping[str, str]) -> Any:
        return end if "BREAK" in texts["first"] + texts["second"] else breaks(task, texts)

    server.script = proposes
    world = World(tmp_path, reward)
    options = {"failure_reward": failure_reward, "significance": 0.05, "max_rollouts": 100}
    found = await search(make(**options), world)
    assert found.chosen == 0
    assert len(found.candidates) > 1 or failure_reward == "lowest"
    assert not any(each.is_scored for each in found.candidates[1:])
    assert found.candidates[0].mean < -8
    lowest = -10.0 if failure_reward == "lowest" else 0.0
    assert all(each.mean == lowest for each in found.candidates[1:])
    assert [note for note in world.notes if "below failure_reward" in note] == (
        []
        if failure_reward == "lowest"
        else [
            "a reward of -10 is below failure_reward=0, so a text with which the app fails may "
            'count as a gain: give failure_reward="lowest", or a number below every reward'
        ]
    )


async def test_the_lowest_reward_is_that_of_earlier_failures_too(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    """Else a candidate that failed early is ahead of one that was run when the lowest was lower."""

    def reward(task: Any, texts: Mapping[str, str]) -> Any:
        if "LATE" in texts["first"] + texts["second"]:
            return -5.0 if task["n"] % 2 else -0.5
        return Outcome.APP_ERROR if task["n"] % 2 else -1.0

    server.script = lambda request: (
        f"it lacks x\n<prompt>\nLATE {{q}} {len(server.requests)}\n</prompt>"
    )
    world = World(tmp_path, reward)
    found = await search(make(max_rollouts=60), world)
    odd = {task_id(task) for task in TASKS if task["n"] % 2}
    rewards = found.candidates[0].rewards
    assert {rewards[name] for name in odd & rewards.keys()} == {world.lowest} == {-5.0}
    assert found.candidates[0].mean == pytest.approx(
        sum(map(float, filter(None, rewards.values()))) / 5
    )
    assert found.chosen > 0


@pytest.mark.parametrize(("failure_reward", "shown"), [("lowest", "-2"), (-7.0, "-7")])
async def test_the_lowest_reward_of_a_held_out_task_is_not_shown(
    make: Make, server: ScriptedServer, tmp_path: Path, failure_reward: Any, shown: str
) -> None:
    """It is in none of the questions, and the log and the metrics have the search's value."""

    def reward(task: Any, texts: Mapping[str, str]) -> Any:
        return Outcome.APP_ERROR if task["n"] % 2 else -2.0

    world = World(tmp_path, reward)
    world.lowest = -50.0  # of a held-out task
    found = await search(make(max_rollouts=60, failure_reward=failure_reward), world)
    rewards = {
        line
        for request in server.requests
        for line in request.last_text.splitlines()
        if line.startswith("Reward: ")
    }
    assert rewards == {"Reward: -2", f"Reward: {shown}"}
    [log] = (tmp_path / "journal").glob("*.jsonl")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    failed = [one for entry in entries for one in entry.get("seen", ()) if one.get("failed")]
    assert {one["reward"] for one in failed} == {float(shown)}
    assert {one["text"].splitlines()[-1] for one in failed} == {f"Reward: {shown}"}
    lowest = -2.0 if failure_reward == "lowest" else None
    assert found.metrics().get("failure_reward") == lowest
    assert {line.get("failure_reward") for line in world.recorded} == {lowest}


class Lossy(World):
    """A world in which lost and failed rollouts end before their call."""

    async def rollouts(self, *args: Any, **options: Any) -> list[Episode]:
        episodes = await super().rollouts(*args, **options)
        for each in episodes:
            if each.outcome is not Outcome.OK or each.reward == 0.25:
                each.calls.clear()  # type: ignore[attr-defined]
        return episodes


@pytest.mark.parametrize("end", [Outcome.INFRASTRUCTURE, Outcome.APP_ERROR, 0.25])
async def test_a_lost_rollout_is_no_sign_of_a_cache(make: Make, tmp_path: Path, end: Any) -> None:
    """Unlike one that ended without a call, with a reward."""
    seen: set[str] = set()

    def reward(task: Any, texts: Mapping[str, str]) -> Any:
        is_new = task_id(task) not in seen
        seen.add(task_id(task))
        return 0.5 if is_new or task["n"] % 3 else end

    world = Lossy(tmp_path, reward, calls=[call(1, "small", 10, 5)])
    found = await search(make(max_rollouts=60), world)
    has_warned = any("had no call of" in note for note in world.notes)
    assert (bool(found.unasked), has_warned) == ((True, True) if end == 0.25 else (False, False))


async def test_rollouts_of_lost_workers_decide_nothing(make: Make, tmp_path: Path) -> None:
    """Those of the initial prompts are left out of the test, so nothing wins by them."""
    lost = {task_id(task) for task in make().split(TASKS).selection[:3]}

    def reward(task: Any, texts: Mapping[str, str]) -> Any:
        is_first = texts == {"first": "Do Q.", "second": "Then Q."}
        return Outcome.INFRASTRUCTURE if is_first and task_id(task) in lost else 1.0

    found = await search(make(significance=0.05), World(tmp_path, reward))
    assert [found.candidates[0].rewards[name] for name in sorted(lost)] == [None] * 3
    assert (found.chosen, found.chance) in ((0, 1.0), (0, None))
    if found.best:
        assert found.left_out == 3
        assert "(3 left out of the test, without a reward in one of both)" in found.verdict()


async def test_it_resumes_with_rewards(make: Make, server: ScriptedServer, tmp_path: Path) -> None:
    broken, mended = World(tmp_path, lambda task, texts: None), World(tmp_path)
    why = (
        "^no rollout of the initial prompts has a reward, so there is nothing to compare; the "
        r"first one returned none \(None, NaN or infinity\) and emitted none: return a number, or "
    )
    with pytest.raises(RewardError, match=why):
        await search(make(), broken)
    assert server.requests == []
    result = await search(make(), mended)
    assert None not in result.candidates[0].rewards.values()
    assert (broken.rollouts_done, mended.rollouts_done) == (5, result.rollouts)


# --- budgets --------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [18, 23, 40, 61])
async def test_rollouts_are_never_more_than_the_budget(
    make: Make, tmp_path: Path, limit: int
) -> None:
    world = World(tmp_path)
    result = await search(make(max_rollouts=limit), world)
    assert result.rollouts == world.rollouts_done <= limit
    again = sum(len(each.again) for each in result.candidates)  # GEPA's finalists
    assert result.rollouts > limit - 21
    assert f"{result.rollouts - again} of max_rollouts={limit} rollouts are done" in result.ended


@pytest.mark.parametrize(("make_one", "least"), [(gepa, 16), (apo, 18)])
async def test_too_few_rollouts_for_one_candidate(
    server: ScriptedServer, tmp_path: Path, make_one: Any, least: int
) -> None:
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=rf"={least - 1}\) is too few .* at least {least}"):
        await search(make_one(server, max_rollouts=least - 1), world)
    assert world.rollouts_done == 0
    assert (await search(make_one(server, max_rollouts=least), world)).rollouts > 5


@pytest.mark.parametrize(
    ("make_one", "limit", "done", "takes"),
    [
        (gepa, 3, 3, "an iteration takes 1"),
        (apo, 2, 2, "another candidate takes two"),
        (apo, 9, 8, "another candidate takes two"),
    ],
)
async def test_reflections_are_never_more_than_the_budget(
    server: ScriptedServer, tmp_path: Path, make_one: Any, limit: int, done: int, takes: str
) -> None:
    result = await search(make_one(server, max_reflections=limit), World(tmp_path))
    assert result.reflections == len(server.requests) == done
    assert result.ended == f"{done} of max_reflections={limit} reflections are done, and {takes}"


async def test_useless_answers_cost_nothing(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    values: Any = iter(
        (
            "I would rather talk about the weather, at length.",
            "<prompt>no placeholder any more</prompt>",
            Reply(text="<prompt>Do {q}, and", finish_reason="length"),
            Reply(text=None),
        )
    )
    server.script = lambda request: (
        next(values) if make.func is gepa or is_edit(request) else "too short"
    )
    once: dict[str, Any] = {"beam_rounds": 1, "reflections_at_once": 1}
    options, batch = ({"max_reflections": 4}, 3) if make.func is gepa else (once, 2)
    world = World(tmp_path)
    result = await search(make(**options), world)
    assert (result.unusable, len(result.candidates)) == (4, 1)
    assert world.rollouts_done == 5 + 4 * batch
    useless = [note for note in world.notes if "is unusable" in note]
    whys = ("no <prompt>…</prompt>", "has no {q}", "cut off", "no <prompt>")
    assert all(why in note for why, note in zip(whys, useless, strict=True))
    asked = result.reflections
    assert world.notes[-1] == f"4 of {asked} answers of the reflection model were unusable"


@pytest.mark.parametrize("answer", ["no tags", "lost", "cut off"])
async def test_a_model_without_a_usable_text_ends_the_run(
    make: Make, server: ScriptedServer, tmp_path: Path, answer: str
) -> None:
    """Each of its answers costs the rollouts of its parent's minibatch."""
    answers = {
        "no tags": Reply(text="I would rather not."),
        "lost": Reply(text="<prompt>no placeholder</prompt>"),
        "cut off": Reply(text="<prompt>Do {q}, and", finish_reason="length"),
    }
    server.script = lambda request: answers[answer]
    options = {"reflections_at_once": 1} if make.func is apo else {}
    why = {"no tags": "has no <prompt>", "lost": "has no {q}", "cut off": "was cut off"}[answer]
    with pytest.raises(
        EngineError, match=rf"^8 answers in a row of the .* had no usable text, the last: .*{why}"
    ) as caught:
        await search(make(**options), World(tmp_path))
    assert ("lightspan.prompt(name, text)" in str(caught.value)) is (answer == "lost")
    assert caught.value.__suppress_context__ or make.func is apo
    server.script = reflects
    result = await search(make(**options), World(tmp_path))
    assert result.reflections == len(server.requests)
    assert result.unusable >= 8
    assert any(proposal.text for proposal in result.proposals)


async def test_a_model_that_repeats_its_texts_ends_the_search(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    """It always gives one text per prompt, and now and then none; the first of both are new."""
    turns = itertools.count()

    def repeats(request: Request) -> str:
        if next(turns) % 5 == 4:
            return "I would rather not."
        return f"<prompt>{text_of(request).split()[0]} {{q}} ALPHA BETA.</prompt>"

    server.script = repeats
    options: dict[str, Any] = {"merge": False} if make.func is gepa else {"beam_rounds": 20}
    world = World(tmp_path, lambda task, texts: 0.5)
    found = await search(make(**options), world)
    assert found.ended == (
        "20 answers in a row of the reflection model had no new text; another model or a higher "
        "temperature may give one, in another folder"
    )
    assert world.notes.count(found.ended) == 1
    texts = {each.text for each in found.proposals if each.text}
    assert texts == {"Do {q} ALPHA BETA.", "Then {q} ALPHA BETA."}
    if make.func is gepa:
        assert (found.unusable, found.reflections) == (20, 22)
    asked = len(server.requests)
    again = await search(make(**options), World(tmp_path, world.reward))
    assert (pool(again), again.ended) == (pool(found), found.ended)
    assert len(server.requests) == asked


@pytest.mark.parametrize(
    ("make_one", "before", "after", "again"),
    [
        (gepa, {}, {"max_rollouts": 200}, True),
        (gepa, {}, {"max_rollouts": 100}, True),
        (gepa, {}, {"max_reflections": 3}, True),
        (gepa, {"max_reflections": 5}, {"max_reflections": 3}, True),
        (gepa, {"max_reflections": 5}, {}, True),
        (gepa, {"max_tokens": 5}, {}, True),
        (gepa, {"max_tokens": 5}, {"max_tokens": 3}, False),
        (gepa, {}, {"max_tokens": 3}, False),
        (gepa, {}, {}, False),
        (apo, {"max_tokens": 5}, {"max_tokens": 9}, True),
        (apo, {"max_tokens": 5}, {"max_tokens": 3}, False),
    ],
)
def test_a_complete_search_starts_again(
    server: ScriptedServer, make_one: Any, before: Any, after: Any, again: bool
) -> None:
    earlier = make_one(server, **before).config()
    assert make_one(server, **after).starts_again(earlier) is again
    assert not make_one(server, **after).starts_again({})


# --- options --------------------------------------------------------------------------------
TEXT = PromptTemplate("x")
NOWHERE = LLM(base_url="http://127.0.0.1:9/v1", model="m")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": {}}, r" has no prompt to learn: give prompts=.* or optimize=\[\"agent\"\]"),
        ({"prompts": {"p": "text"}}, r"prompts\['p'\] is a str: use PromptTemplate"),
        ({"prompts": {"a b": TEXT}}, r"prompts\['a b'\].* no identifier"),
        ({"prompts": {"task": TEXT}}, r"prompts\['task'\].* is reserved"),
        ({"optimize": [""]}, r"optimize=\[''\]: '' is no name"),
        ({"optimize": ["p"]}, "'p' is in prompts and in optimize"),
        ({"reflection": None}, r"reflection=None: use LLM\(base_url=…, model=…\)"),
        ({"reflection": LLM(base_url="x", model="m")}, "the base URL of reflection= 'x' is no"),
        ({"max_reflections": 0}, "max_reflections=0 must be at least"),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be a whole number"),
        ({"selection": 1.0}, "selection=1.0"),
        ({"failure_reward": float("nan")}, "failure_reward=nan"),
    ],
)
@pytest.mark.parametrize("kind", [GEPA, APO])
def test_options_that_cannot_be_honoured(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**{"prompts": {"p": TEXT}, "reflection": NOWHERE, **options})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GEPA, {"max_reflections": 2, "proposals": 3}, "max_reflections=2 is less than propos"),
        (GEPA, {"minibatch": 0}, "minibatch=0"),
        (GEPA, {"proposals": 0}, "proposals=0"),
        (APO, {"edits": LLM(base_url="x", model="m")}, "the base URL of edits= 'x' is no"),
        (
            APO,
            {"edits": LLM(base_url=NOWHERE.base_url, model="editor")}
            | {"max_cost": 0.5, "prices": {"m": Price(input=1.0, output=1.0)}},
            "none for 'editor'",
        ),
        (APO, {"beam_width": 0}, "beam_width=0 must be at least 1"),
        (APO, {"beam_rounds": 1.5}, "beam_rounds=1.5"),
        (APO, {"max_reflections": 1}, "max_reflections=1 must be at least 2"),
    ],
)
def test_options_of_one_search(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind({"p": TEXT}, NOWHERE, **options)


@pytest.mark.parametrize("kind", [GEPA, APO])
def test_a_key_has_to_be_set_and_is_no_setting(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINKER_KEY", raising=False)
    llm = LLM(base_url=NOWHERE.base_url, model="m", api_key_env="THINKER_KEY")
    with pytest.raises(ConfigError, match=r"needs the key in \$THINKER_KEY"):
        kind({"p": TEXT}, llm)
    monkeypatch.setenv("THINKER_KEY", "secret-thing")
    config = kind({"p": TEXT}, llm).config()
    assert config["algorithm"] == kind.__name__
    assert "secret-thing" not in json.dumps(config)


@pytest.mark.parametrize(("kind", "module"), [(GEPA, "gepa"), (APO, "openai")])
def test_without_the_library(kind: Any, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_prompts.search.validation.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf" needs '{module}': .*core\[prompts\]"):
        kind({"p": TEXT}, NOWHERE)


async def test_a_date_of_today_in_a_text_is_named(
    make: Make, server: ScriptedServer, tmp_path: Path
) -> None:
    """In the app's prompt, and where a reflection model copied it from the rollouts."""
    day = datetime.now(UTC)
    server.script = lambda request: (
        f"it lacks x\n<prompt>\n{text_of(request)} ALPHA BETA {day:%d %B %Y}\n</prompt>"
    )
    world = World(tmp_path, lambda task, texts: len(texts["first"]) / 1000)
    prompts = {
        "first": PromptTemplate(f"Do {{q}}, it is {day:%A}."),
        "second": PromptTemplate("Then {q}."),
    }
    await search(make(prompts=prompts), world)
    assert world.notes[0] == (
        f"the text of 'first' contains '{day:%A}', which looks like today: it stays in the learned "
        "text as it is: write a {placeholder} for it"
    )
    copied = [note for note in world.notes if "which looks like today, and its first" in note]
    assert f"contains '{day:%d %B %Y}'" in copied[0]
