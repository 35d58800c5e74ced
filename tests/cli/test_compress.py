"""Test `lightspan compress` on recorded calls: what it imitates, refuses, resumes and compares."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import lightspan
from lightspan import LoRA
from lightspan.algorithms.protocol import PolicySpec
from lightspan.cli import main
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_torch.learning_rate import choose_rate, format_rate
from lightspan_torch.sft import updates
from lightspan_torch.sft.checkpoint import Unfinished, delayed_interrupt

APP = """
import os

import lightspan
import openai


def ask(agent, text):
    client = openai.OpenAI(base_url=os.environ["LARGE_URL"], api_key="own-key", max_retries=0)
    with lightspan.agent(agent):
        chat = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(
            model="large", messages=chat, max_tokens=4, temperature=0
        )
    return reply.choices[0].message.content or ""


@lightspan.rollout
def answer(task: dict) -> float:
    colour = ask("sort", task["q"])
    ask("reply", colour)
    return float(colour.strip() == task["want"])
"""
COLOURS = ("red", "green", "blue")


def by_rule(request: Request) -> str:
    """Answer as the large model: the word before the full stop, and wrongly for seven."""
    words = request.last_text.rstrip(".").split()
    return "mauve" if "seven" in words else words[-1]


def task(number: int) -> dict[str, str]:
    colour = COLOURS[number % 3]
    return {"q": f"mail {'seven' if number == 7 else number} is {colour}.", "want": colour}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Path]:
    """Return a folder with an app, its tasks, and a store with what it asked in production."""
    folder = tmp_path_factory.mktemp("compress")
    (folder / "compressed_app.py").write_text(APP)
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task(n))}\n" for n in (91, 92, 93)))
    (folder / "tiny").symlink_to(tiny, target_is_directory=True)
    with ScriptedServer(by_rule) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LARGE_URL", server.url)
        patch.delenv("LIGHTSPAN_STORE", raising=False)
        patch.syspath_prepend(str(folder))
        client = openai.OpenAI(base_url=server.url, api_key="own-key", max_retries=0)
        with lightspan.record("sqlite:desk.db", service="desk"):
            for number in range(12):
                for agent in ("sort", "reply"):
                    with lightspan.agent(agent):
                        text = task(number)["q"]
                        client.chat.completions.create(
                            model="large", messages=[{"role": "user", "content": text}]
                        )
                        if agent == "sort" and number < 9:
                            lightspan.emit_reward(0.0 if number == 7 else 1.0)
        yield folder
    sys.modules.pop("compressed_app", None)


COMMAND = ["compress", "sqlite:desk.db", "--model", "tiny", "--agents", "sort", "--min-reward", "1"]
QUICK = ["--learning-rate", "3e-3", "--epochs", "1"]


def test_a_dry_run_counts_and_writes_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(project.iterdir())
    assert main([*COMMAND, "--folder", "dry", "--price", "2", "8", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "calls by agent: sort 12, reply 12" in text
    assert "9 of 12 answered calls, mean 0.889, median 1" in text
    assert "8 calls would be imitated; left out: 12 of other agents, 1 scored too low" in text
    assert "3 unscored" in text
    assert "recorded endpoint, calls of production  0.016; 4,000 input and 1,000 output" in text
    assert "--min-reward" not in text
    assert sorted(project.iterdir()) == before


def test_low_scores_are_named_where_they_are_imitated(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compress", "sqlite:desk.db", "--model", "tiny", "--agents", "sort", *QUICK]
    line = "1 of the 12 chosen calls has a score below 0.5: --min-reward 0.5 leaves it out"
    assert main([*command, "--folder", "low", "--dry-run"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert main([*command, "--folder", "low"]) == 0
    output = capsys.readouterr()
    assert line in output.err.splitlines()
    assert line in output.out.splitlines()


def test_a_failed_command_does_not_block_its_folder(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, *QUICK, "--folder", "again", "--batch-size", "8"]
    assert main([*command, "--agents", "srot", "--min-reward", "2"]) == 1
    assert not (project / "again.compress.json").exists()
    # as an earlier version left it
    (project / "again.compress.json").write_text('{"settings":{},"since":null,"until":1.0}')
    assert main(command) == 0
    assert "8 calls imitated" in capsys.readouterr().out
    assert main(command) == 1
    assert "again is in use: add --resume" in capsys.readouterr().err


def test_an_interrupted_run_continues_and_a_finished_one_is_not_repeated(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, *QUICK, "--folder", "small", "--batch-size", "2", "--json"]
    presses = iter([False, True])

    class Pressed:
        def __enter__(self) -> Any:
            return lambda: next(presses, False)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(updates, "delayed_interrupt", Pressed)
    assert main(command) == 130
    assert Unfinished(project / "small").path.is_dir()
    assert not (project / "small").exists()
    assert main(command) == 1
    assert "small is in use: add --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--seed", "3"]) == 1
    assert "begun with other settings (seed)" in capsys.readouterr().err
    monkeypatch.setattr(updates, "delayed_interrupt", delayed_interrupt)
    # what is recorded in the meantime does not change what is imitated
    client = openai.OpenAI(api_key="own-key", base_url=os.environ["LARGE_URL"], max_retries=0)
    with lightspan.record("sqlite:desk.db", service="desk"), lightspan.agent("sort"):
        client.chat.completions.create(
            model="large", messages=[{"role": "user", "content": "mail 99 is red."}]
        )
        lightspan.emit_reward(1.0)
    assert main([*command, "--resume"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["tuning"]["demonstrations"] == 8
    assert len(first["tuning"]["losses"]) == 4
    weights = (project / "small" / "model.safetensors").stat().st_mtime_ns
    assert main([*command, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["tuning"] == first["tuning"]
    assert (project / "small" / "model.safetensors").stat().st_mtime_ns == weights
    (project / "small.compress.json").write_text("{")
    assert main([*command, "--resume"]) == 1
    assert "small.compress.json is damaged" in capsys.readouterr().err


def test_the_learning_rate_is_chosen_from_the_model(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, "--epochs", "0.1", "--folder", "rate", "--lora", "4"]
    assert main(command) == 0
    spec = PolicySpec(model=str(project / "tiny"), lora=LoRA(rank=4))
    rate = format_rate(10 * choose_rate({"policy": spec}).value)
    output = capsys.readouterr()
    assert f"learning rate {rate}: 10 times that of reinforcement learning" in output.err
    assert " calls imitated" in output.out


@pytest.mark.slow
def test_the_app_is_compared_with_its_endpoint(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--folder", "compared", "--app", "compressed_app:answer", "--tasks", "tasks.jsonl"]
    prices = ["--price", "2", "8", "--price-per-hour", "0.36"]
    assert main([*COMMAND, *QUICK, *arguments, *prices, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    # the runs of the comparison are replaced, and the model is not
    assert main([*COMMAND, *QUICK, *arguments, *prices, "--json", "--resume"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tuning"] == first["tuning"]
    assert set(report["before"]["evaluation"]["rewards"].values()) == {1.0}
    assert report["before"]["tokens"]["calls"] == report["after"]["tokens"]["calls"] == 3
    assert report["before"]["tokens"]["input"] == 4
    assert report["after"]["tokens"]["uncounted"] == 0
    assert report["after"]["seconds"] > 0
    assert report["difference"]["n"] == 3
    assert report["cost_per_1000_calls"].keys() == {"recorded", "small"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--app", "compressed_app:answer"], "--app and --tasks belong together"),
        (["--tasks", "tasks.jsonl"], "--app and --tasks belong together"),
        (["--app", "compressed_app:answer", "--tasks", "no.jsonl"], "no tasks file no.jsonl"),
        (["--app", "compressed_app:no", "--tasks", "tasks.jsonl"], "compressed_app"),
        (["--price", "-1", "2"], "--price=-1.0 must be"),
        (["--price-per-hour", "-1"], "--price-per-hour=-1.0 must be"),
        (["--lora", "0"], "--lora=0 must be at least 1"),
        (["--runners", "0"], "--runners=0 must be at least 1"),
        (["--service", "other", "--dry-run"], "no attempt is of the service 'other'"),
        (
            ["--since", "2999-01-01", "--dry-run"],
            "has no attempts of production with these settings",
        ),
        (["--since", "yesterday", "--dry-run"], "since='yesterday'"),
        (["--min-reward", "2"], "no call to imitate with min_reward=2.0; left out: "),
        (["--min-reward", "2", "--dry-run"], "no call to imitate with min_reward=2.0; left out: "),
        (["--agents", "srot"], "no agent matches 'srot'. Did you mean 'sort'?"),
        (["--agents", "srot"], "no call to imitate with agents=('srot',); left out: 2"),
        (["--agents", "srot", "--dry-run"], "no agent matches 'srot'. Did you mean 'sort'?"),
        (
            ["--agents", "srot", "--dry-run"],
            "no call to imitate with agents=('srot',); left out: 2",
        ),
        (["--batch-size", "0"], "batch_size=0 must be"),
        (["--batch-size", "0", "--dry-run"], "batch_size=0 must be"),
        (["--model", "./no-model"], "no-model"),
    ],
)
def test_wrong_arguments_are_refused(
    project: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compress", "sqlite:desk.db", "--model", "tiny", "--folder", "refused", *QUICK]
    assert main([*command, *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not list(project.glob("refused*"))
