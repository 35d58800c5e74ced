"""Play the app on a framework's page, `docs/guides/*.md`, with a scripted model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pages import blocks  # type: ignore[import-not-found]

from lightspan_testing.scripted import Reply, ScriptedServer, ToolCall

_TASK: Final = {"question": "What do 6 lamps at 7 euros each cost?", "answer": "42"}
_PROGRAM: Final = f"""
import asyncio, inspect
from lightspan_testing.attempts import captured
from learning import answer

async def awaited(reward):
    return await reward

with captured() as attempt:
    reward = answer({_TASK!r})
    if inspect.isawaitable(reward):
        reward = asyncio.run(awaited(reward))
print("reward", reward)
print(*attempt.tree, sep="\\n")
"""


def calls(tool: str, **arguments: Any) -> Reply:
    """Return an answer of the model that calls a tool."""
    return Reply(tool_calls=[ToolCall(name=tool, arguments=json.dumps(arguments))])


def check_page(page: str, folder: Path, says: Sequence[Reply | str]) -> None:
    """Run the app on a page, and compare the recorded spans with those that the page shows.

    Args:
        page: name of the page in `docs/guides`, without `.md`.
        folder: an empty folder for the app.
        says: the model's answers in order. The last one contains "42".
    """
    found = blocks(f"guides/{page}.md")
    for _, name, text in found:
        if name:
            (folder / name).write_text(text)
    [shown] = [text for kind, _, text in found if kind == "text"]
    with ScriptedServer(says) as server:
        where = dict.fromkeys(["OPENAI_BASE_URL", "OPENAI_API_BASE"], server.url)
        environment = {**os.environ, **where, "OPENAI_API_KEY": "key"}
        environment["PYTHONPATH"] = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout[done.stdout.rindex("reward ") :] == f"reward 1.0\n{shown}"
    assert len(server.requests) == len(says)
