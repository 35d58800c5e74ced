"""Import installed packages outside the repository, for the sessions `packaging` and `release`.

Where the packages for training are missing, every name either works or says what to install.

    python -I smoke.py lightspan lightspan_langgraph
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version


def main(names: Sequence[str]) -> int:
    """Check the packages `names`; return the exit status."""
    for name in names:
        package, distribution = importlib.import_module(name), name.replace("_", "-")
        assert "site-packages" in str(package.__file__), package.__file__
        absent = {each: missing(package, each) for each in package.__all__}
        print(
            f"{distribution} {version(distribution)}: {len(package.__all__)} names,",
            f"{sum(map(bool, absent.values()))} of them need more",
        )
        for each, error in absent.items():
            assert not error or "pip install" in error, f"{name}.{each}: {error}"
    for script in entry_points(group="console_scripts", name="lightspan"):
        print(f"console script {script.name}: {script.load().__module__}")
    assert "torch" not in sys.modules
    return 0


def missing(package: object, name: str) -> str:
    """Return the error that a name raises if something is missing; empty if the name works."""
    try:
        getattr(package, name)
    except ModuleNotFoundError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
