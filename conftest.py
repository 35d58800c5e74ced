"""Test processes reach nothing but this machine."""

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
"""File for the result of a long session, which the nox session names."""
STARTED = time.monotonic()
DISTRIBUTIONS = ("openai", "langgraph", "autogen-agentchat", "openai-agents", "crewai", "ray")
DISTRIBUTIONS += ("pydantic-ai-slim", "smolagents", "google-adk", "agent-framework-core", "agno")
DISTRIBUTIONS += ("strands-agents", "llama-index-core", "dspy", "litellm", "opentelemetry-sdk")
DISTRIBUTIONS += ("torch", "transformers", "llguidance", "arize-phoenix")
"""Libraries whose versions a result names."""


def pytest_sessionstart() -> None:
    """What the nox session installed for these tests is there: a file that misses it is skipped."""
    for name in filter(None, os.environ.get("LIGHTSPAN_EXPECTED", "").split(",")):
        try:
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
        except ImportError as error:
            raise pytest.UsageError(f"this session's tests need {name}: {error}") from error


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the result of a long session."""
    if not RESULT:
        return
    from _report import circumstances  # of benchmarks/

    stats = terminalreporter.stats
    counts = {key: len(stats.get(key, ())) for key in ("passed", "failed", "error", "skipped")}
    seconds = round(time.monotonic() - STARTED)
    result = {**circumstances(), "versions": _versions(), "seconds": seconds, **counts}
    Path(RESULT).write_text(json.dumps(result, indent=2) + "\n")


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that a session is about, where they are installed."""
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing of what is imported can be freed: to look through it again and again would be a sixth
    of what collecting takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """The garbage collector passes over what was imported. Each engine that closes has transformers
    collect garbage, twice, and half a second went each time into looking at torch's modules."""
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
    """A connection to any other machine fails the test."""
    monkeypatch.setattr(socket.socket, "connect", _guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", _guarded(socket.socket.connect_ex))


@pytest.fixture(scope="session")
def forking() -> Iterator[None]:
    """The process that runners are forked from."""
    forked.prepare()
    yield
    forked.end()


@pytest.fixture(scope="module", autouse=True)
def runners_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where that makes no difference but the time it takes."""
    if not forked.is_forked(request.path):
        yield
        return
    request.getfixturevalue("forking")
    with forked.forked_runners():
        yield


@pytest.fixture
def moments() -> Callable[[Any], random.Random]:
    """Random numbers that go by a name: when to kill a process. They are the same each time, and
    others for every LIGHTSPAN_SEED, with which long runs look for moments that were never tried."""
    seed = os.environ.get("LIGHTSPAN_SEED")
    return lambda name: random.Random(f"{name} {seed}" if seed else name)


@pytest.fixture(scope="session")
def app_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with core, the OpenAI SDK and `only_here`: no torch, no web
    server."""
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
    """A tiny random model."""
    import torch

    from lightspan_testing.tiny import tiny_model

    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)
