"""Sending weights to servers, over real Gloo groups between threads and processes of this machine.

The receiving side is the file that vLLM loads (`vllm_plugin/lightspan_broadcast`). It is tested in
vLLM itself by tests/vllm_servers.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightspan.errors import ConfigError, EngineError
from lightspan_vllm import broadcast
from lightspan_vllm.broadcast import Broadcast, BroadcastError
from lightspan_vllm.config import VLLM, Link
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.requirements import PLUGIN_FOLDER
from lightspan_vllm.vllm_plugin.lightspan_broadcast import receive
from packages.vllm.tests.test_vllm_servers import moved, same, wait_no_longer_than
from packages.vllm.tests.vllm_wire import Wire, served

LOOPBACK = Link("gloo", "127.0.0.1")
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two files with weights of all data types that a server can have."""
    first = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.5)}
    second = {
        "c": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "d": torch.ones(3, dtype=torch.float16) / 3,
    }
    paths = [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")]
    for tensors, path in zip((first, second), paths, strict=True):
        save_file(tensors, path)
    return paths


def content(files: list[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


# --- the two ends ---------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 3])
def test_every_process_of_a_server_gets_every_weight(files: list[str], workers: int) -> None:
    way = Broadcast(files, LOOPBACK, workers)
    info = msgspec.json.decode(msgspec.json.encode(way.info()))
    assert info["weights"] == [
        ["a", "float32", [2, 3]],
        ["b", "float32", []],
        ["c", "bfloat16", [5, 7]],
        ["d", "float16", [3]],
    ]
    with ThreadPoolExecutor(workers + 1) as ends:
        sending = ends.submit(way.send)
        took = ends.map(lambda rank: dict(receive(info, rank, CPU)), range(1, workers + 1))
        every = list(took)
        sending.result()
    for each in every:
        assert list(each) == ["a", "b", "c", "d"]
        for name, tensor in content(files).items():
            assert each[name].dtype == tensor.dtype
            assert torch.equal(each[name], tensor)


def test_nobody_else_s_interface_is_listened_at(files: list[str]) -> None:
    way = Broadcast(files, LOOPBACK, 1)
    port = way.info()["port"]
    tables = [Path("/proc/net/tcp").read_text(), Path("/proc/net/tcp6").read_text()]
    entries = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [entry[1] for entry in entries if entry[3] == "0A"]
    assert [each for each in listening if each.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


RECEIVER = """
import json, os, signal, sys, torch
from lightspan_broadcast import receive
for name, tensor in receive(json.loads(sys.argv[1]), 1, torch.device("cpu")):
    print(name, flush=True)
    sys.stdin.readline()
"""


def receiver(way: Broadcast) -> subprocess.Popen[bytes]:
    """Start a process that receives the next weight at each line on its standard input."""
    command = [sys.executable, "-c", RECEIVER, msgspec.json.encode(way.info()).decode()]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env={"PYTHONPATH": str(PLUGIN_FOLDER)}
    )


@pytest.fixture
def large(tmp_path: Path) -> list[str]:
    """A file with more data than fits into the buffers between two processes."""
    path = str(tmp_path / "large.safetensors")
    save_file({f"w{number}": torch.ones(4 << 20) for number in range(4)}, path)
    return [path]


@pytest.mark.slow
def test_a_server_that_is_killed_while_weights_come(large: list[str]) -> None:
    way = Broadcast(large, LOOPBACK, 1)
    with receiver(way) as process, ThreadPoolExecutor(1) as threads:
        sending = threads.submit(way.send)
        assert process.stdout is not None
        assert process.stdout.readline() == b"w0\n"
        assert not sending.done()
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(BroadcastError):
            sending.result(30)
        assert time.monotonic() - killed < 20


SENDER = """
import json, sys
from lightspan_vllm.broadcast import Broadcast
from lightspan_vllm.config import Link
way = Broadcast(sys.argv[1:], Link("gloo", "127.0.0.1"), 1)
print(json.dumps(way.info()), flush=True)
way.send()
"""


@pytest.mark.slow
def test_a_trainer_that_is_killed_while_weights_go(large: list[str]) -> None:
    command = [sys.executable, "-c", SENDER, *large]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        coming = receive(msgspec.json.decode(process.stdout.readline()), 1, CPU)
        next(coming)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset"):
            list(coming)


def test_a_server_that_does_not_come(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "RENDEZVOUS_S", 0.1)
    with pytest.raises(
        BroadcastError, match=r"2 processes of the server did not connect to 127\.0\.0\.1:"
    ):
        Broadcast(files, LOOPBACK, 2).send()


def test_it_can_be_given_up(files: list[str]) -> None:
    way = Broadcast(files, LOOPBACK, 1)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(way.send)
        way.stop()
        with pytest.raises(BroadcastError, match="the broadcast was stopped"):
            sending.result(10)


# --- the engine -----------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 2])
async def test_servers_need_no_file(folder: Path, tmp_path: Path, workers: int) -> None:
    servers = Wire(folder, workers=workers), Wire(folder, workers=workers)
    own, newer = load_file(folder / "model.safetensors"), moved(folder, 1.0)
    async with served(folder, tmp_path, *servers, transfer="gloo") as engine:
        for server in servers:
            assert set(server.loaded) == {*own, "lm_head.weight"}
            assert all(same(server, name, tensor) for name, tensor in own.items())
        await engine.update("writer", newer, 1)
    for server in servers:
        assert all(same(server, name, tensor) for name, tensor in newer.items())
        assert same(server, "lm_head.weight", newer["model.embed_tokens.weight"])
        assert [each["workers"] for each in server.sent] == [workers] * 2


async def test_a_restarted_server_gets_the_weights_of_now(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    newer = moved(folder, 1.0)
    async with served(folder, tmp_path, server, transfer="gloo") as engine:
        server.dies.add("/finish_weight_update")
        await engine.update("writer", newer, 1)
        assert len(server.sent) == 3
        assert same(server, "model.norm.weight", newer["model.norm.weight"])


async def test_a_refused_update_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server, transfer="gloo") as engine:
        wait_no_longer_than(engine, 5)
        server.refuse["/update_weights"] = 400, "no such layer"
        said = r"version 1 of its weights: .*: 400 no such layer$"
        with pytest.raises(EngineError, match=said):
            await asyncio.wait_for(engine.update("writer", moved(folder, 1.0), 1), 30)


# --- what a user says -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer": "ipc"}, r"VLLM: transfer='ipc'"),
        (
            {"trainer_host": "10.0.0.1"},
            r"trainer_host='10\.0\.0\.1' applies only to transfer='gloo' or 'nccl'",
        ),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLM(python="p", **options)


async def test_a_host_that_is_not_this_machine(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at trainer_host='192\.0\.2\.1'"):
        async with served(
            folder, tmp_path, Wire(folder), transfer="gloo", trainer_host="192.0.2.1"
        ):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_nccl_without_a_gpu(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transfer='nccl' sends weights from a GPU, but this pro"):
        async with served(folder, tmp_path, Wire(folder), transfer="nccl"):
            pass


def test_lora_is_read_from_files(folder: Path, tmp_path: Path) -> None:
    vllm = VLLM(addresses=("http://127.0.0.1:9",), transfer="gloo")
    with pytest.raises(ConfigError, match=r"vLLM reads LoRA from files \(writer\).*merge=True"):
        VLLMEngine(vllm, {"writer": folder}, lora={"writer": 4}, logs=tmp_path)
