"""Hash the source of an app, to compare it between the machines that run the app.

The app is not imported. The modules that it imports are found in its code: those of its top-level
package, or those in the folder of its module. Other installed packages, modules that are imported
by a computed name, and files that are no Python are not compared.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from lightspan.runners.program import is_program

MAX_MODULES: Final = 200
"""Maximum number of modules whose hashes are announced one by one."""
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


def source_hashes(app: str, folders: Sequence[str]) -> dict[str, str]:
    """Return name → short hash for the module of an app and the modules that it imports.

    Empty if the module's source is not found, and for a `Command`: its reference is its text, so
    runners with another text do not join.

    Args:
        app: reference of the app.
        folders: the folders in which to look for modules, as in `sys.path`.
    """
    module = app.partition(":")[0]
    top = module.partition(".")[0]
    if is_program(app) or top in ("__main__", "__mp_main__"):
        return {}
    root = _root(top, folders)
    hashes: dict[str, str] = {}
    if root is None:
        return hashes
    waiting = [module]
    visited = set(waiting)
    while waiting:
        name = waiting.pop()
        file = _file(root, name)
        if file is None:
            continue
        try:
            text = file.read_bytes().replace(b"\r\n", b"\n")
        except OSError:
            continue
        hashes[name] = hashlib.sha256(text).hexdigest()[:12]
        for other in _imports(name, text, is_package=file.name == "__init__.py"):
            is_own = other.partition(".")[0] == top or root.name not in _INSTALLED
            if other not in visited and is_own:
                visited.add(other)
                waiting.append(other)
    if len(hashes) > MAX_MODULES:
        all_hashes = repr(sorted(hashes.items())).encode()
        rest = f"{len(hashes)} modules of {top}"
        hashes = {module: hashes[module], rest: hashlib.sha256(all_hashes).hexdigest()[:12]}
    return dict(sorted(hashes.items()))


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the modules whose hashes differ, for a message; empty if none do.

    A module that only one of the two has does not count: what imports it differs too.
    """
    names = [name for name in one if name in other and one[name] != other[name]]
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*names[:3], *more])


def difference(
    name: str, sources: Mapping[str, str], others: Mapping[str, Mapping[str, str]]
) -> str:
    """Describe how the app of a runner differs from those of other machines; empty if it does not.

    Args:
        name: the runner.
        sources: hashes of the modules of its app.
        others: name of a machine or runner → hashes of its modules.
    """
    for where, own in others.items():
        if modules := differing(sources, own):
            return (
                f"{name} has another version of the app than {where} ({modules}): its rewards and "
                "prompts may differ; give all machines the same version and start its runner again"
            )
    return ""


def _root(top: str, folders: Sequence[str]) -> Path | None:
    """Return the folder of a top-level module or package; None if it is not found."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):  # of a module without a `__spec__`
        spec = PathFinder.find_spec(top, [*folders]) or importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec.has_location and spec.origin else None


def _file(root: Path, name: str) -> Path | None:
    """Return the source file of a module; None if there is none below `root`."""
    path = root.joinpath(*name.split("."))
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _imports(name: str, text: bytes, *, is_package: bool) -> Iterator[str]:
    """Yield the names of all modules that a module may import, and of its packages.

    Args:
        name: full name of the module.
        text: source of the module.
        is_package: whether the module is the `__init__.py` of a package.
    """
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # the runner's own import reports it
        return
    package = parts if is_package else parts[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *([node.module] if node.module else [])]
            names = [".".join([*module, *more]) for more in [[], *([a.name] for a in node.names)]]
        for each in filter(None, names):
            path = each.split(".")
            yield from (".".join(path[: end + 1]) for end in range(len(path)))
