"""Servers that a run starts: how they start, die, come back and end.

The program is not vLLM, but takes its flags and speaks its routes.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from lightspan.errors import EngineError
from lightspan.protocols.engine import GenerationRequest
from lightspan.schema.token_records import Sampling
from lightspan_testing.engine_suite import generate
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.timings import ServerTimings

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that is given as vLLM's interpreter but starts the fake server."""
    path = tmp_path / "python"
    wire = Path(__file__).with_name("vllm_wire.py")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore {wire} "$@"\n')
    path.chmod(0o700)
    return str(path)


@asynccontextmanager
async def running(
    folder: Path,
    tmp_path: Path,
    program: str,
    timings: ServerTimings | None = None,
    **options: Any,
) -> AsyncIterator[VLLMEngine]:
    vllm = VLLM(python=program, exchange=str(tmp_path), **options)
    logs = tmp_path / "logs"
    engine = VLLMEngine(vllm, {"writer": folder}, logs=logs, seed=3, timings=timings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
    assert servers(folder) == []
    assert not list(tmp_path.glob("lightspan-weights-*"))


def servers(folder: Path) -> list[psutil.Process]:
    """Return the running fake servers of the model in `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words and any(word.endswith("vllm_wire.py") for word in words):
            found.append(process)
    return found


async def test_servers_of_a_run(folder: Path, tmp_path: Path, program: str) -> None:
    async with running(folder, tmp_path, program, servers=2) as engine:
        first, second = servers(folder)
        words = first.cmdline()
        assert words[words.index("-m") + 1] == "vllm.entrypoints.openai.api_server"
        socket = Path(words[words.index("--uds") + 1])
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o077 == 0, "others could change its weights"
        seeds = [each[each.index("--seed") + 1] for each in (words, second.cmdline())]
        assert len(set(seeds)) == 2, "both would sample the same"
        assert (await generate(engine, PROMPT, max_tokens=2)).ids == [11, 11]
    assert not socket.exists()
    for number in (0, 1):
        assert "serving" in (tmp_path / "logs" / f"vllm-writer-{number}.log").read_text()


async def test_a_killed_server_comes_back(folder: Path, tmp_path: Path, program: str) -> None:
    weights = load_file(folder / "model.safetensors")
    moved = {name: tensor + torch.ones(()) for name, tensor in weights.items()}
    async with running(folder, tmp_path, program) as engine:
        await engine.update("writer", moved, 4)
        (server,) = servers(folder)
        assert (await generate(engine, PROMPT, max_tokens=1)).ids == [12]
        server.send_signal(signal.SIGKILL)
        server.wait()
        answer = await generate(engine, PROMPT, max_tokens=2)
        assert (answer.ids, answer.versions) == ([11, 11], [4, 4])  # its first update since
        (again,) = servers(folder)
        assert again.pid != server.pid
    said = (tmp_path / "logs" / "vllm-writer-0.log").read_text()
    assert said.count("serving") == 2


@pytest.mark.parametrize("how", ["listens no more", "health"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
async def test_a_front_that_waits_for_a_call_of_its_dead_engine(
    folder: Path,
    tmp_path: Path,
    program: str,
    how: str,
    stream: bool,
) -> None:
    """The server does not end by itself, and no other call shows that its engine is dead."""
    # idle connections are closed before the next look, which has to connect again
    assert ServerTimings().keepalive_s < ServerTimings().health_interval_s
    timings = ServerTimings(keepalive_s=0.01, health_interval_s=0.1)
    mark = tmp_path / "mark"
    environment = {"WIRE_LOSES": how, "WIRE_MARK": str(mark), "WIRE_POLLED": "1"}
    options = {"timings": timings, "environment": environment}
    async with running(folder, tmp_path, program, **options) as engine:
        (server,) = servers(folder)
        mark.touch()
        request = GenerationRequest(
            request_id="r", policy="writer", prompt_ids=PROMPT, sampling=Sampling(max_tokens=3)
        )
        async with asyncio.timeout(120):
            chunks = [chunk async for chunk in engine.generate(request, stream=stream)]
        assert [token for chunk in chunks for token in chunk.ids] == [11, 11, 11]
        assert not mark.exists()
        (again,) = servers(folder)
        assert again.pid != server.pid


@pytest.mark.parametrize("how", ["listens no more", "health"])
@pytest.mark.slow
async def test_updating_a_dead_engine(folder: Path, tmp_path: Path, program: str, how: str) -> None:
    weights = load_file(folder / "model.safetensors")
    moved = {name: tensor + torch.ones(()) for name, tensor in weights.items()}
    mark = tmp_path / "mark"
    environment = {"WIRE_LOSES": how, "WIRE_MARK": str(mark)}
    async with running(folder, tmp_path, program, environment=environment) as engine:
        mark.touch()
        call = asyncio.create_task(generate(engine, PROMPT, max_tokens=2))
        while mark.exists():  # noqa: ASYNC110 - another process takes it away
            await asyncio.sleep(0.01)
        async with asyncio.timeout(120):
            await engine.update("writer", moved, 4)
            answer = await call
        assert (answer.ids, answer.versions) == ([11, 11], [4, 4])  # its first update since


async def test_cpu_time_of_servers_is_counted(folder: Path, tmp_path: Path, program: str) -> None:
    """A killed server's time is counted too; the time of starting is not."""
    async with running(folder, tmp_path, program) as engine:
        assert engine.usage()["cpu_s"] < 0.1
        for number in range(60):
            await generate(engine, PROMPT, max_tokens=20, stream=True, request_id=str(number))
        spent = engine.usage()["cpu_s"]
        assert spent > 0.02
        (server,) = servers(folder)
        server.send_signal(signal.SIGKILL)
        server.wait()
        await generate(engine, PROMPT, max_tokens=1)
        assert engine.usage()["cpu_s"] > spent


async def test_one_that_cannot_start(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho one\necho ValueError: no such flag\nexit 3\n")
    path.chmod(0o700)
    with pytest.raises(EngineError, match=r"(?s)ended with status 3; .*ValueError: no such flag"):
        async with running(folder, tmp_path, str(path)):
            pass
    assert "is lost" not in caplog.text, "it was never there"


@pytest.mark.faults
def test_kill_9_of_the_process_that_has_them(folder: Path, tmp_path: Path, program: str) -> None:
    code = HOLDING.format(python=program, model=str(folder), tmp=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"started\n"
        held = servers(folder)
        assert len(held) == 2
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(held, timeout=30)
    assert not alive


HOLDING = """
import asyncio
from lightspan_vllm import client, supervised_server
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.timings import ServerTimings
async def main():
    vllm = VLLM(python={python!r}, exchange={tmp!r}, servers=2)
    engine = VLLMEngine(vllm, {{"writer": {model!r}}}, logs={tmp!r})
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
