"""Which Python the session `tests_newest_python` takes, and what it runs with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nox
import pytest
from _pythons import find_interpreter, newest_interpreter

import noxfile

NEXT = f"3.{sys.version_info.minor + 1}"
AFTER = f"3.{sys.version_info.minor + 2}"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine on which nothing newer than this Python is installed yet: make programs there by
    their path and what they answer."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    for name in [name for name in os.environ if name.startswith("LIGHTSPAN_PYTHON")]:
        monkeypatch.delenv(name)

    def make(path: str, answer: str) -> str:
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
        return str(program)

    return make


REFUSES = f"echo 'pyenv: python{NEXT}: command not found' >&2; exit 127"
"""A name that pyenv puts on the PATH for every version of its own, whether it is on or not."""


def test_a_name_on_the_path_that_does_not_run_is_passed_over(installed: Any) -> None:
    installed(f"bin/python{NEXT}", REFUSES)
    assert find_interpreter(NEXT) is None
    assert newest_interpreter() == sys.executable
    ninth = installed(f"pyenv/versions/{NEXT}.9/bin/python", f"echo {NEXT} final 0")
    assert newest_interpreter() == find_interpreter(NEXT) == ninth
    tenth = installed(f"pyenv/versions/{NEXT}.10/bin/python", f"echo {NEXT} final 0")
    assert newest_interpreter() == tenth
    installed(f"bin/python{NEXT}", f"echo {NEXT} final 0")
    assert newest_interpreter() == f"python{NEXT}"


@pytest.mark.parametrize("answer", ["beta 0", "final 1"])
def test_neither_a_beta_nor_a_build_without_the_gil_is_taken(installed: Any, answer: str) -> None:
    """Few packages have wheels for them."""
    installed(f"bin/python{AFTER}", f"echo {AFTER} {answer}")
    newest = installed(f"pyenv/versions/{NEXT}.0/bin/python", f"echo {NEXT} final 0")
    assert newest_interpreter() == newest


def test_an_interpreter_may_be_named(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named = installed("elsewhere/python", f"echo {NEXT} final 0")
    monkeypatch.setenv("LIGHTSPAN_PYTHON" + NEXT.replace(".", ""), named)
    assert newest_interpreter() == named


def test_this_very_python_is_one() -> None:
    assert find_interpreter(f"3.{sys.version_info.minor}") is not None


DEFAULT = [*(nox.options.sessions or ())]


class Recording:
    """A session that installs nothing and keeps what would be run."""

    posargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.tests: set[str] = set()

    def run(self, *command: str, **_: Any) -> None:
        if "pytest" in command:
            self.tests.update(each for each in command if each.startswith("tests/"))

    def install(self, *_: str, **__: Any) -> None: ...


def test_the_newest_python_runs_what_the_default_sessions_do() -> None:
    by_default, newest = Recording(), Recording()
    for session in ("tests_capture", "tests_across", "tests_examples", "tests_postgres"):
        assert session in DEFAULT
        getattr(noxfile, session).func(by_default)
    assert "tests_latest(langgraph)" in DEFAULT
    noxfile.tests_latest.func(by_default, "langgraph")
    noxfile.tests_newest_python.func(newest)
    assert "packages/langgraph/tests/test_nodes.py" in by_default.tests
    assert by_default.tests - newest.tests == {"tests/packaging/test_capture_plane.py"}
    assert "tests/packaging" in newest.tests  # which has that one


def test_a_session_without_its_python_fails() -> None:
    """Skipped, it would end with status 0 and have tested nothing."""
    assert nox.options.error_on_missing_interpreters is True
    python = noxfile.tests_newest_python.python
    subprocess.run([str(python), "-I", "-c", "pass"], check=True)
