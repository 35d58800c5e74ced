"""Test a server whose engine process alone is killed, while its HTTP process waits for a call."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import psutil
import pytest

from lightspan_testing.engine_suite import generate
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from tests.vllm_servers.conftest import SMALL, START_S

PROMPT = [5, 6, 7, 8]
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: vllm\r\nContent-Type: application/json\r\n"
    b'Content-Length: 100\r\n\r\n{"model"'
)
"""A request that never ends: the HTTP process waits for it as long as the connection is open."""


@pytest.mark.timeout(600)
async def test_a_front_whose_engine_is_killed(python: str, served: Path, tmp_path: Path) -> None:
    vllm = VLLM(
        python=python,
        exchange=str(tmp_path),
        dtype="float32",
        start_s=START_S,
        environment=SMALL,
        arguments=("--enforce-eager",),
    )
    engine = VLLMEngine(vllm, {"writer": served}, logs=tmp_path)
    try:
        await engine.start()
        before = await generate(engine, PROMPT, max_tokens=8, temperature=0.0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(listens_at())
            waiting.sendall(HALF)
            [core] = [each for each in children() if "EngineCore" in " ".join(each.cmdline())]
            core.send_signal(signal.SIGKILL)
            async with asyncio.timeout(300):  # where it took the 600 s of a rollout
                after = await generate(engine, PROMPT, max_tokens=8, temperature=0.0)
    finally:
        await engine.close()
    assert after.ids == before.ids
    assert "Waiting for connections to close" in (tmp_path / "vllm-writer-0.log").read_text()


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def listens_at() -> str:
    [words] = [each.cmdline() for each in children() if "--uds" in each.cmdline()]
    return words[words.index("--uds") + 1]
