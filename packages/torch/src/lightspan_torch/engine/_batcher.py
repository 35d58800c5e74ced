"""transformers' continuous batching, with its traps closed. Private to `engines.transformers`.

What touches transformers' young API is in this module, `_prefixes` and `_request_attention`
(written for 5.23):

- Blocks that are shared, or kept for prompts to come, would outlive the weights that they were
  computed with: `interrupt` empties the cache.
- Results reach us through a router of our own: the stock one runs every handler on the event loop
  of the last one.
- Cancelled requests never report, and requests in hand while the thread dies are forgotten: the
  caller keeps the list of what is in flight, `on_stop` says that nothing more will come.
- `pause()` keeps the keys and values of requests in flight: `interrupt` drops them too.
- A processor is told which request a row belongs to only before the forward pass. Batches that are
  prepared while the last one runs, and CUDA's graphs, would give it the rows of another step.
- Requests may ask for temperature, top-p and top-k only if the manager's defaults are neither None
  nor neutral, and a temperature of 0 kills the thread.
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
"""Stands for temperature 0: all probability is on the largest logit."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the batch and of the key-value cache; None leaves one to transformers."""

    max_requests: int | None
    """Requests in one forward pass."""
    max_tokens: int | None
    """Tokens in one forward pass."""
    cache_tokens: int | None
    page_size: int
    """Tokens in a block: the unit in which memory is given out, and prefixes are shared."""
    prefix_sharing: bool = True
    seed: int | None = None
    """Of torch's global generator when the thread starts; sampling uses that generator."""


class Batcher:
    """One model, its generation thread, and the requests given to it.

    Args:
        model: is used in place; its attention implementation is changed.
        on_outputs: called on the generation thread with what it has produced.
        on_stop: called on the generation thread as its last act, with the error that killed it.
        on_mismatch: called on the generation thread with a request that cannot follow its grammar
            any further, and why; it has to be cancelled.
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
        self._eos_ids = sorted(eos_ids) or [-1]  # -1: none, as transformers has it
        self._status = _Status(on_stop)
        self._router = _Router(on_outputs)
        self._manager = _manager(model, self._eos_ids, settings)
        self._walks = _GrammarMasks(self._vocabulary, on_mismatch)
        self._manager.logit_processor.logits_processor.insert(0, self._walks)
        self._manager.logit_processor.tensors_required += 1
        self._manager.background_thread_status = self._status
        self._manager.output_router = self._router

    def start(self) -> None:
        """Start the thread. It is a daemon: a forgotten engine does not keep the process alive."""
        # A thread inherits whether it is a daemon from the one that starts it.
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
            walk: at the beginning of the request's grammar.
            answer_start: place in `ids` where that grammar begins.

        Raises:
            EngineError: the thread is gone.
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
        """Forget a request, known or not, and free its blocks."""
        self._manager.cancel_request(request_id)
        self._walks.forget(request_id)

    def interrupt(
        self, request_ids: Collection[str], change: Callable[[], None]
    ) -> dict[str, GenerationOutput]:
        """Take all requests out, empty the cache and call `change` while nothing runs.

        Blocks; not for event loops.

        Returns:
            What each unfinished request had produced. A request that is not in it has delivered
            its result.

        Raises:
            EngineError: the thread is gone.
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
        """End the thread; requests still in flight get no answer. Idempotent."""
        atexit.unregister(self.stop)
        if self._manager.is_running():
            self._status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
            self._manager._wake_up_loop.set()
            self._manager.stop(block=True, timeout=30, hard_stop=True)

    def settle(self, request_id: str) -> None:
        """Forget a request whose result was received."""
        self.finished.discard(request_id)
        self._walks.forget(request_id)

    @property
    def finished(self) -> set[str]:
        """Ids of requests whose result was delivered, until they are settled."""
        return self._router.finished

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the generation thread, at most one step old."""
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
        """Forget all requests, with every key and value. Only while paused."""
        _drain(self._manager.input_queue)
        self._walks.clear()
        processor = self._processor
        scheduler = processor.scheduler
        # also those that were cancelled a moment ago, of which the thread has not heard
        for request_id in (*scheduler.active_requests, *scheduler.waiting_requests):
            scheduler.set_request_cancellation(request_id)
        for state in scheduler.clear_cancelled_requests():
            processor.offloading_manager.free_request_cpu_cache(state)
        # The thread takes requests from the queue before it pauses, and hands them to the scheduler
        # after: they would run beside the ones that take their place, and without their grammar.
        for request_id in request_ids:
            scheduler.set_request_cancellation(request_id)
        scheduler.block_new_requests = False
        processor.cache.reset()

    def _progress(self, request_id: str) -> GenerationOutput:
        """What a request has produced so far. Only while paused."""
        scheduler = self._processor.scheduler
        state = scheduler.active_requests.get(request_id) or scheduler.waiting_requests.get(
            request_id
        )
        if state is None:  # not yet taken from the queue
            return GenerationOutput(request_id=request_id)
        output: GenerationOutput = state.to_generation_output()
        return output


class _Router(OutputRouter):
    """Hands results to one receiver."""

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
    """Tells when the thread ends, and how much CPU it has used."""

    def __init__(self, on_stop: Callable[[BaseException | None], None]) -> None:
        super().__init__()
        self._on_stop = on_stop
        self.cpu_s = 0.0

    def update_with_tp_status(self, tp_status: int) -> None:
        """Called by the thread at each step."""
        self.cpu_s = time.thread_time()
        super().update_with_tp_status(tp_status)

    def mark_as_stopped(self) -> None:
        """Called by the thread on every way out."""
        self.cpu_s = time.thread_time()
        super().mark_as_stopped()
        self._on_stop(self.fatal_error)


SCHEDULER: Final = "lightspan_prefixes"
"""What ours is called where transformers looks schedulers up."""
SCHEDULER_MAPPING[SCHEDULER] = PrefixScheduler


class _Manager(ContinuousBatchingManager):
    """The manager with our attention where the model allows it."""

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if _cpu_attention.supported(model):
            _cpu_attention.install(model)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)


def _manager(
    model: Any, eos_ids: Sequence[int], settings: BatchSettings
) -> ContinuousBatchingManager:
    # Defaults of no request: they only have to be neither None nor neutral (see the module).
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
    """Sort the vocabulary for top-p and top-k only in batches that ask for them."""
    processors: list[Any] = manager.logit_processor.logits_processor
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopPLogitsWarper):
            processors[index] = _LazyTopP(processor)  # type: ignore[arg-type]
        elif isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            vocabulary = int(manager.model.config.get_text_config().vocab_size)
            processors[index] = _LazyTopK(processor, vocabulary)


class _GrammarMasks(ContinuousBatchingLogitsProcessor):
    """Masks what a request's grammar does not allow. It comes first, so that temperature, top-p,
    top-k and log-probabilities are of the masked distribution."""

    def __init__(self, vocabulary: int, on_mismatch: Callable[[str, str], None]) -> None:
        self.supported_kwargs = {}
        self.ignored_kwargs = ()
        self._vocabulary = vocabulary
        self._on_mismatch = on_mismatch
        # by request id, not in the request's own arguments: transformers copies those deeply
        self._running: dict[str, _Running] = {}
        self._rows: list[int] = []
        """Of the next batch, those that are masked."""
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
        """Write a request's mask; False if it has none."""
        running = self._running.get(state.request_id)
        if running is None:
            return False
        try:
            running.follow(state.initial_tokens, state.generated_tokens)
            running.walk.mask(into)
        except GrammarMismatchError as error:
            # it fails alone: its neighbours in the batch, and the thread, go on
            self.forget(state.request_id)
            self._on_mismatch(state.request_id, str(error))
            return False
        return True

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return scores
        free = allowed(self._masks[: len(self._rows)], self._vocabulary)
        if scores.device.type == "cpu":
            # in place, a row at a time: torch's own took a hundred times as long on a busy machine
            array = scores.numpy()
            for row, mask in zip(self._rows, free, strict=True):
                np.copyto(array[row], -np.inf, where=~mask)
            return scores
        rows = torch.tensor(self._rows, device=scores.device)
        masked = scores[rows].masked_fill(torch.from_numpy(~free).to(scores.device), -torch.inf)
        return scores.index_copy(0, rows, masked)


class _Running:
    """A request's walk, and how far it has come."""

    def __init__(self, walk: GrammarState, start: int) -> None:
        self.walk = walk
        self._start = start
        self._taken = 0

    def follow(self, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Take up what was sampled since the last step."""
        before = len(initial) - self._start
        for place in range(self._taken, before + len(generated)):
            inside = place < before
            self.walk.take(initial[self._start + place] if inside else generated[place - before])
        self._taken = before + len(generated)


def _rows_of(masks: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """The masks, or larger ones: [at least count, words]."""
    if count <= len(masks):
        return masks
    return np.empty((max(count, 2 * len(masks)), masks.shape[1]), np.int32)


class _Lazy:
    """A processor that leaves the scores of a batch alone in which no request asks for it."""

    _setting: str
    _neutral: float
    """From this value on the setting changes nothing."""
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
