"""The embedded engine: continuous batching of a transformers model, on a CPU or one GPU.

Each policy has its own weights, key-value cache and generation thread. A thread starts with the
first request for its policy and sleeps while there is none.

**Log-probabilities** are of the distribution that tokens are sampled from, after temperature, top-p
and top-k. Temperature 0 is greedy decoding: the distribution is a point mass, so the
log-probabilities are 0.0 (the log of 1/k among k equal logits).

**Weight updates.** `update` pauses the thread between two steps, takes out all requests with their
partial ids, drops their keys and values, replaces the weights, and resubmits prompt + partial ids.
No key or value of old weights is used again, and each token's version is that of the weights that
sampled it.

**Prefix sharing.** Calls of one policy whose prompts start with the same tokens share the keys and
values of those tokens, in whole pages. They share them with calls in flight and with earlier calls,
until the cache is full or the weights change. The last bits of a log-probability may depend on
which keys and values were shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final

import msgspec
import torch

from lightspan.errors import (
    ConfigError,
    DataError,
    EngineClosedError,
    EngineError,
    EngineMemoryError,
    ModelError,
    NotFoundError,
    UnsupportedError,
)
from lightspan.protocols.decoding import StopWatcher
from lightspan.protocols.engine import (
    ChatTokenizer,
    EngineCapabilities,
    GenerationRequest,
    LoRAWeights,
    PromptRefused,
    TokenChunk,
    TokenEngine,
    ToolParserName,
)
from lightspan.schema.token_records import FinishReason
from lightspan_torch.engine._attention import install_checked
from lightspan_torch.engine._batcher import Batcher, BatchSettings, Output
from lightspan_torch.engine.grammars import LIBRARY, GrammarMismatchError, Grammars, GrammarState
from lightspan_torch.engine.lora import LowRank, check_ranks, is_low_rank
from lightspan_torch.engine.oom import allocation, explained, is_out_of_memory
from lightspan_torch.engine.request_checks import check_request, copy_of
from lightspan_torch.engine.tokenizer import (
    TEMPLATE_DATE,
    TransformersTokenizer,
    context_length as model_context,
    load_tokenizer,
)
from lightspan_torch.engine.weights import (
    SharedModels,
    avoid_cudnn_attention,
    check_device,
    hash_weights,
    load_model,
    numerics,
    weight_change,
)
from lightspan_torch.threads import limit_threads
from lightspan_torch.vision.checks import checked_vision, image_sample
from lightspan_torch.vision.features import Vision

BLOCK_TOKENS: Final = 64
"""Number of tokens in one block of the setting `num_blocks`."""
CPU_PAGE: Final = 4
"""Tokens of a cache page on a CPU, the unit in which memory is allocated and prefixes are shared.
Up to this many tokens of a shared prompt are recomputed."""
GPU_PAGE: Final = 16
CPU_BATCH: Final = (48, 512)
"""Default maximum numbers of requests and of tokens in one forward pass on a CPU; measured by
`benchmarks/engine.py`."""
GPU_BATCH: Final = (256, 4096)
"""The same on a GPU. Not yet measured there."""
CPU_CACHE_TOKENS: Final = 16_384
"""Minimum size of the key-value cache on a CPU, in tokens."""
GPU_CACHE_TOKENS: Final = 131_072
"""Size of the key-value cache on a GPU, in tokens. The learner gets the rest of the memory. Not yet
run on a GPU."""

CAPABILITIES: Final = EngineCapabilities(
    exact_tokens=True,
    stop_strings=True,
    top_p=True,
    top_k=True,
    seed=False,
    in_place_update=True,
    grammars=LIBRARY,
    trainable_grammar=True,
)


class TransformersEngine(TokenEngine):
    """A token engine with one or several models in this process.

    Args:
        models: policy name → folder, hub name, or a loaded model. A loaded model is copied.
        lora: policy name → LoRA rank, for policies whose updates are `LoRAWeights`; 0 for a policy
            whose weights never change. These policies share the weights of their model, but each
            has its own cache. LoRA that is not merged into the weights costs more computation per
            token.
        device: `"cpu"`, `"cuda"` or `"cuda:0"`.
        dtype: data type of the weights; None for the model's.
        tokenizers: policy name → tokenizer, for policies whose model folder has none.
        tool_parser: parser of the models' tool calls (`ToolParserName`); None to choose it by each
            model's chat template.
        template_date: date that chat templates see as today's.
        versions: policy name → version of the initial weights; 0 by default.
        context_length: maximum number of tokens of prompt and answer; None for the model's own
            maximum, which is also used if it is lower.
        batch_requests: maximum number of requests in one forward pass; None for a default that
            depends on the device.
        batch_tokens: maximum number of tokens in one forward pass; None for a default that depends
            on the device.
        num_blocks: size of a policy's key-value cache in blocks of 64 tokens, which also limits the
            length of a call; None for `default_cache_tokens`.
        prefix_sharing: whether requests whose prompts start with the same tokens share the keys and
            values of those tokens.
        seed: seed of each policy's sampling, set when its generation thread starts; None to sample
            with torch's global random generator.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        tokenizers: Mapping[str, ChatTokenizer] | None = None,
        tool_parser: ToolParserName | None = None,
        template_date: datetime.date = TEMPLATE_DATE,
        lora: Mapping[str, int] | None = None,
        versions: Mapping[str, int] | None = None,
        context_length: int | None = None,
        batch_requests: int | None = None,
        batch_tokens: int | None = None,
        num_blocks: int | None = None,
        prefix_sharing: bool = True,
        seed: int | None = None,
    ) -> None:
        if not models:
            raise ConfigError("an engine needs at least one policy: models={'name': folder}")
        if tool_parser is not None and tokenizers:
            raise ConfigError("tokenizers= have their own tool parsers: leave tool_parser= out")
        check_device(device)
        avoid_cudnn_attention(device)
        limit_threads(device)
        ranks = dict(lora or {})
        check_ranks(ranks, models)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._requests = 0
        self._tokens = 0
        self._workers: dict[str, _PolicyWorker] = {}
        load = partial(load_model, device=device, dtype=dtype)
        shared = SharedModels(load)
        loaded: list[Any] = []
        for policy, source in models.items():
            model = shared.load(source) if policy in ranks else load(source)
            loaded.append(model)
            tokenizer = (tokenizers or {}).get(policy) or _tokenizer_of(
                source, tool_parser=tool_parser, date=template_date
            )
            own_context = model_context(model.config)
            context = min(own_context, context_length or own_context)
            on_cpu = model.device.type == "cpu"
            requests, tokens = CPU_BATCH if on_cpu else GPU_BATCH
            settings = BatchSettings(
                max_requests=batch_requests or requests,
                max_tokens=batch_tokens or tokens,
                cache_tokens=cache_tokens(model.device.type, context, num_blocks),
                page_size=CPU_PAGE if on_cpu else GPU_PAGE,
                prefix_sharing=prefix_sharing,
                seed=seed,
            )
            advice = partial(_lower_engine, settings, context)
            with explained(f"loading the model of policy {policy} on {device}", advice):
                sample = image_sample(model, tokenizer)
                install_checked(model, min(context, settings.cache_tokens))
                vision = checked_vision(model, sample)
            self._workers[policy] = _PolicyWorker(
                policy,
                model,
                tokenizer,
                version=(versions or {}).get(policy, 0),
                rank=ranks.get(policy),
                context=context,
                settings=settings,
                vision=vision,
            )
        self._capabilities = msgspec.structs.replace(
            CAPABILITIES,
            lora=tuple(policy for policy, rank in ranks.items() if rank),
            images=tuple(name for name, worker in self._workers.items() if worker.vision),
            numerics=numerics(loaded),
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def start(self) -> None:
        if self._closed:
            raise EngineClosedError
        self._loop = asyncio.get_running_loop()
        for worker in self._workers.values():
            worker.load_grammars()  # holds the GIL, so do it before the first request

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for worker in self._workers.values():
            await worker.close()

    def policies(self) -> dict[str, int]:
        return {policy: worker.version for policy, worker in self._workers.items()}

    def tokenizer(self, policy: str) -> ChatTokenizer:
        return self._worker(policy).tokenizer

    def cache_tokens(self, policy: str) -> int:
        """Return the size of a policy's key-value cache in tokens."""
        return self._worker(policy).cache_tokens

    def check_grammar(self, policy: str, grammar: str) -> None:
        self._worker(policy).grammars.check(grammar)

    async def generate(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[TokenChunk]:
        self._check_usable()
        worker = self._worker(request.policy)
        state = await worker.grammar_start(request.grammar) if request.grammar else None
        job = worker.admit(request, state, stream=stream)
        if request.images:
            await worker.prepare(request)
        self._requests += 1
        try:
            await worker.submit(job)
            while True:
                chunk = await job.next_chunk()
                self._tokens += len(chunk.ids)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            worker.drop(job)

    async def update(
        self, policy: str, weights: Mapping[str, Any] | LoRAWeights, version: int
    ) -> None:
        self._check_usable()
        worker = self._worker(policy)
        # half an update would lose requests, so it continues if the caller is cancelled
        await asyncio.shield(asyncio.ensure_future(worker.update(weights, version)))

    def weight_hash(self, policy: str) -> str:
        """Return the SHA-256 of the weights that a policy is served with."""
        return self._worker(policy).weight_hash()

    def usage(self) -> dict[str, float]:
        for worker in self._workers.values():
            worker.check_alive()
        cpu_s = sum(worker.cpu_s for worker in self._workers.values())
        return {"tokens": self._tokens, "requests": self._requests, "cpu_s": cpu_s}

    def _worker(self, policy: str) -> _PolicyWorker:
        try:
            return self._workers[policy]
        except KeyError:
            policies = ", ".join(sorted(self._workers))
            raise NotFoundError(
                f"the engine has no policy {policy!r}; it has: {policies}"
            ) from None

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineClosedError
        if self._loop is None:
            raise EngineError("the engine is not started: `await engine.start()`")
        if self._loop is not asyncio.get_running_loop():
            raise EngineError("the engine belongs to another event loop, the one that started it")


class _PolicyWorker:
    """One policy's model, batcher and running requests. Used on the event loop only."""

    def __init__(
        self,
        policy: str,
        model: Any,
        tokenizer: ChatTokenizer,
        *,
        version: int,
        rank: int | None,
        context: int,
        settings: BatchSettings,
        vision: Vision | str,
    ) -> None:
        self.policy = policy
        self.vision = vision if isinstance(vision, Vision) else None
        self._no_images = vision if isinstance(vision, str) else ""
        """Why images are refused; "" if they are not."""
        self._rank = rank
        self._low_rank = LowRank(model, rank) if rank else None
        self.tokenizer = tokenizer
        self.version = version
        self._model: Any = model
        self.cache_tokens = settings.cache_tokens
        self._context = min(context, tokenizer.context_length, settings.cache_tokens)
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batcher: Batcher | None = None
        self._spent_cpu_s = 0.0
        self._failure: EngineError | None = None
        self._jobs: dict[str, _Job] = {}
        """Id of the job's current submission to the batcher → job."""
        self._can_submit = asyncio.Event()
        """Set unless an update of the weights is running."""
        self._can_submit.set()
        self._lock = asyncio.Lock()
        self._ids = map(str, itertools.count())

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars for the policy's tokenizer.

        Raises:
            UnsupportedError: grammars cannot be compiled for the tokenizer.
        """
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        eos_ids = self.tokenizer.eos_ids
        return Grammars(tokenizer, vocabulary=self._vocabulary, eos_ids=eos_ids)

    def load_grammars(self) -> None:
        """Index the vocabulary for grammars, so that no request has to wait for the index."""
        with contextlib.suppress(UnsupportedError):  # raised again by a call with a grammar
            _ = self.grammars

    @property
    def cpu_s(self) -> float:
        return self._batcher.cpu_s if self._batcher is not None else self._spent_cpu_s

    def check_alive(self) -> None:
        """Raise the error that ended the generation thread, if it ended by an error."""
        if not isinstance(self._failure, EngineClosedError):
            self._check_running()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise copy_of(self._failure) from self._failure

    def weight_hash(self) -> str:
        low_rank = {} if self._low_rank is None else self._low_rank.tensors()
        return hash_weights({**self._model.state_dict(), **low_rank})

    async def grammar_start(self, grammar: str) -> GrammarState:
        """Return the state of a grammar at its start. If it is not cached, compile it in a thread.

        Raises:
            UnsupportedError: the grammar cannot be compiled, or it allows no first token.
        """
        state = self.grammars.cached_start(grammar)
        return state if state is not None else await asyncio.to_thread(self.grammars.start, grammar)

    async def prepare(self, request: GenerationRequest) -> None:
        """Decode the images of a request, in a thread.

        Raises:
            PromptRefused: an image is damaged, or does not fit the prompt.
        """
        assert self.vision is not None, "`admit` has refused the request"
        try:
            await asyncio.to_thread(self.vision.prompt, request.prompt_ids, request.images)
        except DataError as error:
            raise PromptRefused(str(error)) from error

    def admit(
        self, request: GenerationRequest, state: GrammarState | None, *, stream: bool
    ) -> _Job:
        """Check a request, and return a `_Job` that tracks its answer.

        Args:
            request: the request.
            state: state of the grammar at its start; None if the request has no grammar.
            stream: whether tokens are sent as they are generated.

        Raises:
            ContextOverflowError, PromptRefused, UnsupportedError, EngineError: see `check_request`.
        """
        limit = check_request(
            request,
            context=self._context,
            vocabulary=self._vocabulary,
            options="the engine's options context_length and num_blocks",
            no_images=self._no_images,
        )
        return _Job(request, state, self.tokenizer, limit=limit, stream=stream)

    async def submit(self, job: _Job) -> None:
        """Submit a job to the batcher; wait first if an update of the weights is running."""
        while not self._can_submit.is_set():  # another update may start before this task resumes
            await self._can_submit.wait()
        self._submit(job)

    def _submit(self, job: _Job) -> None:
        self._check_running()
        if self._batcher is None:
            self._batcher = self._start()
        key = next(self._ids)
        job.begin(key, self.version)
        self._jobs[key] = job
        seen = None
        if job.images:  # again for each submission: the vision part may have other weights now
            assert self.vision is not None
            seen = self.vision.prompt(job.prompt, job.images)
        # If the thread is ending, the batcher refuses the job; the scheduled `_fail` fails it.
        with contextlib.suppress(EngineError):
            self._batcher.submit(
                key,
                [*(seen.ids if seen else job.prompt), *job.ids],
                job.sampling,
                job.remaining,
                streaming=job.needs_stream,
                grammar=None if job.grammar_state is None else job.grammar_state.copy(),
                answer_start=job.answer_start,
                seen=seen,
            )

    def drop(self, job: _Job) -> None:
        """Forget a job, and cancel its request if it is running."""
        if self._jobs.pop(job.key, None) is not None and self._batcher is not None:
            self._batcher.cancel(job.key)

    def _change(self, weights: Mapping[str, Any] | LoRAWeights) -> Callable[[], None]:
        """Check `weights`, and return a function that replaces the model's weights by them.

        Raises:
            ModelError: the weights do not fit the model.
        """
        if is_low_rank(weights, self.policy, self._rank):
            assert self._low_rank is not None
            return self._low_rank.change(weights, self.policy)
        assert not isinstance(weights, LoRAWeights)
        change = weight_change(self._model, weights, self.policy)
        return (
            change if self.vision is None else partial(_change_both, self.vision, weights, change)
        )

    async def update(self, weights: Mapping[str, Any] | LoRAWeights, version: int) -> None:
        """Replace the weights as described in the module's docstring."""
        async with self._lock:
            self._check_running()
            change = self._change(weights)
            self._can_submit.clear()
            try:
                partial = await asyncio.to_thread(self._interrupt, change)
                self.version = version
                self._resume(partial)
            except Exception as error:  # weights may be half replaced: the policy is unusable
                self._fail(EngineError(f"an update of policy {self.policy} failed: {error}"))
                raise
            finally:
                self._can_submit.set()

    def _interrupt(self, change: Callable[[], None]) -> dict[str, Output]:
        if self._batcher is None:
            change()
            return {}
        return self._batcher.interrupt(list(self._jobs), change)

    def _resume(self, partial: Mapping[str, Output]) -> None:
        for key, output in partial.items():
            job = self._jobs.pop(key, None)
            if job is None:  # dropped in the meantime
                continue
            job.receive(output)
            if not job.done:
                job.flush()  # a chunk has one version, and these tokens have the old one
                try:
                    self._submit(job)
                except EngineError as error:
                    job.fail(error)

    async def close(self) -> None:
        async with self._lock:
            self._fail(EngineClosedError())
            if self._batcher is not None:
                await asyncio.to_thread(self._batcher.stop)
                self._spent_cpu_s = self._batcher.cpu_s
            self._batcher = self._model = self._low_rank = self.vision = None

    def _start(self) -> Batcher:
        self._loop = asyncio.get_running_loop()
        batcher = Batcher(
            self._model,
            eos_ids=self.tokenizer.eos_ids,
            settings=self._settings,
            on_outputs=partial(self._to_loop, self._receive),
            on_stop=self._stop_from_thread,
            on_mismatch=partial(self._to_loop, self._mismatch),
            vision=self.vision,
        )
        batcher.start()
        return batcher

    def _stop_from_thread(self, error: BaseException | None) -> None:
        failure = EngineError(f"the generation thread of policy {self.policy} stopped")
        if error is not None:
            failure = self._explain(error, f"{failure}: {error}")
            failure.__cause__ = error
        self._to_loop(self._fail, failure)

    def _explain(self, error: BaseException, message: str) -> EngineError:
        """Convert an error to an `EngineError`; if memory ran out, the text has advice.

        Args:
            error: the error.
            message: text of the error if memory did not run out.
        """
        if not is_out_of_memory(error):
            return EngineError(message)
        return EngineMemoryError(
            f"the engine ran out of memory{allocation(error)} while generating for policy "
            f"{self.policy}. {_lower_engine(self._settings, self._context)}"
        )

    def _to_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _receive(self, outputs: Sequence[Output]) -> None:
        if self._batcher is None:  # closed
            return
        for output in outputs:
            key = output.request_id
            if output.is_finished:
                self._batcher.settle(key)
            job = self._jobs.get(key)
            if job is None:
                continue
            job.receive(output)
            if job.done:
                del self._jobs[key]
                if not output.is_finished:  # a stop string
                    self._batcher.cancel(key)

    def _mismatch(self, key: str, reason: str) -> None:
        """Fail a job whose tokens do not follow its grammar."""
        job = self._jobs.get(key)
        if job is not None:
            job.fail(GrammarMismatchError(f"the answer cannot follow its grammar: {reason}"))
            self.drop(job)

    def _fail(self, error: EngineError) -> None:
        """Fail all jobs with `error`, and refuse further jobs."""
        if self._failure is None:
            self._failure = error
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.fail(error)


class _Job:
    """A running request with the tokens sampled so far and the chunks that are to be sent."""

    def __init__(
        self,
        request: GenerationRequest,
        grammar_state: GrammarState | None,
        tokenizer: ChatTokenizer,
        *,
        limit: int,
        stream: bool,
    ) -> None:
        self.key = ""
        self.done = False
        self.sampling = request.sampling
        self.grammar_state = grammar_state
        """Matcher state at the start of the answer; None without a grammar. Each submission gets a
        copy."""
        self.answer_start = len(request.prompt_ids) - request.answered
        self.prompt = request.prompt_ids
        self.images = request.images
        self.ids: list[int] = []
        """The tokens sampled so far."""
        self._limit = limit
        self._stream = stream
        self._eos_ids = tokenizer.eos_ids
        stops = tuple(stop for stop in request.sampling.stop if stop)
        self._stop = StopWatcher(tokenizer, stops) if stops else None
        self._logprobs: list[float] = []
        self._sent = 0
        """Number of sampled tokens that were sent in chunks."""
        self._resumed = 0
        """Number of tokens sampled before the current submission."""
        self._version = 0
        self._chunks: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()

    @property
    def needs_stream(self) -> bool:
        return self._stream or self._stop is not None

    @property
    def remaining(self) -> int:
        return self._limit - len(self.ids)

    async def next_chunk(self) -> TokenChunk:
        item = await self._chunks.get()
        if isinstance(item, EngineError):
            raise copy_of(item) from item
        return item

    def begin(self, key: str, version: int) -> None:
        """Record the id (`key`) of a submission and the `version` of its weights."""
        self.key, self._version, self._resumed = key, version, len(self.ids)

    def receive(self, output: Output) -> None:
        """Add the new tokens of `output`, which contains all tokens since the submission.

        Depending on `output`, finish the job or send a chunk.
        """
        new = len(self.ids) - self._resumed
        for token, logprob in zip(output.ids[new:], output.logprobs[new:], strict=True):
            self.ids.append(token)
            self._logprobs.append(min(logprob, 0.0))  # rounding can exceed 0
            if self._stop is not None and self._stop.complete([token]):
                self._finish(FinishReason.STOP)
                return
        if output.is_finished:
            ended = bool(self.ids) and self.ids[-1] in self._eos_ids
            self._finish(FinishReason.STOP if ended else FinishReason.LENGTH)
        elif self._stream:
            self.flush()

    def flush(self) -> None:
        """Send the tokens that were not sent yet, as one chunk."""
        if len(self.ids) > self._sent:
            self._send(None)

    def fail(self, error: EngineError) -> None:
        self.done = True
        self._chunks.put_nowait(error)

    def _finish(self, reason: FinishReason) -> None:
        self.done = True
        self._send(reason)

    def _send(self, reason: FinishReason | None) -> None:
        chunk = TokenChunk(
            ids=self.ids[self._sent :],
            logprobs=self._logprobs[self._sent :],
            version=self._version,
            finish_reason=reason,
        )
        self._sent = len(self.ids)
        self._chunks.put_nowait(chunk)


def _change_both(vision: Vision, weights: Mapping[str, Any], change: Callable[[], None]) -> None:
    """Replace a model's weights by `change`, and forget features that are of other ones."""
    is_other = vision.differs(weights)
    change()
    if is_other:
        vision.forget()


def _tokenizer_of(source: Any, **options: Any) -> TransformersTokenizer:
    if not isinstance(source, torch.nn.Module):
        return load_tokenizer(source, **options)
    path = str(getattr(source, "name_or_path", "") or "")
    if not path:
        raise ModelError("a model that was not loaded from a folder needs `tokenizers={policy: …}`")
    return load_tokenizer(path, **options)


def default_cache_tokens(device: str, context: int) -> int:
    """Return the default size of one policy's key-value cache, in tokens."""
    if not device.startswith("cpu"):
        return GPU_CACHE_TOKENS
    return max(CPU_CACHE_TOKENS, 2 * context)


def cache_tokens(device: str, context: int, num_blocks: int | None) -> int:
    """Return the size of one policy's key-value cache in tokens, a multiple of `BLOCK_TOKENS`.

    Args:
        device: name of the device.
        context: the policy's context length, in tokens.
        num_blocks: number of blocks that the user set; None for `default_cache_tokens`, rounded up.
    """
    blocks = num_blocks or math.ceil(default_cache_tokens(device, context) / BLOCK_TOKENS)
    return blocks * BLOCK_TOKENS


def _lower_engine(settings: BatchSettings, context: int) -> str:
    """Return advice on which of the engine's settings to lower when memory ran out."""
    tokens = settings.cache_tokens
    blocks = tokens // BLOCK_TOKENS
    now = f"num_blocks, now {blocks} ({tokens:,} tokens of keys and values)"
    now += f", and batch_tokens, now {settings.max_tokens}"
    halved = {"num_blocks": max(1, blocks // 2), "batch_tokens": max(1, settings.max_tokens // 2)}
    fewer = ", ".join(f"{name}={value}" for name, value in halved.items())
    return (
        f"Lower {now}: engine=Transformers({fewer}). If that is not enough: a shorter "
        f"context_length, now {context}, in the same place, a smaller model, or lora=LoRA() to "
        "leave the learner less to hold"
    )
