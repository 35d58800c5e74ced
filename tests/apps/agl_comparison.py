"""Small programs in the original's names, run with Agent Lightning 0.3.0 and with `lightspan.agl`:
what they print is the same.

    python agl_comparison.py agentlightning --check FILE     # does 0.3.0 say what is written there?
    python agl_comparison.py agentlightning --write FILE     # write what it says

A program gets the module and returns JSON; `shows` names the public names that it shows at work.
`tests/core/agl/test_comparison.py` compares them, `nox -s tests_agl` looks whether 0.3.0 still says
what is written there. Where the two differ by design, a program asks for what they share.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from typing import Any

from agl_programs import PROGRAMS, SHOWN

__all__ = ["PROGRAMS", "SHOWN", "as_json", "public_names", "said_by"]


def said_by(module: str) -> dict[str, Any]:
    """The public names of a module, and what each program says with it."""
    agl = importlib.import_module(module)
    said = {name: program(agl) for name, program in PROGRAMS.items()}
    return as_json({"names": public_names(agl), "programs": said})  # type: ignore[no-any-return]


def as_json(value: Any) -> Any:
    """As it is after a journey as JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def public_names(agl: Any) -> list[str]:
    """The names that a module offers: no modules, but for `reward`, which 0.3.0 has as both."""
    return sorted(
        name
        for name in dir(agl)
        if not name.startswith("_")
        and (name == "reward" or not isinstance(getattr(agl, name), types.ModuleType))
    )


def main(module: str, what: str, path: str) -> int:
    """Write what a module says, or look whether it is what a file has."""
    said = said_by(module)
    if what == "--write":
        with open(path, "w") as file:
            file.write(json.dumps(said, indent=1, sort_keys=True) + "\n")
        return 0
    with open(path) as file:
        written = json.load(file)
    other = [name for name in PROGRAMS if said["programs"][name] != written["programs"].get(name)]
    if said["names"] != written["names"]:
        other.append("the public names")
    print(f"{module}: {len(said['names'])} names, {len(PROGRAMS)} programs; differ: {other}")
    return bool(other)


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is downloaded
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # 0.3.0 leaves threads behind that never end
