"""Test `lightspan dev` in a new process, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightspan.cli import main
from lightspan_testing.scripted import ScriptedServer

APP = """
import openai
import lightspan

client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused")


@lightspan.rollout
def answer(task):
    messages = [{"role": "user", "content": task["question"]}]
    with lightspan.agent("writer"):
        reply = client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    return float(len(reply.choices[0].message.content) % 3)
"""


ONE = ("--count=1", "--group-size=1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with an app and tasks."""
    (tmp_path / "my_app.py").write_text(APP)
    lines = [json.dumps({"question": f"question {number}"}) for number in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    return tmp_path


def run(
    project: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `lightspan dev …` in the project's folder."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("OPENAI_")}
    command = "import sys; from lightspan.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", command, "dev", *arguments],
        cwd=project,
        env={**known, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
def test_with_a_model(project: Path, tiny: Path) -> None:
    """Check a project in the current folder: the report is printed, and its JSON written to a
    file.
    """
    done = run(
        project,
        "my_app:answer",
        "tasks.jsonl",
        "--model",
        str(tiny),
        "--optimize",
        "writer",
        "--count=2",
        "--group-size=2",
        "--steps=3",
        "--json=report.json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((project / "report.json").read_text())
    assert (report["app"], report["models"]) == ("my_app:answer", {"policy": str(tiny)})
    assert (report["tasks"], report["group_size"], report["rollouts"]) == (2, 2, 4)
    assert report["agents"][0]["trained"] == 4
    assert report["costs"]["rollouts"] == 3 * 16 * 8
    assert report["memory"]["total_bytes"] > 0
    assert done.stdout.startswith(f"dry run of my_app:answer: lightning_rl on {tiny}, 2 tasks")
    assert "\n\nMEMORY (estimate)\n" in done.stdout
    assert sorted(path.name for path in project.iterdir() if path.suffix) == [
        "my_app.py",
        "report.json",
        "tasks.jsonl",
    ]
    assert not (project / "runs").exists()


ESCAPES = "\x1b[2J\x1b]0;title\x07"
WRITTEN_OUT = r"\x1b[2J\x1b]0;title\x07"


@pytest.mark.slow
def test_what_apps_and_models_say_commands_no_terminal(
    project: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that control characters in an agent's name, an answer or an error are not printed."""
    fails = 'raise ValueError("error" + ESCAPES)'
    app = APP.replace('agent("writer")', 'agent("writer" + ESCAPES)')
    app = app.replace("return", f"if task['question'].endswith('0'): {fails}\n    return")
    said: list[str] = []

    def inspected(*arguments: str) -> str:
        assert main(["inspect", str(project / "kept"), *arguments]) == 0
        said.append(capsys.readouterr().out)
        return said[-1]

    with ScriptedServer(f"answer{ESCAPES}") as server:
        app = app.replace("http://127.0.0.1:9/v1", server.url)
        (project / "my_app.py").write_text(f"ESCAPES = {ESCAPES!r}\n{app}")
        done = run(
            project,
            "my_app:answer",
            "tasks.jsonl",
            f"--model={tiny}",
            "--optimize=another",
            "--count=2",
            "--group-size=1",
            "--folder=kept",
        )
    assert done.returncode == 1
    assert "lightspan: fit would stop: no agent matches 'another'. Agents: " in done.stderr
    assert f"writer{WRITTEN_OUT}" in done.stdout
    assert f"error{WRITTEN_OUT}" in done.stdout
    attempts = re.findall(r"^(\S+) +(?:dev|train|val) ", inspected(), re.MULTILINE)
    texts = [inspected(attempt) for attempt in attempts]
    assert sum(f"ERROR error{WRITTEN_OUT}" in text for text in texts) == 1
    assert sum(f"writer{WRITTEN_OUT}" in text for text in texts) == 2
    call = re.findall(r"(call-\w+)/0", texts[0])[0]
    assert f"answer{WRITTEN_OUT}" in inspected(attempts[0], call)
    for text in (done.stdout, done.stderr, *said):
        assert "\x1b" not in text
        assert "\x07" not in text


HANGS = "import time, lightspan\n\n\n@lightspan.rollout\ndef answer(task):\n    time.sleep(60)\n"


@pytest.mark.slow
def test_a_hanging_app_ends_at_the_limit(project: Path, tiny: Path) -> None:
    (project / "my_app.py").write_text(HANGS)
    limits = ["--count=1", "--group-size=1", "--timeout=1"]
    done = run(project, "my_app:answer", "tasks.jsonl", f"--model={tiny}", *limits)
    assert done.returncode == 1
    assert done.stderr.startswith("dry run: 1 rollouts, 8 at once, 1 s each at most\n")
    assert "lightspan: all 1 rollouts failed, the first: timeout" in done.stderr
    assert "! 1 of 1 rollouts failed, first of all: timeout: the app ran longer" in done.stdout


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_printed(project: Path, tiny: Path) -> None:
    options = [f"--model={tiny}", *ONE, "--json=nowhere/x.json"]
    done = run(project, "my_app:answer", "tasks.jsonl", *options)
    assert done.returncode == 1
    assert done.stdout.startswith("dry run of my_app:answer: ")
    assert done.stderr.splitlines()[-2] == (
        "lightspan: --json nowhere/x.json cannot be written: No such file or directory; give "
        "another path"
    )


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line(project: Path, tiny: Path) -> None:
    (project / "my_app.py").write_text(HANGS)
    command = "import sys; from lightspan.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["dev", "my_app:answer", "tasks.jsonl", f"--model={tiny}"]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", command, *arguments],
        cwd=project,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr is not None
            begun = process.stderr.readline()
            assert begun == "dry run: 12 rollouts, 8 at once, 120 s each at most\n"
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the runners get it too
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # nothing that fails leaves it behind
    stopping = "stopping; Ctrl-C again ends at once\n"
    ended = "lightspan: stopped; nothing was trained\n"
    assert (process.returncode, said) == (130, stopping + ended)


def test_a_search_for_prompts_is_pointed_to_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dev", "my_app:answer", "tasks.jsonl"])
    assert ended.value.code == 2
    assert "--model is missing: " in (error := capsys.readouterr().err)
    assert "(GEPA, APO) trains none: call Trainer(GEPA(…)).dev(app, tasks) in Python" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_app:answer", "none.jsonl", "--model=m"], "there is no tasks file none.jsonl"),
        (
            ["other:answer", "tasks.jsonl", "--model=nowhere/model"],
            "the app 'other:answer' cannot be imported: ModuleNotFoundError: No module named",
        ),
        (
            ["my_app:answer", "tasks.jsonl", "--model=./nowhere"],
            "the model folder ./nowhere does not exist",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    project: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_app", raising=False)
    try:
        assert main(["dev", *arguments]) == 1
    finally:
        sys.modules.pop("my_app", None)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"lightspan: {message}"), said.err
    _, *pages = said.err.splitlines()
    assert all(line.startswith("see docs/troubleshooting.md#") for line in pages)
    assert len(pages) <= 1
