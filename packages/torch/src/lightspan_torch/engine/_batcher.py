"""The generation thread of one policy: continuous batching over a paged key-value cache.

Requests join and leave between two steps. A step computes the next tokens of many requests in one
forward pass: one token of each request that decodes, and prompts in pieces. Requests whose prompts
begin alike wait until the first of them has computed the common pages. If the cache is full, the
last request gives up its pages and is computed again later.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightspan.errors import EngineError
from lightspan.schema.token_records import Sampling
from lightspan_torch.engine._attention import Chunk, forward, make_step
from lightspan_torch.engine._pages import Pages, PageTable, to_device
from lightspan_torch.engine._sampling import sample
from lightspan_torch.engine.grammars import (
    GrammarMismatchError,
    GrammarState,
    allowed,
    forbidden,
)
from lightspan_torch.vision.features import Vision, VisionPrompt

_STOP_TIMEOUT_S: Final = 30.0


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the size of a forward pass, and the size of the key-value cache."""

    max_requests: int
    """Maximum number of requests in one forward pass."""
    max_tokens: int
    """Maximum number of tokens in one forward pass."""
    cache_tokens: int
    page_size: int
    """Number of tokens in a cache page, the unit in which memory is allocated and prefixes are
    shared."""
    prefix_sharing: bool = True
    seed: int | None = None
    """Seed of the sampling; None to sample with torch's global random generator."""


class Output(NamedTuple):
    """The tokens that a request has sampled since it was submitted to the `Batcher`."""

    request_id: str
    ids: list[int]
    logprobs: list[float]
    is_finished: bool


class _Request:
    """A request, as the generation thread keeps it."""

    def __init__(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        streaming: bool,
        grammar: _GrammarPosition | None,
        seen: VisionPrompt | None,
    ) -> None:
        self.request_id = request_id
        self.ids = list(ids)
        self.sampling = sampling
        self.limit = max_new_tokens
        self.streaming = streaming
        self.grammar = grammar
        self.seen = seen
        self.logprobs: list[float] = []
        self.table = PageTable()
        self._submitted = len(ids)

    @property
    def remaining(self) -> int:
        """Number of tokens whose keys and values are not computed yet.

        It is 1 for a request that only samples, because the last sampled token is not computed yet.
        """
        return len(self.ids) - self.table.computed

    def count_within(self, budget: int) -> int:
        """Return how many tokens to compute next, about `budget` at most."""
        count = min(budget, self.remaining)
        return count if self.seen is None else self.seen.whole(self.table.computed, count)

    @property
    def is_prompt(self) -> bool:
        """Whether some of the submitted tokens are not computed yet."""
        return self.table.computed < self._submitted

    def output(self, is_finished: bool = False) -> Output:
        return Output(
            self.request_id, self.ids[self._submitted :], self.logprobs.copy(), is_finished
        )


class _GrammarPosition:
    """How far one request's answer has advanced in its grammar."""

    def __init__(self, state: GrammarState, start: int) -> None:
        self._state = state
        self._taken = start

    def mask(self, ids: Sequence[int], into: NDArray[np.int32]) -> None:
        """Advance by the new tokens in `ids`, and write the mask of the allowed next tokens.

        Args:
            ids: all tokens of the request so far.
            into: array to which the mask is written.

        Raises:
            GrammarMismatchError: the tokens do not follow the grammar.
        """
        for token in ids[self._taken :]:
            self._state.take(token)
        self._taken = len(ids)
        self._state.mask(into)


class Batcher:
    """A model, its generation thread and the requests that it answers.

    Args:
        model: the model, with its attention installed (`_attention.install_checked`).
        eos_ids: ids that end an answer.
        settings: sizes of the batch and the key-value cache.
        on_outputs: called on the generation thread with new outputs.
        on_stop: called on the generation thread just before it ends, with the error that ended it
            or None.
        on_mismatch: called on the generation thread with the id of a request that violates its
            grammar, and the reason; the caller must cancel the request.
        vision: the model's vision part; None if it takes no images.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Collection[int],
        settings: BatchSettings,
        on_outputs: Callable[[list[Output]], None],
        on_stop: Callable[[BaseException | None], None],
        on_mismatch: Callable[[str, str], None],
        vision: Vision | None = None,
    ) -> None:
        self._model = model
        self._vision = vision
        self._eos_ids = frozenset(eos_ids)
        self._settings = settings
        self._on_outputs, self._on_stop, self._on_mismatch = on_outputs, on_stop, on_mismatch
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._generator: torch.Generator | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._changed = threading.Condition()
        # guarded by `_changed`:
        self._submitted: list[_Request] = []
        self._cancelled: set[str] = set()
        self._interrupts: list[_Interrupt] = []
        self._is_stopping = self._has_ended = False
        # used on the generation thread only:
        self.pages = Pages(settings.cache_tokens, settings.page_size)
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self.finished: set[str] = set()
        """Ids of requests whose result was delivered but for which `settle` was not called yet."""
        self.cpu_s = 0.0
        """CPU seconds that the generation thread had used after its last step."""

    def start(self) -> None:
        """Start the generation thread.

        It is a daemon thread, so that an engine that was never closed does not keep the process
        alive.
        """
        self._thread.start()
        atexit.register(self.stop)

    def submit(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        streaming: bool,
        grammar: GrammarState | None = None,
        answer_start: int = 0,
        seen: VisionPrompt | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique id of the request.
            ids: the prompt, followed by the tokens of the answer that were sampled before.
            sampling: temperature, top-p and top-k.
            max_new_tokens: maximum number of further tokens.
            streaming: whether outputs are passed to `on_outputs` before the request is finished.
            grammar: state of the grammar at its start; None if the request has no grammar.
            answer_start: index in `ids` at which the grammar starts.
            seen: the images of the prompt, whose placeholders in `ids` are negative; None if it has
                no images.

        Raises:
            EngineError: the generation thread has ended.
        """
        position = None if grammar is None else _GrammarPosition(grammar, answer_start)
        request = _Request(request_id, ids, sampling, max_new_tokens, streaming, position, seen)
        with self._changed:
            self._check_running()
            self._submitted.append(request)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Cancel a request and free its pages. Do nothing if the request does not exist."""
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify()

    def settle(self, request_id: str) -> None:
        """Forget a finished request. The caller calls this when it has received the result."""
        self.finished.discard(request_id)

    def interrupt(
        self, request_ids: Collection[str], change: Callable[[], None]
    ) -> dict[str, Output]:
        """Replace the weights between two steps; remove all requests and empty the cache. Blocks.

        Args:
            request_ids: ids of the requests whose outputs are wanted.
            change: function that replaces the weights; called on the generation thread.

        Returns:
            Request id → output so far, of each unfinished request. The results of finished requests
            have been passed to `on_outputs`.

        Raises:
            EngineError: the generation thread has ended.
        """
        interrupt = _Interrupt(frozenset(request_ids), change)
        with self._changed:
            self._check_running()
            self._interrupts.append(interrupt)
            self._changed.notify()
        return interrupt.result()

    def stop(self) -> None:
        """Stop the generation thread; requests in flight get no answer. Idempotent."""
        atexit.unregister(self.stop)
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join(_STOP_TIMEOUT_S)

    def _check_running(self) -> None:
        if self._is_stopping or self._has_ended:
            raise EngineError("the generation thread has stopped")

    # --- on the generation thread ---------------------------------------------------------------
    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            if self._settings.seed is not None:
                self._generator = torch.Generator(self._model.device)
                self._generator.manual_seed(self._settings.seed)
            while self._turn():
                self.cpu_s = time.thread_time()
        except BaseException as error:  # reported, or the callers would wait for ever
            failure = error
        with self._changed:
            self._has_ended = True
            interrupts, self._interrupts = self._interrupts, []
        for interrupt in interrupts:
            interrupt.fail(EngineError("the generation thread has stopped"))
        self.cpu_s = time.thread_time()
        self._on_stop(failure)

    def _turn(self) -> bool:
        """Wait for work, then change the weights, if that was asked for, and compute one step.

        Return False if the thread must end.
        """
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._is_stopping:
                return False
            self._waiting += self._submitted
            cancelled, interrupts = self._cancelled, self._interrupts
            self._submitted, self._cancelled, self._interrupts = [], set(), []
        if cancelled:
            self._remove(cancelled)
        for interrupt in interrupts:
            requests = [*self._running, *self._waiting]
            self._running, self._waiting = [], []
            self.pages.clear()
            interrupt.run(requests)
        chunks = self._schedule()
        if chunks:
            with torch.inference_mode():
                self._step(chunks)
        return True

    def _has_work(self) -> bool:
        requests = self._submitted or self._running or self._waiting
        return bool(self._is_stopping or self._interrupts or self._cancelled or requests)

    def _remove(self, request_ids: Collection[str]) -> None:
        for request in self._running:
            if request.request_id in request_ids:
                self.pages.free(request.table)
        self._running = [each for each in self._running if each.request_id not in request_ids]
        self._waiting = [each for each in self._waiting if each.request_id not in request_ids]

    def _schedule(self) -> dict[_Request, int]:
        """Choose the requests of the next step; return request → number of tokens to compute.

        Requests that sample come first, then prompts that are partly computed, then new requests.
        """
        chunks: dict[_Request, int] = {}
        budget = self._settings.max_tokens
        for request in sorted(self._running, key=lambda each: each.remaining > 1):
            count = request.count_within(budget) if budget > 0 else 0
            if count and request in self._running and self._make_room(request, count, chunks):
                chunks[request] = count
                budget -= count
        for request in self._waiting.copy():
            if budget <= 0 or len(self._running) >= self._settings.max_requests:
                break
            pages = self.pages.find(request.ids) if self._settings.prefix_sharing else []
            if self._settings.prefix_sharing and self._is_computed_now(request.ids, len(pages)):
                continue
            # all of it must fit, or requests would take pages from one another in turn
            self.pages.share(request.table, pages)
            needed = self.pages.pages_of(len(request.ids) + 1) - len(pages)
            if needed > self.pages.available and self._running:
                self.pages.free(request.table)
                break
            count = request.count_within(budget)
            self.pages.reserve(request.table, request.table.computed + count)
            self._waiting.remove(request)
            self._running.append(request)
            chunks[request] = count
            budget -= count
        return chunks

    def _is_computed_now(self, ids: Sequence[int], pages: int) -> bool:
        """Return whether a running request will soon compute the page of `ids` after `pages` pages.

        If so, the request of `ids` waits, to use that page instead of computing it too.
        """
        start = pages * self.pages.page_size
        end = start + self.pages.page_size
        return end < len(ids) and any(
            request.table.computed < end <= len(request.ids) and request.ids[:end] == ids[:end]
            for request in self._running
            if request.is_prompt
        )

    def _make_room(self, request: _Request, count: int, chunks: dict[_Request, int]) -> bool:
        """Reserve pages of the cache for the next tokens of a running request.

        If there are too few, requests that are not in this step lose their pages, the last request
        first. They are computed again later.

        Args:
            request: the request.
            count: number of next tokens.
            chunks: the requests that are in this step already.

        Returns:
            False if there are still too few pages, so that the request must wait.
        """
        tokens = request.table.computed + count
        while self.pages.pages_of(tokens) - len(request.table.pages) > self.pages.available:
            others = (each for each in reversed(self._running) if each not in chunks)
            victim = next((each for each in others if each is not request), None)
            if victim is None:
                return False
            self.pages.free(victim.table)
            self._running.remove(victim)
            self._waiting.insert(0, victim)
        self.pages.reserve(request.table, tokens)
        return True

    def _step(self, counts: dict[_Request, int]) -> None:
        """Compute the scheduled tokens, and sample for each request whose tokens are all computed.

        Args:
            counts: request → number of tokens to compute.
        """
        chunks = [
            Chunk(request.ids, request.table, count, request.seen)
            for request, count in counts.items()
        ]
        step = make_step(self.pages, chunks, self._model.device)
        complete = [n for n, chunk in enumerate(chunks) if chunk.size == _remaining(chunk)]
        # the model computes at least one row of logits
        logits = forward(self._model, step, step.ends[complete or [0]], self._vision)
        for chunk in chunks:
            chunk.table.computed += chunk.size
            if self._settings.prefix_sharing:
                self.pages.index(chunk.table, chunk.ids)
        requests = list(counts)
        if complete:
            self._sample(logits, [requests[n] for n in complete])

    def _sample(self, logits: Tensor, requests: Sequence[_Request]) -> None:
        self._mask(logits, requests)
        settings = [request.sampling for request in requests]
        tokens, logprobs = sample(logits, settings, self._generator)
        outputs = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            is_finished = token in self._eos_ids or len(request.logprobs) >= request.limit
            if is_finished:
                self.finished.add(request.request_id)
                self.pages.free(request.table)
                self._running.remove(request)
            if is_finished or request.streaming:
                outputs.append(request.output(is_finished))
        if outputs:
            self._on_outputs(outputs)

    def _mask(self, logits: Tensor, requests: Sequence[_Request]) -> None:
        """Set the logits of all tokens that a request's grammar forbids to -inf, in place."""
        words = (self._vocabulary + 31) // 32
        masks: NDArray[np.int32] = np.empty((len(requests), words), np.int32)
        rows: list[int] = []
        for row, request in enumerate(requests):
            if request.grammar is None:
                continue
            try:
                request.grammar.mask(request.ids, masks[len(rows)])
            except GrammarMismatchError as error:
                # an exception would end the thread: fail this request alone
                request.grammar = None
                self._on_mismatch(request.request_id, str(error))
            else:
                rows.append(row)
        if not rows:
            return
        masks = masks[: len(rows)]
        if logits.device.type == "cpu":
            # torch's masked_fill took a hundred times as long on a busy machine
            array = logits.numpy()
            for row, mask in zip(rows, allowed(masks, self._vocabulary), strict=True):
                np.copyto(array[row, : self._vocabulary], -np.inf, where=~mask)
        else:  # unpacked there: a mask of a large vocabulary has 150 KB, packed 19
            at = torch.tensor(rows, device=logits.device)
            packed = to_device(masks.view(np.uint8), logits.device)
            masked = forbidden(packed, self._vocabulary)
            logits[at] = logits[at].masked_fill(masked, -torch.inf)


def _remaining(chunk: Chunk) -> int:
    return len(chunk.ids) - chunk.table.computed


class _Interrupt:
    """A change of the weights that the generation thread is to make between two steps."""

    def __init__(self, request_ids: frozenset[str], change: Callable[[], None]) -> None:
        self._request_ids = request_ids
        self._change = change
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._partial: dict[str, Output] = {}

    def run(self, requests: Sequence[_Request]) -> None:
        """Store what the requests have sampled so far, and change the weights."""
        wanted = (each for each in requests if each.request_id in self._request_ids)
        self._partial = {request.request_id: request.output() for request in wanted}
        try:
            self._change()
        except BaseException as error:
            self._error = error
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def result(self) -> dict[str, Output]:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._partial
