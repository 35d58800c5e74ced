"""Tests of docs/guides/opentelemetry.md: its program runs, and its names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS, blocks  # type: ignore[import-not-found]

from lightspan_otel.frameworks import FRAMEWORKS
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import ScriptedServer
from tests.packaging import environments

PAGE = (DOCS / "guides/opentelemetry.md").read_text()
[PROGRAM] = (
    text for _, name, text in blocks("guides/opentelemetry.md") if name == "own_framework.py"
)


def test_a_framework_of_ones_own(tmp_path: Path, server: ScriptedServer) -> None:
    (tmp_path / "own_framework.py").write_text(PROGRAM)
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
    assert found.tree() == (
        "invoke_workflow writer\n"
        "  invoke_agent writer\n"
        "    invoke_agent finder\n"
        "      chat my-model @writer/finder\n"
        "    chat my-model @writer"
    )
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_page_says_which_versions_were_tested(name: str) -> None:
    """Compare the page's versions with the constraints that the framework's session installs."""
    [row] = [line for line in PAGE.splitlines() if line.startswith(f'| `"{name}"` |')]
    key = name.replace("-", "_")
    assert key in environments.FRAMEWORKS
    pins = (environments.ROOT / f"constraints/{key}-latest.txt").read_text()
    for shown, version in re.findall(r"([A-Za-z-]+)`? (\d+\.\d+\.\d+)", row.lower()):
        assert f"\n{shown}=={version}\n" in pins
    assert re.findall(r"\d+\.\d+\.\d+", row)
