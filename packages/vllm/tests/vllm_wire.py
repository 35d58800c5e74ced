"""A fake server that speaks vLLM's routes over real HTTP, for tests that need no vLLM.

Its tokens show which weights it had. As a program it takes those flags of a vLLM server that it
needs: `vllm_wire.py … --model FOLDER --uds SOCKET`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors import safe_open


def _received(sent: dict[str, Any]) -> dict[str, Any]:
    """Receive weights as all processes of a server do, with the file that vLLM loads."""
    import torch

    from lightspan_vllm.vllm_plugin.lightspan_broadcast import receive

    def take(rank: int) -> dict[str, Any]:
        return {name: each.numpy() for name, each in receive(sent, rank, torch.device("cpu"))}

    with ThreadPoolExecutor(sent["workers"]) as workers:
        every = list(workers.map(take, range(1, sent["workers"] + 1)))
    for others in every[1:]:
        assert all((others[name] == each).all() for name, each in every[0].items())
    return every[0]


NEVER = 0
"""Used in place of an HTTP status: the request is not answered."""
PROMPT = [5, 6, 7, 8]


class Wire:
    """A fake server that speaks vLLM's routes. It samples nothing.

    Every token is 10 + `updates`; with a LoRA, 50 + the number of LoRAs that were loaded up to it.
    """

    def __init__(self, folder: Path, **info: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        vision = config.get("text_config")
        config = vision or config
        self.info = {
            "vllm": "0.32.0",
            "model": str(folder),
            "dtype": "float32",
            "context": 256,
            "vocabulary": config["vocab_size"],
            "layers": config["num_hidden_layers"],
            "hidden": config["hidden_size"],
            "tied": False,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "transfer": "lightspan",
            "tensor_parallel": 1,
            "workers": 1,
            "lora_rank": 0,
            "loras": 0,
            "lora_updates": False,
            "device": "cpu",
            "is_vision_model": vision is not None,
            "normalizes": False,
            **info,
        }
        self.label = "default"
        self.updates = 0
        self.loaded: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []
        """The arguments `sent` of the updates whose weights were sent over the network."""
        self.loras: dict[str, int] = {}
        """Name of a loaded LoRA → the token of its calls."""
        self.brought: list[dict[str, Any]] = []
        """The contents of each LoRA that was loaded: its tensors by name and its configuration."""
        self.asked: list[dict[str, Any]] = []
        self.reads: list[int] | None = None
        """Ids that calls with images report to have used; None for those of the call."""
        self.came = asyncio.Event()
        """Set when a call has come."""
        self.served = asyncio.Semaphore(0)
        """Released once for each token that is sent."""
        self.hold = asyncio.Event()
        """If set, answers end; otherwise they go on until they are aborted."""
        self.hold.set()
        self.refuse: dict[str, tuple[int, str]] = {}
        """Route → status and text of the next response of the route."""
        self.looked = asyncio.Semaphore(0)
        """Released when the health route is called while `says` replaces its response."""
        self.says: dict[str, tuple[int, bytes]] = {}
        """Route → status and body of its responses, instead of the usual ones. A redirect leads to
        `/v1/models`."""
        self.dies: set[str] = set()
        """Routes at whose next call the server is killed and started again."""
        self.paused = asyncio.Event()
        self.cuts: dict[str, asyncio.Event] = {}
        """Running call → event that aborts it."""
        self._open = asyncio.Event()
        self._open.set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, socket: str = "") -> None:
        """Listen at `socket`; if it is "", at the port that was used before, or a free one."""
        app = web.Application(middlewares=[self._instead])
        app.router.add_get("/health", self._empty)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._info)
        app.router.add_post("/collective_rpc", self._description)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/abort_requests", self._abort)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/init_weight_transfer_engine", self._empty)
        app.router.add_post("/start_weight_update", self._empty)
        app.router.add_post("/update_weights", self._update)
        app.router.add_post("/finish_weight_update", self._finish)
        app.router.add_post("/update_weight_version", self._name)
        app.router.add_post("/v1/load_lora_adapter", self._load_lora)
        app.router.add_post("/v1/unload_lora_adapter", self._unload_lora)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        if socket:
            await web.UnixSite(self._runner, socket).start()
            return
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def lose(self, how: str) -> None:
        """Act like a server whose engine has died.

        If `how` is "health", the health route says so; otherwise the server stops listening.
        """
        if how == "health":
            self.says["/health"] = (503, b"")
            return
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def restart(self) -> None:
        """Act like a server that was killed and started again: it has lost its weights."""
        await self.stop()
        self.forget()
        await self.start()

    def forget(self) -> None:
        """Lose the weights and LoRAs, as a killed process does."""
        self.label, self.updates, self.loras = "default", 0, {}
        self._open.set()

    def _refusal(self, request: web.Request) -> None:
        if request.path in self.dies:
            self.dies.remove(request.path)
            self.forget()
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPInternalServerError
        found = self.refuse.pop(request.path, None)
        if found is not None:
            status, text = found
            kind = {400: web.HTTPBadRequest, 404: web.HTTPNotFound}
            raise kind.get(status, web.HTTPInternalServerError)(text=text)

    @web.middleware
    async def _instead(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in self.says:
            answer: web.StreamResponse = await handler(request)
            return answer
        if request.path == "/health":
            self.looked.release()
        status, body = self.says[request.path]
        if status == NEVER:
            await asyncio.Event().wait()
        headers = {"Location": "/v1/models"} if status == 302 else None
        return web.Response(status=status, body=body, headers=headers)

    async def _empty(self, request: web.Request) -> web.Response:
        self._refusal(request)
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("the-name", *self.loras)]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _description(self, request: web.Request) -> web.Response:
        self._refusal(request)
        return web.json_response({"results": [self.info]})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        self._open.clear()
        self._cut(list(self.cuts))
        self.paused.set()
        return web.json_response({})

    async def _abort(self, request: web.Request) -> web.Response:
        self._cut((await request.json()).get("request_ids") or list(self.cuts))
        return web.json_response({})

    def _cut(self, names: list[str]) -> None:
        for name in names:
            if name in self.cuts:
                self.cuts[name].set()

    async def _resume(self, request: web.Request) -> web.Response:
        self._open.set()
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        self._refusal(request)
        update = (await request.json())["update_info"]
        self.loaded = {}
        if sent := update.get("sent"):
            self.sent.append(sent)
            try:
                self.loaded = await asyncio.to_thread(_received, sent)
            except RuntimeError as error:
                return web.Response(status=500, text=str(error))
        for path in update.get("files", ()):
            with safe_open(path, "np") as file:
                self.loaded |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, source in update["again"].items():
            self.loaded[name] = self.loaded[source]
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self._refusal(request)
        self.label = (await request.json())["weight_version"]
        self.updates += 1
        return web.json_response({})

    async def _name(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def _load_lora(self, request: web.Request) -> web.Response:
        self._refusal(request)
        asked = await request.json()
        folder = Path(asked["lora_path"])
        with safe_open(folder / "adapter_model.safetensors", "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads((folder / "adapter_config.json").read_text())
        self.brought.append({"config": config, "tensors": tensors})
        self.loras[asked["lora_name"]] = 50 + len(self.brought)
        return web.json_response({})

    async def _unload_lora(self, request: web.Request) -> web.Response:
        del self.loras[(await request.json())["lora_name"]]
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        name = f"cmpl-{request.headers['X-Request-Id']}-0"
        self.cuts[name] = asyncio.Event()
        try:
            return await self._answer(request, self.cuts[name])
        finally:
            del self.cuts[name]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not await request.json():
            return web.Response(status=422)
        name = f"generate-tokens-{request.headers['X-Request-Id']}"
        self.cuts[name] = asyncio.Event()
        try:
            return await self._answer(request, self.cuts[name])
        finally:
            del self.cuts[name]

    async def _answer(self, request: web.Request, cut: asyncio.Event) -> web.StreamResponse:
        self._refusal(request)
        asked = await request.json()
        self.asked.append(asked)
        self.came.set()
        prompt = asked.get("token_ids") and (self.reads or asked["token_ids"])
        most = asked.get("sampling_params", asked)["max_tokens"]
        ids: list[int] = []
        finish = "length"
        response = web.StreamResponse()
        if asked["stream"]:
            await response.prepare(request)
        while len(ids) < most:
            if await self._is_cut(cut, last=len(ids) == most - 1):
                finish = "abort"
                break
            ids.append(self.loras.get(asked["model"], 10 + self.updates))
            self.served.release()
            if asked["stream"] and len(ids) < most:
                await response.write(_event(ids[-1:], None, prompt if len(ids) == 1 else None))
        if not asked["stream"]:
            return web.json_response(body(ids, finish, prompt))
        prompt = prompt if len(ids) < 2 else None
        await response.write(_event(ids[-1:] if finish == "length" else [], finish, prompt))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _is_cut(self, its: asyncio.Event, *, last: bool) -> bool:
        """Wait until the next token may be sent; return True if the call is aborted before."""
        cut = asyncio.create_task(its.wait())
        free = asyncio.create_task(self._may_come(last))
        await asyncio.wait([cut, free], return_when=asyncio.FIRST_COMPLETED)
        was_cut = cut.done()
        cut.cancel()
        free.cancel()
        await asyncio.gather(cut, free, return_exceptions=True)
        return was_cut

    async def _may_come(self, last: bool) -> None:
        await self._open.wait()
        if last:
            await self.hold.wait()


def body(ids: list[int], finish: str | None, prompt: list[int] | None = None) -> dict[str, Any]:
    """Return a response; `prompt` has the ids of a prompt with images."""
    logprobs: dict[str, Any] = {"token_logprobs": [-0.5] * len(ids)}
    if prompt is not None:
        logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in ids]}
    choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": finish}
    return {"prompt_token_ids": prompt, "choices": [choice]}


def _event(ids: list[int], finish: str | None, prompt: list[int] | None = None) -> bytes:
    return b"data: " + json.dumps(body(ids, finish, prompt)).encode() + b"\n\n"


@asynccontextmanager
async def served(
    folder: Path,
    tmp_path: Path,
    *servers: Wire,
    ranks: Mapping[str, int] | None = None,
    timings: Mapping[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Any]:
    """Yield an engine that uses `servers`; end the engine and the servers after the block.

    Its policy is `writer` or, with LoRA, those in `ranks`.
    """
    from lightspan_vllm.config import VLLM
    from lightspan_vllm.engine import VLLMEngine
    from lightspan_vllm.timings import ServerTimings

    for server in servers:
        await server.start()
    addresses = tuple(server.address for server in servers)
    vllm = VLLM(**{"addresses": addresses, "exchange": str(tmp_path), **more})
    models = dict.fromkeys(ranks or ["writer"], folder)
    quick = ServerTimings(**{"poll_interval_s": 0.01, "dying_s": 0.1, **(timings or {})})
    engine = VLLMEngine(vllm, models, lora=ranks or {}, logs=tmp_path, timings=quick)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        for server in servers:
            await server.stop()


async def main(arguments: list[str]) -> None:
    """Serve until the process is ended.

    If WIRE_LOSES is set and the file WIRE_MARK exists, the engine dies at the next call, which is
    never answered. If WIRE_POLLED is set too, it dies only after a health check, so that the client
    has an idle connection.
    """
    flags = dict(pairwise(arguments))
    server = Wire(Path(flags["--model"]))
    complete = server._complete
    how = os.environ.get("WIRE_LOSES", "")
    mark = Path(os.environ.get("WIRE_MARK", ""))

    empty, polled = server._empty, asyncio.Event()

    async def polls(request: web.Request) -> web.Response:
        polled.set()
        return await empty(request)

    async def loses(request: web.Request) -> web.StreamResponse:
        if not mark.exists():
            return await complete(request)
        if os.environ.get("WIRE_POLLED"):
            polled.clear()
            await polled.wait()
        mark.unlink()
        response = web.StreamResponse()
        if (await request.json())["stream"]:
            await response.prepare(request)
            await response.write(_event([10 + server.updates], None))
        await server.lose(how)
        await asyncio.Event().wait()
        raise AssertionError

    if how:
        server._complete = loses  # type: ignore[method-assign]
        server._empty = polls  # type: ignore[method-assign]
    await server.start(flags["--uds"])
    print("serving", flags["--model"], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv))
