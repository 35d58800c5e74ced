"""transformers' continuous batching, with its traps closed. Private to `engines.transformers`.

Everything that touches transformers' young API is in this module (written for 5.23):

- Blocks are never shared: a shared prefix would keep keys and values of old weights.
- Results reach us through a router of our own: the stock one runs every handler on the event loop
  of the last one.
- Cancelled requests never report, and requests in hand while the thread dies are forgotten: the
  caller keeps the list of what is in flight, `on_stop` says that nothing more will come.
- `pause()` keeps the keys and values of requests in flight: `interrupt` drops them.
- Requests may ask for temperature, top-p and top-k only if the manager's defaults are neither None
  nor neutral, and a temperature of 0 kills the thread.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput

from lightspan.engines import _attention
from lightspan.errors import EngineError
from lightspan.records import Sampling

GREEDY_TEMPERATURE: Final = 1e-6
"""Stands for temperature 0: all probability is on the largest logit."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the batch and of the key-value cache; None leaves one to transformers."""

    max_requests: int | None
    """Requests in one forward pass."""
    max_tokens: int | None
    """Tokens in one forward pass."""
    num_blocks: int | None
    page_size: int
    """Tokens in a block."""
    seed: int | None = None
    """Of torch's global generator when the thread starts; sampling uses that generator."""


class Batcher:
    """One model, its generation thread, and the requests given to it.

    Args:
        model: is used in place; its attention implementation is changed.
        on_outputs: called on the generation thread with what it has produced.
        on_stop: called on the generation thread as its last act, with the error that killed it.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Collection[int],
        settings: BatchSettings,
        on_outputs: Callable[[list[GenerationOutput]], None],
        on_stop: Callable[[BaseException | None], None],
    ) -> None:
        self._model = model
        self._eos_ids = sorted(eos_ids) or [-1]
        self._status = _Status(on_stop)
        self._router = _Router(on_outputs)
        self._manager = _manager(model, self._eos_ids, settings)
        self._manager.background_thread_status = self._status
        self._manager.output_router = self._router

    def start(self) -> None:
        """Start the thread. It is a daemon: a forgotten engine does not keep the process alive."""
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
    ) -> None:
        """Queue a request.

        Raises:
            EngineError: the thread is gone.
        """
        accepted = self._manager.add_request(
            list(ids),
            request_id=request_id,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos_ids,
            streaming=streaming,
            temperature=max(float(sampling.temperature), GREEDY_TEMPERATURE),
            top_p=float(sampling.top_p),
            top_k=int(sampling.top_k) or self._vocabulary,
        )
        if accepted is None:
            raise EngineError("the generation thread has stopped")

    def cancel(self, request_id: str) -> None:
        """Forget a request, known or not, and free its blocks."""
        self._manager.cancel_request(request_id)

    def interrupt(
        self, request_ids: Collection[str], change: Callable[[], None]
    ) -> dict[str, GenerationOutput]:
        """Take all requests out and call `change` while nothing runs. Blocks; not for event loops.

        Returns:
            What each unfinished request had produced. A request that is not in it has delivered
            its result.

        Raises:
            EngineError: the thread is gone.
        """
        try:
            with self._manager.pause():
                partial = {key: self._take(key) for key in request_ids if key not in self.finished}
                _drain(self._manager.input_queue)
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

    @property
    def finished(self) -> set[str]:
        """Ids of requests whose result was delivered; the receiver discards them."""
        return self._router.finished

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the generation thread, at most one step old."""
        return self._status.cpu_s

    @property
    def _vocabulary(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def _take(self, request_id: str) -> GenerationOutput:
        """What a request has produced so far; it is cancelled. Only while paused."""
        processor = self._manager.batch_processor
        assert processor is not None  # the thread makes it before it can pause
        scheduler = processor.scheduler
        scheduler.set_request_cancellation(request_id)
        state = scheduler.active_requests.get(request_id) or scheduler.waiting_requests.get(
            request_id
        )
        if state is None:  # not yet taken from the queue
            return GenerationOutput(request_id=request_id)
        output: GenerationOutput = state.to_generation_output()  # type: ignore[no-untyped-call]
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


class _Manager(ContinuousBatchingManager):
    """With our attention where the model allows it."""

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        if _attention.supported(model):
            _attention.install(model)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)


def _manager(
    model: Any, eos_ids: Sequence[int], settings: BatchSettings
) -> ContinuousBatchingManager:
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=0.5,
        top_p=0.5,
        top_k=2,
        eos_token_id=list(eos_ids),
    )
    config = ContinuousBatchingConfig(
        allow_block_sharing=False,
        per_request_processors=True,
        return_logprobs=True,
        max_requests_per_batch=settings.max_requests,
        max_batch_tokens=settings.max_tokens,
        num_blocks=settings.num_blocks,
        page_size=settings.page_size,
        seed=settings.seed,
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
            processors[index] = _LazyTopK(processor, manager.model.config.get_text_config())


class _LazyTopP(ContinuousBatchingTopPLogitsWarper):
    _needed = True

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._needed = any(
            request.state.logit_processor_kwargs["top_p"] < 1 for request in requests_with_new_token
        )
        arguments: torch.Tensor = super().prepare_tensor_args(requests_with_new_token)
        return arguments

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return super().__call__(scores, tensor_arg) if self._needed else scores


class _LazyTopK(ContinuousBatchingTopKLogitsWarper):
    _needed = True

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor)
        self._vocabulary = int(config.vocab_size)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._needed = any(
            request.state.logit_processor_kwargs["top_k"] < self._vocabulary
            for request in requests_with_new_token
        )
        arguments: torch.Tensor = super().prepare_tensor_args(requests_with_new_token)
        return arguments

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return super().__call__(scores, tensor_arg) if self._needed else scores


def _drain(items: queue.Queue[Any]) -> None:
    try:
        while True:
            items.get_nowait()
    except queue.Empty:
        pass
