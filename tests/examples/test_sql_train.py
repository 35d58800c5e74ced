"""The command `train.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "sql" / "train.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("sql_train_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.main()
    printed = capsys.readouterr().out
    for option in ("--seed", "--model", "--device", "--lora", "--resume", "--folder"):
        assert option in printed


def test_errors_are_one_line(
    script: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(script.training, "load_tasks", lambda *_: [{"id": "t"}])
    monkeypatch.setattr(script, "_one_torch_thread", lambda device: None)
    missing = str(tmp_path / "no" / "such" / "model")
    folder = str(tmp_path / "run")
    for lora in ([], ["--lora"]):
        arguments = ["--model", missing, "--folder", folder, "--resume", *lora]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        assert script.main() == 1
        error = f"train.py: the model folder {missing} does not exist\n"
        assert capsys.readouterr().err == error
