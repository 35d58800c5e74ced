"""Test the SQL example's command `train.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import VLLM, Torch, Verl
from lightspan.progress import SilentReporter
from lightspan_examples.example import ON_CPU, Run
from lightspan_examples.script import main

pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture
def script(script_of: Callable[[str], Any]) -> Any:
    return script_of("sql")


def test_errors_are_one_line(
    script: Any, capsys: pytest.CaptureFixture[str], sql_cache: Path, tmp_path: Path
) -> None:
    missing = str(tmp_path / "no" / "such" / "model")
    arguments = ["--model", missing, "--folder", str(tmp_path / "run"), "--cache", str(sql_cache)]
    assert main(script.EXAMPLE, script.__doc__, [*arguments, "--resume", "--lora"]) == 1
    error = f"train.py: the model folder {missing} does not exist\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "--json applies only to a dry run: give --dev too"),
        (["--dev", "--resume"], "--dev trains nothing that --resume could go on with"),
        (["--dev", "--data", "spider"], "--data needs --model"),
        (["--demonstrations", "0"], "--demonstrations 0 must be at least 1"),
        (
            ["--demonstrations", "9", "--model", "m"],
            "--demonstrations applies only to the small model",
        ),
    ],
)
def test_options_that_contradict(
    script: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(script.EXAMPLE, script.__doc__, arguments)
    assert message in capsys.readouterr().err


def test_other_backends_are_named_by_their_interpreters(script: Any, sql_cache: Path) -> None:
    """Check that engine and learner can be given by the interpreters of their own environments."""

    def chosen(*given: str) -> tuple[Any, Any]:
        arguments = ["--model", "org/unread", "--cache", str(sql_cache), *given]
        options = script.EXAMPLE.parser("").parse_args(arguments)
        settings = script.prepare(Run(script.EXAMPLE, options, SilentReporter()))[0].settings
        return settings.engine, settings.learner

    quick = ("--enforce-eager",)
    python = sys.executable
    assert chosen("--vllm", python)[0] == VLLM(python=python, arguments=quick, environment=ON_CPU)
    assert chosen("--vllm", python, "--device", "cuda")[0] == VLLM(python=python)
    budget = ("--token-budget", "512")
    assert chosen(*budget)[1] == Torch(token_budget=512)
    assert chosen("--verl", python, *budget)[1] == Verl(python=python, token_budget=512)
