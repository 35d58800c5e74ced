"""Test `nox -s release`, which needs an unchanged, tagged commit that the changelog names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.packaging.releasing import not_releasable

RELEASED = "# Changelog\n\n## 1.2.3 (2026-11-23)\n\n## 1.2.2 (2026-11-01)\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository whose version 1.2.3 is tagged."""
    package = tmp_path / "packages/core/src/lightspan"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(RELEASED)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "work")
    git(tmp_path, "tag", "v1.2.3")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True)


def test_a_tagged_commit_can_be_released(checkout: Path) -> None:
    assert not_releasable(checkout) == ""


@pytest.mark.parametrize("heading", ["Unreleased (1.2.3)", "1.2.4 (2026-11-23)"])
def test_the_changelog_has_to_name_it(checkout: Path, heading: str) -> None:
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
    assert not_releasable(checkout) == (
        f"CHANGELOG.md begins with '{heading}', not with 1.2.3 and its day"
    )


def test_what_is_changed_or_stray_is_not_released(checkout: Path) -> None:
    (checkout / "stray.py").touch()
    assert not_releasable(checkout).startswith("files are changed or not tracked")


def test_the_tag_has_to_be_at_the_commit(checkout: Path) -> None:
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "more")
    git(checkout, "tag", "v1.2.30")
    assert not_releasable(checkout) == "the commit has no tag v1.2.3"
