"""The vLLM engine: routes calls to servers and sends new weights to all of them.

**Log-probabilities** are those of the distribution from which tokens are sampled, after top-p and
top-k.

**Weight updates.** A server's calls are aborted. When it has no call left, its weights are replaced
and its cached keys and values are dropped. Then the calls resume with the tokens that they have
sampled so far, on this or another server. So each token is sampled by one version of the weights,
which is recorded with it.

**LoRA.** LoRA policies of one model share servers. Each version of a policy has a unique name on
the servers, so that its keys and values are never used for another version. An update loads the new
version and aborts the calls of this policy. When they have ended, it unloads the former version.
Calls of other policies continue.

**Images** are prepared here, and sent with the ids of the prompt. The ids that the server reports
to have used are compared with them. Each submission of a call sends its images again.

**Lost servers.** A server that the engine started is restarted. For a server that the user started,
the engine waits. A server that is back gets the current weights before any call. Calls of a lost
server resume on other servers, or when the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError, EngineClosedError, EngineError, NotFoundError
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    ProbedEngine,
    Score,
    TokenChunk,
    TokenEngine,
)
from lightspan.runners.foreign_python import find_interpreter
from lightspan_programs.process import guarding
from lightspan_torch.engine.lora import check_low_rank, check_ranks, is_low_rank
from lightspan_torch.engine.tokenizer import TEMPLATE_DATE, load_tokenizer
from lightspan_torch.vision.tokenizer import VisionTokenizer
from lightspan_vllm.config import VISIBLE, VLLM
from lightspan_vllm.images import SERVED
from lightspan_vllm.process import Process, command, environment
from lightspan_vllm.requirements import check_parallel, max_lora_rank
from lightspan_vllm.server_pool import TEMPERATURES, ServerPool, first_of
from lightspan_vllm.supervised_server import Server
from lightspan_vllm.timings import ServerTimings
from lightspan_vllm.weight_sync_check import Probe, check_probes
from lightspan_vllm.weights import LoRAFiles, ServerSpec, WeightStore

log = logging.getLogger(__name__)

CAPABILITIES: Final = EngineCapabilities(
    exact_tokens=True,
    stop_strings=True,
    top_p=True,
    top_k=True,
    seed=False,
    temperatures=TEMPERATURES,
    in_place_update=True,
    trainable_truncation=True,
)
"""Calls with a grammar are refused: vLLM has grammars, but it is not verified that it masks the
same tokens as the learner."""
INSTALL_HINT: Final = (
    "make vLLM's environment first, such as with `python3 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm`, on a machine without a GPU as docs/guides/vllm.md says, and "
    "give the path of its interpreter"
)
MAX_STEM: Final = 100
"""Maximum length of the part of a log's file name that names policies; file systems allow 255
bytes."""


class VLLMEngine(TokenEngine, ProbedEngine):
    """A token engine that generates with vLLM servers.

    Args:
        settings: the servers' addresses, or how to start them.
        models: policy name → folder, or name on the hub.
        lora: policy name → LoRA rank, for policies whose updates are `LoRAWeights`; 0 for a policy
            whose weights never change. LoRA policies of one model share servers; every other policy
            has its own servers, with whole weights.
        logs: folder of the servers' logs.
        seed: seed of the servers' random generators; None for vLLM's default.
        timings: timeouts and limits; None for the defaults of `ServerTimings`.

    Raises:
        ConfigError: the settings do not fit the policies.
        ModelError: a model does not exist or cannot be read.
    """

    def __init__(
        self,
        settings: VLLM,
        models: Mapping[str, Any],
        *,
        lora: Mapping[str, int] | None = None,
        logs: str | Path,
        seed: int | None = None,
        timings: ServerTimings | None = None,
    ) -> None:
        if not models:
            raise ConfigError("an engine needs at least one policy: models={'name': folder}")
        self._ranks = dict(lora or {})
        check_ranks(self._ranks, models)
        max_lora_rank(max(self._ranks.values(), default=0))
        if self._ranks and settings.transfer != "files":
            raise ConfigError(
                f"VLLM: transfer={settings.transfer!r} sends whole weights, but vLLM reads LoRA "
                f"from files ({', '.join(sorted(self._ranks))}): have it served merged, with "
                "merge=True, or use transfer='files'"
            )
        self.settings = settings
        self._timings = timings
        self._logs = Path(logs).resolve()
        self._random = random.Random(seed) if seed is not None else None
        self._python = ""
        if settings.python:
            self._python = find_interpreter(
                settings.python, option="VLLM: python", hint=INSTALL_HINT
            )
        specs = {
            policy: ServerSpec.of(model, dtype=settings.dtype, context=settings.context_length)
            for policy, model in models.items()
        }
        self._groups = self._grouped(specs)
        self._addresses = settings.addresses_of(self._groups) if settings.addresses else {}
        self._specs = {
            policy: self._group_spec(specs[policy], group)
            for group in self._groups
            for policy in group
        }
        self._tokenizers: dict[str, ChatTokenizer] = {
            policy: load_tokenizer(
                spec.name,
                tool_parser=settings.tool_parser,
                date=settings.template_date or TEMPLATE_DATE,
            )
            for policy, spec in self._specs.items()
        }
        self._no_images = {
            policy: _no_images(spec, self._tokenizers[policy])
            for policy, spec in self._specs.items()
        }
        self._pools: dict[str, ServerPool] = {}
        self._versions = dict.fromkeys(models, 0)
        self._stack = AsyncExitStack()
        self._exchange: WeightStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._started = 0
        self._requests = 0
        self._tokens = 0
        self._cpu_s_of_start = 0.0

    @property
    def capabilities(self) -> EngineCapabilities:
        lora = tuple(policy for policy, rank in self._ranks.items() if rank)
        images = tuple(policy for policy, reason in self._no_images.items() if not reason)
        return msgspec.structs.replace(CAPABILITIES, lora=lora, images=images)

    async def start(self) -> None:
        """Start the servers, or connect to them, and check that they can be used.

        Raises:
            ConfigError: a server does not meet its requirements.
            EngineClosedError: the engine was closed.
            EngineError: a server does not become ready.
            EngineMemoryError: the weights do not fit into the `exchange` folder.
        """
        if self._closed:
            raise EngineClosedError
        self._loop = asyncio.get_running_loop()
        try:
            if self.settings.link is not None:
                from lightspan_vllm.broadcast import check_link

                check_link(self.settings.link)
            self._exchange = WeightStore(self.settings.exchange)
            for policy, spec in self._specs.items():
                self._exchange.check_room(spec, policy)
            launch = await self._launcher() if self._python else None
            pools = [
                self._make_pool(group, launch, await asyncio.to_thread(self._first_lora, group))
                for group in self._groups
            ]
            self._pools = {policy: pool for pool in pools for policy in pool.policies}
            async with asyncio.TaskGroup() as starting:
                for pool in pools:
                    starting.create_task(pool.start())
            self._cpu_s_of_start = self._cpu_s()
        except BaseExceptionGroup as errors:
            await self.close()
            raise first_of(errors) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        pools, self._pools = self._pools, {}
        await asyncio.gather(*(pool.close() for pool in set(pools.values())))
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await asyncio.to_thread(exchange.close)
        await self._stack.aclose()

    def policies(self) -> dict[str, int]:
        return dict(self._versions)

    def tokenizer(self, policy: str) -> ChatTokenizer:
        self._check_policy(policy)
        return self._tokenizers[policy]

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        self._check_policy(request.policy)
        pool = self._pool(request.policy)
        job = pool.admit(request, stream=stream)
        self._requests += 1
        async with contextlib.aclosing(pool.run(job)) as chunks:
            async for chunk in chunks:
                self._tokens += len(chunk.ids)
                yield chunk

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        self._check_policy(policy)
        pool = self._pool(policy)
        # half an update would leave servers with different weights, so it continues if the caller
        # is cancelled
        await asyncio.shield(asyncio.ensure_future(self._update(pool, policy, weights, version)))

    async def probes(self, policy: str) -> list[Probe]:
        """Answer recent prompts with the current weights on each server of the policy.

        Raises:
            EngineError: a server failed.
            NotFoundError: the policy is unknown.
        """
        self._check_policy(policy)
        return await self._pool(policy).probes(policy)

    async def check_weights(self, policy: str, version: int, score: Score) -> None:
        await check_probes(await self.probes(policy), policy, version, score)

    def usage(self) -> dict[str, float]:
        """Return the usage as `TokenEngine.usage` describes.

        The CPU time is that of the servers that the engine started, since they were ready. The CPU
        time of servers at `addresses=` is unknown, and counted as 0.
        """
        for pool in self._pools.values():
            pool.check_running()
        spent = max(0.0, self._cpu_s() - self._cpu_s_of_start)
        return {"tokens": self._tokens, "requests": self._requests, "cpu_s": spent}

    def _cpu_s(self) -> float:
        return sum(pool.cpu_s for pool in set(self._pools.values()))

    async def _update(
        self, pool: ServerPool, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        async with pool.updating:
            exchange, rank = self._exchange, self._ranks.get(policy)
            if exchange is None:
                raise EngineClosedError
            if is_low_rank(weights, policy, rank):
                check_low_rank(pool.spec.shapes, weights, policy, rank or 0)
                pool.spec.check_lora(weights, policy)
                files = await asyncio.to_thread(exchange.write_lora, weights, policy, version)
                await pool.update_lora(policy, files)
            else:
                assert not isinstance(weights, LoRAWeights)
                pool.spec.check(weights, policy)
                written = await asyncio.to_thread(
                    exchange.write, pool.spec, weights, policy, version
                )
                await pool.update(written)
            self._versions[policy] = version

    # --- groups of policies that share servers --------------------------------------------
    def _grouped(self, specs: Mapping[str, ServerSpec]) -> list[tuple[str, ...]]:
        """Group the policies that share servers.

        LoRA policies share servers if they have the same model and addresses. Every other policy is
        a group of its own.
        """
        by_policy = self.settings.addresses
        groups: dict[Any, list[str]] = {}
        for policy, spec in specs.items():
            addresses = by_policy.get(policy) if isinstance(by_policy, dict) else None
            key = (spec.folder, addresses) if policy in self._ranks else policy
            groups.setdefault(key, []).append(policy)
        return [tuple(group) for group in groups.values()]

    def _group_spec(self, spec: ServerSpec, group: Sequence[str]) -> ServerSpec:
        settings = self.settings
        rank = max(self._ranks.get(policy, 0) for policy in group)
        is_local = bool(settings.python)
        names_gpus = is_local and bool(settings.environment.get(VISIBLE))
        spec = replace(
            spec,
            lora_rank=rank,
            loras=len(group) if rank else 0,
            tensor_parallel=settings.tensor_parallel if is_local else None,
            on_gpu=settings.transfer == "nccl" or names_gpus,
        )
        check_parallel(spec)
        return spec

    # --- servers --------------------------------------------------------------------------
    async def _launcher(self) -> Callable[[str, Path], tuple[Process, str]]:
        """Return a function that starts a server for a policy.

        Its arguments are the policy and the server's log file. It returns the process and the path
        of the server's socket. The servers end when this process ends or the engine is closed.
        """
        watchdog = await self._stack.enter_async_context(guarding())
        self._logs.mkdir(parents=True, exist_ok=True)
        env = environment(self.settings)

        def launch(policy: str, log_file: Path) -> tuple[Process, str]:
            self._started += 1
            # in the watchdog's private folder, which is removed with it
            socket = watchdog.folder / f"vllm-{self._started}-{id(self):x}.sock"
            # the same seed after a restart would repeat answers
            seed = None if self._random is None else self._random.randrange(2**31)
            arguments = command(self.settings, self._python, self._specs[policy], socket, seed=seed)
            process = Process(arguments, env, log_file, socket=socket, watchdog=watchdog)
            return process, str(socket)

        return launch

    def _first_lora(self, group: tuple[str, ...]) -> dict[str, LoRAFiles]:
        """Write the LoRA with which each policy of a group starts; return policy → its files.

        This LoRA does not change the model's output. For policies with whole weights, return {}.
        """
        spec = self._specs[group[0]]
        if not spec.lora_rank:
            return {}
        assert self._exchange is not None
        zero = spec.zero_lora()
        return {policy: self._exchange.write_lora(zero, policy, 0) for policy in group}

    def _make_pool(
        self,
        group: tuple[str, ...],
        launch: Callable[[str, Path], tuple[Process, str]] | None,
        lora: Mapping[str, LoRAFiles],
    ) -> ServerPool:
        first = group[0]
        pool = ServerPool(
            group, self._specs[first], self._tokenizers[first], lora, self._no_images[first]
        )
        stem = re.sub(r"[^\w+]|_", "-", "+".join(group))[:MAX_STEM]
        addresses = self._addresses.get(first) or ("",) * self.settings.servers
        for number, address in enumerate(addresses):
            log_file = self._logs / f"vllm-{stem}-{number}.log"
            server = Server(
                f"the vLLM server {number} of {pool.name}",
                pool.spec,
                lambda: pool.target,
                start_s=self.settings.start_s,
                launch=None if launch is None else partial(launch, first, log_file),
                address=address,
                on_loss=pool.recover,
                link=self.settings.link,
                timings=self._timings,
            )
            pool.servers.append(server)
        return pool

    # --- checks ---------------------------------------------------------------------------
    def _check_policy(self, policy: str) -> None:
        if policy not in self._specs:
            policies = ", ".join(sorted(self._specs))
            raise NotFoundError(f"the engine has no policy {policy!r}; it has: {policies}")

    def _pool(self, policy: str) -> ServerPool:
        if self._closed:
            raise EngineClosedError
        if self._loop is None:
            raise EngineError("the engine is not started: `await engine.start()`")
        if self._loop is not asyncio.get_running_loop():
            raise EngineError("the engine belongs to another event loop, the one that started it")
        return self._pools[policy]


def _no_images(spec: ServerSpec, tokenizer: ChatTokenizer) -> str:
    """Return why a policy takes no images; "" if it takes some. Log it for a vision model."""
    if not isinstance(tokenizer, VisionTokenizer):
        return "its model does not see, or its image processor cannot be loaded (see the log)"
    if not spec.family:
        reason = f"with vLLM, images are taken by models of the types {', '.join(sorted(SERVED))}"
        log.warning("images are refused for %s: %s", spec.name, reason)
        return reason
    return ""
