"""Test that a killed search for prompts resumes with the same result as an unbroken one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightspan_prompts.search.candidates import SearchResult, read_found
from lightspan_testing.scripted import Request, ScriptedServer

APPS = Path(__file__).parents[1] / "apps"
pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


def in_several_lives(
    script: str, folder: Path, speaks: Any, reflects: Any, is_fatal: Callable[[int, str, int], bool]
) -> Counter[tuple[int, str]]:
    """Start a program until it ends by itself; return how often each process called each model.

    Args:
        script: the program, in `tests/apps`.
        folder: folder of the run.
        speaks: script of the app's model.
        reflects: script of the reflection model.
        is_fatal: function that returns whether to kill the process number `life`, from 1 on, at its
            n-th call of the model "app" or "reflection".
    """
    alive: list[subprocess.Popen[str]] = []
    asked: Counter[tuple[int, str]] = Counter()

    def killing(script: Any, name: str) -> Any:
        def answer(request: Request) -> Any:
            life = len(alive)
            asked[life, name] += 1
            if is_fatal(life, name, asked[life, name]):
                alive[-1].kill()
            return script(request)

        return answer

    with (
        ScriptedServer(killing(speaks, "app")) as model,
        ScriptedServer(killing(reflects, "reflection")) as thinker,
    ):
        while not alive or alive[-1].returncode == -9:
            alive.append(
                subprocess.Popen(
                    [sys.executable, str(APPS / script), str(folder), model.url, thinker.url],
                    env={**os.environ, "PYTHONHASHSEED": str(len(alive))},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            output, errors = alive[-1].communicate(timeout=200)
    assert alive[-1].returncode == 0, errors
    assert output.strip() == "[]"  # none of torch, matplotlib, transformers, litellm, peft
    return asked


def result_of(folder: Path) -> SearchResult:
    found = read_found(folder)
    assert found is not None
    return found


def pool(found: SearchResult) -> list[Any]:
    """Return the candidates of a search without tasks, which contain the URL of the app's
    endpoint.
    """
    return [(each.templates, each.parents) for each in found.candidates]


@pytest.mark.parametrize("at", ["app", "reflection"])
@pytest.mark.parametrize(("kind", "rollout", "at_once"), [("gepa", 9, 1), ("apo", 15, 4)])
def test_prompts_that_the_app_asks_for(
    tmp_path: Path, kind: str, rollout: int, at_once: int, at: str
) -> None:
    """Kill each of three processes (SIGKILL) in its second reflection, or in a rollout."""
    speaks = importlib.import_module("gepa_toy").speaks
    toy = importlib.import_module(f"{kind}_toy")
    with ScriptedServer(speaks) as model, ScriptedServer(toy.reflects) as thinker:
        toy.train(tmp_path / "whole", model.url, thinker.url)
    fatal = (at, {"app": rollout, "reflection": 2}[at])
    asked = in_several_lives(
        f"{kind}_toy.py",
        tmp_path / "run",
        speaks,
        toy.reflects,
        lambda life, name, count: life <= 3 and (name, count) == fatal,
    )
    kills = max(life for life, _ in asked) - 1
    assert kills > 0
    found, whole = result_of(tmp_path / "run"), result_of(tmp_path / "whole")
    assert pool(found) == pool(whole)
    assert found.reflections == whole.reflections
    in_all = {who: sum(n for (_, name), n in asked.items() if name == who) for _, who in asked}
    lost = at_once * kills if at == "reflection" else 0
    assert found.reflections <= in_all["reflection"] <= found.reflections + lost
    # with the held-out tasks; each of two runners may have been killed before its call
    assert found.rollouts + 4 - 2 * kills <= in_all["app"] <= found.rollouts + 4
    assert (found.rollouts, bool(found.interrupted)) == (
        whole.rollouts + found.interrupted,
        at == "app",
    )


def test_instructions_of_an_app_that_nobody_edits(
    desk: Any, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check SIGKILL in the survey, in the reflection after it, and in a candidate's rollouts."""
    with ScriptedServer(desk.speaks) as model, ScriptedServer(desk.reflects) as thinker:
        environment.setenv("OPENAI_BASE_URL", model.url)
        desk.train(tmp_path / "whole", thinker.url)
    fatal = {1: ("app", 13), 2: ("reflection", 1), 3: ("app", 2)}
    asked = in_several_lives(
        "desk_learning.py",
        tmp_path / "run",
        desk.speaks,
        desk.reflects,
        lambda life, name, count: fatal.get(life) == (name, count),
    )
    found, whole = result_of(tmp_path / "run"), result_of(tmp_path / "whole")
    assert found.surveyed == whole.surveyed
    assert pool(found) == pool(whole)
    assert found.interrupted > 0
    assert found.rollouts - found.interrupted == whole.rollouts
    assert found.reflections == whole.reflections
    assert asked[3, "reflection"] == 1  # the one that was in flight, again
    assert asked[4, "reflection"] == 0
    assert asked[4, "app"] < asked[1, "app"] + asked[2, "app"]  # what was journalled is not asked
