"""Write the files of constraints from `environments.toml`.

    python constraints/update.py                       every file, resolved anew by `uv pip compile`
    python constraints/update.py langgraph-latest …    these
    python constraints/update.py --unbound torch    … but for the bounds of torch
    python constraints/update.py --check               whether the files hold what the table says

Needs uv and a package index, except for `--check`. Run the sessions of a file before committing it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = "3.11"
"""The oldest Python that is supported: what it resolves works on newer ones."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="files without .txt; all if none is named")
    parser.add_argument("--check", action="store_true", help="resolve nothing, compare the names")
    parser.add_argument("--unbound", metavar="PACKAGE", help="ignore the bounds of a package")
    options = parser.parse_args(arguments)
    text = (HERE / "environments.toml").read_text("utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(text)
    unknown = sorted(set(options.names) - table.keys())
    if unknown:
        parser.error(f"environments.toml has no {', '.join(unknown)}")
    if options.check:
        wrong = problems(table)
        print("\n".join(wrong) or f"{len(table)} files hold what the table says")
        return bool(wrong)
    for name in options.names or table:
        versions = resolve(table[name], options.unbound)
        (HERE / f"{name}.txt").write_text(file_text(table[name], versions), "utf-8")
        print(name, *(f"{package}=={version}" for package, version in versions.items()))
    return 0


def resolve(environment: Mapping[str, Any], unbound: str | None = None) -> dict[str, str]:
    """Return the version of each package that the environment names.

    Args:
        environment: its table.
        unbound: package whose bounds are ignored; None for none.
    """
    bounds = [each for each in environment.get("bounds", ()) if not each.startswith(f"{unbound}=")]
    requirements = [*environment["names"], *bounds]
    strategy = "lowest-direct" if environment.get("oldest") else "highest"
    command = ["uv", "pip", "compile", "-", "-q", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [*command, "--python-version", PYTHON, "--resolution", strategy],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    versions = pins(done.stdout)
    return {normalized(name): versions[normalized(name)] for name in environment["names"]}


def file_text(environment: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Return the text of a file of constraints."""
    about = textwrap.wrap(environment["about"], 100, break_on_hyphens=False)
    lines = [f"# {line}" for line in ("Written by constraints/update.py.", *about)]
    lines += [f"{name}=={versions[normalized(name)]}" for name in environment["names"]]
    return "".join(f"{line}\n" for line in lines)


def problems(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return where files and table differ: in names, or in a bound of one version."""
    wrong = []
    files = {path.stem for path in HERE.glob("*.txt")}
    wrong += [f"{name}.txt is missing" for name in sorted(table.keys() - files)]
    wrong += [f"{name}.txt is not in environments.toml" for name in sorted(files - table.keys())]
    for name in sorted(table.keys() & files):
        text = (HERE / f"{name}.txt").read_text("utf-8")
        versions = pins(text)
        named = {normalized(each) for each in table[name]["names"]}
        if named != versions.keys() or text != file_text(table[name], versions):
            wrong.append(f"{name}.txt is not what update.py would write of these versions")
        exact = [bound for bound in table[name].get("bounds", ()) if "==" in bound]
        for package, _, version in (bound.partition("==") for bound in exact):
            if versions.get(normalized(package)) != version:
                wrong.append(f"{name}.txt: {package} is not {version}")
    return wrong


def pins(text: str) -> dict[str, str]:
    """Return package → version of lines `package==version`."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^\s;]+)", text, re.MULTILINE)
    return {normalized(name): version for name, version in found}


def normalized(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    raise SystemExit(main())
