"""Make a real environment for an app, offline and without the packages that training needs."""

from __future__ import annotations

import re
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

import lightspan

CAPTURE = ("msgspec", "opentelemetry-api", "opentelemetry-sdk", "lightspan-cluster")
"""Distributions that an app's environment needs for core and for `lightspan runner`."""


def app_environment(folder: Path, *distributions: str, core: bool = True) -> Path:
    """Make a virtual environment with some distributions of the running one; return its
    interpreter.

    It contains `distributions`, their requirements and, unless `core` is False, lightspan.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    [packages] = (folder / "lib").glob("python*/site-packages")
    for found in _with_dependencies([*(CAPTURE if core else ()), *distributions]):
        for entry in _top_level(found):
            link = packages / entry.name
            if not link.exists():
                link.symlink_to(entry)
    if core:
        # The running ones; apps of tests name scripted parts of the suites.
        for name in ("lightspan", "lightspan_cluster", "lightspan_testing"):
            spec = find_spec(name)
            if spec is not None and not (packages / name).exists():  # no distribution has linked it
                [source] = spec.submodule_search_locations or []
                (packages / name).symlink_to(source)
        for entry in _top_level(distribution("lightspan")):  # which names its commands
            if entry.suffix == ".dist-info" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
        command = folder / "bin" / "lightspan"
        command.write_text(
            f"#!{python}\nimport sys\nfrom lightspan.cli import main\n\n"
            'if __name__ == "__main__":\n    sys.exit(main())\n'
        )
        command.chmod(0o755)
    return python


def of_another_version(python: Path, version: str, protocol: int) -> None:
    """Change the version and the protocol number of the lightspan in an environment."""
    [packages] = (python.parents[1] / "lib").glob("python*/site-packages")
    [source] = lightspan.__path__
    (packages / "lightspan").unlink()
    (packages / "lightspan").mkdir()
    (packages / "lightspan" / "__init__.py").write_text(
        f"""from importlib import import_module
__path__ = [{source!r}]
__version__ = {version!r}
import_module("lightspan.schema.semconv").PROTOCOL_VERSION = {protocol}
agent = import_module("lightspan.capture.emit").agent
rollout = import_module("lightspan.runners.app").rollout
"""
    )


def _with_dependencies(names: Iterable[str]) -> Iterator[Distribution]:
    queue = [Requirement(name) for name in names]
    seen = set[tuple[str, str]]()
    while queue:
        wanted = queue.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        extras = {"", *wanted.extras}
        if {(name, extra) for extra in extras} <= seen:
            continue
        seen |= {(name, extra) for extra in extras}
        try:
            found = distribution(name)
        except PackageNotFoundError:  # an optional one that nothing here needs
            continue
        yield found
        for text in found.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                queue.append(needed)


def _top_level(found: Distribution) -> set[Path]:
    """Return the top-level files and folders of a distribution in site-packages."""
    first = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
    return {Path(str(found.locate_file(name))) for name in first if name != "__pycache__"}
