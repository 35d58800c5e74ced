"""Route, retry and resume the calls of policies that share servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from lightspan.errors import EngineClosedError, EngineError, LightspanError, UnsupportedError
from lightspan.protocols.engine import ChatTokenizer, GenerationRequest, TokenChunk
from lightspan.schema.images import PromptImage
from lightspan.schema.token_records import Sampling
from lightspan_torch.engine.request_checks import check_request, copy_of
from lightspan_torch.vision.tokenizer import VisionTokenizer
from lightspan_vllm.client import Chunk, Unreachable
from lightspan_vllm.images import image_features
from lightspan_vllm.load_balancer import LoadBalancer
from lightspan_vllm.request import Job
from lightspan_vllm.supervised_server import Server
from lightspan_vllm.weight_sync_check import Probe
from lightspan_vllm.weights import LoRAFiles, ServerSpec, TargetWeights, Weights

log = logging.getLogger(__name__)

Prompt: TypeAlias = tuple[list[int], tuple[PromptImage, ...]]
"""The ids of a prompt, and its images."""

MAX_TRIES: Final = 4
"""A call fails after this many consecutive submissions that returned no token."""
TEMPERATURES: Final = (0.01, 2.0)
"""Minimum and maximum temperature of vLLM. vLLM silently raises a temperature between 0 and the
minimum to the minimum."""
PROBES: Final = 4
"""Number of recent prompts per policy that are stored for probes: calls that check a server's
weights."""
PROBE_TOKENS: Final = 8
"""Number of tokens of a probe's answer."""
PROBE_LENGTH: Final = 2048
"""Maximum length, in tokens, of a prompt that is stored for probes."""
TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Data type of the server's weights → how much the log-probabilities of server and learner may
differ, averaged over a probe's tokens."""


class ServerPool:
    """The servers of one policy, or of all LoRA policies of one model, and their running calls.

    Args:
        policies: names of the policies that these servers serve.
        spec: specification of the servers.
        tokenizer: the model's tokenizer.
        lora: policy → initial LoRA; empty for a policy with whole weights.
        no_images: why the policies take no images; "" if they take some.
    """

    def __init__(
        self,
        policies: Sequence[str],
        spec: ServerSpec,
        tokenizer: ChatTokenizer,
        lora: Mapping[str, LoRAFiles],
        no_images: str,
    ) -> None:
        self.policies = tuple(policies)
        self.name = f"polic{'y' if len(policies) == 1 else 'ies'} {', '.join(policies)}"
        """Name of the pool in messages."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._no_images = no_images
        self.servers: list[Server] = []
        self.target = TargetWeights(spec.as_saved(0), lora)
        """The current weights, which every server must get."""
        self.updating = asyncio.Lock()
        self._context = min(spec.context, tokenizer.context_length)
        self._removed_cpu_s = 0.0
        """CPU seconds of servers that were removed from the pool."""
        self._balancer: LoadBalancer[Server] = LoadBalancer()
        self._recent: dict[str, deque[Prompt]] = {
            policy: deque(maxlen=PROBES) for policy in policies
        }
        self._changed = asyncio.Event()
        self._failure: EngineError | None = None
        self._recovering: dict[Server, asyncio.Task[None]] = {}
        self._reading: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the servers that do not run, and load the current weights into all servers.

        Raises:
            ConfigError, EngineError: see `Server.serve`.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for server in self.servers:
                    group.create_task(self._serve(server))
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        self._changed.set()

    async def _serve(self, server: Server) -> None:
        try:
            await server.serve()
        except EngineClosedError:
            if server in self.servers:
                raise  # otherwise it was removed, and other servers remain

    async def close(self) -> None:
        """Stop all servers and delete the weights; running calls raise `EngineClosedError`."""
        self._fail(EngineClosedError())
        tasks = [*self._recovering.values(), *self._reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))
        self.target.weights.remove()
        for files in self.target.lora.values():
            files.remove()

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the servers that the engine started."""
        return self._removed_cpu_s + sum(server.cpu_s for server in self.servers)

    def check_running(self) -> None:
        """Raise the error that ended the pool, if any. Do nothing if the pool was closed."""
        if not isinstance(self._failure, EngineClosedError):
            self._check_open()

    # --- calls ----------------------------------------------------------------------------
    def admit(self, request: GenerationRequest, *, stream: bool) -> Job:
        """Check a request, and return a `Job` that tracks its answer.

        Raises:
            ContextOverflowError, PromptRefused, EngineError: see `check_request`.
            UnsupportedError: the request has a grammar, or a sampling parameter is out of range.
        """
        prompt = request.prompt_ids
        if request.grammar:
            raise UnsupportedError("the vLLM engine does not support grammars")
        limit = check_request(
            request,
            context=self._context,
            vocabulary=self.spec.vocabulary,
            options="VLLM(context_length=…)",
            no_images=self._no_images,
            temperatures=TEMPERATURES,
        )
        if len(prompt) <= min(PROBE_LENGTH, self._context - PROBE_TOKENS):
            self._recent[request.policy].append((prompt, request.images))
        images = self._features(prompt, request.images)
        return Job(request, self.tokenizer, limit=limit, stream=stream, images=images)

    def _features(
        self, ids: list[int], images: Sequence[PromptImage]
    ) -> Callable[[], dict[str, Any]] | None:
        """Return a function that prepares the images of a prompt; None if there are none.

        They are prepared again for each submission, because they may have megabytes.
        """
        if not images:
            return None
        assert isinstance(self.tokenizer, VisionTokenizer)
        processor, spec = self.tokenizer.images, self.spec
        return partial(image_features, ids, images, processor, spec.family, spec.dtype)

    async def run(self, job: Job) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of a call's answer. The call is submitted again after each interruption.

        Raises:
            EngineError: the call failed `MAX_TRIES` times in a row without a token, or the pool has
                ended.
            Refused: the server refused the call.
        """
        while True:
            server = await self._server(job)
            changes = server.changes
            try:
                chunks = server.complete(
                    job.request.policy,
                    job.prompt,
                    job.request.sampling,
                    max_tokens=job.remaining,
                    eos_ids=sorted(self.tokenizer.eos_ids),
                    stream=job.streams,
                    images=job.images,
                )
                async with contextlib.aclosing(self._until_closed(chunks)) as followed:
                    async for chunk in followed:
                        added = job.add(chunk)
                        if added.ids or added.finish_reason is not None:
                            yield added
                        if added.finish_reason is not None:
                            server.deaths = 0
                            return
            except Unreachable as error:
                self._check_open()
                self._count_try(job, error)
                self.recover(server, error)
            else:
                if server.ready and server.changes == changes:  # no update aborted the call
                    self._count_try(job, EngineError(f"{server.name} ended it without an answer"))

    def _count_try(self, job: Job, error: EngineError) -> None:
        """Count a submission of `job` that failed; raise `EngineError` after `MAX_TRIES`."""
        job.tries += 1
        if job.tries >= MAX_TRIES:
            raise EngineError(
                f"a call of policy {job.request.policy} was tried {MAX_TRIES} times: {error}"
            ) from error

    async def _until_closed(self, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
        """Yield `chunks`; raise `EngineClosedError` as soon as the pool is closed.

        The chunks are read in a separate task, which `close` cancels. Otherwise a read from a
        connection that this process has closed would never end.
        """
        items: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        task = asyncio.create_task(_read(chunks, items))
        self._reading.add(task)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._reading.discard(task)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _server(self, job: Job) -> Server:
        """Wait until a server is ready, and return the server for `job`.

        Raises:
            EngineClosedError, EngineError: the pool has ended.
        """
        while True:
            self._check_open()
            loads = {server: server.load for server in self.servers if server.ready}
            if loads:
                return self._balancer.choose(job.request.rollout, loads)
            self._changed.clear()
            await self._changed.wait()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy_of(self._failure) from self._failure

    # --- servers --------------------------------------------------------------------------
    async def update(self, weights: Weights) -> None:
        """Replace the whole weights in every server.

        Raises:
            ConfigError, EngineError: a server failed; the pool has ended.
        """
        former, self.target = self.target, TargetWeights(weights)
        try:
            await self._update_servers()
        finally:
            former.weights.remove()

    async def update_lora(self, policy: str, files: LoRAFiles) -> None:
        """Replace the LoRA of one policy in every server.

        Raises:
            ConfigError, EngineError: a server failed; the pool has ended.
        """
        former = self.target.lora[policy]
        self.target = self.target._replace(lora={**self.target.lora, policy: files})
        try:
            await self._update_servers()
        finally:
            former.remove()

    async def _update_servers(self) -> None:
        try:
            await self.start()
        except Exception as error:  # calls wait for these servers, so fail them
            self._fail(EngineError(f"an update of {self.name} failed: {_describe(error)}"))
            raise

    def recover(self, server: Server, reason: Exception | None = None) -> None:
        """Start the recovery of a lost server in the background.

        A server that the engine started is restarted; a server that the user started is awaited.

        Args:
            server: the server.
            reason: the error that showed that the server is lost; None if there was no error.
        """
        if self._failure is not None or server in self._recovering:
            return
        server.ready = False
        self._recovering[server] = asyncio.create_task(self._recover(server, reason))

    async def _recover(self, server: Server, reason: Exception | None) -> None:
        log.warning("%s is lost%s", server.name, "" if reason is None else f" ({reason})")
        try:
            await server.serve()
        except LightspanError as error:
            log.error("%s", error)
            others = [other for other in self.servers if other is not server]
            if any(other.ready or other in self._recovering for other in others):
                self.servers.remove(server)  # so that no update waits for it
                await server.close()
                self._removed_cpu_s += server.cpu_s
            else:
                self._fail(error if isinstance(error, EngineError) else EngineError(str(error)))
        except Exception as error:  # a bug: without a failure, calls would wait forever
            failure = EngineError(f"{server.name} could not be recovered: {_describe(error)}")
            log.exception("%s", failure)
            self._fail(failure)
        finally:
            del self._recovering[server]
            self._changed.set()

    def _fail(self, error: EngineError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()

    # --- probes ---------------------------------------------------------------------------
    async def probes(self, policy: str) -> list[Probe]:
        """Send the prompts of the policy's recent calls to every server, and return the answers.

        If the policy has had no call yet, send a greeting.

        Raises:
            EngineError: a server does not answer, or the pool has ended.
        """
        greeting = self.tokenizer.render([{"role": "user", "content": "Hello"}])
        prompts = list(self._recent[policy]) or [(greeting[: self._context - PROBE_TOKENS], ())]
        return [
            await self._probe(server, policy, prompt)
            for server in self.servers
            for prompt in prompts
        ]

    async def _probe(self, server: Server, policy: str, prompt: Prompt) -> Probe:
        for _ in range(MAX_TRIES):
            reason: Unreachable | None = None
            try:
                chunks = await self._answer(server, policy, prompt)
            except Unreachable as error:
                reason, chunks = error, []
            # an answer aborted before its first token is no evidence
            if chunks and (chunks[0].ids or chunks[0].finish != "abort"):
                return Probe(
                    where=server.name,
                    version=chunks[0].version,
                    prompt_ids=prompt[0],
                    images=prompt[1],
                    ids=chunks[0].ids,
                    logprobs=chunks[0].logprobs,
                    tolerance=TOLERANCE[self.spec.dtype],
                )
            self.recover(server, reason)
            await asyncio.gather(*filter(None, [self._recovering.get(server)]))
            self._check_open()
        raise EngineError(f"{server.name} does not answer after an update")

    async def _answer(self, server: Server, policy: str, prompt: Prompt) -> list[Chunk]:
        ids, images = prompt
        chunks = server.complete(
            policy,
            ids,
            Sampling(),
            max_tokens=PROBE_TOKENS,
            eos_ids=(),
            stream=False,
            images=self._features(ids, images),
        )
        async with contextlib.aclosing(self._until_closed(chunks)) as followed:
            return [chunk async for chunk in followed]


async def _read(
    chunks: AsyncIterator[Chunk], items: asyncio.Queue[Chunk | Exception | None]
) -> None:
    """Put all chunks into a queue, then None. If reading fails, put the error in place of None."""
    try:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                items.put_nowait(chunk)
        items.put_nowait(None)
    except asyncio.CancelledError:
        items.put_nowait(EngineClosedError())
        raise
    except Exception as error:
        items.put_nowait(error)


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group. If that is a group too, return the first error in it."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _describe(error: Exception) -> str:
    """Return the message of an error. If the error is not lightspan's, prepend its type."""
    return str(error) if isinstance(error, LightspanError) else f"{type(error).__name__}: {error}"
