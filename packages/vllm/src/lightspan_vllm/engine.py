"""The engine: calls go to servers, new weights go to all of them.

**Log-probabilities** are of the distribution sampled from, as the embedded engine's are; under
top-p and top-k too.

**Weight updates.** A server's calls are cut, and only when none is on it are its weights replaced
and its keys and values dropped; then they go on, here or on another server, after the ids that they
have. So each token's version is that of the weights that sampled it.

**LoRA.** Policies that are LoRA beside the same weights share servers. Each version of one has a
name of its own there, so that its keys and values are never those of another; an update brings the
new one, cuts the calls of this policy alone, and gives up the former when none is on it.

**Servers that are lost** are started again, if they are ours, or waited for; they get the weights
of now before any call. Calls that were on them go on elsewhere, or afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError, EngineClosedError, EngineError, NotFoundError
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    Probe,
    ProbedEngine,
    TokenChunk,
    TokenEngine,
)
from lightspan.runners.command.process import guarding
from lightspan.runners.foreign_python import find_interpreter
from lightspan_torch.engine.lora import check_low_rank, check_ranks, is_low_rank
from lightspan_torch.engine.tokenizer import TEMPLATE_DATE, load_tokenizer
from lightspan_vllm.config import VISIBLE, VLLM
from lightspan_vllm.process import Process, command, environment
from lightspan_vllm.requirements import check_parallel, room_for
from lightspan_vllm.server_pool import TEMPERATURES, ServerPool, first_of
from lightspan_vllm.supervised_server import Server
from lightspan_vllm.weights import LoRAFiles, ServerSpec, WeightStore

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
"""No grammars: a constrained call is refused. vLLM has them, and whether its masks are those that
the learner computes with was not looked into yet."""
MAKE_VLLMS: Final = (
    "make vLLM's environment first, such as with `python3 -m venv .venv-vllm && "
    ".venv-vllm/bin/pip install vllm`, on a machine without a GPU as docs/vllm.md says, and give "
    "the path of its interpreter"
)
MAX_STEM: Final = 100
"""Characters of a log's name: a file system takes 255."""


class VLLMEngine(TokenEngine, ProbedEngine):
    """Generates with vLLM servers.

    Args:
        description: where they are, and how they are started.
        models: policy name → folder, or name on the hub.
        lora: policy name → rank of its LoRA, for policies whose updates are `LoRAWeights`; 0 for
            one whose weights never change. Those of one model share servers; every other policy has
            servers of its own, with whole weights.
        logs: a folder; what servers say is written there.
        seed: of their random generators.

    Raises:
        ConfigError: the description does not fit these policies.
        ModelError: a model is not there or cannot be read.
    """

    def __init__(
        self,
        description: VLLM,
        models: Mapping[str, Any],
        *,
        lora: Mapping[str, int] | None = None,
        logs: str | Path,
        seed: int | None = None,
    ) -> None:
        if not models:
            raise ConfigError("an engine needs at least one policy: models={'name': folder}")
        self._ranks = dict(lora or {})
        check_ranks(self._ranks, models)
        room_for(max(self._ranks.values(), default=0))
        if self._ranks and description.transfer != "files":
            raise ConfigError(
                f"VLLM: transfer={description.transfer!r} sends whole weights, and vLLM reads LoRA "
                f"from files ({', '.join(sorted(self._ranks))}): have it served merged, with "
                "merge=True, or use transfer='files'"
            )
        self.description = description
        self._logs = Path(logs).resolve()
        self._random = random.Random(seed) if seed is not None else None
        self._python = _interpreter(description.python) if description.python else ""
        blueprints = {
            policy: ServerSpec.of(
                model, dtype=description.dtype, context=description.context_length
            )
            for policy, model in models.items()
        }
        self._groups = self._grouped(blueprints)
        self._given = description.addresses_of(self._groups) if description.addresses else {}
        self._blueprints = {
            policy: self._of_group(blueprints[policy], group)
            for group in self._groups
            for policy in group
        }
        self._tokenizers: dict[str, ChatTokenizer] = {
            policy: load_tokenizer(
                blueprint.name,
                tool_parser=description.tool_parser,
                date=description.template_date or TEMPLATE_DATE,
            )
            for policy, blueprint in self._blueprints.items()
        }
        self._lanes: dict[str, ServerPool] = {}
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
        return msgspec.structs.replace(CAPABILITIES, lora=lora)

    async def start(self) -> None:
        """Start the servers, or find them, and check them.

        Raises:
            ConfigError: one is not what it has to be.
            EngineError: one does not come up.
            EngineMemoryError: there is no room for the weights where they are handed over.
        """
        if self._closed:
            raise EngineClosedError
        self._loop = asyncio.get_running_loop()
        try:
            if self.description.link is not None:
                from lightspan_vllm.broadcast import check_link

                check_link(self.description.link)
            self._exchange = WeightStore(self.description.exchange)
            for policy, blueprint in self._blueprints.items():
                self._exchange.check_room(blueprint, policy)
            launch = await self._launcher() if self._python else None
            lanes = [
                self._lane_of(group, launch, await asyncio.to_thread(self._first_lora, group))
                for group in self._groups
            ]
            self._lanes = {policy: lane for lane in lanes for policy in lane.policies}
            async with asyncio.TaskGroup() as starting:
                for lane in lanes:
                    starting.create_task(lane.start())
            self._cpu_s_of_start = self._cpu_s()
        except BaseExceptionGroup as errors:
            await self.close()
            raise first_of(errors) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        lanes, self._lanes = self._lanes, {}
        await asyncio.gather(*(lane.close() for lane in set(lanes.values())))
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
        lane = self._lane(request.policy)
        job = lane.admit(request, stream=stream)
        self._requests += 1
        async with contextlib.aclosing(lane.run(job)) as chunks:
            async for chunk in chunks:
                self._tokens += len(chunk.ids)
                yield chunk

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        self._check_policy(policy)
        lane = self._lane(policy)
        # The update goes on when the caller is cancelled: half of one would leave other weights in
        # one server than in the next.
        await asyncio.shield(asyncio.ensure_future(self._update(lane, policy, weights, version)))

    async def probes(self, policy: str) -> list[Probe]:
        self._check_policy(policy)
        return await self._lane(policy).probes(policy)

    def usage(self) -> dict[str, float]:
        """As the protocol says; the CPU time is that of servers of ours since they were there. Of
        those that somebody else keeps it is not known."""
        for lane in self._lanes.values():
            lane.check_going()
        spent = max(0.0, self._cpu_s() - self._cpu_s_of_start)
        return {"tokens": self._tokens, "requests": self._requests, "cpu_s": spent}

    def _cpu_s(self) -> float:
        return sum(lane.cpu_s for lane in set(self._lanes.values()))

    async def _update(
        self, lane: ServerPool, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        async with lane.updating:
            exchange, rank = self._exchange, self._ranks.get(policy)
            if exchange is None:
                raise EngineClosedError
            if is_low_rank(weights, policy, rank):
                check_low_rank(lane.blueprint.shapes, weights, policy, rank or 0)
                files = await asyncio.to_thread(exchange.write_lora, weights, policy, version)
                await lane.update_lora(policy, files)
            else:
                assert not isinstance(weights, LoRAWeights)
                lane.blueprint.check(weights, policy)
                written = await asyncio.to_thread(
                    exchange.write, lane.blueprint, weights, policy, version
                )
                await lane.update(written)
            self._versions[policy] = version

    # --- who shares servers ---------------------------------------------------------------
    def _grouped(self, blueprints: Mapping[str, ServerSpec]) -> list[tuple[str, ...]]:
        """Policies by their servers: one each, but those with LoRA beside the same model, unless
        they were given different addresses."""
        given = self.description.addresses
        groups: dict[Any, list[str]] = {}
        for policy, blueprint in blueprints.items():
            addresses = given.get(policy) if isinstance(given, dict) else None
            shared = (blueprint.folder, addresses) if policy in self._ranks else policy
            groups.setdefault(shared, []).append(policy)
        return [tuple(group) for group in groups.values()]

    def _of_group(self, blueprint: ServerSpec, group: Sequence[str]) -> ServerSpec:
        highest = max(self._ranks.get(policy, 0) for policy in group)
        found = replace(blueprint, lora_rank=highest, loras=len(group) if highest else 0)
        description = self.description
        by_nccl = description.transfer == "nccl"
        if not description.python:
            return replace(found, on_gpu=by_nccl)
        shared = description.tensor_parallel
        on_gpu = by_nccl or bool(description.environment.get(VISIBLE))
        found = replace(found, tensor_parallel=shared, on_gpu=on_gpu)
        check_parallel(found)
        return found

    # --- servers --------------------------------------------------------------------------
    async def _launcher(self) -> Callable[[str, Path], tuple[Process, str]]:
        """What starts servers. They end with this process, or when the engine is closed."""
        watchdog = await self._stack.enter_async_context(guarding())
        self._logs.mkdir(parents=True, exist_ok=True)
        env = environment(self.description)

        def launch(policy: str, log_file: Path) -> tuple[Process, str]:
            self._started += 1
            # in a folder that nobody else can enter, and that goes with the watchdog
            socket = watchdog.folder / f"vllm-{self._started}-{id(self):x}.sock"
            # another stream of random numbers after each start, or answers would come again
            seed = None if self._random is None else self._random.randrange(2**31)
            arguments = command(
                self.description, self._python, self._blueprints[policy], socket, seed=seed
            )
            process = Process(arguments, env, log_file, socket=socket, watchdog=watchdog)
            return process, str(socket)

        return launch

    def _first_lora(self, group: tuple[str, ...]) -> dict[str, LoRAFiles]:
        """What policies begin with that are LoRA: nothing beside the model's own weights."""
        blueprint = self._blueprints[group[0]]
        if not blueprint.lora_rank:
            return {}
        assert self._exchange is not None
        nothing = blueprint.nothing()
        return {policy: self._exchange.write_lora(nothing, policy, 0) for policy in group}

    def _lane_of(
        self,
        group: tuple[str, ...],
        launch: Callable[[str, Path], tuple[Process, str]] | None,
        lora: Mapping[str, LoRAFiles],
    ) -> ServerPool:
        first = group[0]
        lane = ServerPool(group, self._blueprints[first], self._tokenizers[first], lora)
        stem = "+".join(map(_as_file, group))[:MAX_STEM]
        for number, address in enumerate(self._addresses(first)):
            name = f"the vLLM server {number} of {lane.name}"
            log_file = self._logs / f"vllm-{stem}-{number}.log"
            start = None if launch is None else (lambda file=log_file: launch(first, file))
            lane.add(
                Server(
                    name,
                    lane.blueprint,
                    lambda: lane.wanted,
                    start_s=self.description.start_s,
                    launch=start,
                    address=address,
                    died=lane.lost,
                    link=self.description.link,
                )
            )
        return lane

    def _addresses(self, policy: str) -> tuple[str, ...]:
        return self._given.get(policy) or ("",) * self.description.servers

    # --- checks ---------------------------------------------------------------------------
    def _check_policy(self, policy: str) -> None:
        if policy not in self._blueprints:
            policies = ", ".join(sorted(self._blueprints))
            raise NotFoundError(f"the engine has no policy {policy!r}; it has: {policies}")

    def _lane(self, policy: str) -> ServerPool:
        if self._closed:
            raise EngineClosedError
        if self._loop is None:
            raise EngineError("the engine is not started: `await engine.start()`")
        if self._loop is not asyncio.get_running_loop():
            raise EngineError("the engine belongs to another event loop, the one that started it")
        return self._lanes[policy]


def _interpreter(python: str) -> str:
    return find_interpreter(python, option="VLLM: python", hint=MAKE_VLLMS)


def _as_file(policy: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in policy)
