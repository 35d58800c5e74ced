"""The calls of policies that share servers: where each goes, and what becomes of those that an
update or a server's death cuts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Final

from lightspan.errors import (
    ContextOverflowError,
    EngineClosedError,
    EngineError,
    LightspanError,
    UnsupportedError,
)
from lightspan.protocols.engine import (
    ChatTokenizer,
    GenerationRequest,
    Probe,
    PromptRefused,
    TokenChunk,
)
from lightspan.schema.token_records import Sampling
from lightspan_vllm.client import Chunk, Unreachable
from lightspan_vllm.load_balancer import Balance
from lightspan_vllm.request import Job
from lightspan_vllm.supervised_server import Server
from lightspan_vllm.weights import LoRAFiles, ServerSpec, TargetWeights, Weights

log = logging.getLogger(__name__)

TRIES: Final = 4
"""Submissions of one call in a row that brought no token and ended with an error."""
TEMPERATURES: Final = (0.01, 2.0)
"""vLLM's own. What is above 0 and below the least it takes for the least, without a word."""
PROBES: Final = 4
PROBE_TOKENS: Final = 8
PROBE_LENGTH: Final = 2048
"""The longest prompt that is answered for a probe, in tokens."""
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Between the log-probabilities of a server and the learner, on average over a probe's tokens, by
the type that the server computes with."""


class ServerPool:
    """The servers of one policy, or of several that are LoRA beside the same weights, and what was
    asked of them.

    Args:
        policies: their names.
        blueprint: what the servers are.
        tokenizer: of the model.
        lora: what they begin with, if they are LoRA.
    """

    def __init__(
        self,
        policies: Sequence[str],
        blueprint: ServerSpec,
        tokenizer: ChatTokenizer,
        lora: Mapping[str, LoRAFiles],
    ) -> None:
        self.policies = tuple(policies)
        self.name = f"polic{'y' if len(policies) == 1 else 'ies'} {', '.join(policies)}"
        """For a person."""
        self.blueprint = blueprint
        self.tokenizer = tokenizer
        self.wanted = TargetWeights(blueprint.as_saved(0), lora)
        self.updating = asyncio.Lock()
        self._context = min(blueprint.context, tokenizer.context_length)
        self._servers: list[Server] = []
        self._gone_cpu_s = 0.0
        self._balance: Balance[Server] = Balance()
        self._recent: dict[str, deque[list[int]]] = {
            policy: deque(maxlen=PROBES) for policy in policies
        }
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
            raise first_of(errors) from None
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
        self.wanted.weights.remove()
        for files in self.wanted.lora.values():
            files.remove()

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the servers of ours."""
        return self._gone_cpu_s + sum(server.cpu_s for server in self._servers)

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
                f"the prompt has {len(prompt)} tokens; the context of policy {request.policy} "
                f"holds {self._context}, one for the answer included (the model's context, or less "
                "by VLLM(context_length=…))"
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
            self._recent[request.policy].append(prompt)
        return Job(request, self.tokenizer, limit=limit, stream=stream)

    async def run(self, job: Job) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of a call, over as many submissions as it takes."""
        while True:
            server = await self._server(job)
            changes = server.changes
            try:
                parts = server.complete(
                    job.request.policy,
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
                self.lost(server, error)
            else:
                if server.ready and server.changes == changes:  # no update cut it
                    self._count_try(job, EngineError(f"{server.name} ended it without an answer"))

    def _count_try(self, job: Job, error: EngineError) -> None:
        """Raise `EngineError` if that was once too often."""
        job.tries += 1
        if job.tries >= TRIES:
            raise EngineError(
                f"a call of policy {job.request.policy} was tried {TRIES} times: {error}"
            ) from error

    async def _follow(self, parts: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
        """The parts, until the lane is closed: a connection that is closed here tells its reader
        nothing."""
        arrived: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
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
        former, self.wanted = self.wanted, TargetWeights(weights)
        try:
            await self._spread()
        finally:
            former.weights.remove()

    async def update_lora(self, policy: str, files: LoRAFiles) -> None:
        """Replace the LoRA of one policy in every server.

        Raises:
            EngineError: one of them cannot; then all that they serve is over.
        """
        former = self.wanted.lora[policy]
        self.wanted = self.wanted._replace(lora={**self.wanted.lora, policy: files})
        try:
            await self._spread()
        finally:
            former.remove()

    async def _spread(self) -> None:
        try:
            await self.start()
        except Exception as error:  # whatever it is, calls wait for these servers
            self._fail(EngineError(f"an update of {self.name} failed: {_said(error)}"))
            raise

    def lost(self, server: Server, why: Exception | None = None) -> None:
        """A call could not reach a server, or its process ended: have it come back."""
        if self._failure is not None or server in self._recovering:
            return
        server.ready = False
        task = asyncio.create_task(self._recover(server, why))
        self._recovering[server] = task

    async def _recover(self, server: Server, why: Exception | None) -> None:
        because = "" if why is None else f" ({why})"
        log.warning("%s is lost; it has to come back%s", server.name, because)
        try:
            await server.serve()
        except LightspanError as error:
            log.error("%s", error)
            others = [each for each in self._servers if each is not server]
            if any(each.ready or each in self._recovering for each in others):
                self._servers.remove(server)  # no update waits for it
                await server.close()
                self._gone_cpu_s += server.cpu_s
            else:
                self._fail(error if isinstance(error, EngineError) else EngineError(str(error)))
        except Exception as error:  # a fault of ours: who waits would wait for ever
            failure = EngineError(f"{server.name} could not be brought back: {_said(error)}")
            log.exception("%s", failure)
            self._fail(failure)
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
    async def probes(self, policy: str) -> list[Probe]:
        """Prompts of a policy's late calls, answered anew by every server."""
        greeting = self.tokenizer.render([{"role": "user", "content": "Hello"}])
        prompts = list(self._recent[policy]) or [greeting[: self._context - PROBE_TOKENS]]
        return [
            await self._probe(server, policy, prompt)
            for server in self._servers
            for prompt in prompts
        ]

    async def _probe(self, server: Server, policy: str, prompt: list[int]) -> Probe:
        for _ in range(TRIES):
            why: Unreachable | None = None
            try:
                parts = await self._answers(server, policy, prompt)
            except Unreachable as error:
                why, parts = error, []
            # one that was cut before its first token says nothing of the server
            if parts and (parts[0].ids or parts[0].finish != "abort"):
                return Probe(
                    where=server.name,
                    version=parts[0].version,
                    prompt_ids=prompt,
                    ids=parts[0].ids,
                    logprobs=parts[0].logprobs,
                    tolerance=TOLERANCE[self.blueprint.dtype],
                )
            self.lost(server, why)
            await asyncio.gather(*filter(None, [self._recovering.get(server)]))
            self._check_open()
        raise EngineError(f"{server.name} does not answer after an update")

    async def _answers(self, server: Server, policy: str, prompt: list[int]) -> list[Chunk]:
        parts = server.complete(
            policy, prompt, Sampling(), max_tokens=PROBE_TOKENS, eos_ids=(), stream=False
        )
        async with contextlib.aclosing(self._follow(parts)) as followed:
            return [part async for part in followed]


async def _read(
    parts: AsyncIterator[Chunk], arrived: asyncio.Queue[Chunk | Exception | None]
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
        or TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1],
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
    }
    for name, fine in limits.items():
        if not fine:
            raise UnsupportedError(
                f"{name}={getattr(sampling, name)} cannot be sampled with (vLLM's temperature is "
                f"0, or {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g})"
            )


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What several tasks failed with, as one error."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _said(error: Exception) -> str:
    """What an error says: one of ours is a sentence, another's type is half of it."""
    return str(error) if isinstance(error, LightspanError) else f"{type(error).__name__}: {error}"


def _another(error: EngineError) -> EngineError:
    """The error once more: several callers raise it, and each adds its own traceback to its own."""
    return type(error)(str(error))
