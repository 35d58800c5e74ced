"""Test that an adapter outside of the repository's packages passes the adapter suite."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightspan import instrumentation
from tests.plugin_environment import plugin_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/write-an-adapter.md"
TOY = ROOT / "tests/plugins/toy_adapter"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of a virtualenv that also has the toy adapter."""
    return plugin_environment(tmp_path_factory.mktemp("toy"), "toyframe", "toy_adapter")


def test_the_suite(environment: str) -> None:
    """Run the adapter suite with the toy framework."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    done = subprocess.run(
        [environment, "-m", "pytest", *options, str(TOY / "toy_suite.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{3} passed", done.stdout), done.stdout


def test_the_framework_is_known(environment: str) -> None:
    """Check that other adapters know that the framework's agents have names."""
    script = (
        "from lightspan.capture.agent_discovery import frameworks; "
        "print('toyframe' in frameworks())"
    )
    done = subprocess.run([environment, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_it_imports_the_public_module_only() -> None:
    tree = ast.parse((TOY / "lightspan_toy.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name and name.startswith("lightspan")} == {
        "lightspan.instrumentation"
    }


@pytest.mark.parametrize("file", ["lightspan_toy.py", "pyproject.toml"])
def test_the_page_has_the_adapter_as_it_is(file: str) -> None:
    assert (TOY / file).read_text().strip() in PAGE.read_text()


def test_the_page_has_a_line_for_every_name() -> None:
    listed = re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(instrumentation.__all__)


def test_importing_lightspan_loads_no_instrumentation() -> None:
    script = (
        "import sys, lightspan; assert 'lightspan.instrumentation' not in sys.modules\n"
        "import lightspan.instrumentation\n"
        "print([name for name in ('aiohttp', 'numpy', 'openai', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
