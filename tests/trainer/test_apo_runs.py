"""APO in a `Trainer`: real apps, real HTTP, a real store."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan.cli import main
from lightspan.training.collector import stored_episodes
from lightspan_prompts.search.candidates import read_found
from lightspan_testing.scripted import ScriptedServer
from lightspan_tools.inspect import inspect_run

APPS = Path(__file__).parents[1] / "apps"
LEARNED = {"rules": "SHOUT Speak.", "form": 'REVERSE As {"text": …}. Q: {q}'}


@pytest.fixture(scope="module")
def toy() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("apo_toy")


@pytest.fixture(scope="module")
def speaks(toy: Any) -> Any:
    return importlib.import_module("gepa_toy").speaks


@pytest.fixture(scope="module")
def model(speaks: Any) -> Iterator[ScriptedServer]:
    """The app's own model."""
    with ScriptedServer(speaks) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(toy: Any) -> Iterator[ScriptedServer]:
    """Both reflection models."""
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def run(
    toy: Any, model: ScriptedServer, thinker: ScriptedServer, tmp_path_factory: Any
) -> tuple[Path, Any]:
    """The folder of a complete run and its result. Only to be read."""
    folder = tmp_path_factory.mktemp("apo") / "run"
    return folder, toy.train(folder, model.url, thinker.url)


def test_the_prompts_are_learned(run: tuple[Path, Any]) -> None:
    folder, result = run
    assert result.model is None
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert {name: each.template for name, each in result.prompts.items()} == LEARNED
    found = read_found(folder)
    assert found is not None
    in_training = [e for e in stored_episodes(folder / "store.db") if e.mode == "train"]
    assert found.rollouts == len(in_training)
    assert found.candidates[found.chosen].templates == LEARNED


def test_the_folder_says_what_was_found(
    run: tuple[Path, Any], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder, _ = run
    found = read_found(folder)
    assert found is not None
    text = inspect_run(folder)
    assert text.startswith(f"{folder}: APO\napp prompt_apps:told\n")
    assert "candidate 0, as given: selection 0.000 (0 0 0 0)\n" in text
    parents = found.candidates[found.chosen].parents[0]
    assert f"candidate {found.chosen}, of {parents}: selection 1.000 (1 1 1 1), chosen\n" in text
    beaten = [n for n, each in enumerate(found.candidates) if not each.is_whole]
    assert beaten
    assert f"candidate {beaten[0]}, of 0: a batch of selection 0." in text
    assert main(["export", str(folder), "prompts", "--prompt", "rules"]) == 0
    assert capsysbinary.readouterr().out == b"SHOUT Speak.\n"
