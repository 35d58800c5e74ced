"""Which interpreter a benchmark's peer gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _pythons import find_interpreter

NEXT = f"3.{sys.version_info.minor + 1}"


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
    ninth = installed(f"pyenv/versions/{NEXT}.9/bin/python", f"echo {NEXT} final 0")
    assert find_interpreter(NEXT) == ninth
    tenth = installed(f"pyenv/versions/{NEXT}.10/bin/python", f"echo {NEXT} final 0")
    assert find_interpreter(NEXT) == tenth
    installed(f"bin/python{NEXT}", f"echo {NEXT} final 0")
    assert find_interpreter(NEXT) == f"python{NEXT}"


@pytest.mark.parametrize("answer", ["beta 0", "final 1"])
def test_neither_a_beta_nor_a_build_without_the_gil_is_taken(installed: Any, answer: str) -> None:
    """Few packages have wheels for them."""
    installed(f"bin/python{NEXT}", f"echo {NEXT} {answer}")
    assert find_interpreter(NEXT) is None
