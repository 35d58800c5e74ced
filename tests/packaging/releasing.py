"""What `nox -s packaging` and `nox -s release` build, and what is checked before an upload."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import nox

from tests.packaging import environments as envs
from tests.packaging.running import TESTING

SMOKE = Path(__file__).with_name("smoke.py")


def release_packages(session: nox.Session, tests: str) -> None:
    """Build all packages into dist/, check them, and upload them if the session is told to.

    Args:
        session: the nox session.
        tests: test file that checks the built packages.
    """
    uploads, lacking = session.posargs == ["--upload"], not_releasable(envs.ROOT)
    if session.posargs and not uploads:
        session.error(f"{' '.join(session.posargs)}: the only argument is --upload")
    if uploads and lacking:
        session.error(f"nothing is uploaded: {lacking}")
    ours = ["packages/core", "packages/otel"]
    envs.install(session, *envs.PINS, "build", "hatchling", "twine", *envs.PYTEST, ours=ours)
    dist = envs.ROOT / "dist"
    build_packages(session, envs.PACKAGES, dist)
    files = [str(path.relative_to(envs.ROOT)) for path in sorted(dist.iterdir())]
    session.run("twine", "check", "--strict", *files)
    session.run("python", "-m", "pytest", tests, env={**TESTING, "LIGHTSPAN_DIST": str(dist)})
    for name in envs.PACKAGES:
        pins = name if name in envs.ADAPTERS else "core"
        smoke_apart(session, envs.requirement_of(f"packages/{name}"), pins, dist)
    if uploads:
        session.run("twine", "upload", *files)
    else:
        session.log("Not uploaded; it would be: twine upload %s", " ".join(files))
        session.log("Releasable: %s", lacking or "yes")


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
