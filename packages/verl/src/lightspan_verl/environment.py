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
RAY: Final = (2, 60)
"""Older ones start clusters that ask nobody for a token."""
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


def check_environment(python: str, *, with_ray: bool = False) -> dict[str, str]:
    """The versions of what an interpreter's environment has of what is needed.

    Args:
        with_ray: whether Ray is.

    Raises:
        ConfigError: there is no such interpreter; it has no verl, or another one, or lacks
            something beside it; it has a TRL that verl cannot be imported beside; no Ray, or an
            old one, where it is needed.
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
    if with_ray:
        _check_ray(python, found.get("ray", ""))
    return found


def _check_ray(python: str, version: str) -> None:
    wanted = ".".join(map(str, RAY))
    install = f"{python} -m pip install 'ray>={wanted}'"
    if not version:
        raise ConfigError(f"Verl(ray=…): {python} has no Ray: {install}, or leave ray= out")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if parts < RAY:
        raise ConfigError(
            f"Verl(ray=…): {python} has Ray {version}, whose clusters ask nobody for a token: "
            f"{install}, or leave ray= out"
        )


def _install(python: str) -> str:
    return f"{python} -m {INSTALL}"


def _versions(python: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        probed = subprocess.run(
            [python, "-c", _PROBE, *NEEDED, "trl", "ray"],
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
