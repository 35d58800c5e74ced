"""What `nox -s packaging` and `nox -s release` build, and what is checked before an upload."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import nox

SMOKE = Path(__file__).with_name("smoke.py")


def build_packages(session: nox.Session, names: Iterable[str], dist: Path) -> list[Path]:
    """Build the source distribution and the wheel of every package; return the wheels."""
    shutil.rmtree(dist, ignore_errors=True)
    for name in names:
        command = ("python", "-m", "build", "--no-isolation", "--outdir", str(dist))
        session.run(*command, f"packages/{name}", silent=True)
    return sorted(dist.glob("*.whl"))


def smoke_apart(session: nox.Session, name: str, pins: str, dist: Path) -> None:
    """Install a distribution with those of lightspan that it needs in an empty virtualenv; import
    it.

    Args:
        session: the nox session.
        name: name of the distribution.
        pins: `PINS` of the file constraints/PINS-latest.txt.
        dist: folder of the wheels.
    """
    folder = Path(session.create_tmp()).absolute() / name
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    options = ("-q", "--no-compile", f"-cconstraints/{pins}-latest.txt", "--find-links", str(dist))
    session.run(python, "-m", "pip", "install", *options, name, external=True)
    with session.chdir(folder):
        session.run(python, "-I", str(SMOKE), name.replace("-", "_"), external=True)


def not_releasable(root: Path) -> str:
    """Return why a checkout cannot be released; empty if it can."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    source = (root / "packages/core/src/lightspan/__init__.py").read_text("utf-8")
    version = re.findall('^__version__ = "(.*)"$', source, re.MULTILINE)[0]
    heading = re.findall("^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        return f"CHANGELOG.md begins with {heading!r}, not with {version} and its day"
    if git("status", "--porcelain"):
        return "files are changed or not tracked (git status)"
    if f"v{version}" not in git("tag", "--points-at", "HEAD").split():
        return f"the commit has no tag v{version}"
    return ""
