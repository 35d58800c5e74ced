"""Test the folder of a run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from lightspan.errors import ConfigError
from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation
from packages.core.tests.lightning.steps import attempt, batch

WHY = batch([attempt("m"), attempt("m", 0.0, "2")]).explanations["at-1", "c0", 0]
"""The explanation of a call with an advantage of 0.5."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create()
    yield folder
    folder.release()


def _hold(path: Path, held: Event) -> None:
    folder = RunFolder(path)
    folder.create()
    held.set()
    multiprocessing.Event().wait(60)


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "run", held))
    process.start()
    assert held.wait(60)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"\(pid {process.pid}\)"):
        folder.create()
    process.kill()
    process.join()
    folder.create()
    folder.release()


def test_config_and_result_are_whole_files(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"runs/one is no run of lightspan: it has no config"):
        folder.read_config()
    assert folder.read_result() is None
    folder.write_config({"steps": 3, "path": Path("/x")})
    folder.write_result({"steps": 3})
    assert folder.read_config() == {"steps": 3, "path": "/x"}
    assert folder.read_result() == {"steps": 3}
    (folder.path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"runs/one/config\.json is damaged, it is not JSON: "):
        folder.read_config()
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "checkpoints",
        "config.json",
        "lock",
        "result.json",
    ]


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check a user without HOME and without an entry in /etc/passwd, as in a container."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.release()


def test_line_of_metrics_that_was_cut_off_is_ignored(folder: RunFolder) -> None:
    assert folder.metrics() == []
    folder.add_metrics({"kind": "train", "step": 1, "reward": 0.5})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"train","step":2,"rew')
    assert folder.metrics() == [{"kind": "train", "step": 1, "reward": 0.5}]


def test_evaluation_counts_once_its_line_is_there(folder: RunFolder) -> None:
    first = Evaluation(step=0, rewards={"a": 0.5, "b": 1.0}, unscored=1)
    folder.add_evaluation(first, {"kind": "eval", "step": 0, **first.metrics()})
    folder.write("evaluations/step-000005.json", b"{}")
    assert folder.evaluations() == [first]
    [line] = folder.metrics()
    assert (line["mean"], line["n"], line["unscored"], line["failed"]) == (0.75, 2, 1, 0)


def test_evaluations_without_a_reward_are_deleted_to_be_done_again(folder: RunFolder) -> None:
    for step in (0, 5):
        folder.add_metrics({"kind": "train", "step": step, "n": 0})
        for kind in ("selection", "eval"):
            none = Evaluation(step=step, rewards={})
            folder.add_evaluation(none, {"kind": kind, "step": step, **none.metrics()})
    scored = Evaluation(step=5, rewards={"a": 0.5})
    folder.add_evaluation(scored, {"kind": "eval", "step": 5, **scored.metrics()})
    folder.delete_unscored(5)
    assert [(line["kind"], line["step"], line["n"]) for line in folder.metrics()] == [
        ("train", 0, 0),
        ("selection", 0, 0),
        ("eval", 0, 0),
        ("train", 5, 0),
        ("eval", 5, 1),
    ]
    assert [each.step for each in folder.evaluations()] == [0, 5]


def test_explanations_come_back_with_their_advantage(folder: RunFolder) -> None:
    assert folder.explanations(1) == {}
    folder.write_explanations(1, [("at/call/0", WHY)])
    found = folder.explanations(1)
    assert found == {"at/call/0": WHY}
    assert found["at/call/0"].advantage == 0.5
    folder.write_explanations(2, [])
    files = sorted(path.name for path in (folder.path / "explanations").iterdir())
    assert files == ["step-000001.json", "step-000002.json"]


def test_rewind_forgets_what_came_after_a_step(folder: RunFolder) -> None:
    for step in range(3):
        evaluation = Evaluation(step=step, rewards={"a": 1.0})
        folder.add_metrics({"kind": "train", "step": step})
        folder.add_evaluation(evaluation, {"kind": "eval", "step": step})
        folder.write_explanations(step, [("at/call/0", WHY)])
        folder.write_mismatches(step, {"at/call/1": "token 3"})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind"')
    folder.rewind(1)
    assert [line["step"] for line in folder.metrics()] == [0, 0, 1, 1]
    assert [evaluation.step for evaluation in folder.evaluations()] == [0, 1]
    assert folder.explanations(1)
    assert not folder.explanations(2)
    assert folder.mismatches(1) == {"at/call/1": "token 3"}
    assert folder.mismatches(2) == {}
    (folder.path / "notes.txt").write_text("mine")
    folder.rewind(-1)
    assert folder.metrics() == []
    assert (folder.path / "notes.txt").read_text() == "mine"
