"""The sessions of lightspan's development: `nox` runs the fast ones, `nox -l` lists all.

    nox                              checks, tests, packages: what a change must pass
    nox -s quickstart                trains the SQL example on the CPU
    nox -s tests_core -- -k store    arguments after -- go to pytest
    nox -r                           keeps the virtualenvs of the last run

torch is large: the sessions that need it share one virtualenv, .nox/learning. LIGHTSPAN_TORCH_INDEX
names the index that torch comes from, such as https://download.pytorch.org/whl/cpu (CPU only).
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = [
    "lint",
    "tests_capture",
    "tests_langgraph(latest)",
    "packaging",
    "types",
    "tests_core",
    "tests_sql",
]

ROOT = Path(__file__).parent
CORE = "packages/core"
ADAPTERS = {"langgraph": "packages/langgraph"}
EXAMPLES = {"sql": "examples/sql"}

TORCH_INDEX = "LIGHTSPAN_TORCH_INDEX"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

CONSTRAINTS = [
    *("-c", "constraints/dev.txt"),
    *("-c", "constraints/core-latest.txt"),
    *("-c", "constraints/langgraph-latest.txt"),
]
PYTEST = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
FAST = ["-m", "not slow and not faults"]

# A folder named after a framework never shadows it, no test reaches a network, and a test uses one
# core. The programs that tests start as scripts import their neighbours from the two folders.
ISOLATED = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
TESTING = {
    **ISOLATED,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "PYTHONPATH": os.pathsep.join(str(ROOT / "tests" / name) for name in ("apps", "faults")),
}

# Printed by every session that runs code of ours.
DISTRIBUTIONS = [
    *("lightspan", "lightspan-langgraph"),
    *("langgraph", "langchain-core", "langchain", "langchain-openai", "openai"),
    *("opentelemetry-sdk", "aiohttp", "torch", "transformers", "peft", "numpy"),
]
_VERSIONS = """
import platform, sys
from importlib.metadata import PackageNotFoundError, version
found = ["python " + platform.python_version()]
for name in sys.argv[1:]:
    try:
        found.append(name + " " + version(name))
    except PackageNotFoundError:
        pass
print("versions: " + ", ".join(found))
"""


# --- environments ---------------------------------------------------------------------------
def learning_python() -> str:
    """The interpreter of the virtualenv that the session `learning` makes."""
    folder = ROOT / ".nox" / "learning"
    name = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    return str(folder / name)


def report_versions(session: nox.Session, python: str = "python") -> None:
    """Print the versions of the frameworks under test."""
    session.run(
        python, "-I", "-c", _VERSIONS, *DISTRIBUTIONS, external=python != "python", log=False
    )


def install_torch(session: nox.Session) -> None:
    """Install torch, alone, from the index that LIGHTSPAN_TORCH_INDEX names or the default one."""
    index = os.environ.get(TORCH_INDEX)
    source = ["--extra-index-url", index] if index else []
    session.install(*source, *CONSTRAINTS, "torch", silent=False)


def run_pytest(session: nox.Session, *arguments: str, python: str = "python") -> None:
    """Run pytest isolated from the working folder, the network and the caller's settings."""
    session.run(
        *(python, "-m", "pytest", "--durations=5", *arguments, *session.posargs),
        env=TESTING,
        external=python != "python",
    )


@nox.session
def learning(session: nox.Session) -> None:
    """Make the virtualenv with torch, all our packages and the tools that others share."""
    install_torch(session)
    projects: list[str] = ["-e", f"{CORE}[train,otlp]"]
    for path in (*ADAPTERS.values(), *EXAMPLES.values()):
        projects += ["-e", path]
    session.install(
        *CONSTRAINTS, *projects, "langchain", *PYTEST, "mypy", "nox", "types-psutil", silent=False
    )


# --- checks ---------------------------------------------------------------------------------
@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and which module may import which."""
    session.install(*CONSTRAINTS, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(
        [f"{CORE}/src", *(f"{path}/src" for path in ADAPTERS.values()), *EXAMPLES.values()]
    )
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session(venv_backend="none", requires=["learning"])
def types(session: nox.Session) -> None:
    """Check the types of all packages, examples and this file with mypy --strict."""
    python = learning_python()
    sources = [f"{CORE}/src", *(f"{path}/src" for path in ADAPTERS.values())]
    report_versions(session, python)
    checked = [*sources, *EXAMPLES.values(), "tests/packaging", "noxfile.py"]
    session.run(python, "-m", "mypy", "--strict", *checked, env=ISOLATED, external=True)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build the packages, install them outside the repository, import all they promise."""
    session.install(*CONSTRAINTS, "build")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in (CORE, *ADAPTERS.values()):
        session.run("python", "-m", "build", "--outdir", str(dist), path, silent=True)
    wheels = sorted(dist.glob("*.whl"))
    for wheel in wheels:
        session.log("%s: %d files", wheel.name, len(zipfile.ZipFile(wheel).namelist()))
    session.install(*CONSTRAINTS, *map(str, wheels), *PYTEST)
    report_versions(session)
    with session.chdir(dist):
        session.run("python", "-I", str(ROOT / "tests/packaging/smoke.py"))
    session.env["LIGHTSPAN_DIST"] = str(dist)
    run_pytest(session, "tests/packaging/test_metadata.py")


# --- tests ----------------------------------------------------------------------------------
@nox.session(venv_backend="none", requires=["learning"])
def tests_core(session: nox.Session) -> None:
    """Test core, and the promises of the packages and the repository."""
    report_versions(session, learning_python())
    run_pytest(session, *FAST, "tests/core", "tests/packaging", python=learning_python())


@nox.session
def tests_capture(session: nox.Session) -> None:
    """Test that core alone, with what it declares and an OpenAI client, captures an app's calls."""
    session.install(*CONSTRAINTS, CORE)
    session.run("python", "-I", "-c", "import lightspan, lightspan.runner, lightspan.wire")
    session.install(*CONSTRAINTS, "openai", *PYTEST)
    report_versions(session)
    run_pytest(session, "tests/packaging/test_capture_plane.py")


@nox.session
@nox.parametrize("versions", [nox.param(name, id=name) for name in ("oldest", "latest")])
def tests_langgraph(session: nox.Session, versions: str) -> None:
    """Test the LangGraph adapter with the oldest supported or the latest frameworks, no torch.

    The wire shim too: the oldest frameworks bring the oldest OpenAI SDK that is tested.
    """
    constraints = [
        *("-c", "constraints/dev.txt"),
        *("-c", f"constraints/langgraph-{versions}.txt"),
    ]
    session.install(
        *constraints,
        *(f"{CORE}[serve]", ADAPTERS["langgraph"]),
        *("langchain", "langchain-openai", "openai"),
        *PYTEST,
    )
    report_versions(session)
    adapter = test_files("tests/adapters", "test_langgraph_*.py")
    run_pytest(session, *FAST, *adapter, *test_files("tests/core", "test_wire*.py"))


@nox.session(venv_backend="none", requires=["learning"])
def tests_sql(session: nox.Session) -> None:
    """Test the SQL example."""
    report_versions(session, learning_python())
    files = test_files("tests/examples", "test_sql_*.py")
    run_pytest(session, *FAST, *files, python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def faults(session: nox.Session) -> None:
    """Kill real processes and see what is left."""
    report_versions(session, learning_python())
    run_pytest(session, "-m", "faults", "tests", python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def slow(session: nox.Session) -> None:
    """Run the tests that take longer than a few seconds."""
    report_versions(session, learning_python())
    run_pytest(session, "-m", "slow and not faults", "tests", python=learning_python())


def test_files(folder: str, pattern: str) -> Iterable[str]:
    """The test files that a pattern names, as arguments."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob(pattern))]


# --- programs -------------------------------------------------------------------------------
@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Train the SQL example on the CPU: `nox -s quickstart`, and after -- options of train.py."""
    index = os.environ.get(TORCH_INDEX)
    if index:
        session.log(f"Downloads: torch from {index} and 0.1 GB of other packages.")
    elif sys.platform == "linux":
        session.log(
            "Downloads: torch with CUDA, about 3 GB, and 0.1 GB of other packages. "
            f"Without CUDA it is 0.2 + 0.1 GB: {TORCH_INDEX}={CPU_TORCH_INDEX}"
        )
    else:
        session.log("Downloads: torch and other packages, about 0.3 GB.")
    session.log("No model is downloaded: the example makes its own.")
    install_torch(session)
    session.install(
        *CONSTRAINTS, f"{CORE}[train]", *ADAPTERS.values(), EXAMPLES["sql"], silent=False
    )
    report_versions(session)
    session.run("python", "examples/sql/train.py", *session.posargs, env=ISOLATED)


@nox.session(venv_backend="none", requires=["learning"], default=False)
def tests_quickstart(session: nox.Session) -> None:
    """Check what a finished quickstart left behind: LIGHTSPAN_RUN names its folder."""
    if not os.environ.get("LIGHTSPAN_RUN"):
        session.error("set LIGHTSPAN_RUN to the folder of a finished run, such as runs/sql-seed0")
    report_versions(session, learning_python())
    run_pytest(session, "tests/quickstart", python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def bench(session: nox.Session) -> None:
    """Run a benchmark: `nox -s bench -- benchmarks/transitions.py`, with its options."""
    if not session.posargs:
        session.error("name a script: nox -s bench -- benchmarks/transitions.py")
    report_versions(session, learning_python())
    session.run(learning_python(), *session.posargs, env=ISOLATED, external=True)
