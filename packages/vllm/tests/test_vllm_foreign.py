"""Servers that are not vLLM, are replaced by another program, or answer invalid texts.

Each gets an error that says so, and no call waits for it forever.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightspan.errors import ConfigError, EngineError
from lightspan_testing.engine_suite import generate
from lightspan_vllm.client import Client, Refused, Unreachable
from packages.vllm.tests.vllm_wire import PROMPT, Wire, served

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def asked(server: Wire) -> AsyncIterator[Client]:
    """Yield a client of the started server; close both after the block."""
    await server.start()
    client = Client("")
    await client.open(server.address)
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"{}", "Object missing required field `data`"),
        (b'{"data":[]}', "Expected `array` of length >= 1 - at `$.data`"),
        (b"<h1>", "JSON is malformed: invalid character (byte 0)"),
    ],
)
async def test_what_names_no_models_is_no_vllm(folder: Path, answer: bytes, said: str) -> None:
    server = Wire(folder)
    async with asked(server) as client:
        server.says["/v1/models"] = 200, answer
        refusal = (
            f"{server.address}/v1/models returned an invalid response: {said} ({answer.decode()!r})"
        )
        with pytest.raises(ConfigError) as at_the_start:
            await client.info()
        with pytest.raises(Refused) as later:
            await client.loras()
    assert str(at_the_start.value) == (
        f"there is no vLLM server at {server.address}, or it is too old: {refusal}"
    )
    assert str(later.value) == refusal


async def test_descriptions_that_cannot_be_read(folder: Path) -> None:
    server = Wire(folder)
    async with asked(server) as client:
        server.says["/weight_info"] = 200, b'{"weight_version":5}'
        with pytest.raises(Unreachable, match="Expected `str`, got `int`"):
            await client.label()
        server.says["/collective_rpc"] = 200, b'{"results":[]}'
        with pytest.raises(ConfigError, match=r"is invalid .*: restart the server with the lights"):
            await client.info()


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_server_that_becomes_another(folder: Path, tmp_path: Path, breaks: bool) -> None:
    """Calls fail instead of waiting, with and without a break of the connections."""
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        await generate(engine, PROMPT, max_tokens=1)
        server.says = dict.fromkeys(["/v1/models", "/weight_info"], (200, b"{}"))
        if breaks:
            await server.restart()
        with pytest.raises(EngineError, match=r"there is no vLLM server at .*field `data`"):
            await generate(engine, PROMPT)
        with pytest.raises(EngineError, match="there is no vLLM server"):
            engine.usage()


async def test_a_server_without_a_version_is_given_up(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        server.says["/weight_info"] = 200, b"{}"
        with pytest.raises(EngineError, match=r"was lost 3 times and .*field `weight_version`"):
            await generate(engine, PROMPT)


def choice(ids: Any, logprobs: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"token_ids": None}]}, "returns no token ids"),
        (choice([3, -5], [0, 0]), "returned token id -5, but its model's ids are from 0 to"),
        (choice([3, 10**25], [0, 0]), "returned token id 1000.*, but its model's ids are from 0"),
        (
            choice([3, 4], [-0.5, None]),
            "2 log-probabilities, 1 of them null, for 2 tokens: start it with --logprobs-mode "
            "processed_logprobs",
        ),
        (choice([3, 4], [-0.5]), "1 log-probabilities for 2 tokens"),
        ({"choices": [{"token_ids": [5], "logprobs": None}]}, "--logprobs-mode processed_logprobs"),
        ({"choices": "x"}, "invalid completion"),
        (b'{"error":"\xff"}', "invalid completion"),
    ],
)
async def test_untrainable_answers(folder: Path, tmp_path: Path, answer: Any, message: str) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        server.says["/v1/completions"] = 200, text
        with pytest.raises(EngineError, match=message):
            await generate(engine, PROMPT)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, b"<h1>nginx</h1>", "404 <h1>nginx</h1>"),
        (302, b"", "302 Found"),
    ],
)
async def test_what_is_no_vllm_is_not_waited_for(
    folder: Path, tmp_path: Path, status: int, answer: bytes, said: str
) -> None:
    """A redirect is not followed either: it could lead to a machine that is not allowed."""
    server = Wire(folder)
    server.says["/health"] = status, answer
    with pytest.raises(EngineError, match=rf"requires a key \(.*/health: {said}\): give the"):
        async with served(folder, tmp_path, server, start_s=10**6):
            pass


async def test_calls_and_updates_follow_no_redirect(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        server.says["/v1/completions"] = 302, b""
        with pytest.raises(EngineError, match="/v1/completions: 302"):
            await generate(engine, PROMPT)
        server.says["/resume"] = 302, b""
        weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        with pytest.raises(EngineError, match="/resume: 302 Found"):
            await engine.update("writer", weights, 1)
