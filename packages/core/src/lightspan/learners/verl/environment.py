"""Whether an interpreter has what verl's ranks need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Final

from lightspan.errors import ConfigError

VERSION: Final = "0.9.1"
"""Of verl: `internals` is written for it, and tested with it."""
NEEDED: Final = ("verl", "msgspec", "torch", "transformers", "tensordict", "safetensors", "uvicorn")
"""uvicorn is what verl itself imports and does not require."""
INSTALL: Final = f"pip install verl=={VERSION} msgspec uvicorn cachetools fastapi"
_PROBE_S: Final = 60.0
_PROBE: Final = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": ".".join(map(str, sys.version_info[:3]))}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def check_environment(python: str) -> dict[str, str]:
    """The versions of what an interpreter's environment has of what is needed.

    Raises:
        ConfigError: there is no such interpreter; it has no verl, or another one, or lacks
            something beside it; it has a TRL that verl cannot be imported beside.
    """
    if shutil.which(python) is None:
        raise ConfigError(
            f"Verl: python={python!r} is no program that can be run: give the path of the "
            "interpreter that has verl, such as verl-env/bin/python"
        )
    found = _versions(python)
    if "verl" not in found:
        raise ConfigError(f"Verl: {python} has no verl: {_install(python)}")
    if found["verl"] != VERSION:
        raise ConfigError(
            f"Verl: {python} has verl {found['verl']}, and this lightspan drives {VERSION}: "
            f"{_install(python)}"
        )
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        raise ConfigError(f"Verl: {python} lacks {', '.join(lacking)}: {_install(python)}")
    trl = found.get("trl", "0").split(".")[0]
    if trl.isdecimal() and int(trl) >= 1:
        raise ConfigError(
            f"Verl: {python} has TRL {found['trl']}, beside which verl {VERSION} cannot be "
            f"imported: {python} -m pip uninstall trl"
        )
    return found


def _install(python: str) -> str:
    return f"{python} -m {INSTALL}"


def _versions(python: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        probed = subprocess.run(
            [python, "-c", _PROBE, *NEEDED, "trl"],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            env={**inherited, "PYTHONSAFEPATH": "1"},
            check=True,
        )
        found: dict[str, str] = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", "") or ""
        raise ConfigError(
            f"Verl: python={python!r} does not run as an interpreter of Python: {error} {said}"
        ) from error
    return found
