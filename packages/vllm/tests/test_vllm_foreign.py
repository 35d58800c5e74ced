"""Servers that are no vLLM, or no longer, or answer what vLLM would not: each is named, and no call
waits for one that nobody brings back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from lightspan.errors import ConfigError, EngineError
from lightspan_testing.engine_suite import generate
from lightspan_testing.tiny import tiny_model
from lightspan_vllm.client import Client, Refused, Unreachable
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from packages.vllm.tests.vllm_wire import Wire, body

PROMPT = [5, 6, 7, 8]
HANGS_S = 60
"""What takes so long hangs."""
NO_MODELS = [
    (b"{}", "Object missing required field `data`"),
    (b"[]", "Expected `object`, got `array`"),
    (b"null", "Expected `object`, got `null`"),
    (b"5", "Expected `object`, got `int`"),
    (b'{"data":"x"}', "Expected `array`, got `str` - at `$.data`"),
    (b'{"data":[]}', "Expected `array` of length >= 1 - at `$.data`"),
    (
        b'{"data":[{}]}',
        "Object missing required field `id` - at `$.data[0]`",
    ),
    (b"<h1>", "JSON is malformed: invalid character (byte 0)"),
    (b"", "Input data was truncated"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("foreign") / "model", seed=1, context=256)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan_vllm.supervised_server.POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr("lightspan_vllm.supervised_server._DYING_S", 0.1)


@asynccontextmanager
async def asked(server: Wire) -> AsyncIterator[Client]:
    """A client of this server; both end with the block."""
    await server.start()
    client = Client("")
    await client.open(server.address)
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


@asynccontextmanager
async def served(
    folder: Path, tmp_path: Path, server: Wire, **options: Any
) -> AsyncIterator[VLLMEngine]:
    """An engine on this server; both end with the block."""
    await server.start()
    vllm = VLLM(**{"addresses": (server.address,), "exchange": str(tmp_path), **options})
    engine = VLLMEngine(vllm, {"writer": folder}, logs=tmp_path)
    try:
        async with asyncio.timeout(HANGS_S):
            await engine.start()
            yield engine
    finally:
        await engine.close()
        await server.stop()


@pytest.mark.parametrize(("answer", "said"), NO_MODELS)
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


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("{}", "Object missing required field `weight_version`"),
        ("[1]", "Expected `object`, got `array`"),
        ("null", "Expected `object`, got `null`"),
        (
            '{"weight_version":5}',
            "Expected `str`, got `int` - at `$.weight_version`",
        ),
        ("hello", "JSON is malformed: invalid character (byte 0)"),
    ],
)
async def test_a_server_that_does_not_say_which_weights_it_has_is_lost(
    folder: Path, answer: str, said: str
) -> None:
    server = Wire(folder)
    async with asked(server) as client:
        server.says["/weight_info"] = 200, answer.encode()
        with pytest.raises(Unreachable) as caught:
            await client.label()
    assert (
        str(caught.value)
        == f"{server.address}/weight_info returned an invalid response: {said} ({answer!r})"
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"{}", "Object missing required field `results`"),
        (b'{"results":[]}', "Expected `array` of length >= 1 - at `$.results`"),
        (b'{"results":[{"vllm":5}]}', "Expected `str`, got `int` - at `$.results[0].vllm`"),
    ],
)
async def test_facts_that_cannot_be_read(folder: Path, answer: bytes, said: str) -> None:
    server = Wire(folder)
    async with asked(server) as client:
        server.says["/collective_rpc"] = 200, answer
        with pytest.raises(ConfigError) as caught:
            await client.info()
    assert str(caught.value) == (
        f"the description of the server at {server.address} is invalid "
        f"({server.address}/collective_rpc returned an invalid response: {said} "
        f"({answer.decode()!r})): restart the server with the lightspan_vllm_plugin.py of this "
        "version"
    )


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_server_that_becomes_something_else_ends_the_policy(
    folder: Path, tmp_path: Path, breaks: bool
) -> None:
    """With a break of the connections and without one: no call waits for it."""
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        await generate(engine, PROMPT, max_tokens=1)
        server.says = dict.fromkeys(["/v1/models", "/weight_info"], (200, b"{}"))
        if breaks:
            await server.restart()
        with pytest.raises(EngineError) as caught:
            await generate(engine, PROMPT)
        with pytest.raises(EngineError, match="there is no vLLM server"):
            engine.usage()
    assert str(caught.value) == (
        f"there is no vLLM server at {server.address}, or it is too old: {server.address}/v1/models"
        " returned an invalid response: Object missing required field `data` ('{}')"
    )


async def test_a_server_that_never_says_which_weights_it_has_is_given_up(
    folder: Path, tmp_path: Path
) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        server.says["/weight_info"] = 200, b"{}"
        with pytest.raises(EngineError, match=r"was lost 3 times and .*field `weight_version`"):
            await generate(engine, PROMPT)


def breaks(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no server can be served, by a fault of ours."""

    async def serve() -> None:
        raise KeyError("a fault")

    (server,) = engine._pools["writer"].servers
    monkeypatch.setattr(server, "serve", serve)


async def test_a_fault_of_ours_ends_the_policy_and_is_told(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        breaks(engine, monkeypatch)
        await server.stop()
        message = "the vLLM server 0 of policy writer could not be recovered: KeyError: 'a fault'"
        with pytest.raises(EngineError) as caught:
            await generate(engine, PROMPT)
    assert str(caught.value) == message
    (told,) = [record for record in caplog.records if record.exc_info]
    assert told.getMessage() == message


async def test_a_fault_of_ours_in_an_update_ends_the_policy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Wire(folder)
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    async with served(folder, tmp_path, server) as engine:
        breaks(engine, monkeypatch)
        with pytest.raises(KeyError, match="a fault"):
            await engine.update("writer", weights, 1)
        with pytest.raises(EngineError) as caught:
            await generate(engine, PROMPT)
    assert str(caught.value) == "an update of policy writer failed: KeyError: 'a fault'"


def answers(*given: dict[str, Any]) -> Callable[[web.Request], Any]:
    """What answers so, the last again and again."""
    left = list(given)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(left.pop(0) if len(left) > 1 else left[0])

    return answer


@pytest.mark.parametrize("beyond", [0, 10**25, None])
async def test_ids_that_the_model_has_no_token_for(
    folder: Path, tmp_path: Path, beyond: int | None
) -> None:
    server = Wire(folder)
    vocabulary = server.info["vocabulary"]
    foreign = -5 if beyond is None else vocabulary + beyond
    fine = answers(body([0, vocabulary - 1], "length"), body([3, foreign], "length"))
    server._complete = fine  # type: ignore[method-assign]
    async with served(folder, tmp_path, server) as engine:
        assert (await generate(engine, PROMPT, max_tokens=2)).ids == [0, vocabulary - 1]
        with pytest.raises(EngineError) as caught:
            await generate(engine, PROMPT, max_tokens=2)
    assert str(caught.value) == (
        f"{server.address} returned token id {foreign}, but its model's ids are from 0 to "
        f"{vocabulary - 1}: it is not vLLM, or a proxy changes its responses"
    )


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        ([None, None], "2 log-probabilities, 2 of them null,"),
        ([-0.5, None], "2 log-probabilities, 1 of them null,"),
        ([-0.5], "1 log-probabilities"),
    ],
)
async def test_log_probabilities_that_are_not_there(
    folder: Path, tmp_path: Path, logprobs: list[float | None], said: str
) -> None:
    server = Wire(folder)
    choice = {"token_ids": [3, 4], "logprobs": {"token_logprobs": logprobs}}
    server._complete = answers({"choices": [choice]})  # type: ignore[method-assign]
    async with served(folder, tmp_path, server) as engine:
        with pytest.raises(EngineError) as caught:
            await generate(engine, PROMPT)
    assert str(caught.value) == (
        f"{server.address} returned {said} for 2 tokens: start it with --logprobs-mode "
        "processed_logprobs, and no --max-logprobs 0"
    )


async def test_a_completion_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        for answer in (b'{"error":"\xff"}', b'{"error":' + b"[" * 10**5):
            server.says["/v1/completions"] = 200, answer
            with pytest.raises(EngineError, match="returned an invalid completion"):
                await generate(engine, PROMPT)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (404, b"<h1>nginx</h1>", "404 <h1>nginx</h1>"),
        (401, b"", "401 Unauthorized"),
        (302, b"", "302 Found"),
    ],
)
async def test_what_is_no_vllm_is_not_waited_for(
    folder: Path, tmp_path: Path, status: int, answer: bytes, said: str
) -> None:
    """Nor is a redirect followed: it could lead to a machine that nobody allowed."""
    server = Wire(folder)
    server.says["/health"] = status, answer
    with pytest.raises(EngineError) as caught:
        async with served(folder, tmp_path, server, start_s=10**6):
            pass
    assert str(caught.value) == (
        "the vLLM server 0 of policy writer: there is no vLLM server at its address, or it "
        f"requires a key ({server.address}/health: {said}): give the address of the server itself "
        "in VLLM(addresses=…)"
    )


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


async def test_what_a_server_that_is_never_ready_said_last(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    server.says["/health"] = 500, b"boom"
    with pytest.raises(EngineError) as caught:
        async with served(folder, tmp_path, server, start_s=0.05):
            pass
    assert str(caught.value) == (
        f"the vLLM server 0 of policy writer at {server.address} was not ready within 0.05 s "
        f"(VLLM(start_s=…)): {server.address}/health: 500 boom"
    )


async def test_what_speaks_another_protocol(folder: Path, tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    vllm = VLLM(addresses=(address,), exchange=str(tmp_path), start_s=0.05)
    engine = VLLMEngine(vllm, {"writer": folder}, logs=tmp_path)
    with pytest.raises(EngineError) as caught:
        await engine.start()
    assert str(caught.value).startswith(
        f"the vLLM server 0 of policy writer at {address} was not ready within 0.05 s "
        f"(VLLM(start_s=…)): the server at {address} does not speak HTTP: "
    )
    server.close()
    await server.wait_closed()


async def test_a_probe_that_was_cut_before_its_first_token_is_asked_again(
    folder: Path, tmp_path: Path
) -> None:
    server = Wire(folder)
    cut, whole = body([], "abort"), body([11] * 8, "length")
    server._complete = answers(cut, whole)  # type: ignore[method-assign]
    async with served(folder, tmp_path, server) as engine:
        (probe,) = await engine.probes("writer")
    assert probe.ids == [11] * 8
