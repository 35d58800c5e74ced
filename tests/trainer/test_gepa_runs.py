"""GEPA in a `Trainer`: real apps, real HTTP, a real store."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightspan import GEPA, LLM, PromptTemplate, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError, EngineError
from lightspan.progress import SilentReporter
from lightspan.training.collector import stored_episodes
from lightspan_prompts.search.candidates import read_found
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from lightspan_tools.inspect import inspect_run

APPS = Path(__file__).parents[1] / "apps"


@pytest.fixture(scope="module")
def toy() -> Any:
    if str(APPS) not in sys.path:
        sys.path.insert(0, str(APPS))
    return importlib.import_module("gepa_toy")


@pytest.fixture(scope="module")
def model(toy: Any) -> Iterator[ScriptedServer]:
    """The app's own model."""
    with ScriptedServer(toy.speaks) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(toy: Any) -> Iterator[ScriptedServer]:
    """The reflection model."""
    with ScriptedServer(toy.reflects) as server:
        yield server


@pytest.fixture(scope="module")
def run(
    toy: Any, model: ScriptedServer, thinker: ScriptedServer, tmp_path_factory: Any
) -> tuple[Path, Any]:
    """The folder of a complete run and its result. Only to be read."""
    folder = tmp_path_factory.mktemp("gepa") / "run"
    return folder, toy.train(folder, model.url, thinker.url)


def test_the_prompts_are_learned(run: tuple[Path, Any]) -> None:
    _, result = run
    assert result.model is None
    assert [evaluation.mean for evaluation in result.evaluations] == [0.0, 1.0]
    assert result.gain.mean == 1.0
    assert {name: each.template for name, each in result.prompts.items()} == {
        "rules": "SHOUT Speak.",
        "form": 'REVERSE As {"text": …}. Q: {q}',
    }
    assert result.prompts["rules"].diff() == (
        "--- before\n+++ after\n@@ -1 +1 @@\n-Speak.\n+SHOUT Speak."
    )
    assert "held-out reward: 0.00 -> 1.00" in result.summary()


def test_the_held_out_tasks_are_run_before_and_after_only(
    run: tuple[Path, Any], model: ScriptedServer, thinker: ScriptedServer
) -> None:
    said = Counter(request.last_text.rpartition("Q: ")[2] for request in model.requests)
    assert (said["word20"], said["word21"]) == (2, 2)
    asked = "".join(request.last_text for request in thinker.requests)
    assert "word2" in asked or "word3" in asked
    assert "word20" not in asked
    assert "word21" not in asked


def test_reflections_see_what_happened(run: tuple[Path, Any], thinker: ScriptedServer) -> None:
    asked = thinker.requests[0].last_text
    assert "Model call of the agent 'speaker':" in asked
    assert '  user: Speak.\nAs {"text": …}. Q: word' in asked
    assert "  answer: word" in asked
    assert "The app says: it was to be " in asked
    assert "Reward: 0\n  loud: 0" in asked
    assert thinker.requests[0].body["model"] == "thinker"


def test_the_folder_says_what_was_found(run: tuple[Path, Any]) -> None:
    folder, _ = run
    found = read_found(folder)
    assert found is not None
    [train] = [line for line in result_lines(folder) if line["kind"] == "train"]
    in_training = [e for e in stored_episodes(folder / "store.db") if e.mode == "train"]
    assert train["rollouts"] == train["scored"] == found.rollouts == len(in_training) <= 60
    assert train["selection/best"] == 1.0
    assert json.loads((folder / "prompts.json").read_bytes())["rules"] == {
        "before": {"type": "prompt", "template": "Speak."},
        "after": {"type": "prompt", "template": "SHOUT Speak."},
    }
    text = inspect_run(folder)
    assert text.startswith(f"{folder}: GEPA\napp prompt_apps:told\n")
    assert "candidate 0, as given: selection 0.000 (0 0 0 0)\n" in text
    chosen = f"candidate {found.chosen}, of 1: selection 1.000 (1 1 1 1; again 1 1 1 1), chosen\n"
    assert chosen in text
    assert "candidate 1, of 0: " in text
    assert "prompt rules:\n  --- before\n  +++ after\n  @@ -1 +1 @@\n  -Speak.\n  +SHOUT" in text


def test_they_are_exported_as_plain_texts(
    run: tuple[Path, Any], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder, out = str(run[0]), tmp_path / "texts"
    form = b'REVERSE As {"text": \xe2\x80\xa6}. Q: {q}'
    assert main(["export", folder, "prompts", "--prompt", "form"]) == 0
    assert capsysbinary.readouterr().out == form + b"\n"
    assert main(["export", folder, "prompts"]) == 0
    both = b"=== rules\nSHOUT Speak.\n=== form\n" + form + b"\n"
    assert capsysbinary.readouterr().out == both
    assert main(["export", folder, "prompts", "-o", str(out)]) == 0
    assert capsysbinary.readouterr().err == f"2 prompts to {out}\n".encode()
    texts = {file.name: file.read_bytes() for file in out.iterdir()}
    assert texts == {"rules.txt": b"SHOUT Speak.", "form.txt": form}
    for arguments, said in {
        ("prompts", "-o", str(out)): "exists; prompts go into a new folder",
        ("prompts", "-o", str(out / "form.txt" / "x")): "cannot be written: Not a directory",
        ("prompts", "--prompt", "from"): "the run has the prompts rules, form, no 'from'",
        (
            "spans",
            "--prompt",
            "form",
        ): "--prompt form applies only to prompts, not to spans: leave it out",
    }.items():
        assert main(["export", folder, *arguments]) == 1
        assert said.encode() in capsysbinary.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told(run: tuple[Path, Any]) -> None:
    program = [sys.executable, "-m", "lightspan.cli", "export", str(run[0]), "prompts"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "lightspan: the output cannot be written: No space left on device\n"


def test_a_prompts_name_leads_nowhere_else(run: tuple[Path, Any], tmp_path: Path) -> None:
    """A run of somebody else's may have any name in it."""
    copy, out = tmp_path / "run", tmp_path / "out" / "texts"
    shutil.copytree(run[0], copy)
    (learned, *_) = json.loads((copy / "prompts.json").read_bytes()).values()
    (copy / "prompts.json").write_text(json.dumps({"../../x": learned, "crew/writer": learned}))
    assert main(["export", str(copy), "prompts", "-o", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["..%2F..%2Fx.txt", "crew%2Fwriter.txt"]
    (copy / "prompts.json").unlink()
    assert main(["export", str(copy), "prompts"]) == 1


def result_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_learned_prompts_are_evaluated(
    run: tuple[Path, Any], toy: Any, model: ScriptedServer, thinker: ScriptedServer
) -> None:
    import prompt_apps

    folder, result = run
    algorithm = GEPA(
        {name: each.before for name, each in result.prompts.items()},
        LLM(base_url=thinker.url, model="thinker"),
        max_rollouts=60,
        minibatch=2,
    )
    trainer = Trainer(algorithm, runners=1, folder=folder, reporter=SilentReporter())
    assert trainer.evaluate(prompt_apps.told, toy.tasks(model.url, 30), resume=True).mean == 1.0


def test_a_prompt_that_the_app_does_not_take_is_refused_before_any_rollout(
    model: ScriptedServer, thinker: ScriptedServer, toy: Any, tmp_path: Path
) -> None:
    import prompt_apps

    llm = LLM(base_url=thinker.url, model="thinker")
    given = {name: PromptTemplate("{q}") for name in ("rules", "form", "tone")}
    before = len(model.requests)
    trainer = Trainer(GEPA(given, llm), folder=tmp_path / "run", reporter=SilentReporter())
    with pytest.raises(ConfigError, match="'told' has no argument 'tone'"):
        trainer.fit(prompt_apps.told, toy.tasks(model.url, 1, 2))
    assert len(model.requests) == before
    report = Trainer(
        GEPA({name: given[name] for name in ("rules", "form")}, llm, optimize="speaker"),
        folder=tmp_path / "other",
        runners=1,
        reporter=SilentReporter(),
    ).dev(prompt_apps.told, toy.tasks(model.url, 1, 2), count=1)
    assert report.costs.rollouts == 300  # as many as GEPA may take
    [warning] = [text for text in report.warnings if "speaker" in text]
    assert warning.startswith(
        "fit would stop: no agent matches 'speaker'. Agents: none was seen. A "
    )
    assert "rollout ended with: ConfigError: the prompt template needs a value for 'q'" in warning


class Told(SilentReporter):
    """Keeps what a person is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def line(self, text: str) -> None:
        self.told.append(text)


def test_a_dead_reflection_model_ends_the_run_and_another_one_goes_on(
    run: tuple[Path, Any], toy: Any, model: ScriptedServer, tmp_path: Path
) -> None:
    folder, before = tmp_path / "run", len(model.requests)
    with ScriptedServer(lambda request: Reply(status=401, text="no such key")) as refuses:
        with pytest.raises(EngineError, match=r"thinker at .*AuthenticationError.*no such key"):
            toy.train(folder, model.url, refuses.url)
        assert len(refuses.requests) == 1
    assert not (folder / "result.json").exists()
    done = len(model.requests) - before
    with ScriptedServer(toy.reflects) as answers:
        result = toy.train(folder, model.url, answers.url)
    assert result.prompts == run[1].prompts
    found, whole = read_found(folder), read_found(run[0])
    assert found is not None
    assert whole is not None
    assert [c.templates for c in found.candidates] == [c.templates for c in whole.candidates]
    # held-out tasks before and after, and no rollout twice
    assert len(model.requests) - before == found.rollouts + 4 > done


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at", ["app", "reflection"])
def test_a_run_that_is_killed_again_and_again(
    run: tuple[Path, Any], toy: Any, tmp_path: Path, at: str
) -> None:
    """Each life is killed (SIGKILL) in its third reflection, or its ninth rollout."""
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
        ScriptedServer(killing(toy.speaks, "app", 9)) as model,
        ScriptedServer(killing(toy.reflects, "reflection", 2)) as thinker,
    ):
        for life in range(9):
            alive.append(_started(folder, model.url, thinker.url, life))
            said, errors = alive[-1].communicate(timeout=110)
            if alive[-1].returncode == 0:
                break
            assert alive[-1].returncode == -9, errors
        assert said.strip() == "[]"  # none of torch, matplotlib, transformers, litellm, peft
        asked, reflected = len(model.requests), len(thinker.requests)
    assert killed
    found, whole = read_found(folder), read_found(run[0])
    assert found is not None
    assert whole is not None
    assert [(c.templates, c.parents) for c in found.candidates] == [
        (c.templates, c.parents) for c in whole.candidates
    ]
    assert found.reflections == whole.reflections
    lost = len(killed) if at == "reflection" else 0
    assert found.reflections <= reflected <= found.reflections + lost
    if at == "reflection":  # no rollout was under way
        assert asked == found.rollouts + 4


def _started(folder: Path, app: str, thinker: str, life: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(APPS / "gepa_toy.py"), str(folder), app, thinker],
        env={**os.environ, "PYTHONHASHSEED": str(life)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_held_out_tasks_that_choose_too_are_told_of(
    toy: Any, model: ScriptedServer, thinker: ScriptedServer, tmp_path: Path
) -> None:
    apps = importlib.import_module("prompt_apps")
    algorithm = GEPA(
        {"style": PromptTemplate("Say it. Q: {q}")},
        LLM(base_url=thinker.url, model="thinker"),
        max_rollouts=14,
        minibatch=1,
    )
    told = Told()
    trainer = Trainer(algorithm, runners=1, folder=tmp_path / "run", reporter=told)
    train = toy.tasks(model.url, *range(4))
    trainer.fit(apps.styled, train, [*train[:2], *toy.tasks(model.url, 20)])
    said = "2 of the 3 held-out tasks are training tasks too: prompts may be chosen by them"
    assert next(line for line in told.told if "held-out tasks" in line).startswith(said)
