"""Build the documentation, or serve it: `nox -s docs`, `nox -s docs -- serve`.

A broken link, a missing anchor, a warning about a docstring, and a page of the reference that is
not what the code says are errors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(arguments: list[str]) -> int:
    """Build or serve; return the exit status."""
    if arguments not in ([], ["serve"]):
        print(f"{' '.join(arguments)}: the only argument is serve", file=sys.stderr)
        return 2
    checked = subprocess.run([sys.executable, HERE / "reference.py", "--check"], check=False)
    if checked.returncode:
        return checked.returncode
    zensical = [Path(sys.executable).parent / "zensical", *(arguments or ["build", "--clean"])]
    return subprocess.run([*zensical, "--strict"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
