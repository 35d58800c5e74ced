"""A search for the help desk's instructions (`desk_learning`) that is killed three times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from lightspan_testing.scripted import Request, ScriptedServer

SCRIPT = Path(__file__).parents[1] / "apps" / "desk_learning.py"
KILLS = [("app", 13), ("reflection", 1), ("app", 2)]
"""Of each life: whom it asks when it is killed, and for which time. That is in the survey, in a
reflection after it, and in the rollouts of a candidate."""


def killed_thrice(folder: Path, speaks: Any, reflects: Any, *kind: str) -> Counter[tuple[int, str]]:
    """Run it to its end in a fourth life; how often each life, from 1 on, asked whom.

    Args:
        folder: the run's.
        speaks: the script of the app's own model.
        reflects: that of the reflection model.
        kind: of the algorithm, where it is not the program's own.
    """
    alive: list[subprocess.Popen[str]] = []
    asked: Counter[tuple[int, str]] = Counter()

    def killing(script: Any, name: str) -> Any:
        def answer(request: Request) -> Any:
            life = len(alive)
            asked[life, name] += 1
            if KILLS[life - 1 : life] == [(name, asked[life, name])]:
                alive[-1].kill()
            return script(request)

        return answer

    with (
        ScriptedServer(killing(speaks, "app")) as model,
        ScriptedServer(killing(reflects, "reflection")) as thinker,
    ):
        for life in range(4):
            alive.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(folder), model.url, thinker.url, *kind],
                    env={**os.environ, "PYTHONHASHSEED": str(life)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            said, errors = alive[-1].communicate(timeout=200)
            assert alive[-1].returncode == (0 if life == 3 else -9), errors
    assert said.strip() == "[]"  # none of torch, matplotlib, transformers, litellm, peft
    return asked
