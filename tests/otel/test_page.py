"""Tests of docs/guides/opentelemetry.md and of the pages of frameworks known by their spans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import DOCS, blocks  # type: ignore[import-not-found]

from lightspan import LightningRL, Trainer
from lightspan_otel.frameworks import FRAMEWORKS
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer
from tests.packaging import environments

BLOCKS = blocks("guides/opentelemetry.md")
FILES = {name: text for _, name, text in BLOCKS if name}
[SHOWN] = (text for kind, _, text in BLOCKS if kind == "text")


def test_a_framework_of_ones_own(tmp_path: Path, server: ScriptedServer) -> None:
    (tmp_path / "own_framework.py").write_text(FILES["own_framework.py"])
    url = f"sqlite:{tmp_path / 'traces.db'}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "own_framework.py", "hello"],
        cwd=tmp_path,
        env={
            **os.environ,
            "LIGHTSPAN_STORE": url,
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "key",
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr
    [found] = read_recorded(url)
    assert f"{found.tree()}\n" == SHOWN
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


def test_its_rollout(tmp_path: Path, server: ScriptedServer) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    program = "from learning import answer; print(answer({'question': 'q', 'answer': 'said'}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={
            **os.environ,
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": "key",
            "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


# --- the pages of frameworks ----------------------------------------------------------------
def page_of(name: str) -> str:
    """Return the page of a framework, as a name for `blocks`."""
    [page] = [
        path
        for path in DOCS.glob("guides/*.md")
        if f'`otel.instrument("{name}")` is the one line' in path.read_text()
    ]
    return f"guides/{page.name}"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_training_program_is_that_of_the_other_pages(name: str) -> None:
    """Check that the pages' programs are one, and construct its trainer, but do not train."""
    [program] = (text for _, file, text in blocks(page_of(name)) if file == "train.py")
    began: list[Any] = []

    def fit(trainer: Trainer, *given: Any) -> Any:
        began.append((trainer, *given))
        return SimpleNamespace(summary=str)

    learning = SimpleNamespace(answer=object())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "learning", learning)
        patch.setattr(Trainer, "fit", fit)
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    [(trainer, answer, train, held_out)] = began
    assert isinstance(trainer.algorithm, LightningRL)
    assert answer is learning.answer
    assert (len(train), len(held_out)) == (192, 64)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_oldest_versions_are_those_that_are_tested(name: str) -> None:
    key = name.replace("-", "_")
    assert key in environments.FRAMEWORKS
    pins = (environments.ROOT / f"constraints/{key}-oldest.txt").read_text()
    for distribution, floor in FRAMEWORKS[name].floors.items():
        assert f"\n{distribution}=={floor}\n" in pins
