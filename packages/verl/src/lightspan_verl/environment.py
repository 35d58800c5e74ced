"""Check that an interpreter's environment has the packages that verl's processes need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Final

from lightspan.errors import ConfigError

VERSION: Final = "0.9.1"
"""The version of verl for which `verl_adapter` is written and tested."""
NEEDED: Final = ("verl", "msgspec", "torch", "transformers", "tensordict", "safetensors", "uvicorn")
"""Required packages. verl imports uvicorn but does not declare it as a requirement."""
INSTALL: Final = f"pip install verl=={VERSION} msgspec uvicorn cachetools fastapi"
_PROBE_S: Final = 60.0
_PROBE: Final = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
versions = {"python": ".".join(map(str, sys.version_info[:3]))}
for name in sys.argv[1:]:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(versions))
"""


def check_environment(python: str) -> dict[str, str]:
    """Check an interpreter's environment; return the version of each required package.

    Args:
        python: path of the interpreter.

    Raises:
        ConfigError: the interpreter does not exist, a package is missing, verl has another version,
            or TRL 1 or newer is installed, with which verl cannot be imported.
    """
    if shutil.which(python) is None:
        raise ConfigError(
            f"Verl: python={python!r} is no program that can be run: give the path of the "
            "interpreter that has verl, such as verl-env/bin/python"
        )
    versions = _versions(python)
    install = f"{python} -m {INSTALL}"
    if "verl" not in versions:
        raise ConfigError(f"Verl: {python} has no verl: {install}")
    if versions["verl"] != VERSION:
        raise ConfigError(
            f"Verl: {python} has verl {versions['verl']}, and this lightspan drives {VERSION}: "
            f"{install}"
        )
    missing = [name for name in NEEDED if name not in versions]
    if missing:
        raise ConfigError(f"Verl: {python} lacks {', '.join(missing)}: {install}")
    trl = versions.get("trl", "0").split(".")[0]
    if trl.isdecimal() and int(trl) >= 1:
        raise ConfigError(
            f"Verl: {python} has TRL {versions['trl']}, with which verl {VERSION} cannot be "
            f"imported: {python} -m pip uninstall trl"
        )
    return versions


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
        versions: dict[str, str] = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        stderr = getattr(error, "stderr", "") or ""
        raise ConfigError(
            f"Verl: python={python!r} does not run as an interpreter of Python: {error} {stderr}"
        ) from error
    return versions
