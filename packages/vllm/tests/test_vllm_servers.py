"""The vLLM engine with a fake server that speaks vLLM's routes over real HTTP.

The fake server's tokens show which weights it had: 10 + the number of updates so far. Tests that
need vLLM itself are in tests/vllm_servers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from lightspan.errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    UnsupportedError,
)
from lightspan.protocols.engine import GenerationRequest, TokenEngine
from lightspan.schema.token_records import FinishReason, Sampling
from lightspan_testing.engine_suite import Answer, generate
from lightspan_vllm import server_pool
from lightspan_vllm.client import Client, Unreachable
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from packages.vllm.tests.vllm_wire import NEVER, PROMPT, Wire, body, served


def wait_no_longer_than(engine: VLLMEngine, seconds: float) -> None:
    """Lower `start_s` of all servers, after a start that may be slow on a busy machine."""
    for pool in engine._pools.values():
        for server in pool.servers:
            server._start_s = seconds


def moved(folder: Path, by: float) -> dict[str, torch.Tensor]:
    """Return the model's weights plus `by`."""
    weights = load_file(folder / "model.safetensors")
    return {name: tensor + by for name, tensor in weights.items()}


def same(server: Wire, name: str, tensor: torch.Tensor) -> bool:
    """Return whether the server has loaded `tensor` as the weight `name`."""
    return bool((server.loaded[name] == tensor.numpy()).all())


async def test_what_a_server_is_asked(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        answer = await generate(engine, PROMPT, max_tokens=3, top_k=4, top_p=0.9, temperature=0.7)
        assert engine.usage() == {"tokens": 3, "requests": 1, "cpu_s": 0.0}
    assert (answer.ids, answer.versions) == ([11, 11, 11], [0, 0, 0])
    assert answer.logprobs == [-0.5] * 3
    assert answer.finish is FinishReason.LENGTH
    (asked,) = server.asked
    end = asked["stop_token_ids"]
    assert end == sorted(engine.tokenizer("writer").eos_ids)
    assert asked == {
        "model": "the-name",
        "prompt": PROMPT,
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": end,
        "add_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }


async def test_the_models_own_weights_are_sent_at_the_start(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server):
        pass
    own = load_file(folder / "model.safetensors")
    assert set(server.loaded) == {*own, "lm_head.weight"}
    assert same(server, "lm_head.weight", own["model.embed_tokens.weight"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_an_update_cuts(folder: Path, tmp_path: Path, stream: bool) -> None:
    server = Wire(folder)
    server.hold.clear()  # the last token does not come before the update
    async with served(folder, tmp_path, server) as engine:
        task = asyncio.create_task(generate(engine, PROMPT, max_tokens=4, stream=stream))
        for _ in range(3):
            await server.served.acquire()
        server.hold.set()
        server.hold = held = asyncio.Event()
        await engine.update("writer", moved(folder, 1.0), 7)
        held.set()
        answer = await task
    assert answer.ids == [11, 11, 11, 12]
    assert answer.versions == [0, 0, 0, 7]
    assert [asked["prompt"] for asked in server.asked] == [PROMPT, [*PROMPT, 11, 11, 11]]
    assert [asked["max_tokens"] for asked in server.asked] == [4, 1]
    assert same(server, "lm_head.weight", moved(folder, 1.0)["model.embed_tokens.weight"])


async def test_who_reads_a_stream_is_told_that_its_client_was_closed(folder: Path) -> None:
    """aiohttp itself would let the reader wait forever."""
    server = Wire(folder)
    server.hold.clear()
    await server.start()
    client = Client("the server")
    await client.open(server.address)
    await client.info()
    parts = client.complete(
        PROMPT, Sampling(), request_id="r", max_tokens=3, eos_ids=[], stream=True
    )
    assert [(await anext(parts)).ids, (await anext(parts)).ids] == [[10], [10]]
    rest = asyncio.create_task(anext(parts))
    await asyncio.sleep(0.01)  # it waits for the third
    await client.close()
    async with asyncio.timeout(30):
        with pytest.raises(Unreachable, match="closed here"):
            await rest
    await server.stop()


async def test_what_came_too_late_for_the_pause_is_cut_too(folder: Path, tmp_path: Path) -> None:
    """Otherwise the new weights would answer the call, labelled with the old version."""
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        server._open.clear()  # as if paused already: the call waits
        task = asyncio.create_task(generate(engine, PROMPT, max_tokens=2))
        await server.came.wait()
        pausing = server._pause

        async def pause(request: web.Request) -> web.Response:
            return web.json_response({})  # it ends nothing

        server._pause = pause  # type: ignore[method-assign]
        await engine.update("writer", moved(folder, 1.0), 5)
        server._pause = pausing  # type: ignore[method-assign]
        answer = await task
    assert (answer.ids, answer.versions) == ([12, 12], [5, 5])


async def test_a_failed_check_leaves_weights_and_version(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        with pytest.raises(Exception, match="unknown names"):
            await engine.update("writer", {**moved(folder, 1.0), "x": torch.zeros(1)}, 5)
        assert engine.policies() == {"writer": 0}
        assert (await generate(engine, PROMPT, max_tokens=1)).ids == [11]


async def test_a_refused_update_ends_the_policy(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        server.refuse["/update_weights"] = 500, "the weights lack 1 of the model: ['x']"
        with pytest.raises(EngineError, match=r"did not load version 5 .*lack 1 of the model"):
            await engine.update("writer", moved(folder, 1.0), 5)
        with pytest.raises(EngineError, match="an update of policy writer failed"):
            await generate(engine, PROMPT)
        with pytest.raises(EngineError, match="an update of policy writer failed"):
            engine.usage()
        assert engine.policies() == {"writer": 0}


async def test_only_the_present_weights_are_kept(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        for version in (1, 2, 3):
            await engine.update("writer", moved(folder, version), version)
        (kept,) = tmp_path.rglob("*.safetensors")
        assert same(server, "model.norm.weight", load_file(kept)["model.norm.weight"])
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("in_mid_update", [False, True])
async def test_a_restarted_server(folder: Path, tmp_path: Path, in_mid_update: bool) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        if in_mid_update:
            server.dies.add("/finish_weight_update")
        await engine.update("writer", moved(folder, 1.0), 4)
        if not in_mid_update:
            await server.restart()
        answer = await generate(engine, PROMPT, max_tokens=2)
    assert (answer.ids, answer.versions) == ([11, 11], [4, 4])  # its first update since
    assert same(server, "model.norm.weight", moved(folder, 1.0)["model.norm.weight"])


async def test_a_call_outlives_its_killed_server(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    server.hold.clear()
    async with served(folder, tmp_path, server) as engine:
        request = GenerationRequest(
            request_id="r", policy="writer", prompt_ids=PROMPT, sampling=Sampling(max_tokens=3)
        )
        chunks = aiter(engine.generate(request, stream=True))
        ids = [*(await anext(chunks)).ids, *(await anext(chunks)).ids]
        rest = asyncio.create_task(anext(chunks))
        await server.restart()
        server.hold.set()
        ids += (await rest).ids
    assert ids == [11, 11, 11]
    assert server.asked[-1]["prompt"] == [*PROMPT, 11, 11]


async def test_an_update_that_kills(folder: Path, tmp_path: Path) -> None:
    """The server answers 500 to the update, as if the weights did not fit, and then ends."""
    server = Wire(folder)
    async with served(folder, tmp_path, server, timings={"dying_s": 60.0}) as engine:
        server.says["/start_weight_update"] = (500, b"EngineDeadError")
        server.paused.clear()
        update = asyncio.create_task(engine.update("writer", moved(folder, 1.0), 7))
        await server.paused.wait()
        await server.lose("health")
        await server.looked.acquire()
        server.says.clear()
        await server.restart()
        async with asyncio.timeout(60):
            await update
        assert same(server, "model.norm.weight", moved(folder, 1.0)["model.norm.weight"])
        assert engine.policies() == {"writer": 7}


@pytest.mark.parametrize("status", [NEVER, 500])
async def test_a_server_that_is_only_unwell_is_not_given_up(
    folder: Path, tmp_path: Path, status: int
) -> None:
    """A slow server, or an error of a proxy, is no sign that the server is gone."""
    timings = {"health_timeout_s": 0.02, "health_interval_s": 0.005, "max_failed_polls": 1}
    server = Wire(folder)
    server.hold.clear()
    async with served(folder, tmp_path, server, timings=timings) as engine:
        call = asyncio.create_task(generate(engine, PROMPT, max_tokens=2))
        await server.came.wait()
        server.says["/health"] = (status, b"no")
        for _ in range(5):
            await server.looked.acquire()
        server.hold.set()
        assert (await call).ids == [11, 11]
    assert (len(server.asked), server.updates) == (1, 1)


async def test_other_servers_take_over(folder: Path, tmp_path: Path) -> None:
    first, second = Wire(folder), Wire(folder)
    async with served(folder, tmp_path, first, second) as engine:
        wait_no_longer_than(engine, 2.0)
        await asyncio.gather(*(of_rollout(engine, f"r{n}") for n in range(4)))
        assert (len(first.asked), len(second.asked)) == (2, 2)
        await first.stop()
        answers = [await of_rollout(engine, f"r{n}") for n in range(4)]
        assert [answer.ids for answer in answers] == [[11]] * 4
        assert len(second.asked) == 6
        async with asyncio.timeout(60):  # no update waits for the one that is gone
            await engine.update("writer", moved(folder, 1.0), 7)
        assert (await of_rollout(engine, "r0")).ids == [12]
        assert engine.policies() == {"writer": 7}


async def test_the_loss_of_the_last_server_ends_the_policy(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:
        wait_no_longer_than(engine, 0.05)
        await server.stop()
        with pytest.raises(EngineError, match=r"was not ready within 0\.05 s \(VLLM\(start_s="):
            await generate(engine, PROMPT)
        with pytest.raises(EngineError, match="was not ready"):
            engine.usage()


async def test_a_call_that_no_server_survives_is_given_up(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server) as engine:

        async def breaks(request: web.Request) -> web.Response:
            raise web.HTTPInternalServerError(text="EngineDeadError")

        server._complete = breaks  # type: ignore[method-assign]
        await server.restart()
        tries = server_pool.MAX_TRIES
        with pytest.raises(EngineError, match=f"was tried {tries} times: .*EngineDeadError"):
            await generate(engine, PROMPT)


async def test_a_server_that_ends_calls_without_an_answer(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)

    async def ends(request: web.Request) -> web.Response:
        return web.json_response(body([], "abort"))

    server._complete = ends  # type: ignore[method-assign]
    async with served(folder, tmp_path, server) as engine:
        with pytest.raises(EngineError, match="ended it without an answer"):
            await generate(engine, PROMPT)


async def test_closing_while_a_server_comes_back(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server, start_s=600) as engine:
        await server.stop()
        task = asyncio.create_task(generate(engine, PROMPT))
        while not engine._pools["writer"]._recovering:  # noqa: ASYNC110 (until it is noticed)
            await asyncio.sleep(0)
        update = asyncio.create_task(engine.update("writer", moved(folder, 1.0), 1))
        while not list(tmp_path.rglob("*.safetensors")):  # noqa: ASYNC110 (then it waits)
            await asyncio.sleep(0.01)
        await engine.close()
        for each in (task, update):
            with pytest.raises(EngineClosedError):
                await each


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda server: server.info.update(hidden=1), "another model"),
        (lambda server: server.info.update(tied=True), "--hf-overrides"),
        (lambda server: server.info.pop("transfer"), "is invalid"),
        (
            lambda server: server.refuse.update({"/collective_rpc": (404, "none")}),
            "VLLM_SERVER_DEV_MODE=1",
        ),
        (
            lambda server: server.refuse.update({"/collective_rpc": (500, "no attribute")}),
            "--worker-extension-cls",
        ),
    ],
)
async def test_servers_that_cannot_be_used_are_refused_at_the_start(
    folder: Path, tmp_path: Path, prepare: Callable[[Wire], Any], message: str
) -> None:
    server = Wire(folder)
    prepare(server)
    with pytest.raises(ConfigError, match=message):
        async with served(folder, tmp_path, server):
            pass
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.glob("lightspan-weights-*"))


async def test_nobody_there(folder: Path, tmp_path: Path) -> None:
    vllm = VLLM(addresses=("http://127.0.0.1:9",), exchange=str(tmp_path), start_s=0.05)
    engine = VLLMEngine(vllm, {"writer": folder}, logs=tmp_path)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 was not ready"):
        await engine.start()
    with pytest.raises(EngineClosedError):
        await generate(engine, PROMPT)


async def test_an_interpreter_without_vllm(folder: Path, tmp_path: Path) -> None:
    vllm = VLLM(python=sys.executable, exchange=str(tmp_path))
    engine = VLLMEngine(vllm, {"the/writer": folder}, logs=tmp_path / "logs")
    with pytest.raises(EngineError, match="server 0 of policy the/writer: its interpreter has no"):
        await engine.start()
    assert "No module named" in (tmp_path / "logs" / "vllm-the-writer-0.log").read_text()


def test_no_interpreter(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python='\.venv/no/such' is no interpreter: there is"):
        VLLMEngine(VLLM(python=".venv/no/such"), {"writer": folder}, logs=tmp_path)


async def test_requests_that_are_refused(folder: Path, tmp_path: Path) -> None:
    server = Wire(folder)
    async with served(folder, tmp_path, server, context_length=100) as engine:
        server.refuse["/v1/completions"] = 400, "no"
        with pytest.raises(EngineError, match="400 no"):  # it is not tried again
            await generate(engine, PROMPT)
        with pytest.raises(ContextOverflowError, match=r"holds 100.*VLLM\(context_length=…\)"):
            await generate(engine, [5] * 100)
        with pytest.raises(EngineError, match="empty prompt"):
            await generate(engine, [])
        with pytest.raises(EngineError, match="prompt ids must be from 0"):
            await generate(engine, [10**6])
        for temperature in (2.5, 0.001):
            with pytest.raises(UnsupportedError, match=rf"temperature={temperature} .*0\.01 to 2"):
                await generate(engine, PROMPT, temperature=temperature)
        constrained = GenerationRequest(
            request_id="r", policy="writer", prompt_ids=PROMPT, sampling=Sampling(), grammar="{}"
        )
        with pytest.raises(UnsupportedError, match="grammar"):
            await anext(aiter(engine.generate(constrained, stream=False)))
        assert engine.capabilities.grammars == ""
        assert engine.capabilities.temperatures == (0.01, 2.0)
    assert server.asked == []


async def test_probes_are_of_late_prompts_and_every_server(folder: Path, tmp_path: Path) -> None:
    first, second = Wire(folder), Wire(folder)
    async with served(folder, tmp_path, first, second) as engine:
        (probe, other) = await engine.probes("writer")
        greeting = engine.tokenizer("writer").render([{"role": "user", "content": "Hello"}])
        assert probe.prompt_ids == other.prompt_ids == greeting
        await generate(engine, PROMPT, max_tokens=1)
        await engine.update("writer", moved(folder, 1.0), 2)
        await first.restart()
        probes = await engine.probes("writer")
    assert [probe.prompt_ids for probe in probes] == [PROMPT, PROMPT]
    assert len({probe.where for probe in probes}) == 2
    assert [probe.version for probe in probes] == [2, 2]
    assert [probe.ids for probe in probes] == [[11] * 8, [12] * 8]  # its first update since


async def of_rollout(engine: TokenEngine, rollout: str) -> Answer:
    """Return the answer, of one token, to a call of a rollout."""
    request = GenerationRequest(
        request_id=rollout,
        policy="writer",
        prompt_ids=PROMPT,
        sampling=Sampling(max_tokens=1),
        rollout=rollout,
    )
    answer = Answer()
    async for chunk in engine.generate(request, stream=False):
        answer.ids += chunk.ids
    return answer
