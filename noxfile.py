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
from typing import NamedTuple

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
    "tests_examples",
]

ROOT = Path(__file__).parent
CORE = "packages/core"
ADAPTERS = {"langgraph": "packages/langgraph"}
"""Those that share an environment with the learning plane and the SQL example."""
APART = {name: f"packages/{name}" for name in ("autogen", "crewai", "openai_agents")}
"""Those whose frameworks exclude one another: a virtualenv each."""
CLIENTS = {"autogen": ["autogen-ext[openai]"]}
"""What an adapter's tests need beside its framework."""
BESIDE = {
    "langgraph": [
        *(f"openinference-instrumentation-{name}" for name in ("langchain", "openai")),
        "opentelemetry-distro",
    ],
}
"""What an adapter's tests run beside it, with the latest framework; the other adapters' constraints
are installed whole."""
EXPECTED = {
    "langgraph": ["lightspan_langgraph", "langchain", "langchain_openai"],
    "autogen": ["lightspan_autogen", "autogen_agentchat", "autogen_ext.models.openai"],
    "crewai": ["lightspan_crewai", "crewai"],
    "openai_agents": ["lightspan_openai_agents", "agents"],
}
"""What an adapter's tests cannot do without. pytest skips a file whose framework is missing and is
content; a session that names these modules (tests/conftest.py) fails."""
EXPECTED_OF_LATEST = {
    "langgraph": [
        "openinference.instrumentation.langchain",
        "openinference.instrumentation.openai",
        "opentelemetry.distro",
    ],
    "autogen": [
        "openinference.instrumentation.autogen_agentchat",
        "openinference.instrumentation.openai",
        "opentelemetry.distro",
    ],
    "crewai": [
        "litellm",
        "openinference.instrumentation.crewai",
        "openinference.instrumentation.openai",
        "opentelemetry.distro",
    ],
    "openai_agents": [
        "openinference.instrumentation.openai_agents",
        "openinference.instrumentation.openai",
        "opentelemetry.distro",
    ],
}
"""What they need beside that where everything is the latest."""
EXAMPLES = {"common": "examples/common", "sql": "examples/sql"}
"""Those that share the environment `learning`."""


class Apart(NamedTuple):
    """An example in an environment of its own."""

    project: str
    adapter: str
    tests: str
    types: list[str]
    """What mypy checks in this environment; none where the session `types` does."""
    options: list[str]
    """Of its train.py, to train it briefly."""


BRIEFLY = ["--steps", "6"]
EXAMPLES_APART = {
    "sql": Apart("examples/sql", "langgraph", "test_sql_app.py", [], BRIEFLY),
    "math": Apart(
        "examples/math[parquet]", "autogen", "test_math_*.py", ["examples/math"], BRIEFLY
    ),
    "rag": Apart(
        "examples/rag[agents]",
        "openai_agents",
        "test_rag_*.py",
        ["examples/rag", "--exclude", "crew"],
        BRIEFLY,
    ),
    "rag-crewai": Apart(
        "examples/rag[crewai]",
        "crewai",
        "test_rag_crew.py",
        ["examples/rag/rag_example/crew.py", "examples/rag/rag_example/crew_training.py"],
        [*BRIEFLY, "--framework", "crewai"],
    ),
}
SCRIPTS = ["examples/own_algorithm"]
"""Examples that are run where they lie."""

TORCH_INDEX = "LIGHTSPAN_TORCH_INDEX"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

CONSTRAINTS = [
    *("-c", "constraints/dev.txt"),
    *("-c", "constraints/core-latest.txt"),
    *("-c", "constraints/langgraph-latest.txt"),
]
SINKS = ["tensorboard", "wandb", "mlflow", "trackio"]
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
    *("autogen-agentchat", "crewai", "litellm", "openai-agents"),
    *("langgraph", "langchain-core", "langchain", "langchain-openai", "openai"),
    *("opentelemetry-sdk", "aiohttp", "torch", "transformers", "peft", "numpy", "pyarrow"),
    *SINKS,
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


def run_pytest(
    session: nox.Session, *arguments: str, python: str = "python", expected: Iterable[str] = ()
) -> None:
    """Run pytest isolated from the working folder, the network and the caller's settings.

    Args:
        expected: modules that must be there, or the run fails.
    """
    session.run(
        *(python, "-m", "pytest", "--durations=5", *arguments, *session.posargs),
        env={**TESTING, "LIGHTSPAN_EXPECTED": ",".join(expected)},
        external=python != "python",
    )


def expected_of(adapter: str, versions: str) -> list[str]:
    """The modules that the adapter's tests need with these versions."""
    return EXPECTED[adapter] + (EXPECTED_OF_LATEST[adapter] if versions == "latest" else [])


@nox.session
def learning(session: nox.Session) -> None:
    """Make the virtualenv with torch, all our packages and the tools that others share."""
    install_torch(session)
    projects: list[str] = ["-e", f"{CORE}[train,otlp,parquet]"]
    for path in (*ADAPTERS.values(), *EXAMPLES.values()):
        projects += ["-e", path]
    session.install(
        *CONSTRAINTS, *projects, "langchain", *PYTEST, "mypy", "nox", "types-psutil", silent=False
    )
    # for the published chat templates in its files; none of its code is run
    session.install("--no-deps", *CONSTRAINTS, "trl")


# --- checks ---------------------------------------------------------------------------------
@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and which module may import which."""
    session.install(*CONSTRAINTS, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(
        [
            *(f"{path}/src" for path in (CORE, *ADAPTERS.values(), *APART.values())),
            *EXAMPLES.values(),
            *(example.project.partition("[")[0] for example in EXAMPLES_APART.values()),
        ]
    )
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


@nox.session(venv_backend="none", requires=["learning"])
def types(session: nox.Session) -> None:
    """Check the types of packages, examples and this file with mypy --strict.

    The other adapters and examples are checked where their frameworks are.
    """
    python = learning_python()
    sources = [f"{CORE}/src", *(f"{path}/src" for path in ADAPTERS.values())]
    report_versions(session, python)
    packages = [*sources, *EXAMPLES.values(), "tests/packaging", "noxfile.py"]
    for checked in (packages, *([path] for path in SCRIPTS)):
        session.run(python, "-m", "mypy", "--strict", *checked, env=ISOLATED, external=True)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build the packages, install them outside the repository, import all they promise."""
    session.install(*CONSTRAINTS, "build")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in (CORE, *ADAPTERS.values(), *APART.values()):
        session.run("python", "-m", "build", "--outdir", str(dist), path, silent=True)
    wheels = sorted(dist.glob("*.whl"))
    for wheel in wheels:
        session.log("%s: %d files", wheel.name, len(zipfile.ZipFile(wheel).namelist()))
    together = [w for w in wheels if not w.name.startswith(tuple(f"lightspan_{n}" for n in APART))]
    session.install(*CONSTRAINTS, *map(str, together), *PYTEST)
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
    run_pytest(session, "tests/packaging/test_capture_plane.py", expected=["openai"])


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
        *(BESIDE["langgraph"] if versions == "latest" else []),
        *PYTEST,
    )
    report_versions(session)
    adapter = test_files("tests/adapters", "test_langgraph_*.py")
    files = [*adapter, *test_files("tests/core", "test_wire*.py")]
    run_pytest(session, *FAST, *files, expected=expected_of("langgraph", versions))


@nox.session(default=False)
@nox.parametrize(
    ("adapter", "versions"),
    [
        nox.param(adapter, versions, id=f"{adapter}-{versions}")
        for adapter in APART
        for versions in ("oldest", "latest")
    ],
)
def tests_adapters(session: nox.Session, adapter: str, versions: str) -> None:
    """Test an adapter with the oldest supported or the latest version of its framework, no torch.

    The latest environments are also where the adapter's types are checked.
    """
    session.install(
        *("-c", "constraints/dev.txt"),
        *("-r", f"constraints/{adapter}-{versions}.txt"),
        *(f"{CORE}[serve]", APART[adapter], *CLIENTS.get(adapter, []), *PYTEST, "mypy"),
    )
    report_versions(session)
    files = [
        *test_files("tests/adapters", f"test_{adapter}_*.py"),
        *test_files("tests/core", "test_wire*.py"),
    ]
    run_pytest(session, *FAST, *files, expected=expected_of(adapter, versions))
    if versions == "latest":
        silent = "--follow-imports=silent"  # of core, which `types` checks
        session.run("mypy", "--strict", silent, f"{APART[adapter]}/src", env=ISOLATED)


@nox.session(default=False)
@nox.parametrize("versions", [nox.param(name, id=name) for name in ("latest", "newest")])
def tests_together(session: nox.Session, versions: str) -> None:
    """Test the adapters in one process, their frameworks nested in one another.

    `latest`: all four, as the newest CrewAI lets them be. `newest`: all but CrewAI.
    """
    names = ["langgraph", "autogen", "openai_agents"]
    if versions == "latest":
        names.append("crewai")
    together = [{**ADAPTERS, **APART}[name] for name in names]
    session.install(
        *("-c", "constraints/dev.txt"),
        *("-r", f"constraints/together-{versions}.txt"),
        *(f"{CORE}[serve]", *together, *CLIENTS["autogen"], *PYTEST),
    )
    report_versions(session)
    expected = [module for name in names for module in EXPECTED[name]]
    run_pytest(session, "tests/adapters/test_all_together.py", expected=expected)


@nox.session(venv_backend="none", requires=["learning"])
def tests_examples(session: nox.Session) -> None:
    """Test the examples."""
    report_versions(session, learning_python())
    run_pytest(session, *FAST, "tests/examples", python=learning_python())


@nox.session(default=False)
def tests_sinks(session: nox.Session) -> None:
    """Test the metric sinks with the real TensorBoard, W&B, MLflow and trackio, offline."""
    install_torch(session)
    session.install(*CONSTRAINTS, "-c", "constraints/sinks.txt", CORE, *SINKS, *PYTEST)
    report_versions(session)
    run_pytest(session, "tests/sinks")


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
        *CONSTRAINTS, f"{CORE}[train]", *ADAPTERS.values(), *EXAMPLES.values(), silent=False
    )
    report_versions(session)
    session.run("python", "examples/sql/train.py", *session.posargs, env=ISOLATED)


@nox.session(default=False)
@nox.parametrize("example", [nox.param(name, id=name) for name in EXAMPLES_APART])
def examples(session: nox.Session, example: str) -> None:
    """Test an example, train it briefly, and check that the held-out gain is above zero."""
    project, adapter, tests, types, options = EXAMPLES_APART[example]
    install_torch(session)
    constraints = ["dev", f"{adapter}-latest", "examples"]
    if adapter != "crewai":  # which asks for older versions of some
        constraints.append("core-latest")
    session.install(
        *(argument for name in constraints for argument in ("-c", f"constraints/{name}.txt")),
        *(f"{CORE}[train]", {**ADAPTERS, **APART}[adapter], EXAMPLES["common"], project),
        *(*PYTEST, "mypy"),
    )
    report_versions(session)
    if types:
        session.run("python", "-m", "mypy", "--strict", *types, env=ISOLATED)
    run_pytest(session, *test_files("tests/examples", tests))
    folder = Path(session.create_tmp()) / "run"
    shutil.rmtree(folder, ignore_errors=True)
    script = f"{project.partition('[')[0]}/train.py"
    session.run("python", script, *options, "--folder", str(folder), env=ISOLATED)
    session.env["LIGHTSPAN_RUN"] = str(folder)
    run_pytest(session, "tests/learned")


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
    scripts = {**ISOLATED, "PYTHONPATH": str(ROOT / "benchmarks")}  # they share modules
    session.run(learning_python(), *session.posargs, env=scripts, external=True)
