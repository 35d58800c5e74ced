"""A request that can be resumed: the tokens of its answer so far, and how many may follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from lightspan.protocols.decoding import StopWatcher
from lightspan.protocols.engine import ChatTokenizer, GenerationRequest, TokenChunk
from lightspan.schema.token_records import FinishReason
from lightspan_vllm.client import Chunk, Refused

_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Job:
    """A request whose answer can be continued by another server, or with other weights.

    After an update or the loss of a server, the request is submitted again: with its prompt and the
    part of the answer that was sampled so far.

    Args:
        request: the engine's request.
        tokenizer: the policy's tokenizer.
        limit: maximum number of tokens of the answer.
        stream: whether chunks are sent as they are generated.
        images: returns the images of the prompt in vLLM's form; None if it has none.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: ChatTokenizer,
        *,
        limit: int,
        stream: bool,
        images: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.request = request
        self.images = images
        self.tries = 0
        """Number of submissions since the last one that returned a token."""
        self._limit = limit
        self._eos_ids = tokenizer.eos_ids
        self._ids: list[int] = []
        stops = tuple(stop for stop in request.sampling.stop if stop)
        self._stop = StopWatcher(tokenizer, stops) if stops else None
        self.streams = stream or self._stop is not None
        """Whether the server must stream. With stop strings it must, because they are matched here:
        after a resubmission, the server would not see the earlier tokens of the answer."""

    @property
    def prompt(self) -> list[int]:
        """Ids of the prompt, followed by the answer so far."""
        return [*self.request.prompt_ids, *self._ids]

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that may follow."""
        return self._limit - len(self._ids)

    def add(self, chunk: Chunk) -> TokenChunk:
        """Add the tokens of a server's chunk to the answer, and return them as the engine's chunk.

        The last chunk of the answer has a finish reason. Tokens after a stop string are dropped.

        Raises:
            Refused: a log-probability is not finite.
        """
        ids, logprobs = chunk.ids, chunk.logprobs
        stopped = None if self._stop is None else self._stop.complete(ids)
        if stopped is not None:
            ids, logprobs = ids[:stopped], logprobs[:stopped]
        if not all(math.isfinite(value) for value in logprobs):
            raise Refused(f"the server returned the log-probabilities {logprobs[:5]}")
        if self.request.sampling.temperature == 0:  # sampled from a point mass
            logprobs = [0.0] * len(ids)
        if ids:
            self.tries = 0
        self._ids += ids
        return TokenChunk(
            ids=ids,
            logprobs=[min(value, 0.0) for value in logprobs],
            version=chunk.version,
            finish_reason=self._finish(chunk, ids, stopped=stopped is not None),
        )

    def _finish(self, chunk: Chunk, ids: list[int], *, stopped: bool) -> FinishReason | None:
        if stopped or (ids and ids[-1] in self._eos_ids):
            return FinishReason.STOP
        if self.remaining <= 0:
            return FinishReason.LENGTH
        return None if chunk.finish is None else _REASONS.get(chunk.finish)
