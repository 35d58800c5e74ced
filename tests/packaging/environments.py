"""The virtualenvs of the nox sessions: what stands in each `pyproject.toml`, and its installation.

torch is large: the sessions that need it share one virtualenv, .nox/learning. LIGHTSPAN_TORCH_INDEX
names the index of torch, such as https://download.pytorch.org/whl/cpu (CPU only).
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parents[2]


def table(folder: str | Path) -> dict[str, Any]:
    """Return the `pyproject.toml` of a folder."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))


def settings(folder: str | Path) -> dict[str, Any]:
    """Return what `pyproject.toml` says for nox: `[tool.lightspan]`."""
    declared: dict[str, Any] = table(folder)["tool"].get("lightspan", {})
    return declared


SETTINGS = settings(".")
GROUPS: dict[str, list[str]] = table(".")["dependency-groups"]
PYTEST = GROUPS["test"]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
ADAPTERS = {name: settings(f"packages/{name}") for name in PACKAGES}
ADAPTERS = {name: each for name, each in ADAPTERS.items() if "modules" in each}
"""Adapters: the modules that their tests need, and what else (packages/NAME/pyproject.toml)."""
SHARED = [name for name, each in ADAPTERS.items() if not each.get("behind")]
"""Adapters in .nox/learning; the others are in .nox/behind."""
PLAIN = [name for name in PACKAGES if name not in ADAPTERS]
LIGHT = [name for name in PLAIN if name not in SETTINGS["heavy"]]
"""Packages whose tests have an environment without torch."""
TRAIN = ["packages/core", "packages/gateway", "packages/tools", "packages/torch"]
"""What `lightspan[train]` is."""
FRAMEWORKS: dict[str, dict[str, Any]] = settings("packages/otel")["frameworks"]
"""Frameworks without an adapter, known by their spans."""
VERSIONS = [
    (name, versions)
    for name in FRAMEWORKS
    for versions in ("latest", "oldest")
    if (ROOT / f"constraints/{name}-{versions}.txt").exists()
]
EXAMPLES: dict[str, dict[str, Any]] = {
    name: {**each, "folder": f"examples/{path.parent.name}"}
    for path in sorted(ROOT.glob("examples/*/pyproject.toml"))
    for name, each in settings(path.parent).get("examples", {}).items()
}
"""Examples; one that is `apart` needs much that no other does, and is in no shared environment."""
COMMON, DESK, SUITES = "examples/common", "examples/desk", "packages/testing"
HARNESS = [SUITES, "packages/gateway", "packages/otel", "packages/prompts"]
"""What `lightspan_testing.AdapterSuite`, and tests of nested frameworks, need."""
PINS = [f"-cconstraints/{name}.txt" for name in ("dev", "core-latest", "langgraph-latest")]
UV = {"UV_SYSTEM_CERTS": "1", "UV_LINK_MODE": "copy"}  # the trust of pip; no shared files
if "PIP_INDEX_URL" in os.environ:
    UV["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]


def params(names: Iterable[str]) -> list[Any]:
    """Return the values of a parametrised session, each with itself as the id."""
    return [nox.param(name, id=name) for name in names]


def python_of(environment: str) -> str:
    """Return the interpreter of the virtualenv that the session of that name makes."""
    name = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    return str(ROOT / ".nox" / environment / name)


def expected_of(adapter: str, versions: str) -> list[str]:
    """Return the modules that an adapter's tests need with these versions."""
    beside = [*ADAPTERS[adapter]["beside"], *SETTINGS["beside"]] if versions == "latest" else []
    return [f"lightspan_{adapter}", *ADAPTERS[adapter]["modules"], *beside]


def marked(marker: str) -> list[str]:
    """Return the test files with a marker: to collect all others takes 20 s a process."""
    files = sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")])
    named = f"mark.{marker}"
    return [str(path.relative_to(ROOT)) for path in files if named in path.read_text("utf-8")]


def clients_of(adapters: Iterable[str]) -> list[str]:
    """Return the model clients that the tests of these adapters need."""
    return [client for name in adapters for client in ADAPTERS[name].get("clients", ())]


def install(session: nox.Session, *arguments: str, ours: Iterable[str] = ()) -> None:
    """Install by uv where it lies next to nox, else by pip; torch is `install_torch`'s.

    Args:
        ours: folders of this repository, with extras. They are installed first, editable and
            without dependencies, so that no index is asked for them.
    """
    ours = list(dict.fromkeys(ours))
    if ours:
        folders = [argument for each in ours for argument in ("-e", each.partition("[")[0])]
        _run_installer(session, "-cconstraints/dev.txt", "hatchling", "editables")
        _run_installer(session, "--no-deps", "--no-build-isolation", *folders)
    _run_installer(session, *arguments, *map(requirement_of, ours))


def _run_installer(session: nox.Session, *arguments: str) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        command = (uv, "pip", "install", "-q", "--python", str(Path(session.bin) / "python"))
        try:
            session.run_install(*command, *arguments, external=True, env=UV)
        except CommandFailed:  # for example an index that only pip is configured for
            session.warn("uv could not install that: pip tries")
        else:
            return
    session.install("--no-compile", *arguments)


def requirement_of(project: str) -> str:
    """Return the requirement of one of our folders: `packages/core[train]` → `lightspan[train]`."""
    folder, bracket, extras = project.partition("[")
    return str(table(folder)["project"]["name"]) + bracket + extras


def install_torch(session: nox.Session, pins: Iterable[str] = PINS) -> None:
    """Install torch by pip, from the index of LIGHTSPAN_TORCH_INDEX if that is set."""
    index = os.environ.get("LIGHTSPAN_TORCH_INDEX")
    if not index and sys.platform == "linux":
        session.log("torch comes with CUDA, 3 GB; LIGHTSPAN_TORCH_INDEX may name a CPU's index")
    source = ["--extra-index-url", index] if index else []
    session.install("--no-compile", *source, *pins, "torch", silent=False)  # gigabytes: show them


def install_example(session: nox.Session, name: str) -> None:
    """Install an example with its adapter, what training needs and the tools of its tests."""
    example = EXAMPLES[name]
    pins = ["dev", f"{example['adapter']}-latest", "examples"]
    pins += ["core-latest", "pydantic_ai-latest"] if example["adapter"] in SHARED else []
    install_torch(session)
    ours = [
        *TRAIN,
        *HARNESS,
        "packages/cluster",
        "packages/ui",
        f"packages/{example['adapter']}",
        COMMON,
    ]
    ours += [project_of(example)]
    constraints = [f"-cconstraints/{pin}.txt" for pin in pins]
    install(session, *constraints, *example.get("packages", ()), *PYTEST, "mypy", ours=ours)
    if models := example.get("models"):  # a file of theirs is read; what runs it is not needed
        install(session, "-cconstraints/examples.txt", "--no-deps", *models)


def project_of(example: dict[str, Any]) -> str:
    """Return the folder of an example with the extras that its session needs."""
    extras = ",".join(example["extras"])
    return f"{example['folder']}[{extras}]" if extras else str(example["folder"])


def install_learning(session: nox.Session) -> None:
    """Install torch, all packages that can be in one environment, and the tools of the tests."""
    install_torch(session)
    shared = [each for each in EXAMPLES.values() if each["adapter"] in SHARED]
    examples = [each["folder"] for each in shared if not each.get("apart")]
    ours = [f"packages/{name}" for name in (*PLAIN, *SHARED)]
    ours += ["packages/cluster[hosts,postgres]", "packages/tools[parquet]", COMMON, DESK, *examples]
    pins = [*PINS, "-cconstraints/examples.txt", "-cconstraints/pydantic_ai-latest.txt"]
    pins += [f"-rconstraints/{name}-latest.txt" for name in SHARED]
    others = [*GROUPS["learning"], *clients_of(SHARED), *FRAMEWORKS["pydantic_ai"]["packages"]]
    install(session, *pins, *PYTEST, *others, ours=ours)
    install(session, "--no-deps", *PINS, "trl")  # for its chat templates; its code is not run


def install_harbor(session: nox.Session) -> None:
    """Install Harbor with what training needs, in one environment."""
    install_torch(session)
    ours = [*TRAIN, *HARNESS, *(f"packages/{name}" for name in ("programs", "harbor", "ui"))]
    install(session, *PINS, "openai", "podman-compose", *PYTEST, ours=ours)


def install_behind(session: nox.Session) -> None:
    """Install all adapters with the framework that asks for older versions."""
    install_torch(session)
    names = [name for name in ADAPTERS if name not in SHARED]
    pins = ["-cconstraints/dev.txt", "-cconstraints/examples.txt", "-rconstraints/together.txt"]
    pins += [f"-rconstraints/{name}-latest.txt" for name in names]
    ours = [*(f"packages/{name}" for name in (*PLAIN, *ADAPTERS)), COMMON]
    ours += [project_of(each) for each in EXAMPLES.values() if each["adapter"] in names]
    install(session, *pins, *clients_of(ADAPTERS), *PYTEST, "mypy", ours=ours)
