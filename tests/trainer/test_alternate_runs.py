"""Test Alternate in a `Trainer`: a tiny model learns, and a search changes its prompt."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import alternate_toy as toy  # type: ignore[import-not-found]
import pytest

pytest.importorskip("torch")

from lightspan.training import checkpoints
from lightspan_prompts.search.candidates import read_searches
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.inspect import inspect_run

pytestmark = pytest.mark.slow

Run = tuple[Path, Any]

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def thinker() -> Iterator[ScriptedServer]:
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def run(tiny: Path, thinker: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train; return the run's folder and its result. Tests must not change them."""
    folder = tmp_path_factory.mktemp("alternate") / "run"
    return folder, toy.fit(folder, toy.algorithm(tiny, thinker.url))


def weights(model: Path) -> str:
    """Return a hash of the model's weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_both_learn(run: Run, tiny: Path) -> None:
    """Check that both the prompt and the weights improve."""
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


def test_inspect_shows_both(run: Run, tiny: Path) -> None:
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


def test_both_are_kept_of_the_best_step(
    tiny: Path, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """Check that the best step's weights are kept with the prompt that they were trained with."""
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


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_in_either_half_goes_on(
    run: Run, tiny: Path, thinker: ScriptedServer, tmp_path: Path
) -> None:
    """Check SIGKILL in the first search, in a step that trains weights, and in the second
    search.
    """
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
