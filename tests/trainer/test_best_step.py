"""Test keeping the best step and early stopping, both by a separate selection split."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import best_toy as toy  # type: ignore[import-not-found]
import pytest

from lightspan import FitResult, LightningRL, Trainer
from lightspan.errors import CheckpointError, ConfigError, DataError
from lightspan.progress import SilentReporter
from lightspan.training.checkpoints import list_checkpoints
from lightspan.training.folder import RunFolder
from lightspan.training.model_selection import Splits, overlap_warnings
from lightspan.training.settings import TrainerSettings
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

Run = tuple[FitResult, Any, list[str]]


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train six steps, and keep the best; return the result, the algorithm and the output.

    The selection rewards are .2 .5 .9 .9 .1 .1 .3 by step.
    """
    said: list[str] = []
    reporter: Any = SilentReporter()
    reporter.line = said.append
    folder, algorithm = tmp_path_factory.mktemp("best") / "run", toy.Hashing(tiny)
    return toy.fit(folder, algorithm, reporter=reporter), algorithm, said


def _hash(model: Path) -> str:
    return TorchLearner({"drilled": str(model)}).weight_hash("drilled")


def _lines(folder: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in RunFolder(folder).metrics()]


# --- the best step --------------------------------------------------------------------------


def test_model_has_the_weights_of_the_first_best_step(run: Run) -> None:
    result, algorithm, _ = run
    assert result.kept is not None
    assert (result.steps, result.kept.step) == (6, 2)  # step 3 equals it
    assert _hash(result.model) == algorithm.hashes[2]
    assert len(set(algorithm.hashes.values())) == 6


def test_held_out_tasks_have_no_part_in_the_choice(run: Run) -> None:
    """Check that held-out tasks run before training, and once with the weights that are kept."""
    result, _, _ = run
    selections = [("selection", step) for step in range(7)]
    lines = _lines(result.folder)
    assert [line for line in lines if line[0] == "selection"] == selections
    assert [line for line in lines if line[0] == "eval"] == [("eval", 0), ("eval", 6)]
    assert [(found.step, found.weights) for found in result.evaluations] == [(0, None), (6, 2)]
    assert {name.split()[0] for name in result.evaluations[-1].rewards} == {"held"}


def test_selection_score_is_told_and_is_not_the_result(run: Run) -> None:
    result, _, said = run
    assert (
        "step 6: step 2 is kept: its reward on the selection split is 0.900 (95% CI 0.142..0.984, "
        "n=2), the highest of 7, so by luck too: what counts is the held-out one"
    ) in said
    # the toy's rewards follow the steps done, not the weights
    assert result.summary() == (
        "held-out reward: 0.20 -> 0.30 (n=2, 95% CI of the gain -0.83..0.86), keeping step 2"
    )
    saved = json.loads((result.folder / "result.json").read_text())
    assert (saved["steps"], saved["kept"]["step"]) == (6, 2)
    assert saved["kept"]["selection"]["mean"] == pytest.approx(0.9)


def test_checkpoint_of_the_best_step_outlives_later_ones(run: Run) -> None:
    kept = list_checkpoints(RunFolder(run[0].folder).checkpoints)
    assert [path.name for path in kept] == ["step-000002", "step-000005", "step-000006"]


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Path:
    """Return a copy of the complete run."""
    shutil.copytree(run[0].folder, tmp_path / "run")
    return tmp_path / "run"


def test_more_steps_go_on_from_the_last_step_and_keep_the_best(
    run: Run, tiny: Path, copied: Path
) -> None:
    algorithm = toy.Hashing(tiny)
    result = toy.fit(copied, algorithm, told=run[0].folder, steps=7, resume=True)
    assert (result.steps, result.kept.step) == (7, 2)
    assert _hash(result.model) == algorithm.hashes[2]
    assert algorithm.hashes[7] != algorithm.hashes[6]
    [found] = [line for line in RunFolder(copied).metrics() if line["step"] == 7][-1:]
    assert (found["kind"], found["weights"]) == ("eval", 2)


def test_result_does_not_outlive_its_model(
    run: Run, tiny: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a kill between writing the model and the result: no old result is left with it."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    last = {"keep": "last", "patience": 9}
    with monkeypatch.context() as patched:
        patched.setattr("lightspan.training.loop.write_result", killed)
        with pytest.raises(KeyboardInterrupt):
            toy.fit(copied, toy.Hashing(tiny), told=run[0].folder, resume=True, **last)
    assert RunFolder(copied).read_result() is None
    result = toy.fit(copied, toy.Hashing(tiny), told=run[0].folder, resume=True)
    assert _hash(result.model) == run[1].hashes[2]


def test_lost_checkpoint_of_the_best_step_is_named(run: Run, tiny: Path, copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints" / "step-000002")
    shutil.rmtree(copied / "model")
    with pytest.raises(
        CheckpointError, match=r'step-000002 is gone.*\(keep="last" and patience=\)'
    ):
        toy.fit(copied, toy.Hashing(tiny), told=run[0].folder, resume=True)


# --- stopping early -------------------------------------------------------------------------


def test_patience_ends_training(tiny: Path, tmp_path: Path, lines: Any) -> None:
    folder, algorithm = tmp_path / "run", toy.Hashing(tiny)
    last = {"keep": "last", "patience": 3, "selection": 0.5, "reporter": lines}
    result = toy.fit(folder, algorithm, **last)
    assert (result.steps, result.kept) == (5, None)
    assert _hash(result.model) == algorithm.hashes[5]
    assert (
        "step 5: stopped early: the last 3 evaluations on the selection split were no better than "
        "the best before them"
    ) in lines.texts
    again = toy.fit(folder, toy.Hashing(tiny), resume=True, **last)
    assert again.steps == 5
    config = RunFolder(folder).read_config()
    assert [config[split]["tasks"] for split in ("train", "selection", "val")] == [1, 1, 2]
    assert lines.texts[-1] == (
        f"{folder} is complete: nothing is left to train (ended by patience, step 5)"
    )


@pytest.mark.timeout(300)
def test_killed_run_keeps_the_same_step(run: Run, tiny: Path, tmp_path: Path) -> None:
    """Check `kill -9` in the evaluation of the kept weights: best step and patience survive it."""
    folder = tmp_path / "run"
    command = [sys.executable, toy.__file__, str(folder), str(tiny), "step 5: evaluating", "2"]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    algorithm = toy.Hashing(tiny)
    result = toy.fit(folder, algorithm, patience=3, resume=True)
    assert (result.steps, result.kept.step) == (5, 2)
    assert _hash(result.model) == run[1].hashes[2]
    kinds = [line for line in _lines(folder) if line[0] != "train"]
    assert kinds.count(("eval", 5)) == 1
    assert [line for line in kinds if line[0] == "selection"] == [
        ("selection", step) for step in range(6)
    ]


# --- the split ------------------------------------------------------------------------------


def test_split_is_the_same_each_time_and_keeps_equal_tasks_together(tiny: Path) -> None:
    from lightspan.training.model_selection import split_tasks

    def split(seed: int) -> Any:
        algorithm = LightningRL(tiny, seed=seed)
        settings = TrainerSettings(algorithm, keep="best", validate_every=1)
        return split_tasks(settings, [f"task {n % 20}" for n in range(40)], None, 0.25)

    found = split(0)
    assert found == split(0)
    assert found != split(1)
    assert (len(found.train), len(found.selection)) == (30, 5)
    assert not set(found.train) & set(found.selection)
    settings = TrainerSettings(LightningRL(tiny), keep="best", validate_every=1)
    parts = [{"id": n, "part": part} for part in ("easy", "hard") for n in range(4)]
    with pytest.raises(DataError, match=r"train\[0\] and train\[4\] .* have one id \(0\)"):
        split_tasks(settings, parts, None, 0.25)


def test_a_step_above_the_planned_ones_is_evaluated(tiny: Path) -> None:
    """Check a run that is resumed with fewer steps than it has done, and so ends early."""
    settings = TrainerSettings(LightningRL(tiny), keep="best", validate_every=4)
    assert [settings.selects_at(step, 6) for step in (5, 6, 7)] == [False, True, True]
    evaluated = [settings.evaluates_at(step, 6, has_selection=True) for step in (4, 5, 6, 7)]
    assert evaluated == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "selection", "message"),
    [
        ({"keep": "best", "validate_every": 1}, None, r'keep="best" compares steps.*selection=0.1'),
        ({}, 0.5, r"selection= is evaluated between steps: give Trainer\(validate_every=\)"),
        ({"keep": "best", "validate_every": 1}, 1.5, r"selection=1.5: the share.*between 0 and 1"),
    ],
)
def test_what_a_choice_of_steps_needs_is_said(
    tiny: Path, tmp_path: Path, options: Any, selection: Any, message: str
) -> None:
    trainer = Trainer(toy.Hashing(tiny), folder=tmp_path / "run", **options)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(toy.scheduled, [{"q": 1}, {"q": 2}], selection=selection)
    assert not (tmp_path / "run").exists()


def test_selection_tasks_are_not_the_reported_ones(tiny: Path, tmp_path: Path) -> None:
    trainer = Trainer(toy.Hashing(tiny), folder=tmp_path / "run", keep="best", validate_every=1)
    with pytest.raises(DataError, match=r"1 of 2 tasks of selection are held out too \(for exam"):
        trainer.fit(toy.scheduled, [1, 2], ["a", "b"], selection=["b", "c"])
    with pytest.raises(DataError, match=r"selection=0.9 of 2 distinct training tasks leaves none"):
        trainer.fit(toy.scheduled, [1, 2], ["a", "b"], selection=0.9)


def test_selection_tasks_that_are_trained_on_are_told(
    tiny: Path, tmp_path: Path, lines: Any
) -> None:
    folder = tmp_path / "run"
    tasks = toy.tasks(folder, 2, "train")
    trainer = Trainer(
        toy.Hashing(tiny),
        runners=2,
        steps=1,
        folder=folder,
        keep="best",
        validate_every=1,
        reporter=lines,
    )
    trainer.fit(toy.scheduled, tasks, selection=tasks[:1])
    assert lines.texts[0] == (
        "1 of the 1 task of selection are trained on too: the best step may be the one that knows "
        "them by heart"
    )


@pytest.mark.parametrize(
    ("train", "val", "count"),
    [
        ([{"q": "a", "gold": 1}, {"q": "b"}], [{"gold": 1, "q": "a"}, {"q": "c"}], 1),
        ([{"q": "a"}, {"q": "b"}], [{"q": "b"}, {"q": "a"}], 2),
        ([{"id": "1", "q": "a"}], [{"id": "7", "q": "a"}], 1),
        ([{"id": "1", "q": "a"}], [{"id": "1", "q": "b"}], 0),  # numbered in each file
        ([{"id": "1"}, "text", 3], [{"id": "2"}, {"id": "1"}, "text", 4], 2),
    ],
)
def test_held_out_tasks_that_are_training_tasks(
    tiny: Path, train: list[Any], val: list[Any], count: int
) -> None:
    """Check equal values in another order, of fields and of tasks, and with other ids."""
    said = [
        f"{count} of the {len(val)} held-out task{'s' * (len(val) > 1)} are training tasks too: "
        "the weights may know them by heart, so the reported reward is too high; give other "
        "held-out tasks"
    ]
    found = list(overlap_warnings(LightningRL(tiny), Splits(train, None, val)))
    assert found == (said if count else [])


def test_repeated_training_tasks_are_counted(tiny: Path) -> None:
    train: list[Any] = [{"id": str(n % 4), "q": "same"} for n in range(12)]
    assert list(overlap_warnings(LightningRL(tiny), Splits(train, None, None))) == [
        "of 12 training tasks 4 are distinct: others repeat them"
    ]


def test_dev_and_fit_say_that_held_out_tasks_are_trained_on(
    rl: Any, apps: Any, tmp_path: Path, ask: Any, lines: Any
) -> None:
    trainer = Trainer(rl(), steps=1, folder=tmp_path / "run", reporter=lines)
    tasks = ask(2)
    said = "2 of the 2 held-out tasks are training tasks too: the weights may know them by heart"
    report = trainer.dev(apps.spell, tasks, tasks[::-1], count=1, group_size=1)
    assert any(warning.startswith(said) for warning in report.warnings)
    trainer.fit(apps.spell, tasks, tasks[::-1])
    assert any(text.startswith(said) for text in lines.texts)
