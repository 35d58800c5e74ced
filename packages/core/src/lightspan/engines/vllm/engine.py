"""The engine: calls go to servers, new weights go to all of them.

**Log-probabilities** are of the distribution sampled from, as the embedded engine's are; under
top-p and top-k too.

**Weight updates.** A server's calls are cut, and only when none is on it are its weights replaced
and its keys and values dropped; then they go on, here or on another server, after the ids that they
have. So each token's version is that of the weights that sampled it.

**Servers that are lost** are started again, if they are ours, or waited for; they get the weights
of now before any call. Calls that were on them go on elsewhere, or afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from lightspan.engines.protocol import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    Probe,
    ProbedEngine,
    PromptRefused,
    TokenChunk,
    TokenEngine,
)
from lightspan.engines.tokenizer import TEMPLATE_DATE, load_tokenizer
from lightspan.engines.vllm.balance import Balance
from lightspan.engines.vllm.client import Part, Unreachable
from lightspan.engines.vllm.description import VLLM
from lightspan.engines.vllm.jobs import Job
from lightspan.engines.vllm.process import Process, command, environment
from lightspan.engines.vllm.servers import Server
from lightspan.engines.vllm.weights import Blueprint, Exchange, Weights
from lightspan.errors import (
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    LightspanError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.runners.command.process import guarding
from lightspan.runners.interpreters import find_interpreter
from lightspan.schema.tokens import Sampling

log = logging.getLogger(__name__)

CAPABILITIES: Final = EngineCapabilities(
    exact_tokens=True,
    stop_strings=True,
    top_p=True,
    top_k=True,
    seed=False,
    in_place_update=True,
    trainable_truncation=True,
)
"""No grammars: a constrained call is refused. vLLM has them, and whether its masks are those that
the learner computes with was not looked into yet."""
TRIES: Final = 4
"""Submissions of one call in a row that brought no token and ended with an error."""
MIN_TEMPERATURE: Final = 0.01
MAX_TEMPERATURE: Final = 2.0
"""vLLM's own. What is above 0 and below the least it takes for the least, without a word."""
PROBES: Final = 4
PROBE_TOKENS: Final = 8
PROBE_LENGTH: Final = 2048
"""The longest prompt that is answered for a probe, in tokens."""
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Between the log-probabilities of a server and the learner, on average over a probe's tokens, by
the type that the server computes with."""


class VLLMEngine(TokenEngine, ProbedEngine):
    """Generates with vLLM servers.

    Args:
        description: where they are, and how they are started.
        models: policy name → folder, or name on the hub.
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
        logs: str | Path,
        seed: int | None = None,
    ) -> None:
        if not models:
            raise ConfigError("an engine needs at least one policy: models={'name': folder}")
        self.description = description
        self._logs = Path(logs).resolve()
        self._random = random.Random(seed) if seed is not None else None
        self._python = find_interpreter(description.python) if description.python else ""
        self._given = description.addresses_of(models) if description.addresses else {}
        self._blueprints = {
            policy: Blueprint.of(model, dtype=description.dtype, context=description.context_length)
            for policy, model in models.items()
        }
        self._tokenizers: dict[str, ChatTokenizer] = {
            policy: load_tokenizer(
                blueprint.name,
                tool_parser=description.tool_parser,
                date=description.template_date or TEMPLATE_DATE,
            )
            for policy, blueprint in self._blueprints.items()
        }
        self._lanes: dict[str, _Lane] = {}
        self._versions = dict.fromkeys(models, 0)
        self._stack = AsyncExitStack()
        self._exchange: Exchange | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._started = 0
        self._requests = 0
        self._tokens = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return CAPABILITIES

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
            self._exchange = Exchange(self.description.exchange)
            for policy, blueprint in self._blueprints.items():
                self._exchange.check_room(blueprint, policy)
            launch = await self._launcher() if self._python else None
            for policy in self._blueprints:
                self._lanes[policy] = self._lane_of(policy, launch)
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes.values():
                    group.create_task(lane.start())
        except BaseExceptionGroup as errors:
            await self.close()
            raise _first(errors) from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        lanes, self._lanes = self._lanes, {}
        await asyncio.gather(*(lane.close() for lane in lanes.values()))
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

    async def update(self, policy: str, weights: Mapping[str, Any], version: int) -> None:
        self._check_policy(policy)
        lane = self._lane(policy)
        # The update goes on when the caller is cancelled: half of one would leave other weights in
        # one server than in the next.
        await asyncio.shield(asyncio.ensure_future(self._update(lane, weights, version)))

    async def probes(self, policy: str) -> list[Probe]:
        self._check_policy(policy)
        return await self._lane(policy).probes()

    def usage(self) -> dict[str, float]:
        """As the protocol says; the CPU time of servers is not known."""
        for lane in self._lanes.values():
            lane.check_going()
        return {"tokens": self._tokens, "requests": self._requests, "cpu_s": 0.0}

    async def _update(self, lane: _Lane, weights: Mapping[str, Any], version: int) -> None:
        async with lane.updating:
            lane.blueprint.check(weights, lane.policy)
            if self._exchange is None:
                raise EngineClosedError
            written = await asyncio.to_thread(
                self._exchange.write, lane.blueprint, weights, lane.policy, version
            )
            await lane.update(written)
            self._versions[lane.policy] = version

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
            return Process(arguments, env, log_file, watchdog), str(socket)

        return launch

    def _lane_of(
        self, policy: str, launch: Callable[[str, Path], tuple[Process, str]] | None
    ) -> _Lane:
        lane = _Lane(policy, self._blueprints[policy], self._tokenizers[policy])
        for number, address in enumerate(self._addresses(policy)):
            name = f"the vLLM server {number} of policy {policy}"
            log_file = self._logs / f"vllm-{_as_file(policy)}-{number}.log"
            start = None if launch is None else (lambda file=log_file: launch(policy, file))
            lane.add(
                Server(
                    name,
                    lane.blueprint,
                    lambda: lane.weights,
                    start_s=self.description.start_s,
                    launch=start,
                    address=address,
                    died=lane.lost,
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

    def _lane(self, policy: str) -> _Lane:
        if self._closed:
            raise EngineClosedError
        if self._loop is None:
            raise EngineError("the engine is not started: `await engine.start()`")
        if self._loop is not asyncio.get_running_loop():
            raise EngineError("the engine belongs to another event loop, the one that started it")
        return self._lanes[policy]


class _Lane:
    """One policy, with its servers and what was asked of them."""

    def __init__(self, policy: str, blueprint: Blueprint, tokenizer: ChatTokenizer) -> None:
        self.policy = policy
        self.blueprint = blueprint
        self.tokenizer = tokenizer
        self.weights = blueprint.as_saved(0)
        self.updating = asyncio.Lock()
        self._context = min(blueprint.context, tokenizer.context_length)
        self._servers: list[Server] = []
        self._balance: Balance[Server] = Balance()
        self._recent: deque[list[int]] = deque(maxlen=PROBES)
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None
        self._recovering: dict[Server, asyncio.Task[None]] = {}
        self._reading: set[asyncio.Task[None]] = set()

    def add(self, server: Server) -> None:
        """One more."""
        self._servers.append(server)

    async def start(self) -> None:
        """Have every server serve.

        Raises:
            ConfigError, EngineError: see `Server.serve`.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(self._serve(server))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        self._wake()

    async def _serve(self, server: Server) -> None:
        try:
            await server.serve()
        except EngineClosedError:
            if server in self._servers:
                raise  # else it was given up meanwhile, and others serve

    async def close(self) -> None:
        """End everything: who waits gets `EngineClosedError`."""
        self._fail(EngineClosedError())
        tasks = [*self._recovering.values(), *self._reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._servers))
        self.weights.remove()

    def check_going(self) -> None:
        """Raise what ended it, unless it was closed."""
        if self._failure is not None and not isinstance(self._failure, EngineClosedError):
            raise _another(self._failure) from self._failure

    # --- calls ----------------------------------------------------------------------------
    def admit(self, request: GenerationRequest, *, stream: bool) -> Job:
        """Check a request.

        Raises:
            ContextOverflowError, PromptRefused, UnsupportedError, EngineError
        """
        prompt = request.prompt_ids
        if request.grammar:
            raise UnsupportedError("the vLLM engine holds no answer to a grammar")
        if not prompt:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if len(prompt) + 1 > self._context:
            raise ContextOverflowError(
                f"the prompt has {len(prompt)} tokens; the context of policy {self.policy} holds "
                f"{self._context}, one for the answer included (the model's context, or less by "
                "VLLM(context_length=…))"
            )
        if min(prompt) < 0 or max(prompt) >= self.blueprint.vocabulary:
            raise PromptRefused(
                f"prompt ids must be from 0 to {self.blueprint.vocabulary - 1}; got {min(prompt)} "
                f"to {max(prompt)}"
            )
        _check_sampling(request.sampling)
        room = self._context - len(prompt)
        limit = min(request.sampling.max_tokens or room, room)
        if len(prompt) <= min(PROBE_LENGTH, self._context - PROBE_TOKENS):
            self._recent.append(prompt)
        return Job(request, self.tokenizer, limit=limit, stream=stream)

    async def run(self, job: Job) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of a call, over as many submissions as it takes."""
        while True:
            server = await self._server(job)
            try:
                parts = server.complete(
                    job.prompt,
                    job.request.sampling,
                    max_tokens=job.remaining,
                    eos_ids=sorted(self.tokenizer.eos_ids),
                    stream=job.streams,
                )
                async with contextlib.aclosing(self._follow(parts)) as followed:
                    async for part in followed:
                        chunk = job.take(part)
                        if chunk.ids or chunk.finish_reason is not None:
                            yield chunk
                        if chunk.finish_reason is not None:
                            server.deaths = 0
                            return
            except Unreachable as error:
                self._check_open()
                self._count_try(job, error)
                self.lost(server)
            else:
                if server.ready:  # no update cut it
                    self._count_try(job, EngineError(f"{server.name} ended it without an answer"))

    def _count_try(self, job: Job, error: EngineError) -> None:
        """Raise `EngineError` if that was once too often."""
        job.tries += 1
        if job.tries >= TRIES:
            raise EngineError(
                f"a call of policy {self.policy} was tried {TRIES} times: {error}"
            ) from error

    async def _follow(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Part, None]:
        """The parts, until the lane is closed: a connection that is closed here tells its reader
        nothing."""
        arrived: asyncio.Queue[Part | Exception | None] = asyncio.Queue()
        task = asyncio.create_task(_read(parts, arrived))
        self._reading.add(task)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._reading.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _server(self, job: Job) -> Server:
        """A server that can be used, when there is one.

        Raises:
            EngineClosedError, EngineError: there will be none.
        """
        while True:
            self._check_open()
            loads = {server: server.load for server in self._servers if server.ready}
            if loads:
                return self._balance.choose(job.request.rollout, loads)
            self._changed.clear()
            await self._changed.wait()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise _another(self._failure) from self._failure

    # --- servers --------------------------------------------------------------------------
    async def update(self, weights: Weights) -> None:
        """Replace the weights of every server.

        Raises:
            EngineError: one of them cannot; then the policy is over.
        """
        former, self.weights = self.weights, weights
        try:
            await self.start()
        except LightspanError as error:
            self._fail(EngineError(f"an update of policy {self.policy} failed: {error}"))
            raise
        finally:
            former.remove()

    def lost(self, server: Server) -> None:
        """A call could not reach a server, or its process ended: have it come back."""
        if self._failure is not None or server in self._recovering:
            return
        server.ready = False
        task = asyncio.create_task(self._recover(server))
        self._recovering[server] = task

    async def _recover(self, server: Server) -> None:
        log.warning("%s is lost; it has to come back", server.name)
        try:
            await server.serve()
        except LightspanError as error:
            log.error("%s", error)
            others = [each for each in self._servers if each is not server]
            if any(each.ready or each in self._recovering for each in others):
                self._servers.remove(server)  # no update waits for it
                await server.close()
            else:
                self._fail(error if isinstance(error, EngineError) else EngineError(str(error)))
        finally:
            del self._recovering[server]
            self._wake()

    def _fail(self, error: EngineError) -> None:
        if self._failure is None:
            self._failure = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    # --- probes ---------------------------------------------------------------------------
    async def probes(self) -> list[Probe]:
        """Prompts of late calls, answered anew by every server."""
        greeting = self.tokenizer.render([{"role": "user", "content": "Hello"}])
        prompts = list(self._recent) or [greeting[: self._context - PROBE_TOKENS]]
        return [await self._probe(server, prompt) for server in self._servers for prompt in prompts]

    async def _probe(self, server: Server, prompt: list[int]) -> Probe:
        for _ in range(TRIES):
            with contextlib.suppress(Unreachable):
                parts = await self._answers(server, prompt)
                if parts:
                    return Probe(
                        where=server.name,
                        version=parts[0].version,
                        prompt_ids=prompt,
                        ids=parts[0].ids,
                        logprobs=parts[0].logprobs,
                        tolerance=TOLERANCE[self.blueprint.dtype],
                    )
            self.lost(server)
            await asyncio.gather(*filter(None, [self._recovering.get(server)]))
            self._check_open()
        raise EngineError(f"{server.name} does not answer after an update")

    async def _answers(self, server: Server, prompt: list[int]) -> list[Part]:
        parts = server.complete(
            prompt, Sampling(), max_tokens=PROBE_TOKENS, eos_ids=(), stream=False
        )
        async with contextlib.aclosing(self._follow(parts)) as followed:
            return [part async for part in followed]


async def _read(
    parts: AsyncIterator[Part], arrived: asyncio.Queue[Part | Exception | None]
) -> None:
    """Pass on what comes, and last how it ended."""
    try:
        async with contextlib.aclosing(parts):  # type: ignore[type-var]
            async for part in parts:
                arrived.put_nowait(part)
        arrived.put_nowait(None)
    except asyncio.CancelledError:
        arrived.put_nowait(EngineClosedError())
        raise
    except Exception as error:
        arrived.put_nowait(error)


def _check_sampling(sampling: Sampling) -> None:
    limits = {
        "temperature": sampling.temperature == 0
        or MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
    }
    for name, fine in limits.items():
        if not fine:
            raise UnsupportedError(
                f"{name}={getattr(sampling, name)} cannot be sampled with (vLLM's temperature is "
                f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g})"
            )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What several tasks failed with, as one error."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _another(error: EngineError) -> EngineError:
    """The error once more: several callers raise it, and each adds its own traceback to its own."""
    return type(error)(str(error))


def _as_file(policy: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in policy)
