"""Alternate over an app that nobody edits: the instructions of two agents are found and learned,
and in turns the weights of one of them, which is asked at the gateway; the other has an endpoint
of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

from lightspan.lightning.episode import Episode
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.token_records import CallOutcome
from lightspan.stores import open_store
from lightspan.training import checkpoints
from lightspan.training.collector import stored_episodes
from lightspan_prompts.search.candidates import read_searches
from lightspan_prompts.search.prompt_discovery import texts_of
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_tools.inspect import inspect_run

APPS = Path(__file__).parents[1] / "apps"
SEARCHES = (1, 4)
"""Steps of the run: two searches, of its five."""


class Run(NamedTuple):
    """A complete one. Only to be read."""

    folder: Path
    result: Any
    guide: list[Request]
    """What the guide's own endpoint was asked."""
    kind: str


@pytest.fixture(scope="module")
def toy() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("alternate_agents")


@pytest.fixture(scope="module")
def thinker(toy: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def guide(toy: Any) -> Iterator[ScriptedServer]:
    """The endpoint that the app is configured with."""
    with ScriptedServer(toy.speaks) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", server.url)
        yield server


@pytest.fixture(scope="module", params=["GEPA", "APO"])
def run(
    request: pytest.FixtureRequest,
    toy: Any,
    tiny: Path,
    guide: ScriptedServer,
    thinker: ScriptedServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    folder = tmp_path_factory.mktemp("alternate") / "run"
    before = len(guide.requests)
    result = toy.fit(folder, toy.algorithm(tiny, thinker.url, kind=request.param))
    return Run(folder, result, guide.requests[before:], request.param)


def tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def by_step(folder: Path) -> dict[int, list[Episode]]:
    """The episodes of training."""
    async with open_store(folder / "store.db") as store:
        states = await store.rollouts(mode=Mode.TRAIN)
    steps = {state.rollout.rollout_id: state.rollout.step for state in states}
    found: dict[int, list[Episode]] = defaultdict(list)
    for episode in await asyncio.to_thread(stored_episodes, folder / "store.db", mode=Mode.TRAIN):
        found[steps[episode.rollout_id]].append(episode)
    return found


@pytest.mark.slow
def test_prompts_of_both_and_the_weights_of_one_learn(run: Run, toy: Any, tiny: Path) -> None:
    """It fails when any of the three does nothing."""
    prompts = run.result.prompts
    assert {name: (each.place, each.agent) for name, each in prompts.items()} == {
        name: ("agent", name) for name in toy.BOTH
    }
    assert [prompts[name].before.text for name in toy.BOTH] == [toy.GUIDE, toy.WRITER]
    assert prompts["guide"].after.text.startswith(f"{toy.GUIDE} softly")
    assert prompts["writer"].after.text.startswith(f"{toy.WRITER} softly")
    before, after = tensors(tiny), tensors(run.result.model)
    moved = [name for name in before if not before[name].equal(after[name])]
    assert len(moved) > len(before) / 2
    first, last = run.result.evaluations
    assert last.mean - first.mean >= 0.2 - 0.1  # one word for the guide; the model's may fall
    assert json.loads((run.folder / "prompts.json").read_text())["writer"]["agent"] == "writer"


async def test_it_takes_turns_within_one_budget(run: Run, toy: Any) -> None:
    train = [line for line in lines(run.folder) if line["kind"] == "train"]
    assert [line["step"] for line in train if "candidates" in line] == list(SEARCHES)
    assert [line["step"] for line in train if "learner/loss" in line] == [2, 3, 5]
    most = 80 if run.kind == "GEPA" else 96
    assert sum(line["rollouts"] for line in train) <= most + 3 * 8
    done = sum(map(len, (await by_step(run.folder)).values()))
    assert done == sum(line["rollouts"] for line in train)


def test_the_app_is_looked_at_once(run: Run, toy: Any) -> None:
    first, second = read_searches(run.folder).values()
    assert first.surveyed == second.surveyed is not None
    given = first.candidates[0].templates
    assert given == {"guide": toy.GUIDE, "writer": toy.WRITER}
    assert second.candidates[0].templates == first.candidates[first.chosen].templates != given
    journals = sorted(run.folder.glob(f"journal/step-*/journal/{run.kind.lower()}.jsonl"))
    assert [path.read_text().count('"type":"survey"') for path in journals] == [1, 0]
    assert first.kept == second.kept == {}
    # in every rollout but those of the survey both agents are told a candidate's text
    assert first.applied == 2 * (first.rollouts - 4)
    assert second.applied == 2 * second.rollouts


async def test_weights_learn_with_the_texts_that_were_chosen(run: Run, toy: Any) -> None:
    """The writer's prompts are computed from them, and the guide's endpoint is asked with them."""
    searches = [*read_searches(run.folder).values()]
    chosen = [each.candidates[each.chosen].templates for each in searches]
    expected = {2: chosen[0], 3: chosen[0], 5: chosen[1]}
    for step, episodes in (await by_step(run.folder)).items():
        if step in SEARCHES:
            continue
        assert len(episodes) == 8
        for episode in episodes:
            texts = {text.agent: text for text in texts_of(episode)}
            assert {name: (t.text, t.applied) for name, t in texts.items()} == {
                "guide": (toy.GUIDE, True),
                "writer": (toy.WRITER, True),
            }
            for call in episode.calls:
                assert call.span is not None
                sent = str(call.span.attributes[c.INPUT_MESSAGES])
                assert expected[step][call.agent_path] in sent
                assert (call.record is not None) == (call.agent_path == "writer")
                assert call.outcome is CallOutcome.OK
    told = {request.messages[0]["content"] for request in run.guide}
    assert {toy.GUIDE, *(each["guide"] for each in chosen)} <= told
    assert {request.headers["authorization"] for request in run.guide} == {"Bearer own-key"}


def test_what_was_learned_is_evaluated_together(
    run: Run, toy: Any, tiny: Path, thinker: ScriptedServer
) -> None:
    trainer = toy.trainer(run.folder, toy.algorithm(tiny, thinker.url, kind=run.kind))
    mean = trainer.evaluate(toy.guided, toy.tasks(30), resume=True).mean
    assert mean >= 0.2 + run.result.evaluations[0].mean - 0.1
    assert trainer.algorithm.learned_prompts() == run.result.prompts


def test_inspect_shows_both(run: Run) -> None:
    text = inspect_run(run.folder)
    assert "search of step 1:\ncandidate 0, as given: selection 0." in text
    assert "search of step 4:\ncandidate 0, as given: selection 0." in text
    assert text.count("texts of candidates were sent in ") == 2
    assert "prompt guide:\n  --- before\n" in text
    assert "prompt writer:\n  --- before\n" in text


def test_a_dry_run_says_what_it_finds_and_takes(
    toy: Any, tiny: Path, guide: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    trainer = toy.trainer(tmp_path / "run", toy.algorithm(tiny, thinker.url))
    report = trainer.dev(toy.guided, toy.tasks(*range(8)), toy.tasks(20, 21), count=2, group_size=2)
    text = report.text()
    assert "found the text of 'guide': 29 characters" in text
    assert "found the text of 'writer': 6 characters" in text
    assert report.costs.rollouts == 80 + 3 * 8 + 2 * 2


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_either_half_goes_on(
    toy: Any, tiny: Path, guide: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """SIGKILL in the first search, in a step of weights, and in the second search, which then still
    knows what the first one found in the app."""
    folder = tmp_path / "run"
    before = len(thinker.requests)

    def live(batches: int) -> int:
        program = [sys.executable, str(APPS / "alternate_agents.py"), str(folder), str(tiny)]
        done = subprocess.run(
            [*program, guide.url, thinker.url, str(batches)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode in (0, -9), done.stderr
        return done.returncode

    def step() -> int:
        latest = checkpoints.latest(folder / "checkpoints")
        assert latest is not None
        return checkpoints.load_state(latest).step

    assert live(4) == -9  # after the held-out tasks, the survey and a batch of the search
    assert step() == 0
    while step() < 3:
        assert live(6) == -9
    [*_, journal] = sorted(folder.glob("journal/step-000004-*/journal/gepa.jsonl"))
    kept = journal.read_bytes()
    assert b'"evaluation"' in kept
    assert live(99) == 0
    assert journal.read_bytes().startswith(kept)
    first, second = read_searches(folder).values()
    assert second.candidates[0].templates == first.candidates[first.chosen].templates
    # killed before a batch of rollouts, no question was under way: none was asked twice
    assert len(thinker.requests) - before == first.reflections + second.reflections
    learned = json.loads((folder / "prompts.json").read_text())
    assert all("softly" in learned[name]["after"]["template"] for name in toy.BOTH)
