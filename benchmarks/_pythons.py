"""Find installed Pythons: on the PATH, or among pyenv's, whose names on the PATH may not run.

Used by `_peers`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ASK = (
    "import sys, sysconfig; "
    "print('%d.%d' % sys.version_info[:2], sys.version_info.releaselevel, "
    "sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
)


def find_interpreter(version: str) -> str | None:
    """Return a working interpreter of a version such as "3.12"; None if there is none.

    Builds without the GIL are not used, because few packages have wheels for them.
    """
    return next((each for each in _candidates(version) if _is_release(each, version)), None)


def variable(version: str) -> str:
    """Return the name of the environment variable that may contain a version's interpreter."""
    return "LIGHTSPAN_PYTHON" + version.replace(".", "")


def _candidates(version: str) -> Iterator[str]:
    named = os.environ.get(variable(version))
    if named:
        yield named
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = (pyenv / "versions").glob(f"{version}.*")
    for folder in sorted(folders, key=_patch, reverse=True):
        yield str(folder / "bin" / "python")


def _patch(folder: Path) -> tuple[int, str]:
    """Return a sort key that orders 3.13.10 after 3.13.9."""
    patch = folder.name.rpartition(".")[2]
    return (int(patch) if patch.isdigit() else -1, folder.name)


def _is_release(python: str, version: str) -> bool:
    """Return whether an interpreter runs and is a release of `version`."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return done.stdout.split() == [version, "final", "0"]
