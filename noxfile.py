"""The sessions of lightspan's development: `nox` runs the fast ones, `nox -l` lists all.

    nox                              style, types, tests: what a change must pass
    nox -s quickstart                trains the SQL example on the CPU
    nox -s tests_across -- -k store  arguments after -- go to pytest

tests/packaging/environments.py installs. Sessions outside CI write to benchmarks/results.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent))
from tests.packaging import environments as envs
from tests.packaging.releasing import build_packages, release_packages
from tests.packaging.running import ISOLATED, RESULTS, run_benchmark, run_pytest

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True  # or such a session is skipped, and nox succeeds
nox.options.sessions = ["lint", "learning", "types", "tests_package", "tests_across"]

ROOT = envs.ROOT
ACROSS = sorted(
    f"tests/{path.name}"
    for path in (ROOT / "tests").iterdir()
    if path.name not in envs.SETTINGS["apart"] and (path.is_dir() or path.name.startswith("test_"))
)
"""Tests that cross packages."""
BRIEFLY = ["--steps", "6", "--validate-every", "0", "--held-out", "200"]
"""Options of an example's train.py with which it learns enough to be told from chance."""
FAST = ["-m", "not slow and not faults and not pages and not long and not controls"]
PARALLEL = ["-n", str(min(4, 1 + (os.cpu_count() or 1))), "--dist", "worksteal"]  # tests wait, too
SMOKE, BUILT = ROOT / "tests/packaging/smoke.py", "tests/packaging/test_metadata.py"


@nox.session
def learning(session: nox.Session) -> None:
    """Make the virtualenv that others share."""
    envs.install_learning(session)


@nox.session(default=False)
def behind(session: nox.Session) -> None:
    """Make the virtualenv of the framework that asks for older versions, with all adapters."""
    envs.install_behind(session)


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Make the virtualenv of vLLM's servers, for the CPU."""
    envs.install_torch(session)
    session.install("-r", "constraints/vllm.txt")  # brings what transformers cannot import:
    session.run("python", "-m", "pip", "uninstall", "-q", "-y", *envs.GROUPS["cuda-only"])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, words and which module may import which."""
    envs.install(session, *envs.PINS, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    folders = [f"packages/{name}/src" for name in envs.PACKAGES]
    folders += [str(path.parent) for path in ROOT.glob("examples/*/pyproject.toml")]
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(folders)})
    session.run("python", "tests/packaging/words.py")
    session.run("python", "tests/packaging/prose.py")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; `nox -s docs -- serve` shows it."""
    ours = [f"packages/{name}" for name in envs.LIGHT]
    envs.install(session, *envs.PINS, *envs.GROUPS["docs"], ours=ours)
    session.run("python", "tests/website/build.py", *session.posargs)


@nox.session(venv_backend="none", requires=["learning"])
def types(session: nox.Session) -> None:
    """Check types of the packages by mypy --strict, but for the adapter that is behind."""
    sources = [f"packages/{name}/src" for name in (*envs.PLAIN, *envs.SHARED)]
    run_mypy(session, "learning", *sources, envs.COMMON, "tests/packaging", "noxfile.py")


@nox.session(venv_backend="none", requires=["learning"], default=False)
def types_examples(session: nox.Session) -> None:
    """Check types of the examples, but for that of the adapter that is behind."""
    examples = [each.get("types", [each["folder"]]) for each in envs.EXAMPLES.values()]
    apart = dict.fromkeys(tuple(each) for each in examples if "crew.py" not in str(each))
    for paths in (*apart, [envs.DESK], ["examples/own_algorithm"]):
        run_mypy(session, "learning", *paths)


@nox.session(venv_backend="none", requires=["behind"], default=False)
def types_behind(session: nox.Session) -> None:
    """Check types of the adapter and the example whose framework is behind."""
    paths = [f"packages/{name}/src" for name in envs.ADAPTERS if name not in envs.SHARED]
    examples = [path for each in envs.EXAMPLES.values() for path in each.get("types", ())]
    paths += [path for path in examples if path.endswith(("crew.py", "crew_training.py"))]
    run_mypy(session, "behind", "--follow-imports=silent", *paths)


def run_mypy(session: nox.Session, environment: str, *arguments: str) -> None:
    command = ("-m", "mypy", "--strict", *arguments)
    session.run(envs.python_of(environment), *command, env=ISOLATED, external=True)


@nox.session(default=False)
def packaging(session: nox.Session) -> None:
    """Build the packages, install those without torch outside the repository, import all names."""
    envs.install(session, *envs.PINS, "build", "hatchling")
    dist = Path(session.create_tmp()) / "dist"
    built = build_packages(session, envs.PACKAGES, dist)
    wheels = {wheel.name.partition("-")[0]: str(wheel) for wheel in built}
    light = [name for name in (*envs.LIGHT, *envs.SHARED) if name != "core"]
    names = ["lightspan", *(f"lightspan_{name}" for name in light)]
    envs.install(session, *envs.PINS, *(wheels[name] for name in names), *envs.PYTEST)
    with session.chdir(dist):
        session.run("python", "-I", str(SMOKE), *names)
    session.env["LIGHTSPAN_DIST"] = str(dist)
    run_pytest(session, BUILT)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what a release uploads, into dist/, and check it; `-- --upload` uploads it.

    Uploading needs the release's commit: tagged with the version, unchanged, with its CHANGELOG.
    """
    release_packages(session, BUILT)


@nox.session
@nox.parametrize("package", envs.params(envs.LIGHT))
def tests_package(session: nox.Session, package: str) -> None:
    """Run a package's tests with what it declares, the suites and its `dependency-groups.test`."""
    groups: dict[str, list[str]] = envs.table(f"packages/{package}").get("dependency-groups", {})
    needs = groups.get("test", [])
    ours = [f"packages/{name.removeprefix('lightspan-')}" for name in needs if "lightspan-" in name]
    ours = ["packages/core", envs.SUITES, f"packages/{package}", *ours]
    others = [name for name in needs if "lightspan-" not in name]
    envs.install(session, *envs.PINS, *others, *envs.PYTEST, ours=ours)
    run_pytest(session, *FAST, *PARALLEL, f"packages/{package}/tests")


@nox.session(venv_backend="none", requires=["learning"])
def tests_across(session: nox.Session) -> None:
    """Run the tests of the packages that need torch, and those of several packages."""
    heavy = [f"packages/{name}/tests" for name in envs.SETTINGS["heavy"]]
    run_pytest(session, *FAST, *PARALLEL, *heavy, *ACROSS, environment="learning")


@nox.session(venv_backend="none", requires=["learning"], default=False)
def tests_examples(session: nox.Session) -> None:
    """Test the examples: apart from others, because an example installs its adapter."""
    run_pytest(session, *FAST, *PARALLEL, "tests/examples", environment="learning")


@nox.session(venv_backend="none", requires=["learning"], default=False)
@nox.parametrize("adapter", envs.params([*envs.SHARED, "together"]))
def tests_latest(session: nox.Session, adapter: str) -> None:
    """Test an adapter with its framework's latest version; `together`: all in one process."""
    names, versions, files = [adapter], "latest", [*PARALLEL, f"packages/{adapter}/tests"]
    if adapter == "together":
        names, versions, files = envs.SHARED, "oldest", envs.SETTINGS["together"]
    expected = [module for name in names for module in envs.expected_of(name, versions)]
    run_pytest(session, *FAST, *files, environment="learning", expected=expected)


@nox.session(venv_backend="none", requires=["behind"], default=False)
@nox.parametrize("what", envs.params(["crewai", "rag-crewai", "together"]))
def tests_behind(session: nox.Session, what: str) -> None:
    """Test the adapter whose framework is behind, its example, or all adapters in one process."""
    files, expected = envs.SETTINGS["together"], [f"lightspan_{name}" for name in envs.ADAPTERS]
    if what in envs.ADAPTERS:
        files, expected = [f"packages/{what}/tests"], envs.expected_of(what, "latest")
    elif what in envs.EXAMPLES:
        files = [f"tests/examples/{envs.EXAMPLES[what]['tests']}"]
    options = ["-m", "not controls and not long", *files]
    run_pytest(session, *options, environment="behind", expected=expected, writes_result=True)


@nox.session(default=False)
@nox.parametrize("adapter", [nox.param(name, id=f"{name}-oldest") for name in envs.ADAPTERS])
def tests_adapters(session: nox.Session, adapter: str) -> None:
    """Test an adapter and the SDK's instrumentation with the oldest versions, without torch."""
    pins = ["-cconstraints/dev.txt", f"-rconstraints/{adapter}-oldest.txt"]
    ours = ["packages/core", *envs.HARNESS, f"packages/{adapter}"]
    envs.install(session, *pins, *envs.clients_of([adapter]), *envs.PYTEST, ours=ours)
    files = [str(path) for path in ROOT.glob("packages/core/tests/capture/test_sdk*")]
    files, expected = [f"packages/{adapter}/tests", *files], envs.expected_of(adapter, "oldest")
    run_pytest(session, *FAST, *files, expected=expected, writes_result=True)


@nox.session(default=False)
@nox.parametrize("framework,versions", [nox.param(*v, id="-".join(v)) for v in envs.VERSIONS])
def tests_frameworks(session: nox.Session, framework: str, versions: str) -> None:
    """Test a framework that is known by its spans, without an adapter and torch."""
    pins = ["-cconstraints/dev.txt", f"-cconstraints/{framework}-{versions}.txt"]
    needs, ours = envs.FRAMEWORKS[framework], ["packages/core", "packages/tools", *envs.HARNESS]
    envs.install(session, *pins, *needs["packages"], *envs.PYTEST, ours=ours)
    file = f"tests/frameworks/test_{framework}.py"
    run_pytest(session, *FAST, file, expected=needs["modules"], writes_result=True)


@nox.session(venv_backend="none", requires=["learning"], default=False)
@nox.parametrize("marker", envs.params(["slow", "faults", "pages", "long"]))
def ring(session: nox.Session, marker: str) -> None:
    """Run marked tests: slow, faults (LIGHTSPAN_SEED moves the kills), pages of docs, long."""
    others = [f"not {name}" for name in ("faults", "controls", "long") if name != marker]
    # a file whole in one process: what its tests share may take minutes to make
    options = ["-m", " and ".join([marker, *others]), *PARALLEL, "--dist", "loadfile"]
    options += envs.marked(marker)
    run_pytest(session, *options, environment="learning", writes_result=marker != "slow")


@nox.session(default=False)
@nox.parametrize("versions", envs.params(envs.SETTINGS["transformers"]))
def tests_transformers(session: nox.Session, versions: str) -> None:
    """Test engine and learner with other versions of transformers and of torch."""
    pins = ["-cconstraints/dev.txt", f"-cconstraints/{versions}.txt"]
    envs.install_torch(session, pins)
    envs.install(session, *pins, "openai", *envs.PYTEST, ours=[*envs.TRAIN, envs.SUITES])
    envs.install(session, "--no-deps", *pins, "trl")  # for its chat templates
    files = ["packages/torch/tests", "tests/engines"]
    run_pytest(session, *FAST, *PARALLEL, *files, writes_result=True)


@nox.session(default=False)
def environments(session: nox.Session) -> None:
    """Resolve, without installing, what is asked to share an environment with training."""
    session.install("uv")
    run_benchmark(session, "python", "benchmarks/environments.py", *session.posargs)


@nox.session(default=False)
def tests_sinks(session: nox.Session) -> None:
    """Test the metric sinks with the real TensorBoard, W&B, MLflow and trackio, offline."""
    envs.install_torch(session)
    needs = ["-cconstraints/sinks.txt", *envs.GROUPS["sinks"], *envs.PYTEST]
    envs.install(session, *envs.PINS, *needs, ours=[*envs.TRAIN, envs.SUITES])
    run_pytest(session, "tests/sinks", writes_result=True)


@nox.session(venv_backend="none", requires=["learning", "vllm"], default=False)
def tests_vllm(session: nox.Session) -> None:
    """Test the vLLM engine against real servers on the CPU."""
    session.env["LIGHTSPAN_VLLM_PYTHON"] = envs.python_of("vllm")
    run_pytest(session, "tests/vllm_servers", environment="learning", writes_result=True)


@nox.session(requires=["learning", "vllm"], default=False)
@nox.parametrize("environment", envs.params(["apart", "together"]))
def tests_verl(session: nox.Session, environment: str) -> None:
    """Test the verl learner with real verl on the CPU, in the trainer's environment or apart."""
    envs.install_torch(session, ["-cconstraints/verl.txt"])
    session.install("-r", "constraints/verl.txt")
    session.env["LIGHTSPAN_VERL_PYTHON"] = str(Path(session.bin) / "python")
    session.env["LIGHTSPAN_VLLM_PYTHON"] = envs.python_of("vllm")
    if environment == "apart":
        run_pytest(session, "-rs", "tests/verl_ranks", environment="learning", writes_result=True)
        return
    pins = ["-cconstraints/dev.txt", "-cconstraints/verl.txt"]
    ours = [*envs.TRAIN, envs.SUITES, "packages/verl"]
    envs.install(session, *pins, "openai", *envs.PYTEST, ours=ours)
    # verl brings a package of that name, which hides ours
    session.run("python", "-I", "-c", "import shutil, tests; shutil.rmtree(tests.__path__[0])")
    files = ["packages/torch/tests/engine/test_transformers.py", "packages/torch/tests/learner"]
    files += [f"tests/verl_ranks/test_{name}.py" for name in ("suite", "training")]
    run_pytest(session, "-rs", *FAST, *files, writes_result=True)


@nox.session(requires=["learning"], default=False)
def tests_phoenix(session: nox.Session) -> None:
    """Send spans to a real Phoenix server in the session's virtualenv, and query it."""
    session.install("-r", "constraints/phoenix.txt")
    session.env["PHOENIX_COMMAND"] = str(Path(session.bin) / "phoenix")
    run_pytest(session, "tests/phoenix_server", environment="learning", writes_result=True)


@nox.session(python="3.12", default=False)
def tests_harbor(session: nox.Session) -> None:
    """Train on tasks of Harbor, in folders and in Podman; LIGHTSPAN_TRIALS=200 kills for long."""
    envs.install_harbor(session)
    files = ["packages/harbor/tests", "tests/trainer/test_harbor_training.py"]
    run_pytest(session, *files, expected=["harbor"], writes_result=True)


@nox.session(default=False)
def ui(session: nox.Session) -> None:
    """Compile the web page, and look at it and at the documentation in Debian's Chromium."""
    ours = [*envs.HARNESS, "packages/core", "packages/tools", "packages/ui"]
    envs.install(session, *envs.PINS, *envs.GROUPS["ui"], *envs.PYTEST, ours=ours)
    session.run("python", "packages/ui/web/build.py", "--check")
    browser = ["playwright", "axe_playwright_python"]
    run_pytest(session, "tests/ui", expected=browser, writes_result=True)


@nox.session(default=False)
def tests_ray(session: nox.Session) -> None:
    """Test runners in real Ray clusters on this machine, whose nodes are killed."""
    envs.install_torch(session)
    ours = [*envs.TRAIN, "packages/cluster[ray]", envs.SUITES]
    envs.install(session, *envs.PINS, "openai", *envs.PYTEST, ours=ours)
    run_pytest(session, "tests/ray_nodes", expected=["ray"], writes_result=True)


def train(session: nox.Session, name: str) -> None:
    envs.install_example(session, name)
    script = f"{envs.EXAMPLES[name]['folder']}/train.py"
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
@nox.parametrize("example", envs.params(envs.EXAMPLES))
def examples(session: nox.Session, example: str) -> None:
    """Test and train an example briefly, and check that the held-out gain is above zero."""
    envs.install_example(session, example)
    folder = Path(session.create_tmp()) / "run"
    shutil.rmtree(folder, ignore_errors=True)
    needs = envs.EXAMPLES[example]
    options = [*BRIEFLY, *needs.get("options", ()), "--folder", str(folder)]
    session.run("python", f"{needs['folder']}/train.py", *options, env=ISOLATED)
    session.env["LIGHTSPAN_RUN"] = str(folder)
    files = [str(path) for path in (ROOT / "tests/examples").glob(needs["tests"])]
    run_pytest(session, "-m", "not controls", *files, "tests/learned", writes_result=True)


@nox.session(default=False)
@nox.parametrize("example", envs.params(envs.EXAMPLES))
def controls(session: nox.Session, example: str) -> None:
    """Train an example with every control: hours; after -- options of benchmarks/learning.py."""
    envs.install_example(session, example)
    if (file := envs.EXAMPLES[example].get("structured")) and not session.posargs:
        run_pytest(session, "-m", "controls", file)
    options = ["--example", example, *session.posargs]
    run_benchmark(session, "python", "benchmarks/learning.py", *options)


@nox.session(default=False)
@nox.parametrize("adapter", envs.params(envs.SETTINGS["credit"]))
def credit(session: nox.Session, adapter: str) -> None:
    """Compare the rules of credit: hours; goes on where it stopped (docs/evidence)."""
    for example in envs.SETTINGS["credit"][adapter]:
        envs.install_example(session, example)
    run_benchmark(session, "python", "benchmarks/credit.py", *session.posargs)


@nox.session(default=False)
def outside(session: nox.Session) -> None:
    """Run benchmarks/defaults.py, or the script after --, on tasks of others, for hours."""
    for example in ("sql", "math", "rag", "quest", "router"):
        envs.install_example(session, example)
    envs.install(session, *envs.PINS, *envs.GROUPS["outside"])
    run_benchmark(session, "python", *(session.posargs or ["benchmarks/defaults.py"]))


@nox.session(venv_backend="none", requires=["learning"], default=False)
def tests_quickstart(session: nox.Session) -> None:
    """Check what a finished quickstart left: LIGHTSPAN_RUN names its folder."""
    if not os.environ.get("LIGHTSPAN_RUN"):
        session.error("set LIGHTSPAN_RUN to the folder of a finished run, such as runs/sql-seed0")
    run_pytest(session, "tests/quickstart", environment="learning")


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Prove a GPU in ten minutes; after -- options of benchmarks/gpu.py (docs/guides/gpu.md)."""
    if not (python := os.environ.get("LIGHTSPAN_GPU_PYTHON", "")):
        envs.install_example(session, "router")
    run_benchmark(session, python or "python", "benchmarks/gpu.py", *session.posargs)


@nox.session(venv_backend="none", requires=["learning"], default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmark after --; without further options write its figures for tables.py."""
    if not session.posargs:
        session.error("name a script: nox -s bench -- benchmarks/transitions.py")
    result = str(RESULTS / f"{Path(session.posargs[0]).stem}.json")
    options = ["--json", result] if len(session.posargs) == 1 else []
    run_benchmark(session, envs.python_of("learning"), *session.posargs, *options)
