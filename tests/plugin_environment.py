"""Make a virtualenv with distributions of `tests/plugins` in addition to the running one's."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def plugin_environment(folder: Path, *names: str) -> str:
    """Make the virtualenv in a folder, and return its interpreter.

    Args:
        folder: folder of the virtualenv.
        names: folders of `tests/plugins`. They are copied, so that no build files are left in them.
    """
    venv.create(folder, symlinks=True)
    python = str(folder / "bin/python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    shared = [path for path in sys.path if Path(path).is_dir() and path != str(ROOT)]
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    sources = []
    for name in names:
        source = folder / name
        source.mkdir()
        for file in (ROOT / "tests/plugins" / name).glob("*.*"):
            (source / file.name).write_text(file.read_text())
        sources.append(str(source))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", *sources], check=True)
    return python
