"""Test the app that repairs packages: its tasks, its sandbox, its recorded sessions, its training.

The agent is mini-swe-agent, the sandbox bubblewrap, the verifier pytest. Only the text of the model
is scripted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from lightspan_testing.scripted import ScriptedServer
from terminal_example import bugs, packages, sandbox, sessions, training
from terminal_example.app import SUBMIT, Session, chat_model, config, instruction, repair, solved
from terminal_example.command import main
from terminal_example.packages import Task
from tests.reports.ui_numbers import check_run

SCRIPT = Path(__file__).parents[2] / "examples" / "terminal" / "app.py"

try:
    sandbox.check()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task() -> Task:
    return packages.generate("train", count=1)[0]


def fenced(commands: Sequence[str]) -> list[str]:
    return [sessions.answer(each) for each in commands]


def session_of(task: Task, commands: Sequence[str], limit: int = 4) -> tuple[Session, list[Any]]:
    """Run a session with scripted commands; return it and the requests of the agent."""
    with ScriptedServer(fenced(commands)) as server:
        model = chat_model("scripted", base_url=server.url, api_key="k", temperature=0.7)
        session = repair(task, model, limit=limit)
        return session, list(server.requests)


def direct(task: Task) -> list[str]:
    return [sessions.look(task), sessions.edit(task, task["right"]), SUBMIT]


# --- tasks ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("right", "parameters", "kind", "wrong"),
    [
        ("a - b", "ab", "operator", ["a + b", "a * b", "a // b", "a % b"]),
        ("a + 5", "a", "constant", ["a + 6", "a + 4"]),
        ("a < b and b > 2", "ab", "comparison", ["a <= b and b > 2", "a < b and b >= 2"]),
        ("a - b + 2", "ab", "swapped", ["b - a + 2"]),
        ("max(a, 2)", "a", "function", ["min(a, 2)"]),
        ("a * b", "ab", "variable", ["b * b", "a * a"]),
        ("a * b + 5", "ab", "missing", ["a * b", "a + 5"]),
        ("(a + b) * 5", "ab", "grouping", ["a + b * 5"]),
        ("a < b or a > 2", "ab", "logic", ["a < b and a > 2"]),
        ("a * b", "ab", "literal", [f"{n} * b" for n in range(2, 10)]),
    ],
)
def test_mutants(right: str, parameters: str, kind: str, wrong: list[str]) -> None:
    found = bugs.mutants(right, list(parameters), {**bugs.TRAINED, **bugs.HELD_OUT}[kind])
    assert found[: len(wrong)] == wrong
    if kind != "literal":
        assert found == wrong


def test_no_kind_of_the_test_split_is_in_another() -> None:
    kinds = {
        split: {task["kind"] for task in packages.generate(split)} for split in packages.COUNTS
    }
    assert kinds == {
        "train": set(bugs.TRAINED),
        "dev": set(bugs.TRAINED),
        "test": set(bugs.HELD_OUT),
    }
    assert not set(bugs.TRAINED) & set(bugs.HELD_OUT)


def test_no_expression_of_the_test_split_is_trained_on(tmp_path: Path) -> None:
    held_out = {task["right"] for task in training.load_tasks(tmp_path, "test")}
    trained = {task["right"] for task in training.load_tasks(tmp_path, "train")}
    assert len(trained) == len(training.load_tasks(tmp_path, "train")) == 40
    assert not held_out & trained
    recorded = packages.generate("sessions", count=500, apart=held_out)
    assert not held_out & {task["right"] for task in recorded}


def test_equal_seeds_give_equal_tasks() -> None:
    assert packages.generate("dev", seed=3) == packages.generate("dev", seed=3)
    assert packages.generate("dev", seed=3) != packages.generate("dev", seed=4)


@pytest.mark.parametrize("split", ["train", "test"])
def test_pytest_fails_as_the_task_says(split: packages.Split) -> None:
    for task in packages.generate(split, count=10):
        opened = sandbox.open_sandbox({**task["files"], **task["tests"]}, **config()["environment"])
        printed = opened.execute({"command": "pytest -q"})["output"].splitlines()
        assert [line for line in printed if line.startswith("FAILED")] == [task["failure"]]
        assert sandbox.passes(sessions.repaired(task), task["tests"], **config()["environment"])


# --- the agent ------------------------------------------------------------------------------
def test_a_package_is_repaired(task: Task) -> None:
    session, requests = session_of(task, direct(task))
    assert session.status == "Submitted"
    assert session.files == sessions.repaired(task)
    assert solved(task, session)
    assert [len(request.messages) for request in requests] == [2, 4, 6]
    assert requests[0].messages[1]["content"] == instruction(task)
    assert requests[0].body["temperature"] == 0.7
    seen = requests[1].messages[-1]["content"]
    assert seen.startswith(f"exit 0\n{task['line'] - 2}:def {task['function']}(")
    assert seen.endswith(f"\n{task['line']}-    return {task['wrong']}\n")


def test_equal_packages_are_verified_once(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that end at the same time wait for the one that runs pytest."""
    verified = []

    def passes(files: dict[str, str], *rest: Any, **options: Any) -> bool:
        verified.append(files[task["path"]])
        return real(files, *rest, **options)

    real = sandbox.passes
    monkeypatch.setattr(sandbox, "passes", passes)
    texts = [f"{sessions.repaired(task)[task['path']]}# {name}\n" for name in ("a", "a", "a", "b")]
    ended = [Session("Submitted", [], {**task["files"], task["path"]: text}) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(solved, [task] * 4, ended)) == [True] * 4
    assert sorted(verified) == sorted(set(texts))


def test_a_repair_that_is_not_submitted_is_not_solved(task: Task) -> None:
    commands = [sessions.look(task), sessions.edit(task, task["right"]), "ls", "ls", SUBMIT]
    session, _ = session_of(task, commands)
    assert session.status == "LimitsExceeded"
    assert session.files == sessions.repaired(task)
    assert not solved(task, session)


def test_an_edit_of_the_tests_repairs_nothing(task: Task) -> None:
    [tests] = task["tests"]
    session, _ = session_of(task, [f"echo 'def test_it(): pass' > {tests}", SUBMIT])
    assert session.status == "Submitted"
    assert not solved(task, session)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        f"print('{SUBMIT.removeprefix('echo ')}', flush=True)",
        "import os; os.write(1, b'4 passed in 0.01s\\n'); os._exit(0)",
        "import sys; sys.exit(0)",
    ],
)
def test_a_package_that_ends_the_tests_is_not_repaired(task: Task, code: str) -> None:
    files = {**task["files"], task["path"]: f"{code}\n{task['files'][task['path']]}"}
    assert not sandbox.passes(files, task["tests"], **config()["environment"])


def test_an_answer_without_a_command_is_told_so(task: Task) -> None:
    with ScriptedServer(["I think I should go", *fenced([SUBMIT])]) as server:
        session = repair(task, chat_model("m", base_url=server.url, api_key="k"))
        assert server.requests[1].last_text == config()["model"]["format_error_template"]
    assert session.status == "Submitted"


def test_a_limit_below_one_is_refused(task: Task) -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        repair(task, chat_model("m"), limit=0)


# --- the sandbox ----------------------------------------------------------------------------
def executed(command: str) -> str:
    opened = sandbox.open_sandbox({"a.txt": "text\n"}, **config()["environment"])
    return str(opened.execute({"command": command})["output"])


def test_a_command_sees_no_variable_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", "s3cr3t")
    assert "s3cr3t" not in executed("env; cat /proc/*/environ; set")


def test_a_command_changes_only_its_folder(tmp_path: Path) -> None:
    seen = executed(f"cat a.txt; echo x > a.txt; cat a.txt; ls {tmp_path}; touch /usr/x; ls /home")
    first, second, *rest = seen.splitlines()
    assert (first, second) == ("text", "x")
    assert len(rest) == 3
    assert all("No such file" in line or "Read-only" in line for line in rest)


def test_a_command_reaches_no_network_and_no_process() -> None:
    with ScriptedServer(["a"]) as server:
        port = server.url.split(":")[2].split("/")[0]
        seen = executed(f"(echo > /dev/tcp/127.0.0.1/{port}) && echo open; kill -0 {os.getpid()}")
    assert "open" not in seen
    assert "Connection refused" in seen
    assert "No such process" in seen


@pytest.mark.parametrize(
    "command",
    ["rm {}", "ln -sf /etc/passwd {}", "rm {}; mkfifo {}", "head -c 200000 /dev/zero > {}"],
)
def test_what_is_no_module_any_more_is_not_read(task: Task, command: str) -> None:
    session, _ = session_of(task, [command.format(*[task["path"]] * 2), SUBMIT])
    assert session.files is None
    assert not solved(task, session)


# --- recorded sessions ----------------------------------------------------------------------
def test_recorded_sessions_end_with_the_repaired_package(tmp_path: Path) -> None:
    sessions.write(tmp_path, count=12, seed=0, apart=())
    chats = sessions.load(tmp_path)
    tasks = packages.generate("sessions", count=12)
    for chat, task in zip(chats, tasks, strict=True):
        roles = [message["role"] for message in chat["messages"]]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        said = [each["content"] for each in chat["messages"] if each["role"] == "assistant"]
        assert said[-1] == sessions.answer(SUBMIT)
        edits = [each for each in said if "sed -i" in each]
        assert edits[-1] == sessions.answer(sessions.edit(task, task["right"]))
    assert len({len(chat["messages"]) for chat in chats}) > 1


def test_two_recordings_of_a_package_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "TEST_RATE", 1.0)
    first, second = packages.generate("sessions", count=2)
    texts = [message["content"] for message in sessions.record(first)["messages"]]
    again = [message["content"] for message in sessions.record(first)["messages"]]
    other = [message["content"] for message in sessions.record(second)["messages"]]
    assert texts == again
    times = [re.findall(r"\d passed in (0\.0\d)s", "\n".join(each)) for each in (texts, other)]
    assert [len(each) for each in times] == [1, 1]
    assert times[0] != times[1]


def test_detours_of_the_script(task: Task) -> None:
    scripts = [sessions.script(task, random.Random(seed)) for seed in range(400)]
    assert direct(task) in scripts
    for rate, command in ((sessions.LOOK_RATE, "ls"), (sessions.TEST_RATE, "pytest -q")):
        assert sum(command in each for each in scripts) / 400 == pytest.approx(rate, abs=0.07)
    twice = [each for each in scripts if sum("sed" in command for command in each) == 2]
    assert len(twice) / 400 == pytest.approx(sessions.MISTAKE_RATE, abs=0.07)
    assert min(map(len, scripts)) == training.RECIPE.limit, "training allows no detour"


# --- commands -------------------------------------------------------------------------------
def test_a_key_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "OPENAI_API_KEY is not set" in capsys.readouterr().err


def test_the_script() -> None:
    [task] = packages.generate("dev", seed=5, count=1)
    command = [sys.executable, str(SCRIPT), "--seed", "5", "--model", "named"]
    with ScriptedServer(fenced(direct(task))) as server:
        environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "own"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.stdout.splitlines()[-1], done.returncode) == ("repaired: all tests pass", 0)


def test_the_app_knows_neither_lightspan_nor_torch() -> None:
    code = (
        "import terminal_example.command, sys; "
        "print(sorted({'lightspan', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_short_training(tmp_path: Path) -> None:
    """Train the small model in a step of `train.py`; every call of the agent is a transition."""
    command = [sys.executable, str(SCRIPT.with_name("train.py")), "--demonstrations", "48"]
    command += ["--steps", "1", "--held-out", "4", "--runners", "8", "--validate-every", "0"]
    command += ["--folder", str(tmp_path / "run"), "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(n=4" in done.stdout.splitlines()[-1], "what it gained"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    [step] = [step for step in map(json.loads, lines) if step["kind"] == "train"]
    assert step["rollouts"] == step["scored"] == 96
    assert step["calls/trained"] == step["calls"] == step["agent/repair/calls"]
    asyncio.run(check_run(tmp_path / "run"))
