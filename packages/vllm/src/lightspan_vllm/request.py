"""One call on its way: what it has so far, and what is still asked for."""

from __future__ import annotations

import math
from typing import Final

from lightspan.protocols.decoding import StopWatcher
from lightspan.protocols.engine import ChatTokenizer, GenerationRequest, TokenChunk
from lightspan.schema.token_records import FinishReason
from lightspan_vllm.client import Chunk, Refused

_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Job:
    """A request that may be submitted several times: an update or a server's death cuts it, and it
    goes on after the ids that it has.

    Args:
        request: what is asked.
        tokenizer: of the policy.
        limit: tokens of the answer at most.
        stream: whether tokens are wanted as they come.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: ChatTokenizer, *, limit: int, stream: bool
    ) -> None:
        self.request = request
        self.tries = 0
        """Submissions since the last that brought tokens."""
        self._limit = limit
        self._eos_ids = tokenizer.eos_ids
        self._ids: list[int] = []
        stops = tuple(stop for stop in request.sampling.stop if stop)
        self._stop = StopWatcher(tokenizer, stops) if stops else None
        self.streams = stream or self._stop is not None
        """Whether the server has to show tokens as they come. Stop strings are found here, as by
        every engine: a server would see only what it samples itself after a cut."""

    @property
    def prompt(self) -> list[int]:
        """With the answer so far."""
        return [*self.request.prompt_ids, *self._ids]

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._limit - len(self._ids)

    def take(self, part: Chunk) -> TokenChunk:
        """New tokens, as a chunk; the last one has a finish reason.

        Raises:
            Refused: a log-probability is no number.
        """
        ids, logprobs = part.ids, part.logprobs
        stopped = None if self._stop is None else self._stop.complete(ids)
        if stopped is not None:
            ids, logprobs = ids[:stopped], logprobs[:stopped]
        if not all(math.isfinite(value) for value in logprobs):
            raise Refused(f"the server gave the log-probabilities {logprobs[:5]}")
        if self.request.sampling.temperature == 0:  # it samples from a point mass
            logprobs = [0.0] * len(ids)
        if ids:
            self.tries = 0
        self._ids += ids
        return TokenChunk(
            ids=ids,
            logprobs=[min(value, 0.0) for value in logprobs],
            version=part.version,
            finish_reason=self._finish(part, ids, stopped=stopped is not None),
        )

    def _finish(self, part: Chunk, ids: list[int], *, stopped: bool) -> FinishReason | None:
        if stopped or (ids and ids[-1] in self._eos_ids):
            return FinishReason.STOP
        if self.remaining <= 0:
            return FinishReason.LENGTH
        return None if part.finish is None else _REASONS.get(part.finish)
