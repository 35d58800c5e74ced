"""Recorded good sessions for the warm start before reinforcement learning.

A script that knows the bug plays the model; the agent, the sandbox and the outputs are real. Every
session ends with the repaired package. Many take a detour: they look around first, run the tests
before they submit, or edit twice because the first edit is wrong. A script has as many calls as it
needs, but training allows three. Reinforcement learns to leave the detours out.

A session depends on its package alone, so that a seed gives the same warm start again: random times
of the package's seed replace those that pytest prints.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

from minisweagent.models.test_models import DeterministicModel, make_output

from terminal_example import app, bugs, packages
from terminal_example.app import SUBMIT
from terminal_example.packages import Task

Chat: TypeAlias = dict[str, Any]

COUNT: Final = 6_000
"""Number of recorded sessions of a warm start."""
LOOK_RATE: Final = 0.6
"""Share of sessions that list the folder first.

Most do: a policy that is moved at random does more of what it does most, and must not improve by
that.
"""
MISTAKE_RATE: Final = 0.4
"""Share of sessions whose first edit is wrong."""
TEST_RATE: Final = 0.1
"""Share of sessions that run the tests before they submit."""
_THREADS: Final = 4
_TIME: Final = re.compile(r"(?<= in )\d+\.\d\d(?=s\b)")
"""The seconds in the last line of pytest."""


def write(folder: Path, *, count: int, seed: int, apart: Collection[str]) -> None:
    """Record sessions, and write them to `sessions.jsonl` in `folder`.

    Args:
        apart: expressions that are in no session.
    """
    tasks = packages.generate("sessions", seed=seed, count=count, apart=apart)
    with ThreadPoolExecutor(_THREADS) as pool:
        chats = list(pool.map(record, tasks))
    lines = "".join(f"{json.dumps(chat)}\n" for chat in chats)
    (folder / "sessions.jsonl").write_text(lines, encoding="utf-8")


def load(folder: Path) -> list[Chat]:
    """Read the sessions that `write` wrote."""
    text = (folder / "sessions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def record(task: Task) -> Chat:
    """Return a session of the agent with a script as its model, as a chat."""
    rng = random.Random(f"{task['id']} {task['function']} {task['wrong']}")
    commands = script(task, rng)
    answers = [make_output(answer(each), [{"command": each}], 0.0) for each in commands]
    model = DeterministicModel(
        outputs=answers, observation_template=app.config()["model"]["observation_template"]
    )
    session = app.repair(task, model, limit=len(commands))
    assert session.status == "Submitted", session
    assert session.files == repaired(task), session
    return {
        "messages": [
            {"role": message["role"], "content": _with_random_times(message["content"], rng)}
            for message in session.messages
            if message["role"] != "exit"
        ]
    }


def script(task: Task, rng: random.Random) -> list[str]:
    """Return the commands of a session that repairs the package, perhaps with detours."""
    commands = ["ls"] if rng.random() < LOOK_RATE else []
    commands.append(look(task))
    if rng.random() < MISTAKE_RATE:
        commands += [edit(task, _mistaken(task, rng)), look(task)]
    commands.append(edit(task, task["right"]))
    if rng.random() < TEST_RATE:
        commands.append("pytest -q")
    return [*commands, SUBMIT]


def answer(command: str) -> str:
    """Return an answer of the model with a command."""
    return f"```bash\n{command}\n```"


def look(task: Task) -> str:
    """Return the command that shows the function with the bug."""
    return f"grep -n -A2 'def {task['function']}' {task['path']}"


def edit(task: Task, returned: str) -> str:
    """Return the command with which the function returns the expression `returned`."""
    return f"sed -i '{task['line']}s|return .*|return {returned}|' {task['path']}"


def repaired(task: Task) -> dict[str, str]:
    """Return path → text of the package without the bug."""
    wrong, right = (f"    return {task[key]}\n" for key in ("wrong", "right"))
    lines = task["files"][task["path"]].splitlines(keepends=True)
    assert lines[task["line"] - 1] == wrong, task
    lines[task["line"] - 1] = right
    return {**task["files"], task["path"]: "".join(lines)}


def _with_random_times(text: str, rng: random.Random) -> str:
    """Return a text of a session with times from `rng` in the place of pytest's."""
    return _TIME.sub(lambda _: f"{rng.uniform(0.01, 0.09):.2f}", text)


def _mistaken(task: Task, rng: random.Random) -> str:
    """Return a wrong expression: a bug of a trained kind, other than the task's."""
    kinds = [
        mutants
        for changes in bugs.TRAINED.values()
        if (mutants := bugs.mutants(task["right"], task["parameters"], changes))
    ]
    others = [each for each in rng.choice(kinds) if each != task["wrong"]]
    return rng.choice(others) if others else rng.choice([each[0] for each in kinds])
