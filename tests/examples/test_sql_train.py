"""The command `train.py`."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from apart_training import HOWS, How, trained_apart  # type: ignore[import-not-found]

from lightspan import VLLM, Torch, Verl
from lightspan.progress import SilentReporter
from lightspan_examples.example import ON_CPU, Run
from lightspan_examples.script import main
from sql_example import training

SCRIPT = Path(__file__).parents[2] / "examples" / "sql" / "train.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_help(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(script.EXAMPLE, script.__doc__, ["--help"])
    printed = capsys.readouterr().out
    for option in ("--seed", "--model", "--device", "--lora", "--data", "--resume", "--folder"):
        assert option in printed


def test_data_needs_a_model(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(script.EXAMPLE, script.__doc__, ["--data", "spider"])
    assert "--data needs --model" in capsys.readouterr().err


def test_errors_are_one_line(
    script: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # one task of each split: what is evaluated on the way is not what is reported
    monkeypatch.setattr(
        training, "load_tasks", lambda cache, split, *_: [{"id": split, "schema": split}]
    )
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    missing = str(tmp_path / "no" / "such" / "model")
    folder = str(tmp_path / "run")
    for lora in ([], ["--lora"]):
        arguments = ["--model", missing, "--folder", folder, "--resume", *lora]
        assert main(script.EXAMPLE, script.__doc__, arguments) == 1
        error = f"train.py: the model folder {missing} does not exist\n"
        assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "--json applies only to a dry run: give --dev too"),
        (["--dev", "--resume"], "--dev trains nothing that --resume could go on with"),
        (["--held-out", "-3"], "--held-out -3 must be at least 1"),
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


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch, sql_cache: Path) -> Path:
    """The cache with a world of few questions; and torch keeps its threads."""
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    return sql_cache


@pytest.mark.parametrize("air", [False, True])
def test_what_is_measured_is_what_the_command_trains(
    script: Any, few_tasks: Path, air: bool
) -> None:
    arguments = ["--model", "org/unread", "--seed", "3", "--cache", str(few_tasks)]
    options = script.EXAMPLE.parser("").parse_args([*arguments, *["--air"][: int(air)]])
    trainer, questions, held_out = script.prepare(Run(script.EXAMPLE, options, SilentReporter()))
    measured = training.make_algorithm("org/unread", 3, training.REAL_MODEL, air=air)
    assert trainer.algorithm.config() == measured.config()
    assert trainer.settings.steps == training.REAL_MODEL.steps
    assert (len(questions), len(held_out)) == (16, 4)


@pytest.mark.parametrize(
    ("given", "every"),
    [([], 3), (["--validate-every", "6"], 6), (["--validate-every", "0"], None)],
)
def test_how_often_it_evaluates(
    script: Any, few_tasks: Path, given: list[str], every: int | None
) -> None:
    """On the way those of dev, so that the test is looked at before and after only."""
    arguments = ["--model", "org/unread", "--steps", "6", "--cache", str(few_tasks), *given]
    options = script.EXAMPLE.parser("").parse_args(arguments)
    run = Run(script.EXAMPLE, options, SilentReporter())
    trainer, *_, held_out = script.prepare(run)
    assert trainer.settings.validate_every == every
    if every is None:
        assert run.selection is None
        return
    assert {task["id"].split("-")[0] for task in run.selection} == {"dev"}
    assert {task["id"].split("-")[0] for task in held_out} == {"test"}
    options.data = Path("spider")
    assert run.selection == 0.02


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_dry_run_of_the_small_model(
    script: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`train.py --dev` as a newcomer runs it, but for a warm start of four updates."""
    monkeypatch.setattr("lightspan_examples.example._one_torch_thread", lambda device: None)
    monkeypatch.chdir(tmp_path)
    arguments = ["--dev", "--demonstrations", "64", "--runners", "2"]
    arguments += ["--cache", str(tmp_path / "cache")]
    assert main(script.EXAMPLE, script.__doc__, arguments) == 0
    report = capsys.readouterr().out
    assert "4 tasks x 4 rollouts" in report
    assert "; nothing was trained\n" in report
    for title in ("AGENTS", "MEMORY (estimate)"):
        assert f"\n{title}\n" in report
    trained, frozen = re.findall(r"^  (write_query|check_query) +(\S+) +16 ", report, re.MULTILINE)
    assert {trained, frozen} == {("write_query", "policy"), ("check_query", "-")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    [model] = (tmp_path / "cache").glob("warm-start-*")
    assert (model / "complete").exists()


@pytest.mark.parametrize("how", HOWS)
def test_the_app_in_an_environment_without_torch(few_tasks: Path, tmp_path: Path, how: How) -> None:
    episodes = trained_apart(
        tmp_path,
        "sql_example:answer",
        training.load_tasks(few_tasks, "train")[:2],
        ["write_query"],
        how,
        [
            "lightspan-example-sql",
            "lightspan-examples",
            "lightspan-langgraph",
        ],
    )
    calls = [call for episode in episodes for call in episode.calls]
    assert {call.agent_path for call in calls} >= {"write_query", "check_query"}
    trained = [call for call in calls if call.agent_path in training.TRAINED]
    assert all(call.record is not None for call in trained)


def test_other_backends_are_named_by_their_interpreters(script: Any, few_tasks: Path) -> None:
    """The script stays as it is; each has an environment of its own."""

    def chosen(*given: str) -> tuple[Any, Any]:
        arguments = ["--model", "org/unread", "--cache", str(few_tasks), *given]
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
