"""Alternate in a `Trainer`: a real tiny model learns, and a real search changes its prompt."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lightspan.errors import ConfigError
from lightspan.schema.records import Mode, task_id
from lightspan.stores import open_store
from lightspan.training import checkpoints
from lightspan_prompts.search.candidates import read_searches
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.inspect import inspect_run

APPS = Path(__file__).parents[1] / "apps"
SEARCHES = (1, 4)
"""Steps of the run: two searches, of its five."""


@pytest.fixture(scope="module")
def toy() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("alternate_toy")


@pytest.fixture(scope="module")
def thinker(toy: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def run(
    toy: Any, tiny: Path, thinker: ScriptedServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """The folder of a complete run and its result. Only to be read."""
    folder = tmp_path_factory.mktemp("alternate") / "run"
    return folder, toy.fit(folder, toy.algorithm(tiny, thinker.url))


def weights(model: Path) -> str:
    """What its weights are."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_both_learn(run: tuple[Path, Any], tiny: Path) -> None:
    """It fails when either half does nothing."""
    folder, result = run
    assert result.prompts["style"].before.template == "Say {q}"
    assert result.prompts["style"].template.startswith("Say {q} softly")
    assert result.model == folder / "model"
    before, after = tensors(tiny), tensors(result.model)
    assert before.keys() == after.keys()
    moved = [name for name in before if not before[name].equal(after[name])]
    assert len(moved) > len(before) / 2
    first, last = result.evaluations
    assert last.mean - first.mean >= 0.4 - 0.2  # the prompt's part; the model's may fall
    assert "held-out reward: " in result.summary()


def test_it_takes_turns_within_one_budget(run: tuple[Path, Any]) -> None:
    folder, _ = run
    train = [line for line in lines(folder) if line["kind"] == "train"]
    assert [line["step"] for line in train if "candidates" in line] == list(SEARCHES)
    assert [line["step"] for line in train if "learner/loss" in line] == [2, 3, 5]
    assert sum(line["rollouts"] for line in train) <= 48 + 3 * 8
    assert [line["step"] for line in lines(folder) if line["kind"] == "eval"] == [0, 5]


async def test_no_group_mixes_candidates_or_versions_of_the_policy(run: tuple[Path, Any]) -> None:
    folder, _ = run
    texts: dict[tuple[int, str], set[str]] = defaultdict(set)
    versions: dict[tuple[int, str], set[int]] = defaultdict(set)
    async with open_store(folder / "store.db") as store:
        for state in await store.rollouts(mode=Mode.TRAIN):
            rollout = state.rollout
            group = rollout.step, rollout.group_id
            offered: Any = await store.get_resources(rollout.resources_id)
            texts[group].add(offered["style"].template)
            ids = [each.attempt_id for each in await store.attempts([rollout.rollout_id])]
            for records in (await store.token_records(ids)).values():
                versions[group] |= {version for each in records for version, _ in each.versions}
    assert texts.keys() == versions.keys()
    assert {len(found) for found in texts.values()} == {1}
    assert {len(found) for found in versions.values()} == {1}
    by_step: dict[int, set[Any]] = defaultdict(set)
    searched: dict[int, set[str]] = defaultdict(set)
    for (step, _), found in versions.items():
        by_step[step] |= found
    for (step, _), found_texts in texts.items():
        searched[step] |= found_texts
    # the policy stands still while prompts are searched, and moves after each step of weights
    assert {len(found) for found in by_step.values()} == {1}
    numbers = [min(by_step[step]) for step in range(1, 6)]
    assert numbers[0] == numbers[1] < numbers[2] < numbers[3] == numbers[4]
    # the prompt stands still while weights learn; a search tries several
    first, second = read_searches(folder).values()
    chosen = [each.candidates[each.chosen].templates["style"] for each in (first, second)]
    assert searched[2] == searched[3] == {chosen[0]}
    assert searched[5] == {chosen[1]}
    assert len(searched[1]) > 1


async def test_prompts_are_chosen_by_the_selection_split_alone(
    run: tuple[Path, Any], toy: Any, tiny: Path, thinker: ScriptedServer
) -> None:
    folder, _ = run
    split = toy.algorithm(tiny, thinker.url).prompts.split(toy.tasks(*range(8)))
    selection = {task_id(task) for task in split.selection}
    held_out = {task_id(task) for task in toy.tasks(20, 21)}
    async with open_store(folder / "store.db") as store:
        states = await store.rollouts()
    of_weights = {s.rollout.task_id for s in states if s.rollout.step in (2, 3, 5)}
    in_training = {s.rollout.task_id for s in states if s.rollout.mode is Mode.TRAIN}
    assert not (of_weights - held_out) & selection
    assert not in_training & held_out
    for found in read_searches(folder).values():
        assert all(set(each.rewards) == selection for each in found.candidates)
    asked = "".join(request.last_text for request in thinker.requests)
    assert not any(task["q"] in asked for task in (*split.selection, *toy.tasks(20, 21)))


def test_inspect_shows_both(run: tuple[Path, Any], tiny: Path) -> None:
    folder, _ = run
    text = inspect_run(folder)
    assert text.startswith(f"{folder}: Alternate on {tiny}\n")
    assert "optimize writer\n" in text
    assert "search of step 1:\ncandidate 0, as given: selection 0." in text
    assert "search of step 4:\ncandidate 0, as given: selection 0." in text
    assert "prompt style:\n  --- before\n" in text
    rollouts = sum(line["rollouts"] for line in lines(folder) if line.get("candidates"))
    unused = re.search(r"rejected:unused (\d+)", text)
    assert unused is not None
    assert int(unused[1]) >= rollouts > 0  # nothing was learned from these


def test_what_was_learned_is_evaluated_together(
    run: tuple[Path, Any], toy: Any, tiny: Path, thinker: ScriptedServer
) -> None:
    folder, _ = run
    trainer = toy.trainer(folder, toy.algorithm(tiny, thinker.url))
    assert trainer.evaluate(toy.styled, toy.tasks(30), resume=True).mean >= 0.4
    assert "softly" in trainer.algorithm.resources()["style"].template


def test_a_dry_run_says_what_both_would_take(
    toy: Any, tiny: Path, thinker: ScriptedServer, tmp_path: Path
) -> None:
    asked = len(thinker.requests)
    trainer = toy.trainer(tmp_path / "run", toy.algorithm(tiny, thinker.url))
    report = trainer.dev(toy.styled, toy.tasks(*range(8)), toy.tasks(20, 21), count=2, group_size=2)
    assert report.costs.rollouts == 48 + 3 * 8 + 2 * 2
    said = "76 rollouts: 48 at most in 2 search phases + 3 steps x 2 tasks x 4 + 2 x 2 evaluated"
    assert said in report.text()
    assert len(thinker.requests) == asked
    assert not (tmp_path / "run").exists()


def test_both_are_kept_of_the_best_step(
    toy: Any, tiny: Path, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """The weights of a step, and the prompt that they were trained with."""
    folder = tmp_path / "run"
    made = toy.algorithm(tiny, thinker.url, max_rollouts=48 + 16)
    trainer = toy.trainer(folder, made, keep="best", validate_every=1)
    # the second search finds what the task of the selection split does not stand
    result = trainer.fit(
        toy.quiet, toy.tasks(*range(8)), toy.tasks(20, 21), selection=toy.tasks(40)
    )
    assert result.kept is not None
    assert result.kept.step in (1, 2)
    state = checkpoints.load_state(checkpoints.at_step(folder / "checkpoints", result.kept.step))
    assert result.prompts["style"].template == state.algorithm["templates"]["style"]
    last = checkpoints.load_state(folder / "checkpoints" / "step-000004")
    assert last.algorithm["templates"]["style"] != state.algorithm["templates"]["style"]


def test_an_app_that_takes_no_such_prompt_is_refused(
    toy: Any, tiny: Path, thinker: ScriptedServer, tmp_path: Path, apps: Any
) -> None:
    trainer = toy.trainer(tmp_path / "run", toy.algorithm(tiny, thinker.url))
    with pytest.raises(ConfigError, match="'spell' has no argument 'style', so what Alternate"):
        trainer.fit(apps.spell, toy.tasks(1, 2))
    with pytest.raises(ConfigError, match="steps=3: Alternate sets its own number of steps"):
        toy.trainer(tmp_path / "run", toy.algorithm(tiny, thinker.url), steps=3)


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_either_half_goes_on(
    run: tuple[Path, Any], toy: Any, tiny: Path, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """SIGKILL in the first search, in a step of weights, and in the second search."""
    folder = tmp_path / "run"
    before = len(thinker.requests)

    def live(batches: int) -> int:
        program = [sys.executable, str(APPS / "alternate_toy.py"), str(folder), str(tiny)]
        done = subprocess.run(
            [*program, thinker.url, str(batches)],
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

    assert live(4) == -9  # after the held-out tasks, and two batches of the search
    assert step() == 0
    journal = folder / "journal" / "step-000001-start" / "journal" / "gepa.jsonl"
    kept = journal.read_bytes()
    assert kept.count(b"evaluation") == 2
    assert live(7) == -9  # the rest of it, a step of weights, and in the next one
    assert step() == 2
    assert journal.read_bytes().startswith(kept)
    assert live(5) == -9  # in the second search
    assert step() == 3
    [second_journal] = folder.glob("journal/step-000004-*/journal/gepa.jsonl")
    kept = second_journal.read_bytes()
    assert kept.count(b'"evaluation"') >= 2
    assert live(99) == 0
    assert second_journal.read_bytes().startswith(kept)
    first, second = read_searches(folder).values()
    # killed before a batch of rollouts, no question was under way: none was asked twice
    assert len(thinker.requests) - before == first.reflections + second.reflections
    whole = read_searches(run[0])["step-000001"]
    assert first.candidates[1].templates == whole.candidates[1].templates
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 5
    assert (
        "softly" in json.loads((folder / "prompts.json").read_text())["style"]["after"]["template"]
    )
    assert weights(folder / "model") != weights(tiny)
    spent = [line for line in lines(folder) if line["kind"] == "train"]
    assert sum(line["rollouts"] for line in spent) <= 48 + 3 * 8
