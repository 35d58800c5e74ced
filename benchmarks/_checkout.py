"""Let any interpreter use the packages of this checkout, installed or not.

`lightspan` finds its parts by entry points, which only installed distributions have. So the
distributions of the checkout are described in a folder, which comes first on the module path of
this process and of those that it starts.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]


def use(folder: Path) -> None:
    """Use the checkout's packages, examples and benchmarks; describe them in `folder`."""
    paths = [folder, Path(__file__).parent]
    for file in sorted(ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text("utf-8"))
        sources = file.parent / "src"
        paths.append(sources if sources.is_dir() else file.parent)
        _describe(project["project"], folder)
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *before])
    sys.path[:0] = map(str, paths)


def _describe(project: dict[str, Any], folder: Path) -> None:
    """Write the metadata of a distribution: its name, and its entry points."""
    name = project["name"]
    core = (ROOT / "packages/core/src/lightspan/__init__.py").read_text("utf-8")
    version = re.search(r'__version__ = "(.*)"', core)[1]  # type: ignore[index]
    described = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (described / "METADATA").write_text(header)
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n")
