"""Fixtures of tests with real vLLM servers, whose interpreter is LIGHTSPAN_VLLM_PYTHON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from lightspan_testing.engine_suite import CONTEXT
from lightspan_testing.tiny import tiny_model
from lightspan_vllm.client import Client
from lightspan_vllm.requirements import ENVIRONMENT, FLAGS, UNTIED

SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Options of servers for a machine with little memory that other programs use too."""
STAND_IN = Path(__file__).with_name("stand_in")
START_S = 600.0
TOLERANCE = 3e-5
"""Tolerance of log-probabilities in float32, because vLLM's kernels add up in another order.

Of 23,096 tokens sampled at temperature 0.8 over 12 updates, none differed by more than 9.1e-6. That
is too near the suite's 1e-5 for tests whose tokens differ each time.
"""

Start = Callable[..., str]


class OnServers:
    """Parts of a suite that differ for servers that are running already."""

    served_by: str
    """Name of the fixture of the model's folder."""
    tolerance = TOLERANCE
    started = 1
    tokens_in_flight = 200

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, request: pytest.FixtureRequest) -> Path:
        path: Path = request.getfixturevalue(cls.served_by)
        return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failure, because the engine has all capabilities."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def python() -> str:
    """Return the interpreter of an environment with vLLM."""
    path = os.environ.get("LIGHTSPAN_VLLM_PYTHON")
    assert path, "LIGHTSPAN_VLLM_PYTHON names no interpreter: run `nox -s tests_vllm`"
    return path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that vLLM's kernels can compute, which need heads of size 32."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    return tiny_model(path, seed=1, context=CONTEXT, hidden=128)


@pytest.fixture(scope="module")
def start(python: str, served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Return a function that starts servers by hand, as docs/guides/vllm.md says.

    The servers end with the module's tests.
    """
    yield from _starting(python, served, tmp_path_factory)


@pytest.fixture(scope="class")
def start_vision(
    python: str, served: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Return a function that starts servers of vision models, which end with the class's tests.

    vLLM needs torchvision for such models. The stand-in is used if there is none that loads.
    """
    loads = subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode
    path = str(STAND_IN) if loads else ""
    # without a real image processor, vLLM cannot make an image to measure the memory
    more = ("--skip-mm-profiling",)
    yield from _starting(python, served, tmp_path_factory, path, more)


def _starting(
    python: str,
    served: Path,
    tmp_path_factory: pytest.TempPathFactory,
    path: str = "",
    always: tuple[str, ...] = (),
) -> Iterator[Start]:
    """Yield the function of `start`; stop its servers in the end.

    Args:
        python: vLLM's interpreter.
        served: the model that is served by default.
        tmp_path_factory: pytest's.
        path: a folder of modules for the servers; "" for none.
        always: arguments of all servers.
    """
    running: list[subprocess.Popen[bytes]] = []

    def started(
        *more: str, model: Path = served, flags: tuple[str, ...] = (*FLAGS, *UNTIED)
    ) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *always]
        command += [*flags, *more]
        if "--dtype" not in more:
            command += ["--dtype", "float32"]
        log = tmp_path_factory.mktemp("server") / "log"
        paths = os.pathsep.join(filter(None, [ENVIRONMENT["PYTHONPATH"], path]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, **SMALL, "PYTHONPATH": paths},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running.append(process)
        address = f"http://127.0.0.1:{port}"
        asyncio.run(_healthy(address, process, log))
        return address

    yield started
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    for process in running:
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def _healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    client = Client(address)
    await client.open(address)
    try:
        async with asyncio.timeout(START_S):
            while await client.health_error() is not None:
                assert process.poll() is None, log.read_text()[-3000:]
                await asyncio.sleep(0.5)
    finally:
        await client.close()


@pytest.fixture(scope="module")
def address(start: Start) -> str:
    """Return the address of a server for trainings."""
    return start()


@pytest.fixture(scope="module")
def other(start: Start) -> str:
    """Return the address of a second server."""
    return start()
