"""APO in a `Trainer`: real apps, real HTTP, a real store."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import APO, LLM, PromptTemplate, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError, EngineError
from lightspan.progress import SilentReporter
from lightspan.training.collector import stored_episodes
from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_testing.scripted import Reply, Request, ScriptedServer
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


def test_the_held_out_tasks_are_run_before_and_after_only(
    run: tuple[Path, Any], model: ScriptedServer, thinker: ScriptedServer
) -> None:
    said = Counter(request.last_text.rpartition("Q: ")[2] for request in model.requests)
    assert (said["word20"], said["word21"]) == (2, 2)
    asked = "".join(request.last_text for request in thinker.requests)
    assert "The app says: it was to be " in asked
    assert "word20" not in asked
    assert "word21" not in asked


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


def test_the_learned_prompts_are_evaluated(
    run: tuple[Path, Any], toy: Any, model: ScriptedServer, thinker: ScriptedServer
) -> None:
    import gepa_toy  # type: ignore[import-not-found]
    import prompt_apps  # type: ignore[import-not-found]

    folder, result = run
    algorithm = APO(
        {name: each.before for name, each in result.prompts.items()},
        LLM(base_url=thinker.url, model="another"),
        beam_width=2,
        branch_factor=1,
        beam_rounds=2,
        gradient_batch_size=2,
        val_batch_size=4,
    )
    trainer = Trainer(algorithm, runners=1, folder=folder, reporter=SilentReporter())
    tasks = gepa_toy.tasks(model.url, 30)
    assert trainer.evaluate(prompt_apps.told, tasks, resume=True).mean == 1.0


def test_a_dry_run_and_a_prompt_that_the_app_does_not_take(
    model: ScriptedServer, thinker: ScriptedServer, toy: Any, tmp_path: Path
) -> None:
    import gepa_toy
    import prompt_apps

    llm = LLM(base_url=thinker.url, model="thinker")
    given = {name: PromptTemplate("{q}") for name in ("rules", "form", "tone")}
    quiet: dict[str, Any] = {"runners": 1, "reporter": SilentReporter()}
    trainer = Trainer(APO(given, llm), folder=tmp_path / "run", **quiet)
    with pytest.raises(ConfigError, match=r"'told' has no argument 'tone'.* what APO makes"):
        trainer.fit(prompt_apps.told, gepa_toy.tasks(model.url, 1, 2))
    two = APO({name: given[name] for name in ("rules", "form")}, llm, max_rollouts=250)
    dry = Trainer(two, folder=tmp_path / "other", **quiet)
    report = dry.dev(prompt_apps.told, gepa_toy.tasks(model.url, 1, 2), count=1)
    assert report.costs.rollouts == 250


def test_a_refusing_model_ends_the_run_and_another_one_goes_on(
    run: tuple[Path, Any], toy: Any, model: ScriptedServer, tmp_path: Path
) -> None:
    folder, before = tmp_path / "run", len(model.requests)

    def refuses(request: Request) -> Any:
        is_edit = "<critique>" in request.last_text
        return Reply(status=401, text="no such key") if is_edit else toy.reflects(request)

    with ScriptedServer(refuses) as server:
        with pytest.raises(EngineError, match=r"thinker at .*AuthenticationError.*no such key"):
            toy.train(folder, model.url, server.url)
        assert sum("<critique>" not in r.last_text for r in server.requests) == 2
    assert not (folder / "result.json").exists()
    done = len(model.requests) - before
    with ScriptedServer(toy.reflects) as answers:
        result = toy.train(folder, model.url, answers.url)
        assert "<critique>" in answers.requests[0].last_text  # no critique is asked for again
    assert result.prompts == run[1].prompts
    found, whole = read_found(folder), read_found(run[0])
    assert found is not None
    assert whole is not None
    assert found.candidates == whole.candidates
    # held-out tasks before and after, and no rollout twice
    assert len(model.requests) - before == found.rollouts + 4 > done


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", ["app", "reflection"])
def test_a_run_that_is_killed_again_and_again(
    run: tuple[Path, Any], toy: Any, speaks: Any, tmp_path: Path, at: str
) -> None:
    """Each of three lives is killed (SIGKILL) in its second reflection, or its 15th rollout."""
    folder = tmp_path / "run"
    alive: list[subprocess.Popen[str]] = []
    killed: list[str] = []

    def killing(script: Any, name: str, number: int) -> Any:
        asked: Counter[int] = Counter()

        def answer(request: Request) -> Any:
            process = alive[-1]
            asked[process.pid] += 1
            if name == at and asked[process.pid] == number and len(killed) < 3:
                process.kill()
                killed.append(name)
            return script(request)

        return answer

    with (
        ScriptedServer(killing(speaks, "app", 15)) as model,
        ScriptedServer(killing(toy.reflects, "reflection", 2)) as thinker,
    ):
        for life in range(9):
            alive.append(_started(folder, model.url, thinker.url, life))
            said, errors = alive[-1].communicate(timeout=110)
            if alive[-1].returncode == 0:
                break
            assert alive[-1].returncode == -9, errors
        assert said.strip() == "[]"  # none of torch, matplotlib, transformers, litellm, peft, gepa
        asked, reflected = len(model.requests), len(thinker.requests)
    assert killed
    found, whole = read_found(folder), read_found(run[0])
    assert found is not None
    assert whole is not None
    assert pool(found) == pool(whole)
    assert found.reflections == whole.reflections
    assert found.reflections <= reflected
    if at == "reflection":  # no rollout was under way, and at most the questions of one moment
        assert asked == found.rollouts + 4
        assert reflected <= found.reflections + 4 * len(killed)
    else:
        assert reflected == found.reflections


def pool(found: SearchResult) -> list[Any]:
    """The tasks of another run are others: they name its app's endpoint."""
    return [(each.templates, each.parents, each.mean, each.is_whole) for each in found.candidates]


def _started(folder: Path, app: str, thinker: str, life: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(APPS / "apo_toy.py"), str(folder), app, thinker],
        env={**os.environ, "PYTHONHASHSEED": str(life)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
