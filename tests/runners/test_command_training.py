"""Test training, evaluation, resume and dry run of a program in POSIX shell."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan import Command, LightningRL, Trainer
from lightspan.cli import main
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.progress import SilentReporter
from lightspan.training.folder import RunFolder
from lightspan.training.results import FitResult
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_tools.inspect import inspect_run
from lightspan_torch.learner.torch import TorchLearner

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[1] / "apps" / "programs"
AGENTS = ("writer", "checker")


def program(script: str = "letters.sh", **options: Any) -> Command:
    return Command(["sh", script], cwd=PROGRAMS, env={"PYTHON": sys.executable}, **options)


def questions(count: int, name: str) -> list[dict[str, str]]:
    return [{"q": f"{name} {number}"} for number in range(count)]


def _trainer(folder: Path, tiny: Path, steps: int, **options: Any) -> Trainer:
    usual = {"optimize": "writer", "frozen": "base", "group_size": 4, "tasks_per_step": 2}
    algorithm = LightningRL(tiny, **usual | options, learning_rate=1e-2, seed=1)
    return Trainer(algorithm, steps=steps, runners=4, folder=folder, reporter=SilentReporter())


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    """Train one step, resume, and train another; tests must not change the run."""
    folder = tmp_path_factory.mktemp("runs") / "shell"
    train, val = questions(4, "question"), questions(2, "held out")
    first = _trainer(folder, tiny, 1).fit(program(agents=AGENTS), train, val)
    assert first.steps == 1
    return _trainer(folder, tiny, 2).fit(program(agents=AGENTS), train, val, resume=True)


def _episodes(run: FitResult) -> list[Episode]:
    return stored_episodes(RunFolder(run.folder).store_url)


def test_the_writer_is_trained(run: FitResult, tiny: Path) -> None:
    assert run.steps == 2
    assert [each.step for each in run.evaluations] == [0, 1, 2]
    before, after = (
        TorchLearner({"policy": str(path)}).weight_hash("policy") for path in (tiny, run.model)
    )
    assert before != after
    lines = [line for line in RunFolder(run.folder).metrics() if line["kind"] == "train"]
    assert [line["agent/writer/calls"] for line in lines] == [8, 8]
    assert [line["calls/trained"] for line in lines] == [8, 8]
    assert [line["failed"] + line["lost"] + line["damaged"] for line in lines] == [0, 0]


def test_the_checker_keeps_the_weights_that_it_started_from(run: FitResult) -> None:
    """Check that the checker's answers at temperature 0 stay the same after updates.

    Only the writer's policy has new versions.
    """
    episodes = _episodes(run)
    assert len(episodes) == 2 * 8 + 3 * 2
    calls = [call for episode in episodes for call in episode.calls]
    writer, checker = (
        [call.record for call in calls if call.record is not None and call.agent_path == agent]
        for agent in AGENTS
    )
    assert len(writer) == len(checker) == len(episodes)
    assert {record.policy for record in checker} == {"base"}
    assert len({tuple(record.response_ids) for record in checker}) == 1
    versions = {version for record in writer for version, _ in record.versions}
    assert len(versions) >= 3


def test_a_program_with_anthropics_client_is_trained(tiny: Path, tmp_path: Path) -> None:
    """Check a program that names its agents by the model: only the writer's weights change."""
    command = Command([sys.executable, "letters_anthropic.py"], cwd=PROGRAMS, agents=AGENTS)
    # the client takes 3 s to import, in each process
    trainer = _trainer(tmp_path / "run", tiny, 1, group_size=2, tasks_per_step=1)
    run = trainer.fit(command, questions(1, "question"))
    before, after = (
        TorchLearner({"policy": str(path)}).weight_hash("policy") for path in (tiny, run.model)
    )
    # equal rewards have no advantage
    assert (before != after) == (len({episode.reward for episode in _episodes(run)}) == 2)
    [line] = [line for line in RunFolder(run.folder).metrics() if line["kind"] == "train"]
    assert (line["calls/trained"], line["agent/writer/calls"]) == (2, 2)
    assert line["failed"] + line["lost"] + line["damaged"] == 0
    calls = [call for episode in _episodes(run) for call in episode.calls]
    assert {(call.agent_path, call.record and call.record.policy) for call in calls} == {
        ("writer", "policy"),
        ("checker", "base"),
    }


def test_rewards_are_what_the_program_wrote(run: FitResult) -> None:
    for episode in _episodes(run):
        [text] = [
            str(span.attributes["lightspan.command.stdout"])
            for span in episode.spans
            if span.name == "command sh"
        ]
        assert episode.reward == float(text)
        assert episode.reward_source == "returned"


def test_inspect_shows_what_the_program_wrote(run: FitResult) -> None:
    config = json.loads((run.folder / "config.json").read_text())
    assert config["app"] == program(agents=AGENTS).reference
    table = inspect_run(run.folder)
    assert f"\napp {config['app']}, optimize writer\n" in table
    first = re.findall(r"^(\S+) +train ", table, re.MULTILINE)[0]
    text = inspect_run(run.folder, first)
    assert re.search(r"^  command sh \(\d+\.\d ms\)$", text, re.MULTILINE), text
    assert re.search(r"^    stdout: [01]\.?\d*$", text, re.MULTILINE), text
    assert re.search(r"^    stderr: question \d$", text, re.MULTILINE), text


# --- a dry run ----------------------------------------------------------------------------------


def test_the_dev_command(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(PROGRAMS / "letters.sh", tmp_path)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"q":"question 0"}\n{"q":"question 1"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    options = ["--model", str(tiny), "--optimize=writer", "--frozen=base", "--count=1", "--json"]
    assert main(["dev", "--command", "sh letters.sh", *options, "--group-size=2", str(tasks)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["app"] == 'command:{"arguments":["sh","letters.sh"]}'
    assert [(agent["path"], agent["trained"]) for agent in report["agents"]] == [
        ("checker", 0),
        ("writer", 2),
    ]


# --- what stops a run before rollouts are spent, or at once ---------------------------------------


def test_an_agent_that_nobody_answers(tiny: Path, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", tiny, 1, frozen=None)
    message = r"the command's agents \['checker'\] are neither optimised nor frozen to a model"
    tasks = questions(2, "q")
    ways: list[Callable[..., Any]] = [trainer.fit, trainer.evaluate, trainer.dev]
    for use in ways:
        with pytest.raises(ConfigError, match=message):
            use(program(agents=AGENTS), tasks)
    assert not (tmp_path / "run").exists()
