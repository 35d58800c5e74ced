"""Tests of GEPA's search with simulated rollouts: equal candidates after any interruption, budgets,
a failing reflection model. `test_gepa_runs.py` has real rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lightspan import GEPA, LLM, PromptTemplate
from lightspan.errors import CheckpointError, ConfigError, DataError, EngineError, RewardError
from lightspan.schema.records import task_id
from lightspan_prompts import endpoint_client
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.gepa.reflection_prompts import question
from lightspan_prompts.search.candidates import read_found
from lightspan_prompts.search.reflection import Unusable, proposed_text
from lightspan_prompts.search.search_log import SearchLog
from lightspan_testing import scripted
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.prompts.tests.made_up import TASKS, World, gepa, pool, reflects, score, search


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflects) as running:
        yield running


# --- candidates -----------------------------------------------------------------------------
async def test_it_finds_better_prompts(server: ScriptedServer, tmp_path: Path) -> None:
    algorithm, world = gepa(server), World(tmp_path)
    found = await search(algorithm, world)
    first, best = found.candidates[0], found.candidates[found.chosen]
    assert first.templates == {"first": "Do {q}.", "second": "Then {q}."}
    assert (first.parents, first.mean) == ([], 0.0)
    assert best.mean == max(each.mean for each in found.candidates) > 0.3
    assert algorithm.resources() == {n: PromptTemplate(t) for n, t in best.templates.items()}
    learned = algorithm.learned_prompts()
    assert {name: each.after for name, each in learned.items()} == algorithm.resources()
    assert any(each.is_changed for each in learned.values())
    assert all("{q}" in text for each in found.candidates for text in each.templates.values())
    assert read_found(tmp_path) == found


async def test_candidates_run_side_by_side_and_are_merged_though_their_ancestor_scores_nothing(
    server: ScriptedServer, tmp_path: Path
) -> None:
    """The library's choice among ancestors fails where their scores sum to 0."""
    merged, batches = [], []
    for seed in (7, 9, 14):  # some of which merge siblings
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
    alone = await search(gepa(server, merge=False, proposals=3, seed=7), World(tmp_path / "alone"))
    assert all(len(each.parents) < 2 for each in alone.candidates)


async def test_an_equal_seed_finds_equal_candidates_and_another_one_others(
    server: ScriptedServer, tmp_path: Path
) -> None:
    one, two, other = [
        pool(await search(gepa(server, seed=seed), World(tmp_path / name)))
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    ]
    assert one == two != other


@pytest.mark.slow
async def test_it_goes_on_wherever_it_was_cut_off(server: ScriptedServer, tmp_path: Path) -> None:
    whole_world = World(tmp_path / "whole")
    whole = await search(gepa(server), whole_world)
    lines = (tmp_path / "whole" / "journal" / "gepa.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["type"] for line in lines]
    assert kinds.count("reflection") == whole.reflections > 3
    for cut in range(1, len(lines) + 1):
        for torn in (b"", lines[cut - 1][: len(lines[cut - 1]) // 2]):
            path = tmp_path / f"cut-{cut}-{len(torn)}"
            (path / "journal").mkdir(parents=True)
            (path / "journal" / "gepa.jsonl").write_bytes(b"".join(lines[:cut]) + torn)
            world, asked = World(path), len(server.requests)
            found = await search(gepa(server), world)
            assert pool(found) == pool(whole)
            logged = [json.loads(line) for line in lines[1:cut]]
            replayed = sum(len(entry.get("seen", ())) for entry in logged)
            assert world.rollouts_done == whole_world.rollouts_done - replayed
            reflected = sum(entry["type"] == "reflection" for entry in logged)
            assert len(server.requests) - asked == whole.reflections - reflected
            assert (found.rollouts, found.reflections, found.tokens) == (
                whole.rollouts,
                whole.reflections,
                whole.tokens,
            )


def test_another_process_finds_equal_candidates(tmp_path: Path) -> None:
    """Sets of names have a different order in each process."""
    code = (
        "import asyncio, sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "import test_gepa as t\n"
        "with t.ScriptedServer(t.reflects) as s:\n"
        "    for seed in range(3):\n"
        "        w = t.World(Path(sys.argv[1]) / str(seed))\n"
        "        print(t.pool(asyncio.run(t.search(t.gepa(s, seed=seed), w))))\n"
    )
    paths = [str(Path(__file__).parents[number]) for number in (0, 3)]
    hints = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / hashed), *paths],
            env={**os.environ, "PYTHONHASHSEED": hashed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for hashed in ("1", "2")
    ]
    assert hints[0] == hints[1]
    assert hints[0].count("\n") == 3


async def test_what_a_journal_of_other_questions_says(
    server: ScriptedServer, tmp_path: Path
) -> None:
    await search(gepa(server), World(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"gepa.jsonl: entry 1 differs from the current request"
    ):
        await search(gepa(server, seed=1), World(tmp_path))
    path = tmp_path / "journal" / "gepa.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0].replace(b'"library":"', b'"library":"0.0.') + lines[1])
    with pytest.raises(CheckpointError, match=r"was begun with Header\(library='0\.0\."):
        SearchLog(path, "gepa 1")
    path.write_bytes(lines[0] + b"{}\n" + lines[1])
    with pytest.raises(CheckpointError, match=r"gepa.jsonl, line 2 is damaged"):
        SearchLog(path, "gepa 1")


# --- what it is compared by -----------------------------------------------------------------
async def test_reflections_never_see_the_selection_split(
    server: ScriptedServer, tmp_path: Path
) -> None:
    algorithm = gepa(server)
    split = algorithm.split(TASKS)
    assert (len(split.feedback), len(split.selection)) == (5, 5)
    assert sorted(map(task_id, split.feedback + split.selection)) == sorted(map(task_id, TASKS))
    await search(algorithm, World(tmp_path))
    asked = "".join(request.last_text for request in server.requests)
    assert all(json.dumps(task) in asked for task in split.feedback)
    assert not any(json.dumps(task) in asked for task in split.selection)
    assert gepa(server, seed=1).split(TASKS) != split


async def test_a_split_needs_tasks_on_both_sides(server: ScriptedServer) -> None:
    assert len(gepa(server, selection=0.01).split(TASKS).selection) == 1
    assert len(gepa(server).split([*TASKS, *TASKS]).feedback) == 5
    with pytest.raises(DataError, match=r"selection=0.5 of 1 distinct training task leaves none"):
        gepa(server).split([TASKS[0], TASKS[0]])


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


async def test_an_unscored_rollout_counts_for_the_failure_reward(
    server: ScriptedServer, tmp_path: Path
) -> None:
    def some(task: Any, texts: Mapping[str, str]) -> float | None:
        return None if task["n"] % 2 else score(task, texts)

    found = await search(gepa(server, failure_reward=-1.0), World(tmp_path, some))
    unscored = sum(task["n"] % 2 for task in gepa(server).split(TASKS).selection)
    assert found.candidates[0].mean == -unscored / 5
    assert list(found.candidates[0].rewards.values()).count(None) == unscored
    assert found.unscored > unscored
    assert found.mean is not None
    assert found.mean >= 0.0


async def test_rewards_that_cannot_be_compared_end_it(
    server: ScriptedServer, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match="no rollout of the initial prompts has a reward"):
        await search(gepa(server), World(tmp_path / "none", lambda task, texts: None))
    with pytest.raises(RewardError, match=r"a reward of 1e\+06 is too large to compare exactly"):
        await search(gepa(server), World(tmp_path / "large", lambda task, texts: 1e6))
    assert server.requests == []


async def test_an_app_without_rewards_is_mended_and_it_goes_on(
    server: ScriptedServer, tmp_path: Path
) -> None:
    broken, mended = World(tmp_path, lambda task, texts: None), World(tmp_path)
    with pytest.raises(RewardError, match="no rollout of the initial prompts has a reward"):
        await search(gepa(server, max_rollouts=16), broken)
    found = await search(gepa(server, max_rollouts=16), mended)
    assert None not in found.candidates[0].rewards.values()
    assert (broken.rollouts_done, mended.rollouts_done) == (5, found.rollouts)


async def test_a_key_in_a_task_is_kept_and_shown_nowhere(
    server: ScriptedServer, tmp_path: Path
) -> None:
    key = "sk-" + "proj-abcdefghijklmnop1234567890"
    world = World(tmp_path)
    world.tasks = [{**task, "with": key} for task in TASKS]
    await search(gepa(server, max_reflections=1), world)
    [request] = server.requests
    logged = (tmp_path / "journal" / "gepa.jsonl").read_text()
    assert key not in request.last_text + logged
    assert '"with": "<key>"' in request.last_text
    assert logged.count("<key>") > 5


async def test_it_ends_when_nothing_is_left_to_learn(
    server: ScriptedServer, tmp_path: Path
) -> None:
    world = World(tmp_path, lambda task, texts: 1.0)
    found = await search(gepa(server, perfect_reward=1.0), world)
    assert (found.rollouts, found.reflections, found.chosen) == (5, 0, 0)
    assert found.ended == "the selection split has the perfect reward on every task"
    assert "the prompts stay unchanged" in world.notes[-1]


# --- the finalists --------------------------------------------------------------------------
class Lucky:
    """A prompt with ALPHA scores 1 on each task in its first run, and 0 afterwards; one with BETA
    alone .6; the initial prompts .55."""

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
        (1, 0, [0.55, 0.6, 0.5]),  # the second one has no further result
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
        found = await search(GEPA(prompts, llm, max_reflections=2, finalists=finalists), world)
    assert [each.mean for each in found.candidates] == pytest.approx(means)
    assert found.chosen == chosen
    again = [number for number, each in enumerate(found.candidates) if each.again]
    assert again == [[], [2], [1, 2], [0, 1, 2]][min(finalists, 3)]
    assert {*found.candidates[2].again.values()} == ({0.0} if finalists else set())
    assert found.rollouts == world.rollouts_done
    assert read_found(tmp_path) == found


# --- budgets --------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [16, 17, 40, 41, 42, 43])
async def test_rollouts_are_never_more_than_given(
    server: ScriptedServer, tmp_path: Path, limit: int
) -> None:
    world = World(tmp_path)
    found = await search(gepa(server, max_rollouts=limit), world)
    assert found.rollouts == world.rollouts_done <= limit
    again = sum(len(each.again) for each in found.candidates)
    assert again in ({0} if len(found.candidates) == 1 else {0, 5, 10})
    assert found.rollouts > limit - (11 if again else 21)
    assert f"{found.rollouts - again} of max_rollouts={limit} rollouts are done" in found.ended


async def test_finalists_wait_for_a_candidate_and_not_for_tokens(
    server: ScriptedServer, tmp_path: Path
) -> None:
    many = await search(gepa(server, finalists=30), World(tmp_path / "many"))
    assert len(many.candidates) > 1
    assert any(each.again for each in many.candidates)
    spent = await search(gepa(server, max_tokens=1), World(tmp_path / "spent"))
    assert spent.ended.startswith("max_tokens=1 is used up")
    assert not any(each.again for each in spent.candidates)


@pytest.mark.parametrize("limit", [20, 50, 90, 120, 150])
async def test_one_that_goes_on_with_fewer_rollouts_asks_nothing(
    server: ScriptedServer, tmp_path: Path, limit: int
) -> None:
    """The log's further entries are left unchanged."""
    whole = await search(gepa(server), World(tmp_path))
    asked, world = len(server.requests), World(tmp_path)
    less = await search(gepa(server, max_rollouts=limit), world)
    assert len(server.requests) == asked
    assert less.rollouts <= whole.rollouts
    assert pool(less)[0] == pool(whole)[0]


async def test_too_few_rollouts_for_one_candidate(server: ScriptedServer, tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=r"max_rollouts=15\) is too few .* at least 16"):
        await search(gepa(server, max_rollouts=15), world)
    assert world.rollouts_done == 0


async def test_reflections_are_never_more_than_given(
    server: ScriptedServer, tmp_path: Path
) -> None:
    found = await search(gepa(server, max_reflections=3), World(tmp_path))
    assert found.reflections == len(server.requests) == 3
    assert found.ended == "3 of max_reflections=3 reflections are done, and an iteration takes 1"


async def test_tokens_are_counted(server: ScriptedServer, tmp_path: Path) -> None:
    found = await search(gepa(server, max_tokens=500), World(tmp_path))
    words = [len(request.last_text.split()) for request in server.requests]
    assert sum(words[:-1]) < 500 <= found.tokens
    assert found.tokens > sum(words)
    assert found.ended == f"max_tokens=500 is used up: {found.tokens} tokens"


# --- a reflection model that fails ----------------------------------------------------------
async def test_answers_that_are_of_no_use_cost_no_rollouts(
    server: ScriptedServer, tmp_path: Path
) -> None:
    answers: Any = (
        "I would rather talk about the weather, at length.",
        "<prompt>no placeholder any more</prompt>",
        "<prompt>  </prompt>",
        Reply(text="<prompt>Do {q}, and", finish_reason="length"),
        Reply(text=None),
    )
    values = iter(answers)
    server.script = lambda request: next(values)
    world = World(tmp_path)
    found = await search(gepa(server, max_reflections=5), world)
    assert (found.reflections, found.unusable, len(found.candidates)) == (5, 5, 1)
    assert world.rollouts_done == 5 + 5 * 3
    useless = [note for note in world.notes if "is unusable" in note]
    whys = ("no <prompt>…</prompt>", "has no {q}", "no <prompt>", "cut off", "no <prompt>")
    assert len(useless) == 5
    assert all(why in note for why, note in zip(whys, useless, strict=True))
    assert world.notes[-1] == "5 of 5 answers of the reflection model were unusable"


SAID = "<prompt>Do {q} well \ud83d</prompt>"
PARTS = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": SAID}, "odd"]


@pytest.mark.parametrize(
    ("hints", "usage", "tokens", "unusable"),
    [
        ({"message": {"content": PARTS}}, {"prompt_tokens": 3, "completion_tokens": 4}, 7, 0),
        ({"message": {"content": SAID}}, {"prompt_tokens": 3, "completion_tokens": None}, 3, 0),
        ({"message": {"content": SAID}}, {"total_tokens": 7}, 0, 0),
        ({"message": {"content": SAID}}, None, 0, 0),
        ({"message": {"content": 1}}, None, 0, 1),
        ({"message": None}, None, 0, 1),
        ({}, None, 0, 1),
    ],
)
async def test_an_endpoint_that_answers_otherwise_than_the_sdk_promises(
    server: ScriptedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hints: Any,
    usage: Any,
    tokens: int,
    unusable: int,
) -> None:
    choice = {"index": 0, "finish_reason": "stop", **hints}
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    monkeypatch.setattr(scripted, "completion", lambda *asked: {**reply, "choices": [choice]})
    algorithm, world = gepa(server, max_reflections=1), World(tmp_path)
    world.reward = lambda task, texts: float("well" in texts["first"])
    found = await search(algorithm, world)
    assert (found.reflections, found.tokens, found.unusable) == (1, tokens, unusable)
    learned = ["Do {q}.", "Do {q} well \ufffd"][: 2 - unusable]
    assert [each.templates["first"] for each in found.candidates] == learned
    again = World(tmp_path)
    assert pool(await search(gepa(server, max_reflections=1), again)) == pool(found)
    assert again.rollouts_done == 0


@pytest.mark.parametrize(
    ("body", "tries", "message"),
    [
        (b'{"choices": [', endpoint_client.MAX_TRIES, "failed: JSONDecodeError: Expecting value"),
        (b"null", 1, "returned no choice: 'None'"),
        (b'{"choices": {"a": 1}}', 1, "returned no choice"),
    ],
)
async def test_a_body_that_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, body: bytes, tries: int, message: str
) -> None:
    monkeypatch.setattr(endpoint_client, "RETRY_BACKOFF_S", 0.0)
    asked = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answers)) as http:
        client = openai.AsyncOpenAI(base_url=llm.base_url, api_key="k", http_client=http)
        model = EndpointClient(llm, timeout_s=None, patience_s=0.0, note=print, client=client)
        with pytest.raises(EngineError, match=message):
            await model.ask("?")
    assert len(asked) == tries


async def test_a_failing_reflection_model_ends_it_and_it_goes_on_later(
    server: ScriptedServer, tmp_path: Path
) -> None:
    whole = await search(gepa(server), World(tmp_path / "whole"))
    number = len(server.requests)

    def fails(request: Request) -> Any:
        tired = len(server.requests) > number + 4
        return Reply(status=400, text="no more") if tired else reflects(request)

    server.script = fails
    world = World(tmp_path / "run")
    with pytest.raises(EngineError, match=r"thinker at http.* failed: BadRequestError: .*no more"):
        await search(gepa(server), world)
    done = world.rollouts_done
    server.script = reflects
    again = World(tmp_path / "run")
    assert pool(await search(gepa(server), again)) == pool(whole)
    assert done + again.rollouts_done == whole.rollouts


async def test_it_can_be_cancelled_while_it_waits(server: ScriptedServer, tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(request: Request) -> Any:
        loop.call_soon_threadsafe(asked.set)
        return Reply(text="late", delay_s=30)

    server.script = slow
    running = asyncio.create_task(search(gepa(server), World(tmp_path)))
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    server.script = reflects
    assert (await search(gepa(server), World(tmp_path))).rollouts > 0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_client, "RETRY_BACKOFF_S", 0.01)


async def asks(url: str, notes: list[str], **options: Any) -> Any:
    values = {"timeout_s": 30.0, "patience_s": 30.0, **options}
    reflector = EndpointClient(LLM(base_url=url, model="thinker"), note=notes.append, **values)
    try:
        return await reflector.ask("why?")
    finally:
        await reflector.close()


@pytest.mark.usefixtures("soon")
async def test_a_dead_endpoint() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EngineError, match=f"thinker at {url} failed: APIConnectionError"):
        await asks(url, [])


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("reply", "error", "tries"),
    [
        (Reply(status=401, text="who are you"), "AuthenticationError: .*who are you", 1),
        (Reply(status=403), "PermissionDeniedError", 1),
        (Reply(status=404), "NotFoundError", 1),
        (Reply(status=500), "InternalServerError", 4),
        (Reply(drop=True), "APIConnectionError", 4),
        (Reply(text="late", delay_s=2.0), "(API)?TimeoutError", 4),
    ],
)
async def test_an_endpoint_that_fails(
    server: ScriptedServer, reply: Reply, error: str, tries: int
) -> None:
    server.script = lambda request: reply
    with pytest.raises(EngineError, match=f"failed: {error}"):
        await asks(server.url, [], timeout_s=0.3)
    assert len(server.requests) == tries


@pytest.mark.usefixtures("soon")
async def test_an_endpoint_that_never_ends_its_answer() -> None:
    """It never pauses, so no read timeout ends it."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    answering: list[Any] = []

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while not writer.is_closing():  # while the client is connected
            writer.write(b" ")
            await asyncio.sleep(0.05)
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    endpoint = await asyncio.start_server(drips, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{endpoint.sockets[0].getsockname()[1]}/v1"
    with pytest.raises(EngineError, match=r"failed: TimeoutError: no complete answer within 0.3 s"):
        await asyncio.wait_for(asks(url, [], timeout_s=0.3), 15)
    assert len(answering) == 4
    await asyncio.gather(*answering)
    endpoint.close()
    await endpoint.wait_closed()


@pytest.mark.usefixtures("soon")
async def test_an_endpoint_that_recovers(server: ScriptedServer) -> None:
    answers = iter([Reply(status=503), Reply(drop=True), "well"])
    server.script = lambda request: next(answers)
    answer = await asks(server.url, [])
    assert (answer.text, answer.finish_reason) == ("well", "stop")
    assert (answer.input_tokens, answer.output_tokens) == (1, 1)


@pytest.mark.usefixtures("soon")
async def test_a_busy_endpoint_is_waited_for(server: ScriptedServer) -> None:
    busy = Reply(status=429, headers={"retry-after-ms": "20"})
    answers = iter([*[busy] * 9, Reply(status=429), "well"])
    server.script = lambda request: next(answers)
    notes: list[str] = []
    assert (await asks(server.url, notes)).text == "well"
    assert len(server.requests) == 11
    assert notes == ["the reflection model is busy (429): waiting 0 s"]


async def test_a_busy_endpoint_is_not_waited_for_for_ever(server: ScriptedServer) -> None:
    server.script = lambda request: Reply(status=429, headers={"retry-after": "31"})
    with pytest.raises(EngineError, match="failed: RateLimitError"):
        await asks(server.url, [])
    assert len(server.requests) == 1


# --- questions and answers ------------------------------------------------------------------
def test_what_is_asked() -> None:
    text = question("style", PromptTemplate('As {{"a": 1}}: {q} {n:.1f} {q}'), [])
    assert 'the prompt called "style"' in text
    assert '<prompt>\nAs {"a": 1}: {q} {n:.1f} {q}\n</prompt>' in text
    assert "placeholders that the application fills: {q}, {n:.1f}." in text
    assert "placeholders" not in question("style", PromptTemplate("plain"), [])


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<prompt>a</prompt>", "a"),
        ("Well.\n<prompt>\n a\n\nb \n</prompt>\nSo.", "a\n\nb"),
        ("<prompt>say <prompt>x</prompt></prompt>", "say <prompt>x</prompt>"),
        ("It is\n```text\na\n```\nDone.", "a"),
        ("<prompt>```a```</prompt>", "```a```"),
    ],
)
def test_the_text_of_an_answer(answer: str, text: str) -> None:
    assert proposed_text(answer, "stop") == text


@pytest.mark.parametrize("answer", ["", "a", "<prompt></prompt>", "</prompt>a<prompt>"])
def test_answers_without_a_text(answer: str) -> None:
    with pytest.raises(Unusable, match="has no <prompt>"):
        proposed_text(answer, "stop")


# --- options --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": {}}, "GEPA has no prompt to learn"),
        ({"prompts": {"p": "text"}}, r"prompts\['p'\] is a str: use PromptTemplate"),
        ({"prompts": {"a b": PromptTemplate("x")}}, r"prompts\['a b'\].* no identifier"),
        ({"prompts": {"task": PromptTemplate("x")}}, r"prompts\['task'\].* is reserved"),
        ({"reflection": "gpt"}, "reflection='gpt': use LLM"),
        ({"reflection": LLM(base_url="x", model="m")}, "the base URL of reflection= 'x' is no"),
        ({"max_rollouts": 0}, "max_rollouts=0 must be at least 1"),
        ({"max_reflections": 0}, "max_reflections=0 must be at least 1"),
        (
            {"max_reflections": 2, "proposals": 3},
            "max_reflections=2 is less than proposals=3",
        ),
        ({"max_tokens": 1.5}, "max_tokens=1.5 must be a whole number"),
        ({"minibatch": 0}, "minibatch=0"),
        ({"proposals": 0}, "proposals=0"),
        ({"selection": 1.0}, "selection=1.0"),
        ({"failure_reward": float("nan")}, "failure_reward=nan"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    values = {"prompts": {"p": PromptTemplate("x")}, "reflection": llm, **options}
    with pytest.raises(ConfigError, match=message):
        GEPA(**values)


def test_a_key_that_is_missing_is_known_before_any_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("THINKER_KEY", raising=False)
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="THINKER_KEY")
    with pytest.raises(ConfigError, match=r"needs the key in \$THINKER_KEY"):
        GEPA({"p": PromptTemplate("x")}, llm)
    monkeypatch.setenv("THINKER_KEY", "secret-thing")
    algorithm = GEPA({"p": PromptTemplate("x")}, llm)
    assert "secret-thing" not in json.dumps(algorithm.config())


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_prompts.search.validation.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"GEPA needs 'gepa': .*core\[prompts\]"):
        GEPA({"p": PromptTemplate("x")}, LLM(base_url="http://127.0.0.1:9/v1", model="m"))
