"""Test that the examples generate data once, and completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightspan.progress import PlainReporter
from lightspan_examples.data import generated


def test_it_is_generated_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Path] = []

    def generate(folder: Path) -> None:
        calls.append(folder)
        (folder / "tasks").write_text("1")

    for _ in range(2):
        folder = generated(tmp_path, generate, "tasks", PlainReporter())
    assert calls == [folder]
    assert (folder / "tasks").read_text() == "1"
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("generating tasks (first time only)") == 1


def test_it_is_generated_again_when_what_makes_it_has_changed(tmp_path: Path) -> None:
    def generate(folder: Path) -> None:
        (folder / "tasks").write_text("new")

    folder = generated(tmp_path, generate, "tasks", None)
    (folder / "tasks").write_text("old")
    assert (generated(tmp_path, generate, "tasks", None) / "tasks").read_text() == "old"
    (folder / "complete").write_text("")  # as of a version without a digest
    assert (generated(tmp_path, generate, "tasks", None) / "tasks").read_text() == "new"


def test_what_was_cut_off_is_generated_anew(tmp_path: Path) -> None:
    def cut_off(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generated(tmp_path, cut_off, "tasks", None)
    folder = generated(tmp_path, lambda path: (path / "whole").touch(), "tasks", None)
    assert sorted(path.name for path in folder.iterdir()) == ["complete", "whole"]
