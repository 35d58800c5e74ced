"""Test the files of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging import environments

ROOT = Path(__file__).parents[2]


def tracked() -> list[Path]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def texts() -> list[tuple[str, str]]:
    """Return path and content of every text file."""
    found: list[tuple[str, str]] = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            found.append((str(path.relative_to(ROOT)), data.decode()))
    return found


def lines_that(pattern: str) -> list[str]:
    """Return `file:line: text` for every line that contains the pattern."""
    searched = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if searched.search(line)
    ]


def test_no_large_files() -> None:
    large = {str(path): path.stat().st_size for path in tracked() if path.stat().st_size > 2**20}
    assert large == {}


def test_no_models_stores_or_environments() -> None:
    forbidden = {".db", ".sqlite", ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pyc", ".whl"}
    assert [str(path) for path in tracked() if path.suffix in forbidden] == []


def test_no_paths_of_one_machine() -> None:
    assert lines_that(r"(?<![\w*{}.-])/(work|home|root|Users|opt)/[a-z.]") == []


def test_no_keys() -> None:
    assert lines_that(r"\b(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{30,})") == []


def test_sessions_know_every_adapter() -> None:
    adapters = {path.parents[2].name for path in ROOT.glob("packages/*/src/*/_hook.py")}
    assert set(environments.ADAPTERS) == adapters


@pytest.mark.parametrize("adapter", environments.ADAPTERS)
def test_what_adapter_tests_are_skipped_without_is_expected_by_nox(adapter: str) -> None:
    """Check that nox expects every module without which tests are skipped.

    Otherwise a session without the module would skip the tests and pass.
    """
    suite = ROOT / "packages/testing/src/lightspan_testing/adapter_suite"
    skipped = {
        name
        for path in [*(ROOT / f"packages/{adapter}/tests").glob("*.py"), *suite.glob("*.py")]
        for name in re.findall(r'importorskip\("([\w.]+)"\)', path.read_text())
    }
    expected = environments.expected_of(adapter, "latest")
    assert skipped - set(expected) == set()
    assert "opentelemetry.distro" in skipped


def documents() -> list[str]:
    return [name for name, _ in texts() if name.endswith(".md")]


@pytest.mark.parametrize("name", documents())
def test_code_in_documents_compiles(name: str) -> None:
    """Check that every Python block in a document can be parsed."""
    for block in re.findall(
        r"^```python(?: title=\S+)?\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S
    ):
        compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("name", documents())
def test_links_in_documents_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not ((ROOT / name).parent / link).exists()] == []


@pytest.mark.parametrize("name", documents())
def test_sessions_in_documents_exist(name: str) -> None:
    named = set(re.findall(r"nox (?:-r )?-s ['\"]?(\w+)", (ROOT / name).read_text()))
    noxfile = ast.parse((ROOT / "noxfile.py").read_text())
    assert named <= {node.name for node in noxfile.body if isinstance(node, ast.FunctionDef)}
