"""Wrapper of transformers' continuous batching. Private to `engine.transformers`.

Only this module, `_prefix_scheduler` and `_cpu_attention` use transformers' continuous-batching
API (written for 5.23). Its traps:

- Shared and cached blocks outlive the weights that computed them, so `interrupt` empties the cache.
- The stock router runs every handler on the event loop of the handler that was registered last, so
  `_Router` replaces it.
- A cancelled request delivers no result, and a generation thread that dies drops its requests. So
  the caller keeps the list of requests in flight, and `on_stop` reports that no more results come.
- `pause()` keeps the keys and values of requests in flight, so `interrupt` drops them too.
- A logits processor gets the request of each row before the forward pass only. Asynchronous batches
  and CUDA graphs would give it the rows of another step, so both are off.
- Requests can set temperature, top-p and top-k only if the manager's defaults are neither None nor
  neutral, and a temperature of 0 kills the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from lightspan.errors import EngineError
from lightspan.schema.token_records import Sampling
from lightspan_torch.engine import _cpu_attention
from lightspan_torch.engine._prefix_scheduler import PrefixScheduler
from lightspan_torch.engine.grammars import GrammarMismatchError, GrammarState, allowed

GREEDY_TEMPERATURE: Final = 1e-6
"""Temperature used instead of 0: so low that the largest logit gets all probability."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the batch and the key-value cache; a size of None is chosen by transformers."""

    max_requests: int | None
    """Maximum number of requests in one forward pass."""
    max_tokens: int | None
    """Maximum number of tokens in one forward pass."""
    cache_tokens: int | None
    page_size: int
    """Number of tokens in a cache block, the unit in which memory is allocated and prefixes are
    shared."""
    prefix_sharing: bool = True
    seed: int | None = None
    """Seed of torch's global generator, which sampling uses; None to leave the generator as it is.
    The seed is set when the generation thread starts."""


class Batcher:
    """A model, its generation thread and the requests that it answers.

    Args:
        model: the model; its attention implementation is changed in place.
        eos_ids: ids that end an answer.
        settings: sizes of the batch and the key-value cache.
        on_outputs: called on the generation thread with new outputs.
        on_stop: called on the generation thread just before it ends, with the error that ended it
            or None.
        on_mismatch: called on the generation thread with the id of a request that violates its
            grammar, and the reason; the caller must cancel the request.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Collection[int],
        settings: BatchSettings,
        on_outputs: Callable[[list[GenerationOutput]], None],
        on_stop: Callable[[BaseException | None], None],
        on_mismatch: Callable[[str, str], None],
    ) -> None:
        self._model = model
        self._eos_ids = sorted(eos_ids) or [-1]  # transformers' value for none
        self._status = _Status(on_stop)
        self._router = _Router(on_outputs)
        self._manager = _manager(model, self._eos_ids, settings)
        self._walks = _GrammarMasks(self._vocabulary, on_mismatch)
        self._manager.logit_processor.logits_processor.insert(0, self._walks)
        self._manager.logit_processor.tensors_required += 1
        self._manager.background_thread_status = self._status
        self._manager.output_router = self._router

    def start(self) -> None:
        """Start the generation thread.

        It is a daemon thread, so that an engine that was never closed does not keep the process
        alive.
        """
        # threads inherit the daemon flag from the thread that starts them
        starter = threading.Thread(target=self._manager.start, daemon=True)
        starter.start()
        starter.join()
        atexit.register(self.stop)

    def submit(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        streaming: bool,
        walk: GrammarState | None = None,
        answer_start: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique id of the request.
            ids: the prompt, followed by the tokens of the answer that were sampled before.
            sampling: temperature, top-p and top-k.
            max_new_tokens: maximum number of further tokens.
            streaming: whether outputs are passed to `on_outputs` before the request is finished.
            walk: matcher state at the start of the request's grammar; None without a grammar.
            answer_start: index in `ids` at which the grammar starts.

        Raises:
            EngineError: the generation thread has ended.
        """
        if walk is not None:
            self._walks.begin(request_id, walk, answer_start)
        accepted = self._manager.add_request(
            list(ids),
            request_id=request_id,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos_ids,
            streaming=streaming,
            temperature=max(float(sampling.temperature), GREEDY_TEMPERATURE),
            top_p=float(sampling.top_p),
            top_k=min(int(sampling.top_k) or self._vocabulary, self._vocabulary),
        )
        if accepted is None:
            raise EngineError("the generation thread has stopped")

    def cancel(self, request_id: str) -> None:
        """Cancel a request and free its cache blocks. Do nothing if the request does not exist."""
        self._manager.cancel_request(request_id)
        self._walks.forget(request_id)

    def interrupt(
        self, request_ids: Collection[str], change: Callable[[], None]
    ) -> dict[str, GenerationOutput]:
        """Pause generation, remove all requests, empty the cache and call `change`. Blocks.

        Args:
            request_ids: ids of the requests in flight.
            change: function that replaces the weights.

        Returns:
            Request id → output so far, of each unfinished request. The results of finished requests
            have been passed to `on_outputs`.

        Raises:
            EngineError: the generation thread has ended.
        """
        try:
            with self._manager.pause():
                partial = {
                    key: self._progress(key) for key in request_ids if key not in self.finished
                }
                self._empty(request_ids)
                change()
                return partial
        except RuntimeError as error:
            if self._status.can_accept_new_requests() is None:  # the change failed, not the thread
                raise
            raise EngineError("the generation thread has stopped") from error

    def stop(self) -> None:
        """Stop the generation thread; requests in flight get no answer. Idempotent."""
        atexit.unregister(self.stop)
        if self._manager.is_running():
            self._status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
            self._manager._wake_up_loop.set()
            self._manager.stop(block=True, timeout=30, hard_stop=True)

    def settle(self, request_id: str) -> None:
        """Forget a finished request. The caller calls this when it has received the result."""
        self.finished.discard(request_id)
        self._walks.forget(request_id)

    @property
    def finished(self) -> set[str]:
        """Ids of requests whose result was delivered but for which `settle` was not called yet."""
        return self._router.finished

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the generation thread had used at its last step."""
        return self._status.cpu_s

    @property
    def _vocabulary(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def _processor(self) -> Any:
        processor = self._manager.batch_processor
        assert processor is not None  # the thread makes it before it can pause
        return processor

    def _empty(self, request_ids: Collection[str]) -> None:
        """Remove all requests, keys and values. Call this only while generation is paused."""
        _drain(self._manager.input_queue)
        self._walks.clear()
        processor = self._processor
        scheduler = processor.scheduler
        # including cancelled requests that the thread has not processed yet
        for request_id in (*scheduler.active_requests, *scheduler.waiting_requests):
            scheduler.set_request_cancellation(request_id)
        for state in scheduler.clear_cancelled_requests():
            processor.offloading_manager.free_request_cpu_cache(state)
        # The thread dequeues requests before the pause and schedules them after it. They would run
        # in addition to their resubmissions, and without their grammar, so cancel them here.
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        scheduler.block_new_requests = False
        processor.cache.reset()

    def _progress(self, request_id: str) -> GenerationOutput:
        """Return a request's output so far. Call this only while generation is paused."""
        scheduler = self._processor.scheduler
        state = scheduler.active_requests.get(request_id) or scheduler.waiting_requests.get(
            request_id
        )
        if state is None:  # not yet dequeued
            return GenerationOutput(request_id=request_id)
        output: GenerationOutput = state.to_generation_output()
        return output


class _Router(OutputRouter):
    """A router that passes all outputs to one callback."""

    def __init__(self, receive: Callable[[list[GenerationOutput]], None]) -> None:
        super().__init__()
        self._receive = receive
        self.finished: set[str] = set()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self.finished.update(output.request_id for output in outputs if output.is_finished())
        self._receive(outputs)


class _Status(BackgroundThreadStatus):
    """The status of the generation thread, with its CPU time and a callback at its end."""

    def __init__(self, on_stop: Callable[[BaseException | None], None]) -> None:
        super().__init__()
        self._on_stop = on_stop
        self.cpu_s = 0.0

    def update_with_tp_status(self, tp_status: int) -> None:
        """Record the CPU time. The generation thread calls this at each step."""
        self.cpu_s = time.thread_time()
        super().update_with_tp_status(tp_status)

    def mark_as_stopped(self) -> None:
        """Call `on_stop`. The generation thread calls this whenever it ends."""
        self.cpu_s = time.thread_time()
        super().mark_as_stopped()
        self._on_stop(self.fatal_error)


SCHEDULER: Final = "lightspan_prefixes"
"""Name of `PrefixScheduler` in transformers' registry."""
SCHEDULER_MAPPING[SCHEDULER] = PrefixScheduler


class _Manager(ContinuousBatchingManager):
    """transformers' manager that uses `_cpu_attention` for the models it supports."""

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if _cpu_attention.supported(model):
            _cpu_attention.install(model)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)


def _manager(
    model: Any, eos_ids: Sequence[int], settings: BatchSettings
) -> ContinuousBatchingManager:
    # No request uses these defaults; they must be neither None nor neutral (see the module).
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=0.5,
        top_p=0.5,
        top_k=2,
        eos_token_id=list(eos_ids),
    )
    config = ContinuousBatchingConfig(
        allow_block_sharing=settings.prefix_sharing,
        scheduler_type=SCHEDULER,
        per_request_processors=True,
        return_logprobs=True,
        max_requests_per_batch=settings.max_requests,
        max_batch_tokens=settings.max_tokens,
        num_blocks=settings.cache_tokens and max(1, settings.cache_tokens // settings.page_size),
        page_size=settings.page_size,
        seed=settings.seed,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    manager = _Manager(model=model, generation_config=generation, continuous_batching_config=config)
    if not any(manager.continuous_batching_config.cuda_graph_booleans):
        _skip_idle_processors(manager)
    return manager


def _skip_idle_processors(manager: ContinuousBatchingManager) -> None:
    """Replace the top-p and top-k processors by versions that skip batches without top-p or top-k.

    Each processor sorts the vocabulary, which is wasted work in such batches.
    """
    processors: list[Any] = manager.logit_processor.logits_processor
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopPLogitsWarper):
            processors[index] = _LazyTopP(processor)  # type: ignore[arg-type]
        elif isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            vocabulary = int(manager.model.config.get_text_config().vocab_size)
            processors[index] = _LazyTopK(processor, vocabulary)


class _GrammarMasks(ContinuousBatchingLogitsProcessor):
    """Logits processor that masks the tokens that a request's grammar does not allow.

    It is the first processor, so that temperature, top-p, top-k and log-probabilities apply to the
    masked distribution.
    """

    def __init__(self, vocabulary: int, on_mismatch: Callable[[str, str], None]) -> None:
        self.supported_kwargs = {}
        self.ignored_kwargs = ()
        self._vocabulary = vocabulary
        self._on_mismatch = on_mismatch
        # by request id, not in the request's arguments, which transformers copies deeply
        self._running: dict[str, _Running] = {}
        self._rows: list[int] = []
        """Indices of the next batch's rows that have a mask, in the order of `_masks`."""
        self._masks = np.empty((0, (vocabulary + 31) // 32), np.int32)

    def begin(self, request_id: str, walk: GrammarState, start: int) -> None:
        self._running[request_id] = _Running(walk, start)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def clear(self) -> None:
        self._running.clear()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = []
        if self._running:
            self._masks = _rows_of(self._masks, len(requests_with_new_token))
            for row, request in enumerate(requests_with_new_token):
                if self._mask(request.state, self._masks[len(self._rows)]):
                    self._rows.append(row)
        return torch.zeros(len(requests_with_new_token), dtype=torch.int32)

    def _mask(self, state: Any, into: NDArray[np.int32]) -> bool:
        """Write the mask of the tokens that the grammar allows next into `into`.

        Return False if the request has no grammar, or if its tokens violate the grammar.
        """
        running = self._running.get(state.request_id)
        if running is None:
            return False
        try:
            running.follow(state.initial_tokens, state.generated_tokens)
            running.walk.mask(into)
        except GrammarMismatchError as error:
            # an exception would end the thread: fail this request alone
            self.forget(state.request_id)
            self._on_mismatch(state.request_id, str(error))
            return False
        return True

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return scores
        free = allowed(self._masks[: len(self._rows)], self._vocabulary)
        if scores.device.type == "cpu":
            # torch's masked_fill took a hundred times as long on a busy machine
            array = scores.numpy()
            for row, mask in zip(self._rows, free, strict=True):
                np.copyto(array[row], -np.inf, where=~mask)
            return scores
        rows = torch.tensor(self._rows, device=scores.device)
        masked = scores[rows].masked_fill(torch.from_numpy(~free).to(scores.device), -torch.inf)
        return scores.index_copy(0, rows, masked)


class _Running:
    """The position of one request's answer in its grammar, and how many tokens led there."""

    def __init__(self, walk: GrammarState, start: int) -> None:
        self.walk = walk
        self._start = start
        self._taken = 0

    def follow(self, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Advance the matcher over the tokens of the answer that are new since the last call.

        Args:
            initial: the tokens that were submitted: the prompt and the start of the answer, if any.
            generated: the tokens sampled since the submission.
        """
        before = len(initial) - self._start
        for place in range(self._taken, before + len(generated)):
            inside = place < before
            self.walk.take(initial[self._start + place] if inside else generated[place - before])
        self._taken = before + len(generated)


def _rows_of(masks: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return `masks` if it has at least `count` rows, else a new array that has."""
    if count <= len(masks):
        return masks
    return np.empty((max(count, 2 * len(masks)), masks.shape[1]), np.int32)


class _Lazy:
    """Mixin of a logits processor that skips batches in which no request uses its setting."""

    _setting: str
    _neutral: float
    """Value from which on the setting has no effect, such as 1 for top-p."""
    _needed = True

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._needed = any(
            request.state.logit_processor_kwargs[self._setting] < self._neutral
            for request in requests_with_new_token
        )
        arguments: torch.Tensor = super().prepare_tensor_args(requests_with_new_token)  # type: ignore[misc]
        return arguments

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self._needed:
            return scores
        processed: torch.Tensor = super().__call__(scores, tensor_arg)  # type: ignore[misc]
        return processed


class _LazyTopP(_Lazy, ContinuousBatchingTopPLogitsWarper):
    _setting, _neutral = "top_p", 1


class _LazyTopK(_Lazy, ContinuousBatchingTopKLogitsWarper):
    _setting = "top_k"

    def __init__(self, processor: Any, vocabulary: int) -> None:
        super().__init__(processor)
        self._neutral = vocabulary


def _drain(items: queue.Queue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            items.get_nowait()
